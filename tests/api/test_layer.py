"""SparseAttention equals a layer built from PyTorch's own parts, token by token or all at once."""

import copy
import pickle
import warnings
from functools import partial

import calls
import numpy as np
import pytest
import torch
from calls import LAYERS, assert_right, one_rank
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Sizes
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_flash as sf

parametrize = pytest.mark.parametrize
TOKENS, DIM = 150, 48
SPEC = "causal & (sinks(2) | local(20))"
WINDOW = "causal & local(20)"
CHOSEN = "causal & (sampled(4, keep=1, block=64) | sinks(2))"
CHOSEN_BY_HEAD = "per_head([causal & pooled(keep=1), causal & pooled(keep=2), causal & local(9), causal & pooled(keep=1)])"
E4M3 = torch.float8_e4m3fn
BY_MEANS = {"keep": 3, "block_size": 16, "share_group": True}
SELECT = partial(sf.topk_blocks, **BY_MEANS, every=1, always="sinks(2)")


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def layer(**options) -> sf.SparseAttention:
    torch.manual_seed(0)
    mask = {} if "select" in options else {"mask": SPEC}
    return sf.SparseAttention(DIM, 4, **mask | options)


def inputs(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(2, tokens, DIM, generator=torch.Generator().manual_seed(1))


def in_one_graph(attn):
    return torch.compile(attn, fullgraph=True, backend="aot_eager")


@parametrize("seed", range(len(LAYERS)))
def test_results_and_gradients_are_those_of_pytorchs_parts(seed):
    assert_right(calls.layer(Sizes(seed=seed, q_len=TOKENS)), "auto")


# Caches.


@torch.no_grad()
@parametrize("dtype, autocast", [(None, False), (None, True), (E4M3, False)], ids=["as keys are", "autocast", "e4m3"])
@parametrize(
    "options, pieces",
    [
        ({"kv_heads": 2, "v_head_dim": 20}, [30, 7, 1, 12]),
        ({"kv_heads": 2}, [30] + 20 * [1]),
        ({"mask": "causal"}, [30, 20, 1]),
        ({"mask": sf.compile_mask(WINDOW, 200), "kv_heads": 2, "v_head_dim": 20}, [70, 1, 1, 7, 65, 1]),
        ({"mask": sf.compile_mask(WINDOW, 145)}, [70, 1, 1, 7, 65, 1]),  # just as long
        *(({"kv_heads": 2, "select": choice}, [60, 1, 1, 2, 1, 16, 1, 18]) for choice in (SELECT, SELECT.keywords, BY_MEANS)),
        *(({"kv_heads": 2, "select": BY_MEANS | more}, [60, 1, 20]) for more in ({"score": "max"}, {"share_group": False})),
    ],
)
def test_tokens_in_pieces_through_the_cache_give_what_they_give_at_once(options, pieces, dtype, autocast):
    attn, x = layer(**options), inputs(sum(pieces))
    cache = attn.new_cache(2, 145 if sum(pieces) == 145 else 200, dtype)
    close = {"atol": 2e-2, "rtol": 2e-2} if autocast else {"atol": 1e-5, "rtol": 1e-4}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if dtype is None:  # a table of the cache is not that of the tokens of a call
            wanted = layer(**options | {"mask": WINDOW})(x) if isinstance(options.get("mask"), sf.BlockMask) else attn(x)
        else:
            wanted = attn(x, cache)
        for _ in range(2):
            cache.reset()
            parts = [attn(piece, cache) for piece in x.split(pieces, 1)]
            torch.testing.assert_close(torch.cat(parts, 1), wanted, **close)
            assert cache.tokens == sum(pieces) and cache.keys.shape == (2, attn.kv_heads, sum(pieces), attn.head_dim)
            assert cache.values.shape == (*cache.keys.shape[:3], attn.v_head_dim)


@torch.no_grad()
@parametrize("options", [{"select": SELECT}, {"select": BY_MEANS}, {"mask": "local(9)"}], ids=["picks", "means", "mask"])
def test_a_layer_with_a_cache_takes_no_tokens_and_tells_shapes_on_the_meta_device(options):
    attn, x = layer(kv_heads=2, **options), inputs(100)
    cache = attn.new_cache(2, 100)
    assert attn(x[:, :0]).shape == attn(x[:, :0], cache).shape == (2, 0, DIM)
    assert torch.equal(attn(x[:, :9], cache), attn(x[:, :9], attn.new_cache(2, 100)))
    attn, x = attn.to("meta"), x.to("meta")
    cache = attn.new_cache(2, 100)
    assert [attn(part, cache).shape for part in x.split([97, 2, 1], 1)] == [(2, n, DIM) for n in (97, 2, 1)]


@torch.no_grad()
def test_a_step_reads_no_value_that_was_not_picked():
    attn, x, chosen = layer(kv_heads=2, select=BY_MEANS), inputs(100), []
    wanted, cache = attn(x), attn.new_cache(2, 100)
    attn(x[:, :-1], cache)
    choice = attn.select
    attn.select = lambda q, k: chosen.append(choice(q, k)) or chosen[-1]
    attn(x[:, -1:], copy.deepcopy(cache))
    for batch, head in np.ndindex(2, 2):
        cache.room[1][batch, head, ~chosen[0].kept_keys(0, batch, head)] = float("nan")
    torch.testing.assert_close(attn(x[:, -1:], cache), wanted[:, -1:])


@given(st.data())
@settings(max_examples=40)
def test_an_e4m3_cache_holds_each_token_to_a_sixteenth_whatever_came_before_it(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    batch, kv_heads, head_dim, v_head_dim = (data.draw(st.integers(1, 9)) for _ in range(4))
    pieces = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    cache = sf.KeyValueCache(batch, kv_heads, sum(pieces) + 2, head_dim, v_head_dim=v_head_dim, dtype=E4M3)
    assert all(room.dtype == E4M3 for room in cache.room)
    k, v = (torch.randn(batch, kv_heads, sum(pieces), width, generator=generator) for width in (head_dim, v_head_dim))
    sizes = 2.0 ** torch.randint(-12, 12, (2, batch, kv_heads, sum(pieces), 1), generator=generator)
    k, v = (k * sizes[0]).to(dtype), (v * sizes[1]).to(dtype)
    v[:, :, ::3] = 0
    for some in zip(k.split(pieces, 2), v.split(pieces, 2), strict=True):
        found = cache.append(*some)
    assert all(t.dtype == dtype for t in found) and cache.keys.dtype == torch.float32
    for ours, wanted in ((cache.keys, k.float()), (cache.values, v.float())):
        # Small numbers of a token are multiples of 2^-9 times its scale.
        least = wanted.abs().amax(-1, keepdim=True) / 448 / 1024
        assert bool(((ours - wanted).abs() <= 1.01 * (wanted.abs() / 16 + least)).all())


def test_a_table_with_a_cache_gives_the_gradients_of_its_pattern():
    x, gradients = inputs(90), []
    for mask in (sf.compile_mask(WINDOW, 128), WINDOW):
        attn = layer(mask=mask)
        attn.k_proj.requires_grad_(False), attn.v_proj.requires_grad_(False)
        cache = attn.new_cache(2, 128)
        attn(x[:, :80], cache)
        attn(x[:, 80:], cache).square().sum().backward()
        gradients.append([p.grad for p in (attn.q_proj.weight, attn.out_proj.weight)])
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


@parametrize("options", [{"mask": "causal"}, {"mask": CHOSEN}, {"mask": None, "kv_heads": 1}, {"select": {"keep": 2}}])
def test_a_cache_is_refused_where_keys_or_values_would_lose_their_gradients(options):
    attn, x = layer(**options), inputs(70)
    cache = attn.new_cache(2, 200)
    for learned in (attn.k_proj.weight, attn.v_proj.weight, x):
        attn.requires_grad_(False), x.requires_grad_(False)
        attn.q_proj.requires_grad_(True), learned.requires_grad_(True)
        with pytest.raises(
            ValueError, match=r"a layer with a cache gives no gradients.*under torch.no_grad\(\), or without a cache"
        ):
            attn(x, cache)
        assert cache.tokens == 0
    with torch.no_grad():
        attn(x, cache)
    assert cache.tokens == 70 and not any(
        t.requires_grad for t in cache.append(*torch.ones(2, 2, attn.kv_heads, 1, 12).requires_grad_())
    )


@torch.no_grad()
@parametrize(
    "spec, limit, call",
    [
        (sf.parse(CHOSEN), "causal", None),
        ("causal & local(150) & sampled(4, keep=1, block=64)", "causal & local(150)", None),
        ("sampled(4, keep=1, block=64)", None, None),
        (sf.parse(CHOSEN_BY_HEAD), "per_head([causal, causal, causal & local(9), causal])", None),
        (sf.parse(CHOSEN_BY_HEAD), "per_head([causal, causal, causal & local(9), causal])", in_one_graph),
    ],
)
def test_a_prompt_chooses_and_few_tokens_after_it_attend_to_all_before_the_choosers(spec, limit, call):
    attn, dense, x = layer(mask=spec), layer(mask=limit), inputs(200)
    call = attn if call is None else call(attn)
    cache, of_dense = attn.new_cache(2, 200), dense.new_cache(2, 200)
    torch.testing.assert_close(call(x[:, :130], cache), attn(x[:, :130]))
    dense(x[:, :130], of_dense)
    for piece in x[:, 130:].split([1, 1, 64, 4], 1):
        torch.testing.assert_close(call(piece, cache), dense(piece, of_dense), atol=1e-5, rtol=1e-4)
    cache.reset(), of_dense.reset()
    torch.testing.assert_close(call(x[:, :20], cache), dense(x[:, :20], of_dense), atol=1e-5, rtol=1e-4)  # a short prompt
    assert cache.tokens == 20


@torch.no_grad()
@parametrize(
    "options, message",
    [
        ({"mask": "scored(keep=1)"}, "scored needs the scores"),
        ({"mask": "per_head([causal, full])"}, "the mask's heads must be q's, 4"),
        ({"mask": "causal & documents((0, 40, 75))"}, "it names 75"),
        ({"select": lambda q, k: 1 / 0}, "division by zero"),
        ({"mask": "causal", "backend": "hopper"}, "hopper"),
        ({"mask": sf.compile_mask(WINDOW, 149)}, "the cache's room of 150 tokens; got q_len=149, kv_len=149; compile it for 150"),
    ],
)
def test_a_call_that_fails_leaves_the_cache_as_it_was(options, message):
    attn, failing, x = layer(), layer(**options), inputs(150)
    cache, alone = attn.new_cache(2, 150), attn.new_cache(2, 150)
    for piece in x.split([70, 80], 1):
        with pytest.raises(Exception, match=message):
            failing(piece, cache)
        assert torch.equal(attn(piece, cache), attn(piece, alone))
    assert torch.equal(cache.keys, alone.keys) and torch.equal(cache.values, alone.values)


@torch.no_grad()
@parametrize("q_len, kv_len", [(40, 40), (1, 1), (1, 9)])
def test_a_table_may_be_of_the_tokens_of_a_call_and_not_of_the_cache(q_len, kv_len):
    attn, cache = layer(mask=sf.compile_mask(WINDOW, q_len, kv_len)), layer().new_cache(2, 41)
    layer()(inputs(kv_len - q_len), cache)
    assert attn(inputs(q_len), cache).shape == (2, q_len, DIM)


@torch.no_grad()
@parametrize(
    "options, dtype",
    [
        ({"mask": WINDOW}, E4M3),
        ({"mask": sf.compile_mask(WINDOW, 160)}, None),
        ({"mask": None}, None),
        ({"select": BY_MEANS}, None),
    ],
    ids=["text", "table", "dense", "picks"],
)
def test_a_compiled_layer_with_a_cache_compiles_nothing_with_each_token(options, dtype):
    attn, counter, counts = layer(kv_heads=2, **options), CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(attn, backend=counter, fullgraph=True)
    caches = [attn.new_cache(2, 160, dtype) for _ in range(2)]
    for piece in inputs(90).split([80] + 10 * [1], 1):
        torch.testing.assert_close(compiled(piece, caches[0]), attn(piece, caches[1]), atol=1e-5, rtol=1e-4)
        counts.append(counter.frame_count)
    assert counts[3] == counts[-1] and caches[0].tokens == 90


# Masks.

MASKS = {"text": "causal & local(9)", "pattern": sf.causal() & sf.local(9), "table": sf.compile_mask("causal & local(9)", TOKENS)}


def copies(attn):
    return copy.deepcopy(attn), pickle.loads(pickle.dumps(attn))


@parametrize("select", [SELECT, SELECT.keywords], ids=["function", "arguments"])
def test_a_layer_shows_its_choice_and_so_do_its_copies(select):
    attn, x = layer(kv_heads=2, select=select), inputs(100)
    for one in copies(attn):
        assert torch.equal(one(x), attn(x)) and repr(one) == repr(attn)
    assert "keep=3" in repr(attn) and "always='sinks(2)'" in repr(attn) and "mask=" not in repr(attn)


@parametrize("name", [*MASKS, "dense"])
def test_a_mask_that_is_set_later_is_that_of_every_use(name):
    mask, x = MASKS.get(name), inputs()
    attn, other = layer(), layer(mask=mask)
    compiled = in_one_graph(attn)
    before = compiled(x)
    attn.mask = mask
    wanted = other(x)
    assert not torch.allclose(before, wanted)
    for one in (attn, compiled, *copies(attn)):
        torch.testing.assert_close(one(x), wanted)
        assert repr(getattr(one, "_orig_mod", one)) == repr(other)
    assert attn.state_dict().keys() == other.state_dict().keys() and f"mask={sf.parse(SPEC)}" in repr(layer())


@parametrize("compiles", [False, True], ids=["eager", "compiled"])
@parametrize("name", MASKS)
def test_a_mask_of_one_call_does_not_stay_with_the_layer(name, compiles):
    if compiles and name == "pattern" and torch.__version__ < "2.13":
        pytest.skip("PyTorch before 2.13 traces no Pattern objects")
    attn, x, wanted = layer().requires_grad_(False), inputs(), layer(mask=MASKS[name])(inputs())
    own, saved, cache = attn(x), attn.state_dict(), attn.new_cache(2, TOKENS)
    call = in_one_graph(attn) if compiles else attn
    parts = [call(part, cache, mask=MASKS[name]) for part in x.split([149, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), wanted)
    for mask, expected in ((MASKS[name], wanted), (None, own)):
        torch.testing.assert_close(call(x, mask=mask), expected)
    assert all(torch.equal(saved[one], tensor) for one, tensor in attn.state_dict().items())


def test_weights_are_dropped_only_in_training():
    attn, plain, x = layer(dropout_p=0.3), layer(), inputs()
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attn(x))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    with pytest.raises(ValueError, match=r"with dropout_p=0.3 takes no cache; call layer.eval\(\)"):
        attn(x, attn.new_cache(2, TOKENS))
    assert torch.equal(attn.eval()(x), plain(x))
    with torch.no_grad():
        attn(x, attn.new_cache(2, TOKENS))


# Saved layers.

TEXTLESS = {
    "a function": {"mask": sf.causal() & sf.from_mask_fn(lambda q, kv: (q - kv) % 3 == 0)},
    "a table": {"mask": sf.compile_mask("causal & local(3)", TOKENS)},
    "a selection": {"mask": "causal", "select": {"keep": 2, "block_size": 16}},
}


def test_a_saved_mask_is_its_text_and_goes_through_safetensors():
    save, load = (getattr(pytest.importorskip("safetensors.torch"), name) for name in ("save", "load"))
    model = torch.nn.Sequential(layer(), layer(mask=None), *(layer(**options) for options in TEXTLESS.values()))
    state = load(save(model.half().state_dict()))
    specs = {name: bytes(value.tolist()).decode() for name, value in state.items() if name.endswith("mask_spec")}
    assert specs == {"0.mask_spec": SPEC, "1.mask_spec": "full"}
    for saved in (state, {name: value.bfloat16() for name, value in state.items()}):
        assert str(model.load_state_dict(saved)) == "<All keys matched successfully>"
    for textless in model[2:]:  # neither saved nor compared
        textless.load_state_dict(model[0].state_dict())
        model[0].load_state_dict(textless.state_dict())


@parametrize(
    "here, saved, warns",
    [
        (SPEC, "causal", True),
        ("full", SPEC, True),
        ("causal", "full", True),
        (SPEC, "causal & windmill(3)", True),
        # In another order.
        (SPEC, "(local(20) | sinks(2)) & causal\n", False),
        (SPEC, None, False),
    ],
)
def test_a_layer_that_loads_keeps_its_mask_and_warns_once_if_another_was_saved(here, saved, warns):
    model, other = (torch.nn.Sequential(*(layer(mask=here) for _ in range(2))) for _ in range(2))
    state = {name: tensor for name, tensor in model.state_dict().items() if "mask_spec" not in name}
    if saved is not None:
        state |= {f"{n}.mask_spec": torch.tensor(list(saved.encode()), dtype=torch.uint8) for n in (0, 1)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    said = f"under the mask '{saved}', and the layer that loads it keeps its own, '{here}'; set layer.mask"
    assert [said in str(one.message) for one in caught] == [True] * warns
    assert torch.equal(model(inputs()), other(inputs()))
    assert torch.equal(model.state_dict()["0.mask_spec"], other.state_dict()["0.mask_spec"])


def test_a_layer_made_without_memory_saves_its_mask_and_loads():
    saved, wanted = layer().state_dict(), layer()(inputs())
    with torch.device("meta"):
        one, with_table, *others = layer(), sf.SparseAttention(DIM, 4), layer(), layer()
    one.to_empty(device="cpu").mask_spec.zero_()
    assert torch.equal(one.state_dict()["mask_spec"], saved["mask_spec"])
    for other, state in zip(others, (saved, {name: x for name, x in saved.items() if name != "mask_spec"}), strict=True):
        other.load_state_dict(state, assign=True)
        assert torch.equal(other.to("cpu").mask_spec, saved["mask_spec"])
        assert torch.equal(other(inputs()), wanted)
    with_table.mask = sf.compile_mask(SPEC, TOKENS)
    with_table.to_empty(device="cpu").load_state_dict(saved)
    torch.testing.assert_close(with_table(inputs()), wanted)


@pytest.fixture
def mesh():
    yield one_rank("cpu")
    torch.distributed.destroy_process_group()


@parametrize("options", [{}, {"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}], ids=str)
def test_sharded_layers_keep_their_mask_and_check_it(options, mesh, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states
    from torch.distributed.fsdp import fully_shard

    def made():
        return fully_shard(torch.nn.Sequential(fully_shard(layer(), mesh=mesh)), mesh=mesh)

    one, other, options = made(), made(), states.StateDictOptions(**options)
    with torch.no_grad():
        one[0].q_proj.weight.mul_(2)
    dcp.save(states.get_model_state_dict(one, options=options), checkpoint_id=tmp_path)
    state = states.get_model_state_dict(other, options=options)
    state["0.mask_spec"].zero_()
    dcp.load(state, checkpoint_id=tmp_path)
    states.set_model_state_dict(other, dict(state), options=options)
    assert torch.equal(one(inputs()), other(inputs())) and state["0.mask_spec"].dtype == torch.uint8
    other[0].mask = "causal"
    with pytest.warns(UserWarning, match="saved under the mask"):
        states.set_model_state_dict(other, dict(state), options=options)


# Devices and dtypes.


def test_a_layers_tables_follow_it_to_a_device_and_are_never_cast():
    mask = sf.compile_mask("causal & local(20)", TOKENS, block_size=32)
    attn, other = (layer(mask=mask) for _ in range(2))
    always = sf.compile_mask("sinks(4)", TOKENS, block_size=16)
    choosing = sf.SparseAttention(DIM, 4, select={"keep": 2, "block_size": 16, "always": always})
    before = attn(inputs())
    for cast in (attn.half, attn.bfloat16):
        cast()
        assert attn(inputs().to(attn.q_proj.weight.dtype)).dtype == attn.new_cache(1, 4).keys.dtype == attn.q_proj.weight.dtype
    for cast in (attn.float, attn.cpu, lambda: attn.to("cpu", torch.float32)):
        cast()
        assert attn.mask is mask
    assert all(name.endswith("_proj.weight") for name in attn.state_dict())
    twin = copy.deepcopy(attn)
    assert twin.mask.equal(mask) and not twin.mask.mask_index.is_meta
    torch.testing.assert_close(twin(inputs()), before, rtol=1e-2, atol=1e-2)
    for module in (attn, other, choosing):
        module.to("meta")
    assert {t.device.type for t in (*attn.mask.tensors(), *choosing.select.always.tensors())} == {"meta"}
    assert [t.dtype for t in attn.mask.tensors()] == [t.dtype for t in mask.tensors()]
    assert attn.mask is other.mask, "layers that share a table share its copy"
    assert attn(inputs().to("meta")).shape == before.shape and not mask.mask_index.is_meta
