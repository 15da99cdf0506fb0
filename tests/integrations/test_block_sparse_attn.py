"""``integrations.block_sparse_attn`` against what that package documents, in float64: which pairs each type of head keeps."""

import inspect
import math

import pytest
import torch
from accepted import DEVICE
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import dense_attention

import sparse_flash as sf
from sparse_flash.integrations import block_sparse_attn as bsa

HEADS, DIM, BLOCK = 4, 16, 128
# Kernels have no float64, which the definition is computed in.
DTYPE, TOLERANCE = (torch.float64, 1e-9) if DEVICE == "cpu" else (torch.float16, 4e-3)


def blocks(tokens):
    return -(-tokens // BLOCK)


def kept_pairs(kind, first, last, own_map, causal, exact, q_len, kv_len):
    """(q_len, kv_len) bool of one head of one document. kind: 0, -1, or positive for own_map, (q_blocks, kv_blocks)."""
    i, j = torch.arange(q_len)[:, None], torch.arange(kv_len)
    position = i + kv_len - q_len
    seen = (j <= position) | (not causal)
    if kind == 0:
        return seen
    if kind > 0:
        return seen & own_map[i // BLOCK, j // BLOCK]
    if exact:
        return seen & ((j < first) | (j > position - last))
    rows_before = max(0, (q_len - kv_len) // BLOCK)
    stop = blocks(max(0, kv_len - q_len)) + 1 + i // BLOCK - rows_before if causal else blocks(kv_len)
    return seen & ((j // BLOCK < first) | ((j // BLOCK >= stop - last) & (j // BLOCK < stop)))


def expected(q, k, v, kept):
    """For one document: q (q_len, heads, dim), k and v (kv_len, kv_heads, dim), kept (heads, q_len, kv_len)."""
    out, lse = dense_attention(*(t.transpose(0, 1)[None].to(DEVICE) for t in (q, k, v)), kept.to(DEVICE))
    return out[0].transpose(0, 1).cpu(), lse[0].cpu()


def assert_alike(mine, right):
    largest = torch.cat([torch.ones(1), right[right.isfinite()].abs()]).max().item()
    torch.testing.assert_close(mine.double().cpu(), right, atol=TOLERANCE * largest, rtol=0)


def starts_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


lengths = st.integers(1, 300) | st.sampled_from([0, 1, 127, 128, 129, 256, 257])
pairs = st.tuples(lengths, lengths) | lengths.map(lambda n: (n, n))


@st.composite
def calls(draw):
    documents = draw(st.lists(pairs, min_size=1, max_size=3) | st.builds(lambda pair: [pair, pair], pairs))
    exact = draw(st.booleans())
    most, types = (300, [0, -1]) if exact else (3, [0, 1, -1])
    return {
        "documents": documents,
        "types": draw(st.lists(st.sampled_from(types), min_size=HEADS, max_size=HEADS)),
        "info": draw(st.lists(st.integers(0, most), min_size=2 * HEADS, max_size=2 * HEADS)),
        "kv_heads": draw(st.sampled_from([1, 2, 4])),
        "causal": exact or draw(st.booleans()),
        "exact": exact,
        "share": draw(st.sampled_from([0.2, 0.6, 1.0])),
        "past": draw(st.sampled_from([0, 3])),
        "on_host": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


MIXED = {"documents": [(257, 384)] * 2, "types": [1, -1, 0, 1], "kv_heads": 2, "share": 0.6, "past": 0, "on_host": False, "seed": 0}


@settings(max_examples=25)
@given(calls())
@example(MIXED | {"info": [1, 1] * HEADS, "causal": True, "exact": False})
@example(MIXED | {"info": [1, 1] * HEADS, "causal": False, "exact": False})
@example(MIXED | {"types": [-1, -1, 0, -1], "info": [3, 140] * HEADS, "causal": True, "exact": True})
def test_each_head_of_each_document_is_the_definition(call):
    torch.manual_seed(call["seed"])
    q_lens, kv_lens = zip(*call["documents"], strict=True)
    longest = max(q_lens) + 5, max(kv_lens) + 5
    maps = call["types"].count(1)
    base = torch.rand(len(q_lens), maps, *map(blocks, longest)) < call["share"]
    q = torch.randn(sum(q_lens) + call["past"], HEADS, DIM)
    k, v = (torch.randn(sum(kv_lens), call["kv_heads"], DIM) for _ in "kv")
    mine = [t.to(DEVICE, DTYPE).requires_grad_() for t in (q, k, v)]
    q, k, v = (t.detach().cpu().double().requires_grad_() for t in mine)
    cu, cu_k = starts_of(q_lens), starts_of(kv_lens)
    numbers = [cu, cu_k, *(torch.tensor(n, dtype=torch.int32) for n in (call["types"], call["info"]))]
    out, lse, none = bsa.block_sparse_attn_func(
        *mine,
        *(t if call["on_host"] else t.to(DEVICE) for t in numbers),
        base.to(DEVICE) if maps else None,
        *longest,
        0.0,
        is_causal=call["causal"],
        exact_streaming=call["exact"],
        return_attn_probs=True,
    )

    right, right_lse = [], torch.full((len(q_lens), HEADS, longest[0]), -math.inf, dtype=torch.float64)
    for b, (q_len, kv_len) in enumerate(call["documents"]):
        own_map, kept = iter(base[b]), []
        for head, kind in enumerate(call["types"]):
            counts = call["info"][2 * head : 2 * head + 2]
            chosen = next(own_map) if kind > 0 else None
            kept.append(kept_pairs(kind, *counts, chosen, call["causal"], call["exact"], q_len, kv_len))
        own, keys = slice(cu[b], cu[b + 1]), slice(cu_k[b], cu_k[b + 1])
        of_one, right_lse[b, :, :q_len] = expected(q[own], k[keys], v[keys], torch.stack(kept))
        right.append(of_one)
    right = torch.cat([*right, torch.zeros(call["past"], HEADS, DIM)])
    assert none is None and out.shape == q.shape and out.dtype == DTYPE
    assert_alike(out, right)
    assert_alike(lse, right_lse.detach())
    if right.requires_grad:
        grad = torch.randn(right.shape).to(DTYPE).double()
        wanted = torch.autograd.grad(right, (q, k, v), grad)
        for ours, theirs in zip(torch.autograd.grad(out, mine, grad.to(DEVICE, DTYPE)), wanted, strict=True):
            assert_alike(ours, theirs)


def kept_by(function, q_len, kv_len, info, **options):
    """The pairs that a call with one streaming head keeps, which its weights show: every score is 0, and v is the identity."""
    q, k = torch.zeros(q_len, 1, DIM), torch.zeros(kv_len, 1, DIM)
    ends = [starts_of([n]) for n in (q_len, kv_len)]
    numbers = [torch.tensor(n, dtype=torch.int32) for n in ([-1], info)]
    return function(q, k, torch.eye(kv_len)[:, None], *ends, *numbers, q_len, kv_len, **options, backend="reference")[:, 0] > 0


def test_token_streaming_counts_the_querys_own_key_and_the_first_keys():
    kept = kept_by(bsa.token_streaming_attn_func, 8, 10, [2, 3])
    assert [row.nonzero().flatten().tolist() for row in kept[-3:]] == [[0, 1, 5, 6, 7], [0, 1, 6, 7, 8], [0, 1, 7, 8, 9]]
    assert kept[:3].sum(1).tolist() == [3, 4, 5]
    assert not kept_by(bsa.token_streaming_attn_func, 8, 10, [0, 0]).any()
    assert kept_by(bsa.token_streaming_attn_func, 8, 10, [0, 1]).equal(torch.eye(8, 10, dtype=torch.bool).roll(2, 1))


def test_local_blocks_end_with_that_of_the_query_or_without_causal_with_the_last():
    kept = kept_by(bsa.block_streaming_attn_func, 640, 640, [1, 2], p_dropout=0.0)
    assert kept[600].nonzero().flatten().tolist() == [*range(128), *range(384, 601)]
    kept = kept_by(bsa.block_streaming_attn_func, 640, 600, [1, 2], p_dropout=0.0, is_causal=False)
    assert all(row.nonzero().flatten().tolist() == [*range(128), *range(384, 600)] for row in kept[::100])
    # A whole block of queries from position 255 on would end in the third block of keys.
    assert not kept_by(bsa.block_streaming_attn_func, 1, 256, [0, 1], p_dropout=0.0).any()


def tensors(documents, heads=2, maps=1):
    """Arguments of a call of documents of these lengths, one type 1 head and streaming ones."""
    q, k, v = (torch.randn(sum(documents), heads, DIM) for _ in "qkv")
    ends, size = starts_of(documents), blocks(max(documents))
    types, info = torch.tensor([1] * maps + [-1] * (heads - maps)), torch.tensor([1, 1] * heads)
    base = torch.ones(len(documents), maps, size, size, dtype=torch.bool)
    names = inspect.signature(bsa.block_sparse_attn_func).parameters
    return dict(zip(names, (q, k, v, ends, ends, types, info, base, max(documents), max(documents), 0.0), strict=False))


@pytest.mark.parametrize("documents, calls", [([200], 1), ([200, 200, 200], 1), ([200, 200, 130, 200], 3)], ids=str)
def test_documents_of_one_length_are_one_call(documents, calls, monkeypatch):
    made = []
    monkeypatch.setattr(bsa, "attention", lambda *args, **options: made.append(args) or sf.attention(*args, **options))
    bsa.block_sparse_attn_func(**tensors(documents))
    assert len(made) == calls


def test_a_type_above_one_shares_the_map_of_that_number():
    call = tensors([300], heads=3, maps=3)
    call["base_blockmask"] = torch.rand(1, 3, 3, 3) < 0.5
    apart = bsa.block_sparse_attn_func(**call)
    call["head_mask_type"], maps = torch.tensor([1, 1, 2]), call["base_blockmask"]
    call["base_blockmask"] = maps[:, [0, 2]].int()
    q, k, v = (call[name].transpose(0, 1)[None] for name in "qkv")
    right = sf.attention(q, k, v, sf.BlockMask.from_blocks(maps[:, [0, 2, 2]], BLOCK, 300, 300))
    shared = bsa.block_sparse_attn_func(**call)
    torch.testing.assert_close(shared, right[0].transpose(0, 1))
    torch.testing.assert_close(shared[:, [0, 2]], apart[:, [0, 2]])


def test_dropout_scale_and_the_back_end_reach_attention():
    call = tensors([200]) | {"p_dropout": 0.3, "softmax_scale": 0.2, "head_mask_type": torch.zeros(2, dtype=torch.int32)}
    call["base_blockmask"] = None
    q, k, v = (call[name].transpose(0, 1)[None] for name in "qkv")
    torch.manual_seed(1)
    out = bsa.block_sparse_attn_func(**call, is_causal=True, backend="reference")
    torch.manual_seed(1)
    right = sf.attention(q, k, v, "causal", dropout_p=0.3, scale=0.2, backend="reference")
    torch.testing.assert_close(out, right[0].transpose(0, 1))


def test_arguments_have_that_packages_names_and_order():
    shared = "q k v cu_seqlens_q cu_seqlens_k head_mask_type streaming_info"
    longest, rest = "max_seqlen_q_ max_seqlen_k_", "deterministic softmax_scale"
    for function, names in (
        (bsa.block_sparse_attn_func, f"{shared} base_blockmask {longest} p_dropout {rest} is_causal exact_streaming"),
        (bsa.block_streaming_attn_func, f"{shared} {longest} p_dropout {rest} is_causal"),
        (bsa.token_streaming_attn_func, f"{shared} {longest} {rest}"),
    ):
        assert [*inspect.signature(function).parameters] == [*names.split(), "return_attn_probs", "backend"]
    defaults = {n: p.default for n, p in inspect.signature(bsa.block_streaming_attn_func).parameters.items()}
    assert defaults["is_causal"] is True and defaults["deterministic"] is False and defaults["softmax_scale"] is None
