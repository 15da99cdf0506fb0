"""What holds for every entry point, whatever it is called with: a new property is one test here, over all of ``calls.ENTRIES``."""

import gc
from dataclasses import replace
from itertools import pairwise

import pytest
import strategies
import torch
from accepted import DEVICE, shapes
from calls import (
    ENTRIES,
    SPEC,
    TERMS,
    Call,
    assert_right,
    attention_under_a_table,
    attention_with_terms,
    beside_empty_blocks,
    name_of,
    terms_of,
    varlen,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import ALL, BACKENDS, LAYOUTS, LSE, OUT, Sizes, is_interpreted, normal, sizes_for, table_of, unless_refused

import sparse_flash as sf

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize
every_backend = parametrize("backend", BACKENDS)
OF_AUTO = ("flash_attn_call", "model")  # which take no back end
CASES = [(entry, backend) for entry in ENTRIES for backend in (("auto",) if entry in OF_AUTO else BACKENDS)]
every_call = parametrize("entry, backend", CASES)
# Triton's interpreter takes seconds, so on a CPU each of its kernels is seen in one entry, and in all by their definitions.
OF_KERNELS = ("attention_with_terms", "varlen", "decode_in_pages", "decode_in_eight_bits", "selection", "decode_selection_in_pages")
each_kernel = parametrize("entry, backend", [case for case in CASES if not is_interpreted(case[1]) or case[0] in OF_KERNELS])
# Which take deterministic=True; and whose out lies in memory as q does.
TOLD = ("attention", "attention_under_a_table", "attention_with_terms", "context_parallel", "varlen", "varlen_in_place")
KEEP_ORDER = (*TOLD[:3], "decode", "decode_in_pages", "topk", "choose", "blocks")


def made(entry: str, sizes: Sizes) -> Call:
    return ENTRIES[entry](sizes)


# Results and gradients.


@st.composite
def drawn_sizes(draw, entry: str, backend: str) -> Sizes:
    longest = 60 if is_interpreted(backend) else 200
    shape = draw(shapes("torch" if backend == "auto" else backend))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1), (3, 1)]))
    q_len, kv_len = (min(n, longest) for n in draw(strategies.lengths))
    sizes = Sizes(
        batch=draw(st.integers(1, 3)),
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=shape["head_dim"],
        v_head_dim=shape["v_head_dim"] or shape["head_dim"],
        dtype=shape["dtype"],
        layout=draw(st.sampled_from((*LAYOUTS, "mixed"))),
        backend=backend,
        seed=draw(st.integers(0, 99)),
        spec=draw(st.none() | st.just("causal & ~local(9)") | strategies.expressions),
        block_size=shape["block_size"],
        terms=tuple(draw(st.lists(st.sampled_from(TERMS), max_size=4, unique=True))),
        scale=draw(st.sampled_from([None, 0.05, 0.3])),
        queries=draw(st.sampled_from([1, 3, 20])),
    )
    if entry.startswith("varlen"):
        most = longest // 3 if is_interpreted(backend) else longest
        lens = draw(st.lists(st.tuples(st.integers(0, most), st.integers(0, most)), min_size=1, max_size=5))
        q_lens, k_lens = zip(*lens, strict=True)
        beyond = draw(st.integers(1, 50))
        sizes = replace(sizes, lens=q_lens, q_len=sum(q_lens) + beyond, k_lens=draw(st.sampled_from([None, k_lens])))
        sizes = replace(sizes, kv_len=sum(k_lens) + beyond)
    if "decode" in entry:
        lens = draw(st.lists(st.integers(0, longest), min_size=1, max_size=4))
        sizes = replace(sizes, lens=lens, kv_len=max(1, *lens), page=draw(st.sampled_from([None, 1, 16, 64])))
    if entry == "context_parallel" and is_interpreted(backend):
        sizes = replace(sizes, block_size=16)  # of which each rank has whole ones
    return replace(sizes, dtype=torch.float32) if entry == "model" else sizes


@every_call
def test_results_and_gradients_are_those_of_the_definition(entry, backend):
    with unless_refused():
        made(entry, sizes_for(backend))()

    @settings(max_examples=2 if is_interpreted(backend) else 8)
    @given(drawn_sizes(entry, backend))
    def property_holds(sizes):
        with unless_refused():
            call = replace(made(entry, sizes), differentiated=(ALL, OUT, LSE)[sizes.seed % 3])
            assert_right(call, backend, entry in KEEP_ORDER)

    property_holds()


