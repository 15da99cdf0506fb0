"""The Hopper kernels, run on a CPU in drawn orders of events: see ``gluon_on_cpu``. On a GPU, other tests run the compiled ones."""

from dataclasses import replace

import chosen
import fuzz_calls
import pytest
import torch
from calls import OWN, Sizes, beside_empty_blocks, own_in_torch, varlen
from calls import assert_right as assert_call_right
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import poisoned_memory, tiles

import sparse_flash as sf
from sparse_flash.choosers import choose, features
from sparse_flash.masks.grid import BlockGrid
from sparse_flash.packed import in_place

pytest.importorskip("triton.experimental.gluon")
import gluon_on_cpu as emulated
import triton
import triton.language as tl
from gluon_on_cpu import MASKS, assert_right

from sparse_flash.choosers.kernels import hopper_log_sums
from sparse_flash.selection import choice
from sparse_flash.selection.kernels import hopper_pick_blocks

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernels run on this GPU"),
    pytest.mark.usefixtures("poison"),
]
parametrize = pytest.mark.parametrize

# Up to 64, two warp groups share a role in the backward pass. Above, each has its role.
TO_128 = {"dense, ragged": 64, "causal": 64, "whole blocks": 40, "blocks of 64": 64, "empty rows and columns": 80}
TO_128 |= {"one document": 128, "bits": 96, "blocks of 256": 128}
CASES = [(mask, dim, dim, False) for mask, dim in TO_128.items()]
CASES += [("causal", 64, 64, True), ("bits", 96, 96, True), ("causal", 128, 128, True), ("blocks of 64", 72, 72, False)]
# Sums are repeatable, and heads share keys, under half of the masks.
CASES += [(mask, *dims, i % 2 == j) for j, dims in enumerate([(256, 256), (192, 128)]) for i, mask in enumerate(MASKS)]
CASES += [(mask, *dims, mask == "bits") for dims in [(192, 192), (256, 72)] for mask in ("causal", "bits")]
CASES += [("empty rows and columns", 136, 136, False), ("causal", 200, 200, False)]  # which are padded


@parametrize("name, head_dim, v_head_dim, deterministic", CASES)
def test_results_are_right_in_a_drawn_order_of_events(name, head_dim, v_head_dim, deterministic):
    sizes = {"head_dim": head_dim, "v_head_dim": v_head_dim, "kv_heads": 1 if deterministic else 2}
    assert_right(*MASKS[name], seed=len(name), deterministic=deterministic, **sizes)


@parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128)])
def test_what_blocks_that_no_pair_touches_hold_decides_nothing(dims):
    sizes = Sizes(batch=1, heads=2, kv_heads=1, head_dim=dims[0], v_head_dim=dims[1], dtype=torch.float16, block_size=128)
    with emulated.gluon_on_cpu(3):
        assert_call_right(beside_empty_blocks(replace(sizes, backend="hopper", terms=())), "hopper")


def test_the_forward_pass_takes_values_wider_than_keys():
    assert_right(None, 100, 190, head_dim=64, v_head_dim=200, portable=True)


@parametrize("spec, head_dim", [(None, 64), ("causal", 128), ("local(150)", 96)])
def test_scores_that_rise_far_from_key_to_key_are_right(spec, head_dim):
    assert_right(spec, 500, seed=3, head_dim=head_dim, heads=1, kv_heads=1, rise=100.0)


UNCOVERED = "shifted(documents((0, 129, 257, 258, 400)), 0)"
WINDOW = "causal & local(100)"
TERMS = ("softcap", "alibi of batch", "frozen bias", "short frozen bias", "own", "kv_lens of nothing", "q_lens", "starts")
ALL = ("softcap", "alibi", "frozen bias", "own", "lengths", "sinks")
UNDER = {
    "causal": ("causal", 300, 300, 128),
    "dense, ragged": (None, 270, 310, 128),
    "bits": ("causal & (local(170) | strided(7, block=1))", 300, 310, 128),
    "whole blocks": ("butterfly(block=128)", 512, 512, 128),
    "blocks of 64": ("local(90)", 300, 300, 64),
    "blocks of 256": ("local(200)", 400, 400, 256),
}
OF_TERMS = [*(((term,), "causal", 64) for term in (*TERMS, "dropout", "lengths")), (ALL, "causal", 64), (ALL, "bits", 96)]
OF_TERMS += [(("lengths",), "dense, ragged", 128), (("lengths",), "blocks of 64", 64), (("lengths",), "bits", 256)]
OF_TERMS += [(ALL, "whole blocks", 128), (ALL, "blocks of 64", 64), (ALL, "dense, ragged", 192)]
OF_TERMS += [((*ALL, "dropout"), *under) for under in (("dense, ragged", 64), ("blocks of 256", 64), ("bits", 256))]
REPEATABLE = [(("lengths",), "bits", 96), (("lengths", "softcap", "alibi", "frozen bias", "dropout", "sinks"), "causal", 96)]


