"""The Hopper kernels, run on a CPU in drawn orders of events: see ``gluon_on_cpu``. On a GPU, other tests run the compiled ones."""

from itertools import product

import fuzz_calls
import pytest
import torch
from calls import OWN, own_in_torch
from oracle import check, heavy_rows_split, poisoned_memory

import sparse_flash as sf
from sparse_flash.masks import document_blocks, tall
from sparse_flash.packed import gather_rows, in_place
from sparse_flash.variant.definition import find_existing_tokens
from sparse_flash.variant.variant import LENGTHS, Variant

pytest.importorskip("triton.experimental.gluon")
import gluon_on_cpu as emulated
import triton
import triton.language as tl

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernels run on this GPU"),
    pytest.mark.usefixtures("poison"),
]

WITH = {"causal": {"kv_heads": 1}, "one document": {"head_dim": 128}, "bits": {"head_dim": 96}, "whole blocks": {"kv_heads": 1}}
CASES = {name: (*of, WITH.get(name, {})) for name, of in emulated.MASKS.items() if name != "blocks of 64"}
CASES |= {
    "256": ("causal", 300, 300, 128, {"head_dim": 256, "kv_heads": 1}),
    "256, blocks of 64": ("local(90)", 200, 200, 64, {"head_dim": 256}),
    "192 and 128": (*emulated.MASKS["bits"], {"head_dim": 192, "v_head_dim": 128}),
    "136, empty rows": ("prefix(70) & ~causal", 300, 200, 128, {"head_dim": 136}),
    "64 and 200, dense": (None, 100, 190, 128, {"head_dim": 64, "v_head_dim": 200}),
}


@pytest.mark.parametrize(
    "name, deterministic", [*((name, False) for name in CASES), ("causal", True), ("bits", True), ("256", True)]
)
def test_hopper_kernels_are_right_in_a_drawn_order_of_events(name, deterministic):
    spec, q_len, kv_len, block_size, changed = CASES[name]
    options = {"dtype": torch.float16, "head_dim": 64, "heads": 2, "deterministic": deterministic} | changed
    with emulated.gluon_on_cpu(seed=len(name)):
        check("hopper", spec, q_len, kv_len, block_size=block_size, **options)


@pytest.mark.parametrize("spec, head_dim", [(None, 64), ("causal", 128), ("local(150)", 96)])
def test_scores_that_rise_far_from_key_to_key_are_right(spec, head_dim):
    with emulated.gluon_on_cpu(seed=3):
        check("hopper", spec, 500, block_size=128, dtype=torch.float16, head_dim=head_dim, heads=1, score_rise=100.0)


# Tiles of 192 and 64 queries without a table, of 64 with one.
@pytest.mark.parametrize("spec, q_len, head_dim", [(None, 700, 40), (None, 100, 80), ("causal & local(90) | sinks(70)", 100, 40)])
def test_calls_are_right_in_tiles_that_suit_their_length(monkeypatch, spec, q_len, head_dim):
    from sparse_flash.kernels.hopper import configs

    monkeypatch.setattr(configs, "SHORT_TILES", {64: 2, 128: 2})
    with emulated.gluon_on_cpu(seed=5):
        check("hopper", spec, q_len, 300, block_size=128, dtype=torch.float16, head_dim=head_dim, heads=2, kv_heads=1)


