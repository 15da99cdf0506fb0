"""``integrations.flash_attn`` against its definition, in float64: names and layouts of the flash-attn package."""

import inspect
import math

import pytest
import torch
from oracle import dense_attention

import sparse_flash as sf
from sparse_flash.integrations import flash_attn as fa
from sparse_flash.packed.rows import write

BATCH, HEADS, DIM = 2, 4, 16
WINDOWS = [(False, (-1, -1)), (True, (-1, -1)), (False, (20, 7)), (True, (9, 3)), (False, (-1, 5)), (False, (30, -1))]


def tensors(*shapes, grad=False):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=grad) for shape in shapes]


def expected(q, k, v, causal=False, window=(-1, -1), softcap=0.0, slopes=None, first=0, extra=None):
    """For one sequence: q (q_len, heads, dim), k and v (kv_len, kv_heads, dim). Keys before ``first`` do not exist."""
    distance = torch.arange(len(k)) - (torch.arange(len(q))[:, None] + len(k) - len(q))  # key - query
    left, right = window[0], 0 if causal else window[1]
    kept = (distance >= -left if left >= 0 else distance < math.inf) & (distance <= right if right >= 0 else distance < math.inf)
    kept = kept & (torch.arange(len(k)) >= first)
    kept = kept if extra is None else kept & extra(distance)
    out, lse = dense_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), kept, softcap=softcap or None, alibi_slopes=slopes)
    return out[0].transpose(0, 1), lse[0]


def assert_alike(mine, right):
    torch.testing.assert_close(mine, right, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("lengths", [(40, 40), (30, 50), (50, 30)], ids=str)
@pytest.mark.parametrize("causal, window", WINDOWS)
def test_dense_calls_are_the_definition(lengths, causal, window):
    q, k, v = tensors((BATCH, lengths[0], HEADS, DIM), *[(BATCH, lengths[1], 2, DIM)] * 2, grad=True)
    slopes = torch.rand(BATCH, HEADS)
    options = {"causal": causal, "window_size": torch.tensor(window)}  # a tensor, as in that package's tests
    terms = {"softcap": 5.0, "alibi_slopes": slopes}
    out, lse, none = fa.flash_attn_func(q, k, v, **options, **terms, return_attn_probs=True)
    right = [expected(q[b], k[b], v[b], causal, window, 5.0, slopes[b].double()) for b in range(BATCH)]
    assert none is None and out.is_contiguous()
    assert_alike(out, torch.stack([o for o, _ in right]))
    assert_alike(lse, torch.stack([s for _, s in right]))
    grad = torch.randn_like(out)
    for mine, theirs in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad([o for o, _ in right], (q, k, v), list(grad))
    ):
        assert_alike(mine, theirs)


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
@pytest.mark.parametrize("terms", [{}, {"softcap": 5.0, "alibi": True}], ids=["plain", "terms"])
@pytest.mark.parametrize("causal, window", WINDOWS)
def test_sequences_are_each_the_definition(causal, window, terms, paged):
    q_lens, k_lens = [5, 0, 33, 20], [20, 7, 12, 20]
    q_ends, k_ends = (torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (q_lens, k_lens))
    q, k, v = tensors((sum(q_lens), HEADS, DIM), *[(sum(k_lens), 2, DIM)] * 2, grad=not paged)
    slopes = torch.rand(4, HEADS) if terms else None
    options = {"causal": causal, "window_size": window, "softcap": terms.get("softcap", 0.0), "alibi_slopes": slopes}
    cache, table = (k, v), None
    if paged:
        table = torch.randperm(12, dtype=torch.int32).view(4, 3)
        cache = tensors(*[(12, 8, 2, DIM)] * 2)
        for b in range(4):
            for j in range(k_lens[b]):
                for mine, theirs in zip(cache, (k, v)):
                    mine[table[b, j // 8], j % 8] = theirs[k_ends[b] + j]
    lengths = q_ends, k_ends, max(q_lens), max(k_lens)
    out, lse, _ = fa.flash_attn_varlen_func(q, *cache, *lengths, **options, block_table=table, return_attn_probs=True)
    right = []
    for b in range(4):
        own = slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])
        slope = None if slopes is None else slopes[b].double()
        right.append(expected(q[own[0]], k[own[1]], v[own[1]], causal, window, options["softcap"], slope))
    assert_alike(out, torch.cat([o for o, _ in right]))
    assert_alike(lse, torch.cat([s for _, s in right], 1))
    if not paged:
        grad = torch.randn_like(out)
        wanted = torch.autograd.grad(torch.cat([o for o, _ in right]), (q, k, v), grad)
        for mine, theirs in zip(torch.autograd.grad(out, (q, k, v), grad), wanted):
            assert_alike(mine, theirs)


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
@pytest.mark.parametrize("softcap", [0.0, 5.0], ids=["plain", "terms"])
def test_the_longest_sequence_may_be_a_tensor_of_one_number(softcap, paged):
    torch._dynamo.reset()
    ends = torch.tensor([0, 5, 38, 40], dtype=torch.int32)
    q, k, v = (torch.randn(40, HEADS, DIM) for _ in range(3))
    cache, table = (k, v), None
    if paged:
        cache, table = torch.randn(2, 15, 8, HEADS, DIM), torch.arange(15, dtype=torch.int32).view(3, 5)

    def call(longest):
        return fa.flash_attn_varlen_func(q, *cache, ends, ends, longest, longest, softcap=softcap, causal=True, block_table=table)

    given = ends.diff().max()  # as Transformers passes it
    for ran in (call, torch.compile(call, fullgraph=True, backend="eager")):
        torch.testing.assert_close(ran(given), call(33))


