"""A selection in the layer, in explain, draw and check."""

import copy
import pickle
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from oracle import tensor
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_flash as sf
from sparse_flash.tools.draw import make_picture

SELECT = partial(sf.topk_blocks, keep=3, every=1, block_size=16, always="sinks(2)", share_group=True)


def layer(**options) -> sf.SparseAttention:
    torch.manual_seed(0)
    return sf.SparseAttention(48, 4, **{"kv_heads": 2, "select": SELECT} | options)


def inputs(tokens=100) -> torch.Tensor:
    return torch.randn(2, tokens, 48, generator=torch.Generator().manual_seed(1))


def by_head(projection, x):
    return projection(x).unflatten(2, (-1, 12)).transpose(1, 2)


def test_a_layer_attends_to_the_blocks_that_its_queries_choose():
    attn, x = layer(rotary_base=None), inputs()
    q, k, v = (by_head(projection, x) for projection in (attn.q_proj, attn.k_proj, attn.v_proj))
    wanted = attn.out_proj(sf.attention(q, k, v, SELECT(q, k)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attn(x), wanted)
    torch.testing.assert_close(torch.compile(attn, backend="aot_eager", fullgraph=True)(x), wanted)
    assert "select=functools.partial" in repr(attn) and "mask" not in repr(attn)
    attn(x).sum().backward()
    assert all(p.grad is not None for p in attn.parameters())
    torch.testing.assert_close(copy.deepcopy(attn)(x), wanted)


def test_a_layers_arguments_of_topk_blocks_are_its_choice():
    torch._dynamo.reset()
    attn, x = layer(select=SELECT.keywords), inputs()
    wanted = layer()(x)
    for one in (
        attn,
        copy.deepcopy(attn),
        pickle.loads(pickle.dumps(attn)),
        torch.compile(attn, backend="aot_eager", fullgraph=True),
    ):
        torch.testing.assert_close(one(x), wanted)
    assert (
        "keep=3, every=1, block_size=16, always='sinks(2)'" in repr(attn)
        and attn.state_dict().keys() == layer().state_dict().keys()
    )


BY_MEANS = {"keep": 3, "block_size": 16, "share_group": True}


@torch.no_grad()
@pytest.mark.parametrize(
    "select", [SELECT, SELECT.keywords, BY_MEANS, BY_MEANS | {"score": "max"}, BY_MEANS | {"share_group": False}]
)
def test_decoding_with_a_cache_gives_the_rows_of_training(select):
    attn, x = layer(select=select), inputs()
    cache = attn.new_cache(2, 120)
    for _ in range(2):
        pieces = [attn(part, cache) for part in x.split([60, 1, 1, 2, 1, 16, 1, 18], 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), attn(x))
        cache.reset()


@torch.no_grad()
@pytest.mark.parametrize("select", [SELECT, BY_MEANS])
def test_decoding_under_autocast_gives_the_rows_of_training_under_autocast(select):
    attn, x = layer(select=select), inputs()
    cache = attn.new_cache(2, 100)
    with torch.autocast("cpu", torch.bfloat16):
        pieces = [attn(part, cache) for part in x.split([60, 1, 20, 19], 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), attn(x), atol=2e-2, rtol=2e-2)


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{"select": SELECT}, {"select": BY_MEANS}, {"select": None, "mask": "local(9)"}], ids=["picks", "means", "mask"]
)
def test_a_layer_on_the_meta_device_tells_the_shapes_of_decoding(options):
    attn, x = layer(**options).to("meta"), inputs().to("meta")
    cache = attn.new_cache(2, 100)
    assert [attn(part, cache).shape for part in x.split([97, 2, 1], 1)] == [(2, n, 48) for n in (97, 2, 1)]
    assert sf.topk_blocks(*[x.unflatten(2, (4, 12)).transpose(1, 2)] * 2, 3, block_size=16).device.type == "meta"


@pytest.mark.parametrize("select", [SELECT, BY_MEANS])
def test_a_layer_that_selects_takes_no_tokens_too(select):
    attn = layer(select=select)
    cache, x = attn.new_cache(2, 100), inputs()
    with torch.no_grad():
        for nothing in (attn(x[:, :0]), attn(x[:, :0], cache)):
            assert nothing.shape == (2, 0, 48)
        assert torch.equal(attn(x[:, :9], cache), attn(x[:, :9], attn.new_cache(2, 100)))


@torch.no_grad()
def test_a_step_reads_no_value_that_was_not_picked():
    attn, x, chosen = layer(select=BY_MEANS), inputs(), []
    wanted, cache = attn(x), attn.new_cache(2, 100)
    attn(x[:, :-1], cache)
    choice = attn.select
    attn.select = lambda q, k: chosen.append(choice(q, k)) or chosen[-1]
    attn(x[:, -1:], copy.deepcopy(cache))
    for batch, head in np.ndindex(2, 2):
        cache.room[1][batch, head, ~chosen[0].kept_keys(0, batch, head)] = float("nan")
    torch.testing.assert_close(attn(x[:, -1:], cache), wanted[:, -1:])