@parametrize("terms, under, head_dim, deterministic", [*((*row, False) for row in OF_TERMS), *((*row, True) for row in REPEATABLE)])
def test_each_term_follows_its_definition_whatever_nonexistent_tokens_hold(terms, under, head_dim, deterministic):
    sizes = {"batch": 2, "kv_heads": 1, "head_dim": head_dim, "v_head_dim": 128 if head_dim == 192 else head_dim}
    assert_right(*UNDER[under], terms=terms, seed=len(terms), deterministic=deterministic, **sizes)


@parametrize(
    "head_dim, v_head_dim, kv_heads, terms",
    [(64, 64, 1, ()), (80, 80, 2, ()), (192, 128, 2, ()), (256, 72, 1, ()), (256, 256, 1, ()), (64, 64, 1, ("lengths",))],
)
def test_splits_of_heavy_rows_and_columns_are_combined(head_dim, v_head_dim, kv_heads, terms):
    assert_right("causal | sinks(130)", 512, split=True, head_dim=head_dim, v_head_dim=v_head_dim, kv_heads=kv_heads, terms=terms)


DOCUMENTS = "causal & documents((0, 33, 40, 200, 385))"
# Options of ``oracle.tiles``, the call, what differs from usual sizes.
OF_TILES = {
    "64 queries": ({"short": True}, None, 100, 300, {"head_dim": 80}),
    "64 queries under a table": ({"short": True}, "local(90) | sinks(70)", 100, 300, {"head_dim": 40}),
    "192 queries": ({"tall": True}, None, 700, 300, {"head_dim": 40}),
    "192, causal": ({"tall": True}, "causal", 700, 640, {}),
    "192, rows of one block": ({"tall": True}, DOCUMENTS, 385, 385, {"kv_heads": 2}),
    "192, bits": ({"tall": True}, "causal & (local(70) | strided(7, block=1))", 400, 420, {"kv_heads": 2, "head_dim": 40}),
    "192, whole blocks": ({"tall": True}, "butterfly(block=128)", 768, 768, {"kv_heads": 2}),
    "192, empty rows": ({"tall": True}, "prefix(70) & ~causal", 600, 300, {}),
    "192, splits": ({"tall": True}, "causal | sinks(130)", 700, 700, {"split": True}),
    "documents": ({"by_document": True}, DOCUMENTS, 385, 385, {"terms": ("sinks",), "head_dim": 128}),
    "documents, head groups": ({"by_document": True, "together": True}, DOCUMENTS, 385, 385, {"head_dim": 128}),
    "documents, both ways": ({"by_document": True}, UNCOVERED, 500, 500, {"kv_heads": 2, "head_dim": 128}),
    "documents, window": ({"by_document": True}, f"{WINDOW} & documents((0, 300, 301, 501))", 501, 501, {"deterministic": True}),
    "fine": ({"fine": True}, DOCUMENTS, 385, 385, {"terms": ("sinks",), "head_dim": 128}),
    "fine, both passes": ({"fine": True, "together": True}, WINDOW, 300, 330, {}),
    "fine, bits": ({"fine": True}, "causal & (local(70) | strided(7, block=1))", 400, 420, {"kv_heads": 2, "head_dim": 80}),
    "fine, splits": ({"fine": True}, "causal | sinks(130)", 500, 500, {"split": True}),
    "documents, whole blocks": ({"by_document": True}, "causal & documents((0, 128, 256, 513))", 513, 513, {"batch": 2}),
}


@parametrize("name", OF_TILES)
def test_calls_are_right_in_every_kind_of_tiles(name):
    kind, spec, q_len, kv_len, changed = OF_TILES[name]
    with tiles(**kind):
        if spec is not None and "short" not in kind:
            own_table = next(iter(kind))
            assert getattr(sf.compile_mask(spec, q_len, kv_len), own_table) is not None
        assert_right(spec, q_len, kv_len, seed=len(name), **{"kv_heads": 1} | changed)