@pytest.mark.parametrize("dim, dim_v", [*product((64, 128, 192, 256), (64, 128, 256))])
def test_wide_tiles_of_two_steps_fit_into_shared_memory(dim, dim_v):
    from sparse_flash.kernels.hopper.configs import wide_forward_config

    found = {
        wide_forward_config(dim, dim_v, block_size, tiles, 132, plain)
        for block_size, tiles, plain in product((None, 64, 128), (132, 1000), (True, False))
    }
    assert {config.queries for config in found} == {64, 128}
    for config in found:
        taken = 2 * (config.queries * dim + config.stages * config.keys * (dim + dim_v))
        assert config.stages >= 2 and config.programs * (taken + 1024) <= 228 * 1024, config
        # Sums of dim_v columns, scores, and the weights that wait in 16 bits.
        registers = (config.queries // 64 == 2 and 240) or 65536 // (256 * config.programs)
        assert dim_v // 2 + config.keys // 2 + config.keys // 4 <= registers - 16, config


def test_a_short_call_of_wide_heads_takes_smaller_tiles_unless_it_has_a_variant(monkeypatch):
    from sparse_flash.kernels.hopper import configs

    monkeypatch.setattr(configs, "SHORT_TILES", {256: 1})
    assert [configs.wide_forward_config(192, 128, None, tiles, 132, True).queries for tiles in (132, 133)] == [64, 128]
    assert configs.wide_forward_config(192, 128, None, 132, 132, False).queries == 128


@pytest.mark.parametrize("head_dim, v_head_dim", [(64, 64), (192, 128)])
def test_splits_of_heavy_rows_are_combined(head_dim, v_head_dim):
    with heavy_rows_split():
        mask = sf.compile_mask("causal | sinks(130)", 512, 512, 128)
    assert mask.by_query.is_split and mask.by_key.is_split
    shape = {"head_dim": head_dim, "v_head_dim": v_head_dim, "heads": 2, "kv_heads": 1}
    with emulated.gluon_on_cpu():
        check("hopper", mask, 512, 512, block_size=128, dtype=torch.float16, **shape)


OF_TALL_ROWS = {
    "causal": ("causal", 700, 640, {"kv_heads": 1}),
    "rows of one block": ("causal & documents((0, 33, 40, 200, 385))", 385, 385, {}),
    "bits": ("causal & (local(70) | strided(7, block=1))", 400, 420, {"head_dim": 40}),
    "whole blocks": ("butterfly(block=128)", 768, 768, {}),
    "empty rows": ("prefix(70) & ~causal", 600, 300, {"kv_heads": 1}),
}


@pytest.fixture
def tall_tiles(monkeypatch):
    """Tiles of 192 queries wherever a mask may have rows for them."""
    from sparse_flash.kernels.hopper import configs

    monkeypatch.setattr(configs, "SHORT_TILES", {64: 0, 128: 0})
    monkeypatch.setattr(configs, "TALL_TILE_TIME", 0)
    monkeypatch.setattr(tall, "_MOST_TIME", 1 << 30)


@pytest.mark.parametrize("name", OF_TALL_ROWS)
def test_tiles_of_192_queries_have_rows_of_their_own(tall_tiles, name):
    spec, q_len, kv_len, changed = OF_TALL_ROWS[name]
    options = {"dtype": torch.float16, "head_dim": 64, "heads": 2} | changed
    mask = sf.compile_mask(spec, q_len, kv_len, 128)
    assert mask.tall is not None
    with emulated.gluon_on_cpu(seed=len(name)):
        check("hopper", mask, q_len, kv_len, **options)


def test_splits_of_heavy_tall_rows_are_combined(tall_tiles):
    with heavy_rows_split():
        mask = sf.compile_mask("causal | sinks(130)", 700, 700, 128)
        assert mask.tall.by_query.is_split
    with emulated.gluon_on_cpu():
        check("hopper", mask, 700, 700, block_size=128, dtype=torch.float16, head_dim=64, heads=2, kv_heads=1)


OF_DOCUMENTS = {
    "causal": ("causal & documents((0, 33, 40, 200, 385))", 385, {"kv_heads": 1}),
    "both ways": ("shifted(documents((0, 129, 257, 258, 400)), 0, allow_uncovered=True)", 500, {"head_dim": 128}),
    "window": ("causal & local(100) & documents((0, 300, 301, 501))", 501, {"head_dim": 96, "kv_heads": 1}),
    "whole blocks": ("causal & documents((0, 128, 256, 513))", 513, {"batch": 2}),
}


@pytest.fixture
def blocks_by_document(monkeypatch):
    """Blocks that start where documents start wherever a mask may have them."""
    from sparse_flash.kernels.hopper import configs

    monkeypatch.setattr(configs, "SHORT_TILES", {64: 0, 128: 0})
    monkeypatch.setattr(configs, "TALL_TILE_TIME", 1 << 30)
    monkeypatch.setattr(document_blocks, "_LEAST_GAIN", 0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", OF_DOCUMENTS)
def test_tiles_start_where_documents_start(blocks_by_document, name, deterministic):
    spec, tokens, changed = OF_DOCUMENTS[name]
    options = {"dtype": torch.float16, "head_dim": 64, "heads": 2, "deterministic": deterministic} | changed
    mask = sf.compile_mask(spec, tokens)
    with emulated.gluon_on_cpu(seed=len(name)):
        check("hopper", mask, tokens, tokens, **options)
    assert mask.by_document is not None


def test_gradients_of_tiles_that_start_where_documents_start_repeat_in_any_order_of_events(blocks_by_document):
    mask = sf.compile_mask("causal & documents((0, 33, 40, 200, 385))", 385)
    q, k, v, dout = (torch.randn(1, heads, 385, 64, dtype=torch.float16) for heads in (2, 1, 1, 2))
    found = []
    for seed in range(3):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        with emulated.gluon_on_cpu(seed=seed):
            out = sf.attention(*leaves, mask, backend="hopper", deterministic=True)
            found.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert mask.by_document is not None and all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, *found[1:]))