# In a short cache, some queries lie before the first token.
SHORT = {"short": [13, 2], "short, paged": [13, 2], "short, an int": 2}


@pytest.mark.parametrize("kind", ["contiguous", "batch_idx", "leftpad", "paged", "odd pages", "terms", "many queries", *SHORT])
@pytest.mark.parametrize("causal, window", WINDOWS)
@pytest.mark.parametrize("new", [0, 3])
def test_a_cache_is_written_and_attended_to(kind, causal, window, new):
    size, q_len, lens = {"paged": 16, "odd pages": 12}.get(kind, 96), 70 if kind == "many queries" else 4, SHORT.get(kind, [13, 80])
    size, held = 16 if kind == "short, paged" else size, [lens] * BATCH if isinstance(lens, int) else lens
    paged = "page" in kind
    q, k, v = tensors((BATCH, q_len, HEADS, DIM), *[(BATCH, new, 2, dim) for dim in (DIM, 24)])
    caches = tensors(*[(24 if paged else 4, size, 2, dim) for dim in (DIM, 24)])
    before = [cache.clone() for cache in caches]
    table = torch.randperm(24, dtype=torch.int32)[:16].view(2, 8) if paged else None
    index = torch.tensor([3, 1], dtype=torch.int32) if kind == "batch_idx" else None
    leftpad = torch.tensor([2, 40], dtype=torch.int32) if kind == "leftpad" else None
    slopes = torch.rand(HEADS) if kind == "terms" else None
    out, lse = fa.flash_attn_with_kvcache(
        q,
        *caches,
        *((k, v) if new else (None, None)),
        cache_seqlens=lens if isinstance(lens, int) else torch.tensor(lens, dtype=torch.int32),
        cache_batch_idx=index,
        cache_leftpad=leftpad,
        block_table=table,
        causal=causal,
        window_size=window,
        alibi_slopes=slopes,
        return_softmax_lse=True,
    )
    for b in range(BATCH):

        def of(cache, b=b):
            if paged:
                return cache[table[b].long()].flatten(0, 1)
            return cache[b if index is None else index[b]]

        keys, values = (of(cache)[: held[b]] for cache in before)
        if new:
            keys, values = torch.cat([keys, k[b]]), torch.cat([values, v[b]])
        first = 0 if leftpad is None else int(leftpad[b])
        right = expected(q[b], keys, values, causal, window, slopes=None if slopes is None else slopes.double(), first=first)
        assert_alike(out[b], right[0])
        assert_alike(lse[b], right[1])
        for cache, written, old in zip(caches, (keys, values), before):
            stop = len(written)
            assert torch.equal(of(cache)[:stop], written)
            assert torch.equal(of(cache)[stop:], of(old)[stop:])
            assert paged or index is not None or torch.equal(cache[BATCH:], old[BATCH:])


def test_a_mask_of_ours_goes_with_every_call():
    q, k, v = tensors(*[(1, 40, HEADS, DIM)] * 3)
    right, _ = expected(q[0], k[0], v[0], causal=True, extra=lambda distance: distance % 3 == 0)
    comb, text = sf.from_mask_fn(lambda q, kv: (q - kv) % 3 == 0), "strided(3, block=1)"
    assert_alike(fa.flash_attn_func(q, k, v, causal=True, mask=comb)[0], right)
    ends = torch.tensor([0, 40], dtype=torch.int32)
    assert_alike(fa.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 40, 40, causal=True, mask=comb), right)
    plain = fa.flash_attn_func(q, k, v, causal=True, window_size=(20, 0), mask=text)
    table = sf.compile_mask(f"window(20, 0) & {text}", 40)
    assert_alike(fa.flash_attn_func(q, k, v, mask=table), plain)
    assert_alike(fa.flash_attn_with_kvcache(q[:, -3:], k, v, causal=True, window_size=(20, 0), mask=text), plain[:, -3:])
    slopes = torch.rand(HEADS)
    in_rows = fa.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 40, 40, alibi_slopes=slopes, mask="causal & sinks(4)")
    assert_alike(in_rows, fa.flash_attn_func(q, k, v, alibi_slopes=slopes, mask="causal & sinks(4)")[0])