def test_one_document_much_longer_than_the_rest_is_right():
    mask = sf.compile_mask(f"{WINDOW} & documents((0, 5, 8001, 8300))", 8300)
    leaves, found = [torch.randn(1, 1, 8300, 64, dtype=torch.float16, requires_grad=True) for _ in range(3)], []
    for backend in ("hopper", "torch"):
        with emulated.gluon_on_cpu(seed=1), tiles(by_document=True):
            out = sf.attention(*leaves, mask, backend=backend)
            found.append([out, *torch.autograd.grad(out, leaves, leaves[0].detach())])
    assert mask.by_document is not None
    for ours, theirs in zip(*found, strict=True):
        assert (ours.float() - theirs.float()).norm() < 2e-3 * theirs.float().norm()


def test_gradients_of_tiles_that_start_where_documents_start_repeat_in_any_order_of_events():
    mask, found = sf.compile_mask(DOCUMENTS, 385), []
    leaves = [torch.randn(1, heads, 385, 64, dtype=torch.float16, requires_grad=True) for heads in (2, 1, 1)]
    for seed in range(3):
        with emulated.gluon_on_cpu(seed=seed), tiles(by_document=True):
            out = sf.attention(*leaves, mask, backend="hopper", deterministic=True)
            found.append([out, *torch.autograd.grad(out, leaves, leaves[0].detach())])
    assert mask.by_document is not None
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, *found[1:]))


@parametrize("kind", ["by_document", "fine"])
def test_packed_documents_are_attended_to_in_each_kind_of_blocks(monkeypatch, kind):
    for limit in ("_LEAST_TOKENS", "_LEAST_MEAN", "_LEAST_RUN"):
        monkeypatch.setattr(in_place, limit, 0)
    monkeypatch.setattr(in_place, "_MOST_KEYS", 1000 if kind == "fine" else -1)
    monkeypatch.setattr(in_place, "can_use_kernels", lambda device: True)
    monkeypatch.setattr(in_place, "_assemble", None)  # nothing needs the other table
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 64, "v_head_dim": 64, "dtype": torch.float16, "backend": "hopper"}
    call = varlen(Sizes(spec="causal", lens=(33, 7, 161, 184), q_len=600, **sizes))  # so that whole blocks are of no document
    with emulated.gluon_on_cpu(seed=1), tiles(by_document=True):
        assert_call_right(replace(call, hidden=()), "hopper")  # NaN past the last document may reach others


@triton.jit
def by_place(score, batch, head, q_pos, k_pos, params):
    return score + tl.load(params[0] + q_pos) - tl.load(params[0] + k_pos)


@triton.jit
def by_place_derivative(score, batch, head, q_pos, k_pos, params):
    return 1.0 + 0.0 * (tl.load(params[0] + q_pos) + tl.load(params[0] + k_pos))


@parametrize("mask", ["causal", None])
def test_a_function_reads_its_tables_at_positions_that_exist(mask):
    in_torch = lambda score, b, h, q, k, params: score + params[0][q] - params[0][k]  # noqa: E731
    options = {"score_mod": sf.ScoreFunction(in_torch, by_place, by_place_derivative), "score_params": (torch.randn(200),)}
    q, k, v = (torch.randn(1, 2, 200, 64, dtype=torch.float16).requires_grad_() for _ in range(3))
    with emulated.gluon_on_cpu():  # it raises for a read outside a tensor
        out = sf.attention(q, k, v, mask, backend="hopper", **options)
        out.sum().backward()
    wanted = sf.attention(q.double(), k.double(), v.double(), mask, backend="reference", **options)
    assert (out.double() - wanted).abs().max() < 4e-3 * wanted.abs().max()


@parametrize(
    "options, message",
    [
        ({"rel_bias": torch.zeros(2, 41).requires_grad_()}, "computes no gradient of rel_bias"),
        ({"score_mod": sf.ScoreFunction(own_in_torch)}, "has no triton function"),
        ({"score_mod": OWN, "deterministic": True}, "derivative may exceed"),
    ],
)
def test_what_the_kernels_lack_is_refused_by_name(options, message):
    q = torch.randn(1, 2, 64, 64, dtype=torch.float16)
    with emulated.gluon_on_cpu(), pytest.raises(ValueError, match=message):
        sf.attention(q, q, q, backend="hopper", **options)


