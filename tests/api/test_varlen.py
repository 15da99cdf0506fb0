"""Packed documents: the call equals one call per document, and tables keep what the pattern keeps in each document."""

from itertools import accumulate, pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from accepted import needs_triton
from calls import Counted, assert_right, replayed, varlen
from hypothesis import given, settings
from oracle import DEVICE, sizes_for, unless_refused
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import sparse_flash as sf
from sparse_flash.core import backends
from sparse_flash.masks.block_mask import compile_up_to
from sparse_flash.packed import documents, in_place, moved

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize

EDGES = (127, 0, 128, 1, 129, 0)
FEWER, MORE = (130, 1, 0, 40, 5), (300, 1, 7, 200, 0)


# Patterns in which each query keeps one run of keys, ascending: documents are attended to in place.
SINGLE_RUNS = {
    "dense": None,
    "causal": "causal",
    "local": "local(30)",
    "window": "causal & local(100)",
    "prefix": "prefix(70)",
    "sinks": "causal & sinks(3)",
    "later": ~sf.causal(),
    "long documents": "shifted(documents((0, 100, 150)), 0)",
}
PATTERNS = SINGLE_RUNS | {
    "both ways": "local(30) | global_tokens(5)",
    "butterfly": "butterfly(block=32)",
    "strided": "causal & strided(7, block=1)",
    "random": "random(0.4, block=16)",
    "custom": Counted(),
}
BOTH_WAYS = parametrize("mask", ["causal & local(50)", "causal & (local(50) | sinks(3))"], ids=["in place", "moved"])


def bounds(lengths) -> tuple[int, ...]:
    return (0, *accumulate(lengths))