LOCAL, BITS, HALF, BRAIN = "causal & local(50)", "causal & strided(7, block=1)", torch.float16, torch.bfloat16
PER_HEAD = "per_head([causal, causal & local(9), causal, causal & strided(5, block=1)])"  # others at 40 tokens too
# (q_len, kv_len, spec); (head_dim, v_head_dim, dtype, layout)
OF_LENGTHS = [(1, 1, None), (1, 300, "causal"), (300, 1, "local(40)"), (77, 200, "causal"), (200, 77, "local(40)")]
OF_LENGTHS += [(128, 256, None), (256, 128, "causal"), (129, 127, None)]
OF_V = [(192, 128, HALF, "sliced"), (64, 128, torch.float32, "heads first"), (40, 72, HALF, "head_dim first")]
OF_V += [(16, 256, torch.float32, "tokens first"), (128, 64, HALF, "tokens first"), (100, 36, HALF, "sliced")]
# What differs from usual sizes.
ROWS = [
    *({"head_dim": dim} for dim in (16, 40, 64, 80, 96, 128, 256)),
    *({"head_dim": dim, "v_head_dim": of_v, "dtype": dtype, "layout": layout} for dim, of_v, dtype, layout in OF_V),
    {"head_dim": 1, "spec": None},
    {"head_dim": 33, "spec": "causal", "layout": "sliced"},
    {"head_dim": 300, "spec": "causal", "layout": "tokens first", "q_len": 130, "kv_len": 70},
    *({"dtype": dtype, "head_dim": 64} for dtype in (HALF, BRAIN, torch.float32, torch.float64)),
    *({"dtype": dtype, "head_dim": 64, "spec": None} for dtype in (HALF, torch.float64)),
    *({"block_size": n, "q_len": n + 44, "kv_len": n + 44, "spec": f"{LOCAL} | strided(7)"} for n in (16, 32, 64, 128, 256)),
    *({"q_len": q_len, "kv_len": kv_len, "spec": spec} for q_len, kv_len, spec in OF_LENGTHS),
    *({"heads": heads, "kv_heads": kv_heads} for heads, kv_heads in ((4, 2), (6, 1), (3, 3))),
    *({"layout": layout, "kv_heads": kv_heads} for layout, kv_heads in zip(LAYOUTS, (1, 2, 1, 2), strict=True)),
    *({"heads": 4, "kv_heads": kv_heads, "spec": PER_HEAD} for kv_heads in (4, 2, 1)),
    {"batch": 4, "spec": "per_batch([causal, causal & local(9), causal, local(20)])"},
    {"spec": "~full"},
    {"heads": 6, "spec": "local(3) & ~prefix(30)"},  # rows that keep nothing
]


@every_backend
@parametrize("row", ROWS, ids=name_of)
def test_every_size_type_and_order_is_right(row, backend):
    usual = {"batch": 1, "heads": row.get("kv_heads", 1), "kv_heads": 1} if is_interpreted(backend) else {"heads": 2}
    sizes = sizes_for(backend, **{"spec": LOCAL} | usual | row)
    # Where lse has no gradient, PyTorch's kernel for CPUs computes.
    for some in (ALL, OUT) if backend == "torch" else (ALL,):
        with unless_refused():
            assert_right(replace(attention_under_a_table(sizes), differentiated=some), backend, keeps_order=True)