def test_dropout_keeps_what_it_should_in_all_layouts():
    q, k, v = (torch.randn(1, 64, HEADS, DIM) for _ in range(3))
    ends = torch.tensor([0, 64], dtype=torch.int32)
    torch.manual_seed(3)
    right = sf.attention(*(t.transpose(1, 2) for t in (q, k, v)), "causal", dropout_p=0.3).transpose(1, 2)
    torch.manual_seed(3)
    torch.testing.assert_close(fa.flash_attn_func(q, k, v, 0.3, causal=True), right)
    torch.manual_seed(3)
    torch.testing.assert_close(fa.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 64, 64, 0.3, causal=True), right[0])


@pytest.mark.parametrize("softcap", [0.0, 5.0], ids=["in place", "copied"])
@pytest.mark.parametrize("page", [-1, 3])
def test_pages_that_do_not_exist_are_refused_where_they_are_read_or_written_and_nowhere_else(page, softcap):
    q, k, v, keys, values = tensors(*[(2, 1, 2, DIM)] * 3, *[(3, 8, 2, DIM)] * 2)
    lens, before = torch.tensor([9, 0], dtype=torch.int32), keys.clone()
    table = torch.tensor([[2, 0, page], [page, page, page]], dtype=torch.int32)
    options = {"cache_seqlens": lens, "softcap": softcap}
    out = fa.flash_attn_with_kvcache(q, keys, values, block_table=table, **options)
    assert torch.equal(out, fa.flash_attn_with_kvcache(q, keys, values, block_table=table.clamp(0, 2), **options))
    said = f"one of the 3 pages for each token of a sequence; sequence 1 has {page} to {page}"
    with pytest.raises(ValueError, match=said):
        fa.flash_attn_with_kvcache(q, keys, values, k, v, block_table=table, **options)
    with pytest.raises(ValueError, match=said):
        fa.flash_attn_with_kvcache(q, keys, values, block_table=table, **options | {"cache_seqlens": lens + 1})
    ends = torch.tensor([0, 9, 10], dtype=torch.int32)
    with pytest.raises(ValueError, match=said):
        fa.flash_attn_varlen_func(q[:, 0], keys, values, torch.arange(3, dtype=torch.int32), ends, 1, 24, block_table=table)
    assert torch.equal(keys, before)


@pytest.mark.parametrize("queries", [1, 70])  # decoded, and beyond that
def test_a_batch_of_none_has_results_of_none(queries):
    q, cache, lens = torch.randn(0, queries, HEADS, DIM), torch.randn(0, 128, HEADS, DIM), torch.zeros(0, dtype=torch.int32)
    out = fa.flash_attn_with_kvcache(q, cache, cache, k=q, v=q, cache_seqlens=lens, causal=True)
    assert out.shape == q.shape


def test_what_does_not_fit_a_cache_is_dropped_where_it_cannot_be_seen():
    cache, tokens = torch.zeros(3, 4, 1, 1), torch.arange(1.0, 10).view(3, 3, 1, 1)
    held = torch.tensor([0, 2, 4])
    write(cache, tokens, held[:, None] + torch.arange(3), torch.arange(3)[:, None])
    assert cache.flatten(1).tolist() == [[1, 2, 3, 0], [0, 0, 4, 5], [0, 0, 0, 0]]


def test_names_order_and_defaults_are_those_of_the_package():
    rest = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
    lengths = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    order = {
        "flash_attn_func": f"q k v {rest}",
        "flash_attn_varlen_func": f"q k v {lengths} {rest} block_table",
        "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
        "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
    }
    defaults = {"dropout_p": 0.0, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "deterministic": False}
    defaults |= {"return_attn_probs": False, "rotary_interleaved": True, "num_splits": 0, "return_softmax_lse": False}
    for name, names in order.items():
        parameters = inspect.signature(getattr(fa, name)).parameters.values()
        positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert [p.name for p in positional] == names.split()
        assert all(p.default == defaults[p.name] for p in positional if p.name in defaults)