@pytest.mark.parametrize(
    "spec, tokens, sinks",
    [
        ("causal & documents((0, 33, 40, 200, 385))", 385, torch.tensor([0.5, -1.0], requires_grad=True)),
        ("causal & local(100) & documents((0, 5, 8001, 8300))", 8300, None),
    ],
    ids=["sinks", "a long document"],
)
def test_results_by_document_are_those_of_another_back_end(blocks_by_document, spec, tokens, sinks):
    torch.manual_seed(0)  # the gradient of sinks, a sum of all queries', may be near 0, and then has a large relative error
    mask = sf.compile_mask(spec, tokens)
    leaves = [torch.randn(1, heads, tokens, 64, dtype=torch.float16, requires_grad=True) for heads in (2, 1, 1)]
    dout = torch.randn(1, 2, tokens, 64, dtype=torch.float16)

    def results(backend):
        out = sf.attention(*leaves, mask, backend=backend, sinks=sinks)
        return out, *torch.autograd.grad(out, leaves + ([] if sinks is None else [sinks]), dout)

    with emulated.gluon_on_cpu(seed=1):
        found = results("hopper")
    assert mask.by_document is not None
    for one, other in zip(found, results("torch"), strict=True):
        assert (one.float() - other.float()).norm() < 2e-3 * other.float().norm()


def test_packed_documents_are_attended_to_in_tiles_that_start_where_they_start(blocks_by_document, monkeypatch):
    for limit in ("_LEAST_TOKENS", "_LEAST_MEAN", "_LEAST_RUN"):
        monkeypatch.setattr(in_place, limit, 0)
    bounds = torch.tensor([0, 33, 40, 201, 385])
    tokens = 600  # so that whole blocks are of no document
    leaves = [torch.randn(tokens, heads, 64, dtype=torch.float16, requires_grad=True) for heads in (2, 1, 1)]
    dout = torch.randn(tokens, 2, 64, dtype=torch.float16)

    def results(backend):
        out, lse = sf.attention_varlen(*leaves, bounds, mask="causal", backend=backend, return_lse=True)
        return out, lse[:, :385], *torch.autograd.grad(out, leaves, dout)

    wanted = results("reference")
    monkeypatch.setattr(gather_rows, "can_use_kernels", lambda device: True)
    monkeypatch.setattr(in_place, "_assemble_on_device", None)  # nothing needs the other table
    with emulated.gluon_on_cpu(seed=1):
        found = results("hopper")
    assert not found[0][385:].any()
    for one, other in zip(found, wanted, strict=True):
        assert (one.float() - other.float()).norm() < 2e-3 * other.float().norm()


def test_dropout_drops_the_pairs_that_it_drops_elsewhere():
    inputs = [torch.randn(1, 2, 200, 64, dtype=torch.float16, requires_grad=True) for _ in range(3)]

    def results(backend):
        torch.manual_seed(3)  # of the pairs
        out = sf.attention(*inputs, "causal", dropout_p=0.3, backend=backend)
        return out, *torch.autograd.grad(out.float().sum(), inputs)

    with emulated.gluon_on_cpu():
        found = results("hopper")
    for one, other in zip(found, results("torch"), strict=True):
        assert (one.float() - other.float()).norm() < 1e-3 * other.float().norm()


def lens(*values):
    return torch.tensor(values)