@parametrize("seed", (0, 3))
def test_drawn_calls_are_right_in_drawn_orders_of_events(seed):
    with emulated.gluon_on_cpu(seed), poisoned_memory():
        call = fuzz_calls.draw(seed, "hopper")
        wrong = fuzz_calls.failure(call)
    assert wrong is None, f"{call}: {wrong}"


def scores(chooser, q, k, causal, lengths, by_kernel):
    """lengths: starts, ends and q_ends of ``features_of``, lists or None."""
    lengths = (None if one is None else torch.tensor(one) for one in lengths)
    content = features.Content(q, k, BlockGrid(q.shape[2], k.shape[2], chooser.block_size), causal, 0.1, None, *lengths)
    with torch.no_grad():
        return torch.cat([part for *_, part in choose._iter_scores(chooser, content, by_kernel)], 2)


EXISTING = st.none() | st.lists(st.integers(0, 300), min_size=2, max_size=2)


@settings(max_examples=12)
@given(
    chooser=chosen.drawn(chosen.COMPARING),
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)) | st.integers(1, 300).map(lambda n: (n, n)),
    heads=st.sampled_from([(1, 1), (2, 1)]),
    causal=st.booleans(),
    starts=EXISTING,
    ends=EXISTING,
    q_ends=EXISTING,
    head_dim=st.sampled_from([64, 128]),
    seed=st.integers(0, 999),
)
# Rows that precede all existing columns by more than a step read none, and end.
@example(sf.parse("sampled(64, keep=1, block=64)"), (500, 500), (1, 1), True, [0, 499], None, None, 64, 0)
@example(sf.parse("antidiagonal(8, keep=1, block=64)"), (300, 300), (2, 1), True, None, None, None, 128, 0)
@example(sf.parse("sampled(64, keep=1, block=64)"), (500, 500), (1, 1), False, None, [0, 3], [3, 0], 64, 0)
def test_hoppers_log_sums_are_right_in_a_drawn_order_of_events(
    chooser, lengths, heads, causal, starts, ends, q_ends, head_dim, seed
):
    options = {"batch": 2, "heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim, "dtype": torch.float16, "seed": seed}
    q, k = chosen.tensors(*lengths, **options)
    starts = starts and [min(start, lengths[1] - 1) for start in starts]
    existing = starts, ends, q_ends
    wanted = scores(chooser, q, k, causal, existing, False)
    with emulated.gluon_on_cpu(seed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_log_sums, "supports", lambda rows, per_kv_block: per_kv_block >= 4)  # head_dim 64 too
        found = scores(chooser, q, k, causal, existing, True)
    torch.testing.assert_close(found, wanted, rtol=3e-3, atol=1e-5)


# q_len, kv_len, heads, key heads, blocks kept, their keys, head_dim, ends of packed documents
CHOICES = [
    (300, 300, 4, 1, 3, 128, 128, ()),
    (70, 2700, 2, 1, 16, 128, 40, ()),
    (260, 1100, 4, 2, 5, 64, 64, ()),
    (193, 100, 2, 2, 4, 64, 72, ()),
    (1700, 1700, 2, 1, 4, 64, 64, (70, 1390, 1650)),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CHOICES)
def test_hoppers_choice_of_blocks_is_right_in_a_drawn_order_of_events(case, seed):
    q_len, kv_len, heads, kv_heads, keep, block, dim, ends = case
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randint(-3, 4, (2, *size, dim), generator=generator).half() for size in ((heads, q_len), (kv_heads, kv_len)))
    asked = choice.BlockChoice("max", heads, min(keep, -(-kv_len // block)), block, kv_len)
    token, bounds = torch.arange(q_len), None
    if ends:  # a query past the last document has no block
        starts = torch.tensor([0, *ends, q_len])
        document = torch.searchsorted(starts, token, right=True) - 1
        own = torch.where(document < len(ends), token // block, -1)
        bounds = torch.stack([-(-starts[document] // block), own], 1).int()
    assert hopper_pick_blocks.supports(q, asked)
    with emulated.gluon_on_cpu(seed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_pick_blocks, "launch", emulated.run)
        found = hopper_pick_blocks.pick_blocks(q, k[:, :, : kv_len // block * block], asked, bounds)
    assert torch.equal(found, choice.choose(asked, q, k, bounds=bounds))


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
        except AssertionError as error:  # arrivals that nobody waited for, or a tile whose batch-head was not written yet
            assert "more arrivals" in str(error) or str(error).startswith("[-")