ALL_TERMS = ("q_lens", "kv_lens", "dropout", "softcap", "alibi", "bias", "own", "sinks")
# Terms, and what differs from usual sizes and a causal mask.
TERM_ROWS = {
    **{term: ((term,), {}) for term in TERMS},
    "all": (ALL_TERMS, {}),
    **{f"lengths, {spec}": (("lengths",), {"spec": spec}) for spec in (None, BITS, "local(9)")},
    **{f"all, {spec}": (ALL_TERMS, {"spec": spec}) for spec in ("local(30)", BITS)},
    "kv_lens, 80 and 8 of v": (("kv_lens",), {"head_dim": 80, "v_head_dim": 8}),
    "kv_lens, 80 and 8 of v, dense": (("kv_lens",), {"head_dim": 80, "v_head_dim": 8, "spec": None}),
    "lengths, 40 and 72 of v": (("lengths",), {"spec": "local(30)", "head_dim": 40, "v_head_dim": 72}),
    **{f"cut blocks, {spec}": (("lengths",), {"spec": spec, "block_size": 16}) for spec in ("causal", "local(40)")},
    "all, a mask for each head": (ALL_TERMS, {"spec": "per_head([causal, local(9)])"}),
    "all, a mask for each sequence": (ALL_TERMS, {"spec": "per_batch([causal, local(9)])"}),
    "all, float16": (ALL_TERMS, {"dtype": HALF}),
    "lengths, bfloat16": (("lengths",), {"dtype": BRAIN}),
    "q_lens and sinks, tokens first": (("q_lens", "sinks"), {"layout": "tokens first"}),
    # Queries that keep nothing leave all weight to their sink, and none if it is -inf.
    "sinks, more queries": (("sinks",), {"kv_len": 40}),
    "no sinks, more queries": (("no sinks",), {"kv_len": 40}),
    "no keys": (("q_lens", "sinks", "bias"), {"kv_len": 0, "spec": None}),
    # A query past the last one would be far from all keys, and what squares its score overflows.
    "far scores of one query": (("own", "bias", "steep alibi"), {"q_len": 1, "spec": None}),
    "far scores": (("own", "bias", "steep alibi"), {"q_len": 40, "spec": None}),
    "positions, more queries": (("alibi of batch", "kv_lens of nothing"), {"q_len": 90, "kv_len": 70}),
}


@every_backend
@parametrize("row", TERM_ROWS)
def test_each_term_follows_its_definition(row, backend):
    terms, changed = TERM_ROWS[row]
    lengths = {"q_len": 40, "kv_len": 50} if is_interpreted(backend) else {"q_len": 70, "kv_len": 90}
    usual = {"spec": "causal", "heads": 2, "kv_heads": 1, **lengths}
    sizes = sizes_for(backend, terms=terms, **usual | changed)
    table = table_of(sizes) if "block_size" in changed else None
    with unless_refused():
        assert_right(attention_with_terms(sizes, table), backend, keeps_order=True)


# Each takes some seconds to compile, so not all combinations are tested.
ON_GPU = [("triton", (term,), "causal", BRAIN, 64, 64, 128) for term in TERMS]
ON_GPU += [("hopper", (term,), "causal", BRAIN, 128, 128, 128) for term in TERMS]
ON_GPU += [
    ("triton", terms, *changed, 128)
    for terms in (("lengths",), ("dropout",), ("bias",), ALL_TERMS)
    for changed in (
        (BITS, BRAIN, 128, 128),
        ("local(30)", HALF, 256, 256),
        (None, torch.float32, 64, 64),
        ("local(30)", BRAIN, 192, 128),
        ("local(30)", BRAIN, 64, 128),
    )
]
ON_GPU += [
    ("hopper", (term,), spec, BRAIN, dim, dim, block_size)
    for term in ("lengths", "softcap", "alibi of batch", "own", "dropout")
    for spec, dim, block_size in ((BITS, 64, 128), ("local(30)", 96, 256), (None, 128, 128), ("causal", 128, 64))
]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@parametrize("backend, terms, spec, dtype, head_dim, v_head_dim, block_size", ON_GPU)
def test_terms_are_right_at_the_tile_sizes_of_a_gpu(backend, terms, spec, dtype, head_dim, v_head_dim, block_size):
    shape = {"dtype": dtype, "head_dim": head_dim, "v_head_dim": v_head_dim, "q_len": 700, "kv_len": 900, "heads": 2, "kv_heads": 1}
    sizes = sizes_for(backend, terms=terms, spec=spec, block_size=block_size, **shape)
    with unless_refused():
        assert_right(attention_with_terms(sizes, table_of(sizes)), backend)


# Heads, documents, padding, keys.


def flipped(t: torch.Tensor, learned: bool = False) -> torch.Tensor:
    """The heads in the opposite order. learned: of a parameter, whose heads come first."""
    return t.flip(0) if learned and t.dim() < 3 else t.flip(1) if t.dim() > 2 else t