BIAS = torch.linspace(-2, 2, 2 * 41).view(2, 41)
TERMS = {
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": torch.tensor([0.3, 0.05])},
    "alibi of batch": {"alibi_slopes": torch.tensor([[0.3, 0.05], [0.0, 0.2]])},
    "frozen bias": {"rel_bias": BIAS},
    "short bias": {"rel_bias": BIAS[:, :3]},
    "own function": {"score_mod": OWN, "score_params": (torch.tensor([[0.1, -0.05], [0.0, 0.08]]), lens(2).int())},
    "kv_lens": {"kv_lens": lens(41, 290)},
    "kv_lens of nothing": {"kv_lens": lens(0, 1000)},
    "q_lens": {"q_lens": lens(300, 133).int()},
    "starts": {"kv_starts": lens(150, -3), "q_starts": lens(133, 264).int()},
    "lengths": {"kv_starts": lens(10, 164), "kv_lens": lens(20, 275), "q_starts": lens(9, 0), "q_lens": lens(240, 0)},
}
TERMS["all"] = {**TERMS["softcap"], **TERMS["alibi"], **TERMS["frozen bias"], **TERMS["own function"], **TERMS["lengths"]}
TERMS["biased lengths"] = {**TERMS["softcap"], **TERMS["alibi"], **TERMS["frozen bias"], **TERMS["lengths"], "dropout_p": 0.25}
TERMS["all, dropout"] = {**TERMS["all"], "dropout_p": 0.25}
UNDER = {
    "causal": ("causal", 300, 300, {}),
    "dense, ragged": (None, 270, 310, {}),
    "bits": ("causal & (local(170) | strided(7, block=1))", 300, 310, {"head_dim": 96}),
    "whole blocks": ("butterfly(block=128)", 512, 512, {"head_dim": 128}),
    "blocks of 64": ("local(90)", 300, 300, {"block_size": 64}),
    "blocks of 256": ("local(200)", 400, 400, {"block_size": 256}),
    "head_dim 192": ("causal", 200, 200, {"head_dim": 192}),
}
OF_TERMS = [*((name, "causal", False) for name in TERMS), *(("all", under, False) for under in UNDER)]
OF_TERMS += [("lengths", under, under == "bits") for under in UNDER] + [("all, dropout", "dense, ragged", False)]
OF_TERMS += [("biased lengths", "causal", True)]


@pytest.mark.parametrize("name, under, deterministic", OF_TERMS)
def test_each_term_is_as_it_is_defined_whatever_nonexistent_tokens_hold(name, under, deterministic):
    spec, q_len, kv_len, changed = UNDER[under]
    shape = {"block_size": 128, "head_dim": 64} | changed
    mask = spec and sf.compile_mask(spec, q_len, kv_len, shape["block_size"])
    generator, given = torch.Generator().manual_seed(0), TERMS[name]
    # Heads share keys.
    sizes = (2, 2, q_len), (2, 1, kv_len), (2, 1, kv_len), (2, 2, q_len)
    q, k, v, dout = (torch.randn((*size, shape["head_dim"]), generator=generator).half() for size in sizes)
    variant = Variant(**{side: given[side] for side in LENGTHS if side in given})

    def results(backend, dtype, filling):
        spoiled = []
        for tensor, side in zip((q, k, v, dout), ("q", "kv", "kv", "q"), strict=True):
            exist = find_existing_tokens(getattr(variant, f"{side}_starts"), getattr(variant, f"{side}_lens"), *tokens_of(tensor))
            spoiled.append(tensor if exist is None else torch.where(exist[:, None, :, None], tensor, filling))
        *leaves, cotangent = (tensor.to(dtype) for tensor in spoiled)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        torch.manual_seed(3)  # of dropout
        options = {"return_lse": True, "backend": backend, "deterministic": deterministic}
        out, lse = sf.attention(*leaves, mask, **options, **given)
        dlse = torch.linspace(-1, 1, lse.numel(), dtype=lse.dtype).view_as(lse)
        return [out, lse, *torch.autograd.grad([out, lse], leaves, [cotangent, dlse])]

    wanted = results("reference", torch.float64, 0.0)
    with emulated.gluon_on_cpu(seed=len(name)):
        found = results("hopper", torch.float16, float("nan"))
    for label, one, other in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert not one.isnan().any() and torch.equal(one.isneginf(), other.isneginf()), label
        finite = ~other.isneginf()
        if finite.any():
            error = (one[finite].double() - other[finite]).abs().max()
            assert error <= 4e-3 * max(1.0, other[finite].abs().max()), f"{label} is off by {error:.2g}"