def cu_seqlens(lengths, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(bounds(lengths), dtype=dtype, device=DEVICE)


def check(backend, spec, lens, k_lens=None, *, beyond=0, **given):
    """Asserts that the call is right. beyond: tokens that belong to no document."""
    tokens = {"q_len": sum(lens) + beyond, "kv_len": sum(k_lens or lens) + beyond, "lens": lens, "k_lens": k_lens}
    with unless_refused():
        assert_right(varlen(sizes_for(backend, spec=spec, **{"heads": 2, "kv_heads": 1} | tokens | given)), backend)


@pytest.fixture(params=["moved", "kernels"])
def packer(request, monkeypatch):
    """With and without kernels that make the table of documents in place; without a GPU, Triton's interpreter runs them."""
    if request.param == "kernels" and backends.get_backend("triton").why_unavailable():
        pytest.skip(backends.get_backend("triton").why_unavailable())
    monkeypatch.setattr(in_place, "can_use_kernels", lambda device: request.param == "kernels")
    return request.param


# Lengths of queries, of keys where these are others, and tokens of no document after them.
LENGTHS = {
    "edges": (EDGES, None, 0),
    "tokens of no document": ((290, 5), None, 20),
    "blocks of no document": ((70, 80), None, 200),
    "fewer queries": (FEWER, MORE, 0),
    "more queries": (MORE, FEWER, 0),
    "empty documents": ((0, 20), (5, 0), 150),
    "no document": ((0, 0), None, 7),
    "no token": ((0, 0), None, 0),
    "no query": ((0, 0), (5, 0), 0),
    "no key": ((5, 0), (0, 0), 0),
}


@parametrize("lengths", LENGTHS)
@parametrize("name", PATTERNS)
def test_each_document_attends_to_itself_under_the_pattern_at_its_length(packer, name, lengths, monkeypatch):
    if packer == "kernels" and name in SINGLE_RUNS:
        monkeypatch.setattr(documents, "put_rows", None)  # no row moves
    q_lens, k_lens, beyond = LENGTHS[lengths]
    check("torch", PATTERNS[name], q_lens, k_lens, beyond=beyond)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@parametrize("backend", ["triton", "hopper"])
@parametrize("name", PATTERNS)
def test_long_documents_are_right_on_a_gpu(backend, name):
    lengths = (1000, 3, 0, 517, 128, 700)
    check(backend, PATTERNS[name], lengths, heads=4, kv_heads=2, head_dim=128, dtype=torch.bfloat16, beyond=50)
    check(backend, PATTERNS[name], lengths, lengths[::-1], heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)


@BOTH_WAYS
def test_maxima_bound_the_table_and_change_no_result(mask):
    q, k, v = (torch.randn(700, 1, 16, device=DEVICE) for _ in range(3))
    starts = cu_seqlens((200, 300, 100))
    wanted = sf.attention_varlen(q, k, v, starts, mask=mask)
    for most_q, most_k in ((300, None), (300, 10_000), (None, 384), (np.int64(300), np.int32(300))):
        assert torch.equal(sf.attention_varlen(q, k, v, starts, mask=mask, max_seqlen_q=most_q, max_seqlen_k=most_k), wanted)


def test_new_lengths_compile_no_new_table():
    q, k, v = (torch.randn(600, 1, 16, device=DEVICE) for _ in range(3))
    sf.attention_varlen(q, k, v, cu_seqlens((300, 300)), mask=Counted(), max_seqlen_q=400)
    Counted.evaluations.clear()
    for lengths in ((10, 290, 200), (1, 2, 3), (300, 200)):
        for longest in (300, 400, 512):
            sf.attention_varlen(q, k, v, cu_seqlens(lengths), mask=Counted(), max_seqlen_q=longest)
    assert not Counted.evaluations


# The tables.


def sides_of(q_cu_seqlens, k_cu_seqlens=None, tokens=(1000, 1000), longest=(400, 400)):
    """Documents of queries, and of keys unless these are the same."""
    return [
        starts if starts is None else documents.PackedDocuments(torch.tensor(starts, device=DEVICE), *rest)
        for starts, *rest in zip((q_cu_seqlens, k_cu_seqlens), tokens, longest, strict=True)
    ]


STARTS = {
    "edges": (bounds(EDGES), None),
    "several blocks": (bounds((400, 257, 300)), None),
    "fewer queries": (bounds(FEWER), bounds(MORE)),
    "more queries": (bounds(MORE), bounds(FEWER)),
    "falling": ((0, 300, 200, 500), None),
    "past the tokens": ((0, 300, 5000), (-3, 900, 1001)),
    "longer than the maximum": ((0, 900, 1000), None),
    "not from zero": ((70, 400, 500), None),
    "many short": (bounds((1, 3, 0, 64, 2, 65, 5, 63, 1, 200, 40, 70) * 2), None),
    "short and falling": ((-5, 3, 1, 8, 8, 7, 90, 60, 140, 150, 149, 5000), None),
}


@needs_triton
@parametrize("name", [*SINGLE_RUNS, "both ways", "random"])
@parametrize("starts", STARTS)
def test_the_table_keeps_what_the_pattern_keeps_in_each_document(name, starts, monkeypatch):
    monkeypatch.setattr(in_place, "can_use_kernels", lambda device: True)
    pattern, (queries, keys) = "full" if name == "dense" else PATTERNS[name], sides_of(*STARTS[starts])
    mask, rows = in_place.pack_documents(pattern, queries, keys), [torch.arange(1000, device=DEVICE)] * 2
    assert isinstance(mask, moved.MovedDocuments) == (name not in SINGLE_RUNS)
    if isinstance(mask, moved.MovedDocuments):
        mask, *axes = mask
        rows = [axis.row_of_token for axis in axes]
    assert_well_formed(mask)
    wanted, kept = torch.zeros(1000, 1000, dtype=torch.bool, device=DEVICE), mask.to_dense()
    extents = [torch.stack(side.extents(), 1).tolist() for side in (queries, keys or queries)]
    for (q_start, q_len), (k_start, k_len) in zip(*extents, strict=True):
        if q_len and k_len:
            whole = compile_up_to(pattern, q_len, k_len, 128, DEVICE).to_dense()
            wanted[q_start : q_start + q_len, k_start : k_start + k_len] = whole
    assert torch.equal(kept[rows[0][:, None], rows[1]], wanted)


@given(
    pattern=st.sampled_from(sorted(SINGLE_RUNS)),
    lengths=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), min_size=1, max_size=12),
    same=st.booleans(),
    beyond=st.integers(1, 300),
    slack=st.integers(0, 200),
)
@settings(max_examples=30)
def test_the_capacity_suffices_for_any_lengths(pattern, lengths, same, beyond, slack):
    q_lens, k_lens = zip(*lengths, strict=True)
    k_lens = q_lens if same else k_lens
    tokens = sum(q_lens) + beyond, sum(k_lens) + beyond
    sides = sides_of(bounds(q_lens), bounds(k_lens), tokens, (max(q_lens) + slack, max(k_lens) + slack))
    spec = "full" if pattern == "dense" else SINGLE_RUNS[pattern]
    (before, entries, tiles), (runs, *_) = in_place._make_plan(spec, *sides[0][1:], *sides[1][1:], same, torch.device("cpu"))
    first, stop = np.zeros((2, tokens[0]), np.int64)
    for q_start, q_len, k_start, k_len in zip(bounds(q_lens)[:-1], q_lens, bounds(k_lens)[:-1], k_lens, strict=True):
        line = before * 128 + k_len - q_len
        of_query = runs[:, line : line + q_len].numpy().clip(max=k_len)
        first[q_start : q_start + q_len], stop[q_start : q_start + q_len] = of_query + k_start * (of_query[1] > of_query[0])
    blocks = [slice(low, low + 128) for low in range(0, tokens[0], 128)]
    touched = full = 0
    for block in blocks:
        some = stop[block] > first[block]
        if some.any():
            touched += -(-stop[block].max() // 128) - first[block][some].min() // 128
            if some.all() and len(some) == 128:
                full += max(0, stop[block].min() // 128 + -first[block].max() // 128)
    assert touched <= entries and touched - full <= tiles


def assert_well_formed(mask):
    """By ``Table``'s docstring: segments ascend, work is the rows' bounds, heaviest first, and both tables agree."""
    said = []
    for table in (mask.by_query, mask.by_key):
        ptr, split, order, cols, tiles = (t.cpu().numpy() for t in (*(t[0] for t in table[:3]), *table[3:5]))
        assert ptr[0] == 0 and ptr[-1] <= len(cols)
        assert sorted(order) == list(range(len(order)))
        work = table.work[0].cpu().numpy()
        row_bounds = np.stack([ptr[:-1], split[:, 0], split[:, 1], ptr[1:]], 1)
        assert (np.diff(row_bounds) >= 0).all() and not table.is_split and (table.splits == 0).all()
        assert (work[:, 0] == order).all() and (work[:, 1:5] == row_bounds[order]).all() and (work[:, 5:] == 0).all()
        assert (np.diff(work[:, 4] - work[:, 1]) <= 0).all()
        entries = set()
        for row, line in enumerate(row_bounds):
            for kind, (begin, end) in enumerate(pairwise(line)):
                assert (np.diff(cols[begin:end]) > 0).all()
                for entry in range(begin, end):
                    entries.add((row, int(cols[entry]), kind, int(tiles[entry]) if kind else 0))
        said.append(entries)
    assert said[0] == {(row, col, kind, tile) for col, row, kind, tile in said[1]}


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@BOTH_WAYS
def test_gradients_wait_for_nothing_and_lengths_change_under_a_graph(mask):
    q, k, v = (torch.randn(2000, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    starts = cu_seqlens((700, 900, 400))

    def step():
        out, lse = sf.attention_varlen(q, k, v, starts, mask=mask, return_lse=True)
        return [out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), (q, k, v))]

    with torch.cuda.stream(torch.cuda.Stream()):  # gradients are captured in another stream than the current one
        step()
    torch.cuda.synchronize()
    torch.testing.assert_close(replayed(step, lambda: starts.copy_(cu_seqlens((1, 1500, 499)))), step())


@BOTH_WAYS
def test_compiled_code_takes_new_lengths_and_numbers_of_documents(mask):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sf.attention_varlen, fullgraph=True, backend=counter)
    qkv = [torch.randn(200, 2, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
    linear = [torch.linspace(0, 200, documents + 1, device=DEVICE).to(torch.int32) for documents in (40, 33, 64, 50, 35, 62)]
    for number, ends in enumerate([cu_seqlens((100, 100)), cu_seqlens((10, 150)), cu_seqlens((200, 0)), *linear]):
        ours, theirs = (call(*qkv, ends, mask=mask, return_lse=True) for call in (compiled, sf.attention_varlen))
        torch.testing.assert_close(ours, theirs)
        of_both = [torch.autograd.grad(out.square().sum() + lse[:, :10].sum(), qkv) for out, lse in (ours, theirs)]
        torch.testing.assert_close(*of_both, rtol=1e-4, atol=1e-5)
        # One graph for a number of documents, one for many numbers, and at most one more for the power of two above them.
        assert counter.frame_count <= (1 if number < 3 else 3)


def test_sizes_of_packed_tables_are_plain_numbers_where_those_of_their_arguments_are_symbols():
    # Inductor cannot compile a backward pass that is given a size and not the symbol that it is made of.
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def dynamic(tensor):
        sizes = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (tensor.dim() - 1)
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        return mode.from_tensor(tensor, symbolic_context=context)

    side = documents.PackedDocuments(dynamic(torch.zeros(9, dtype=torch.int32)), 1000, 400)
    sizes = 1000, 400, 1000, 400, True
    plan, constants = in_place._make_plan("causal", *sizes, torch.device("cpu"))
    moved_plan, entries = moved._make_plan("causal & (local(9) | sinks(3))", *sizes, 8, torch.device("cpu"))
    with mode:
        starts, (runs, *_) = side.cu_seqlens, map(dynamic, constants)
        made = torch.ops.sparse_flash.assemble_runs(runs, starts, starts, *sizes, *plan)
        made += moved._assemble(side, side, list(map(dynamic, entries)), moved_plan).mask.tensors()
    assert all(type(size) is int for t in made for size in t.shape)