@each_kernel
def test_heads_in_another_order_give_results_in_that_order(entry, backend):
    if entry in ("layer", "model"):
        pytest.skip("its heads share their input")
    call = made(entry, sizes_for(backend, terms=("kv_lens", "softcap", "bias", "sinks")))
    inputs, others = tuple(flipped(t, True) for t in call.inputs), tuple(flipped(t) for t in call.others)
    with unless_refused():
        for one, other in zip(call(), replace(call, inputs=inputs, others=others)(), strict=True):
            torch.testing.assert_close(other, flipped(one), rtol=1e-4, atol=1e-5)


@every_backend
@parametrize("entry", ["varlen", "varlen_in_place"])
def test_documents_do_not_affect_each_other(entry, backend):
    bounds = (0, 30, 31, 80)
    call = made(entry, sizes_for(backend, q_len=90, lens=(30, 1, 49)))
    with unless_refused():
        wanted = call.outcome()
        for start, stop in pairwise(bounds):
            inside = torch.zeros(90, 1, dtype=torch.bool, device=DEVICE)
            inside[start:stop] = True
            found = replace(call, inputs=tuple(torch.where(inside, t, 7 * t.flip(2)) for t in call.inputs)).outcome()
            for mine, right in zip(found, wanted, strict=True):
                some = (..., slice(start, stop), slice(None)) if mine.dim() == 4 else (..., slice(start, stop))
                torch.testing.assert_close(mine[some], right[some], rtol=1e-5, atol=1e-5)


@each_kernel
def test_padding_is_ignored(entry, backend):
    call = made(entry, sizes_for(backend, terms=("lengths", "bias", "sinks"), lens=(20, 9, 5) if "varlen" in entry else None))
    if not call.hidden:
        pytest.skip("it has no padding")
    with unless_refused():
        spoiled = call.spoiled().outcome()
        for mine, right in zip(spoiled, call.outcome(), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)
    if call.differentiable:
        for gradient, hidden in zip(spoiled[2:5], call.hidden, strict=False):
            assert not gradient.masked_select(hidden).any()


@every_backend
@parametrize("dims", [(64, 64), (128, 128), (192, 128)])
def test_what_blocks_that_no_pair_touches_hold_decides_nothing(dims, backend):
    if backend == "reference":
        pytest.skip("it multiplies whole matrices")
    with unless_refused():
        assert_right(beside_empty_blocks(sizes_for(backend, head_dim=dims[0], v_head_dim=dims[1], dtype=HALF, terms=())), backend)


@every_backend
@parametrize("spec", [None, SPEC, BITS])
def test_parts_of_the_keys_merged_by_lse_are_the_whole(spec, backend):
    sizes = sizes_for(backend, spec=spec, terms=("softcap", "alibi", "frozen bias"))
    q, k, v = normal(sizes)
    cut = torch.tensor([37, 11], device=DEVICE)

    def attend(**lengths):
        return sf.attention(q, k, v, spec, **terms_of(sizes), **sizes.options(), **lengths)

    with unless_refused():
        parts, (out, lse) = [attend(kv_lens=cut), attend(kv_starts=cut)], attend()
    torch.testing.assert_close(torch.logaddexp(parts[0][1], parts[1][1]), lse, rtol=1e-3, atol=1e-3)
    merged = sum(of_part.float() * (weight - lse).exp()[..., None] for of_part, weight in parts)
    torch.testing.assert_close(merged.to(out.dtype), out, rtol=1e-3, atol=1e-3)


# Gradients.

# Decoding has none, and a model computes its norms in float32.
NOT_DIFFERENTIATED = (*(entry for entry in ENTRIES if entry.startswith("decode")), "model")


@each_kernel
def test_what_is_deterministic_repeats_bit_for_bit(entry, backend):
    terms = ("kv_lens", "softcap", "dropout", "sinks", *(() if backend in ("triton", "hopper") else ("bias",)))
    sizes = sizes_for(backend, deterministic=True, terms=terms)
    with unless_refused():
        one, other = (made(entry, sizes).outcome() for _ in range(2))
    assert all(map(torch.equal, one, other)) or (DEVICE == "cuda" and entry not in TOLD)