def tokens_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch entries and tokens, of shapes that broadcast."""
    return torch.arange(tensor.shape[0])[:, None], torch.arange(tensor.shape[2])[None]


def test_splits_of_heavy_rows_are_combined_where_lengths_leave_some_empty():
    with heavy_rows_split():
        mask = sf.compile_mask("causal | sinks(130)", 512, 512, 128)
    assert mask.by_query.is_split and mask.by_key.is_split
    given = {"kv_lens": lens(140, 512), "kv_starts": lens(0, 300), "q_lens": lens(500, 290)}
    inputs = [torch.randn(2, heads, 512, 64, dtype=torch.float16) for heads in (2, 1, 1)]

    def results(backend, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        out, lse = sf.attention(*leaves, mask, return_lse=True, backend=backend, **given)
        return out, lse, *torch.autograd.grad(out.square().sum(), leaves)

    with emulated.gluon_on_cpu():
        found = results("hopper", torch.float16)
    for one, other in zip(found, results("reference", torch.float64), strict=True):
        assert torch.equal(one.isneginf(), other.isneginf())
        finite = ~other.isneginf()
        assert (one[finite].double() - other[finite]).abs().max() < 4e-3 * other[finite].abs().max()


@triton.jit
def by_place(score, batch, head, q_pos, k_pos, params):
    return score + tl.load(params[0] + q_pos) - tl.load(params[0] + k_pos)


@triton.jit
def by_place_derivative(score, batch, head, q_pos, k_pos, params):
    return 1.0 + 0.0 * (tl.load(params[0] + q_pos) + tl.load(params[0] + k_pos))


@pytest.mark.parametrize("mask", ["causal", None])
def test_a_function_reads_its_tables_at_positions_that_exist(mask):
    function = sf.ScoreFunction(
        lambda score, b, h, q, k, params: score + params[0][q] - params[0][k], by_place, by_place_derivative
    )
    given = {"score_mod": function, "score_params": (torch.randn(200),)}
    q, k, v = (torch.randn(1, 2, 200, 64, dtype=torch.float16).requires_grad_() for _ in range(3))
    with emulated.gluon_on_cpu():  # it raises for a read outside a tensor
        out = sf.attention(q, k, v, mask, backend="hopper", **given)
        out.sum().backward()
    wanted = sf.attention(q.double(), k.double(), v.double(), mask, backend="reference", **given)
    assert (out.double() - wanted).abs().max() < 4e-3 * wanted.abs().max()


def test_a_learned_bias_and_a_function_without_triton_are_refused_by_name():
    q = torch.randn(1, 2, 64, 64, dtype=torch.float16)
    with emulated.gluon_on_cpu():
        with pytest.raises(ValueError, match="computes no gradient of rel_bias"):
            sf.attention(q, q, q, backend="hopper", rel_bias=BIAS.clone().requires_grad_())
        with pytest.raises(ValueError, match="has no triton function"):
            sf.attention(q, q, q, backend="hopper", score_mod=sf.ScoreFunction(own_in_torch))
        with pytest.raises(ValueError, match="derivative may exceed"):
            sf.attention(q, q, q, backend="hopper", score_mod=OWN, deterministic=True)


@pytest.mark.parametrize("seed", (0, 24, 60))
def test_drawn_calls_are_right_in_drawn_orders_of_events(seed):
    with emulated.gluon_on_cpu(seed), poisoned_memory():
        call = fuzz_calls.draw(seed, "hopper")
        wrong = fuzz_calls.failure(call)
    assert wrong is None, f"{call}: {wrong}"


def attend():
    q = torch.randn(1, 2, 400, 64, dtype=torch.float16)
    return sf.attention(q, q, q, "causal", backend="hopper")


def test_a_barrier_that_counts_one_arrival_too_many_is_a_deadlock(monkeypatch):
    init = emulated.mbarrier.init
    monkeypatch.setattr(emulated.mbarrier, "init", lambda barrier, count: init(barrier, count + 1))
    with emulated.gluon_on_cpu(), pytest.raises(emulated.Deadlock, match="of program"):
        attend()


def test_data_used_before_it_has_arrived_or_after_it_was_overwritten_shows(monkeypatch):
    monkeypatch.setattr(emulated.mbarrier, "wait", lambda *_, **__: emulated.here().pause())
    with emulated.gluon_on_cpu():
        try:
            assert attend().isnan().any()
        except AssertionError as error:  # arrivals that nobody waited for
            assert "more arrivals" in str(error)