def test_a_compiled_layer_compiles_nothing_with_each_token():
    torch._dynamo.reset()
    attn, x, counter = layer(select=BY_MEANS), inputs(80), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attn, backend=counter, fullgraph=True)
    with torch.no_grad():
        cache, wanted, found, counts = attn.new_cache(2, 96), attn(x), [attn(x[:, :60])], []
        attn(x[:, :60], cache)
        for token in range(60, 80):
            found.append(compiled(x[:, token : token + 1], cache))
            counts.append(counter.frame_count)
    torch.testing.assert_close(torch.cat(found, 1), wanted)
    assert counts[-1] == counts[4] > 0


@torch.no_grad()
def test_a_layer_with_a_cache_selects_for_each_query():
    attn = layer(select=partial(sf.topk_blocks, keep=3, every=4))
    with pytest.raises(ValueError, match="must choose for each query; got every=4"):
        attn(inputs(), attn.new_cache(2, 100))


def selection(every=1, always=None):
    generator = torch.Generator().manual_seed(2)
    q, k = tensor((2, 4, 150, 8), generator=generator), tensor((2, 2, 150, 8), generator=generator)
    return sf.topk_blocks(q, k, 4, every=every, block_size=16, always=always, share_group=True)


@pytest.mark.parametrize("every", [1, 4])
def test_the_numbers_of_explain_are_those_of_the_picks(every):
    chosen = selection(every, "sinks(2) | local(20)")
    e = sf.explain(chosen, heads=8, head_dim=8)
    dense = chosen.to_dense()
    causal = 150 * 151 / 2
    assert e.density == pytest.approx(dense.float().mean().item())
    assert e.causal_density == pytest.approx(dense.sum().item() / 4 / causal)
    assert e.flops == pytest.approx(4 * 2 * 8 * 8 * dense.sum().item() / 4) and e.dense_flops == 4 * 2 * 8 * 8 * causal
    rows = [[set(row[row >= 0].tolist()) for row in line] for line in chosen.picks.flatten(0, 1)]
    count = sum(len(row) for line in rows for row in line)
    assert e.picks == pytest.approx(count / (4 * chosen.groups))
    alike = sum(len(a & b) for line in rows for a, b in pairwise(line))
    assert e.alike == pytest.approx(alike / sum(len(row) for line in rows for row in line[1:]))
    assert "a choice on average" in str(e) and e.table_bytes == chosen.nbytes


def test_picks_that_are_alike_are_told():
    alike = sf.BlockSelection.from_picks(torch.zeros(1, 1, 400, 1, dtype=torch.int32), 16)
    assert "every=" in str(sf.explain(alike)) and not sf.explain(selection(), heads=2).hints
    empty = sf.topk_blocks(*[torch.zeros(0, 2, 32, 8)] * 2, 1, every=1, block_size=16)
    assert sf.explain(empty, heads=2).flops == sf.explain(empty, heads=2).picks == 0


def test_what_is_shown_of_a_selection_does_not_depend_on_the_default_device():
    chosen = selection(always="sinks(2)")
    wanted = chosen.to_dense()[1, 0].cpu()
    with torch.device("meta"):
        assert torch.equal(chosen.kept_keys(70, 1), wanted[70])
        assert sf.explain(chosen, heads=4).density == chosen.density


@pytest.mark.parametrize("level", ["tokens", "blocks"])
def test_a_picture_shows_the_share_of_kept_pairs(level, tmp_path):
    one = selection(always="sinks(2) | local(20)").select(1, 1)
    picture = make_picture(one, 5, 5, level)
    kept = torch.nn.functional.pad(one.to_dense()[0, 0].double().cpu(), (0, -150 % picture.unit, 0, -150 % picture.unit))
    totals = kept.unfold(0, picture.unit, picture.unit).unfold(1, picture.unit, picture.unit).sum((2, 3)).numpy()
    rows, cols = picture.shares.shape
    sizes = [min(picture.unit, 150 - i * picture.unit) for i in range(rows)]
    assert (rows, cols) == totals.shape and picture.level == level
    np.testing.assert_allclose(picture.shares, totals / np.outer(sizes, sizes))
    drawing = sf.draw(one, tmp_path / "one.png")
    assert "blocks of 16 picked by query" in str(drawing) and (tmp_path / "one.png").exists()


def test_pairs_are_counted_in_cells_of_whole_blocks():
    one = selection(always="sinks(2) | local(20)").select(1, 1)
    size = max(one.block_size, one.always.block_size)
    assert one.kept_pairs(unit=size).sum() == one.kept_pairs().sum() == one.to_dense().sum()
    for unit in (0, 3, size + 1):
        with pytest.raises(ValueError, match=f"the sizes of blocks; got {unit}"):
            one.kept_pairs(unit=unit)