@every_call
@pytest.mark.skipif(DEVICE != "cpu", reason="kernels have no float64")
def test_gradients_are_finite_differences(entry, backend):
    if backend in ("triton", "hopper") or entry in NOT_DIFFERENTIATED:
        pytest.skip("it has no gradients in float64")
    tiny = {"q_len": 7, "kv_len": 7, "head_dim": 4, "v_head_dim": 3, "heads": 2, "kv_heads": 1}
    with unless_refused():
        call = made(entry, sizes_for(backend, dtype=torch.float64, batch=1, terms=("kv_lens", "softcap", "alibi", "own"), **tiny))
        leaves = [t.detach().requires_grad_() for t in call.inputs]
        finite = lambda *t: tuple(r.masked_fill(r.isneginf(), 0.0) for r in call.run(*t, *call.others))  # noqa: E731
        assert torch.autograd.gradcheck(finite, leaves, fast_mode=True)


@each_kernel
def test_gradients_of_queries_that_keep_nothing_are_ignored(entry, backend):
    """Neither by lse, nor by out where PyTorch's operations compute it: kernels multiply it by weights of 0."""
    if entry in (*NOT_DIFFERENTIATED, "context_parallel", "layer", "block_sparse_call", "selection_masses"):
        pytest.skip("it has no gradient, or no lse, or no such queries")
    of_documents = {"lens": (20, 0, 9)} if "varlen" in entry else {"block_size": 16, "terms": ("kv_lens of nothing", "bias")}
    call = made(entry, sizes_for(backend, q_len=50, kv_len=40, spec="causal", **of_documents))
    leaves = [t.detach().requires_grad_() for t in call.inputs]
    with unless_refused():
        out, lse = call.run(*leaves, *call.others)
    empty, ones = lse.isneginf(), [torch.ones_like(out), torch.ones_like(lse)]
    wanted = torch.autograd.grad((out, lse), leaves, ones, retain_graph=True)
    ones[1] = ones[1].masked_fill(empty, float("nan"))
    if backend not in ("triton", "hopper") and (backend, DEVICE) != ("auto", "cuda"):
        ones[0] = ones[0].masked_fill(empty[..., None], float("nan"))
    rounding = 0.0 if DEVICE == "cpu" else 1e-4  # a GPU adds in any order
    assert empty.any()
    torch.testing.assert_close(torch.autograd.grad((out, lse), leaves, ones), wanted, rtol=rounding, atol=rounding)


@every_backend
@parametrize("entry", ["attention", "attention_with_terms", "selection"])
def test_expanded_tensors_are_as_good_as_whole_ones(entry, backend):
    call = made(entry, sizes_for(backend, deterministic=True, terms=("kv_lens", "sinks")))
    leaves = [t.detach().requires_grad_() for t in call.inputs]
    with unless_refused():
        out = call.run(*leaves, *call.others)[0]
    assert out.is_contiguous() or entry == "selection"
    expanded = torch.autograd.grad(out.sum(), leaves, retain_graph=True)  # its cotangent has strides of 0
    for mine, right in zip(expanded, torch.autograd.grad(out, leaves, torch.ones_like(out)), strict=True):
        torch.testing.assert_close(mine, right)
    q, k, *rest = call.inputs
    one_head = k[:, :1].expand_as(k)
    ours, wanted = (replace(call, inputs=(q, keys, *rest)).outcome() for keys in (one_head, one_head.contiguous()))
    torch.testing.assert_close(ours, wanted)


@parametrize("k_lens", [None, (20, 0, 9)], ids=["the same documents of keys", "different documents"])
@parametrize("entry", ["varlen", "varlen_in_place"])
def test_documents_are_those_that_their_bounds_say_at_each_call(entry, k_lens):
    at_first, later = (made(entry, Sizes(lens=lens, k_lens=k_lens, kv_len=40)) for lens in ((20, 0, 9), (3, 30, 7)))
    call = replace(later, others=tuple(t.clone() for t in at_first.others))
    for bounds, wanted in ((at_first, at_first), (later, later), (at_first, at_first)):
        for mine, theirs in zip(call.others, bounds.others, strict=True):
            mine.copy_(theirs)
        for _layer in range(2):
            torch.testing.assert_close(replace(call, inputs=wanted.inputs).outcome(), wanted.outcome())


def test_tables_of_documents_live_as_long_as_their_bounds():
    def tables() -> int:
        gc.collect()
        return sum(type(each) is sf.BlockMask for each in gc.get_objects())

    call = varlen(Sizes(lens=(20, 0, 9)))
    call()
    bounds, alive = call.others[0].clone(), tables()
    replace(call, others=(bounds,))()
    replace(call, others=(bounds,))()
    assert tables() == alive + 1
    del bounds
    assert tables() == alive
