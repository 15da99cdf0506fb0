"""``integrations.flash_attn`` against its definition, in float64: names and layouts of the flash-attn package.

Arguments are passed by their positions, as these are that package's too."""

import pytest
import torch
from calls import bounds_of
from oracle import Call, assert_right, dense_attention

import sparse_flash as sf
from sparse_flash.integrations import flash_attn as fa
from sparse_flash.packed.rows import write

BATCH, HEADS, DIM = 2, 4, 16
WINDOWS = [(False, (-1, -1)), (True, (-1, -1)), (False, (20, 7)), (True, (9, 3)), (False, (-1, 5)), (False, (30, -1))]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def tensors(*shapes):
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def kept_by(q_len, kv_len, causal, window, first=0):
    """(q_len, kv_len) bool. Keys before ``first`` do not exist."""
    distance = torch.arange(kv_len) - (torch.arange(q_len)[:, None] + kv_len - q_len)  # key - query
    left, right = window[0], 0 if causal else window[1]
    kept = ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))
    return kept & (torch.arange(kv_len) >= first)


def assert_alike(mine, right):
    torch.testing.assert_close(mine, right, atol=1e-9, rtol=1e-9)


# (queries, keys) of sequences.
SEQUENCES = {"dense": [(40, 40)] * 2, "dense, more keys": [(30, 50)] * 2, "dense, more queries": [(50, 30)] * 2}
SEQUENCES |= dict.fromkeys(("packed", "in pages"), ((5, 20), (0, 7), (33, 12), (20, 20)))


@pytest.mark.parametrize("form", SEQUENCES)
@pytest.mark.parametrize("terms", [False, True], ids=["plain", "terms"])
@pytest.mark.parametrize("causal, window", WINDOWS)
def test_sequences_are_each_the_definition(causal, window, terms, form):
    q_lens, k_lens = zip(*SEQUENCES[form], strict=True)
    past = 0 if form.startswith("dense") else 3  # tokens of no sequence
    softcap, slopes = (5.0, torch.rand(len(q_lens), HEADS)) if terms else (0.0, None)
    options = 0.0, None, causal, torch.tensor(window), softcap, slopes, False, True  # a tensor, as in that package's tests
    table = torch.randperm(12, dtype=torch.int32).view(4, 3)

    def in_pages(t):
        slots = [(8 * table[row, :, None] + torch.arange(8)).flatten()[:length] for row, length in enumerate(k_lens)]
        return t.new_zeros(96, 2, DIM).index_put((torch.cat(slots),), t).view(12, 8, 2, DIM)

    def run(*heads_first):
        q, k, v = (t[0].transpose(0, 1).contiguous() for t in heads_first)
        if form.startswith("dense"):
            out, lse, none = fa.flash_attn_func(*(t.unflatten(0, (BATCH, -1)) for t in (q, k, v)), *options)
            assert none is None and out.is_contiguous()
            return out.flatten(0, 1).transpose(0, 1)[None], lse.transpose(0, 1).flatten(1)[None]
        lengths = bounds_of(q_lens), bounds_of(k_lens), max(q_lens), max(k_lens)
        keys = (in_pages(k), in_pages(v)) if form == "in pages" else (k, v)
        out, lse, _ = fa.flash_attn_varlen_func(q, *keys, *lengths, *options, table if form == "in pages" else None)
        return out.transpose(0, 1)[None], lse[None]

    def define(q, k, v):
        results = []
        for row, part in enumerate(zip(q.split((*q_lens, past), 2), k.split(k_lens, 2), v.split(k_lens, 2))):
            of_row = {"softcap": softcap, "alibi_slopes": slopes[row]} if terms else {}
            results.append(dense_attention(*part, kept_by(q_lens[row], k_lens[row], causal, window), **of_row))
        out, lse = (torch.cat(each, 2) for each in zip(*results, strict=True))
        return torch.nn.functional.pad(out, (0, 0, 0, past)), torch.nn.functional.pad(lse, (0, past), value=float("-inf"))

    inputs = tensors((1, HEADS, sum(q_lens) + past, DIM), *[(1, 2, sum(k_lens), DIM)] * 2)
    assert_right(Call(inputs, run, define), "auto")


CACHES = {
    "in one piece": {},
    "of other entries": {"index": ints(3, 1)},
    "padded on the left": {"first": ints(2, 40)},
    "in pages": {"page": 16},
    "in pages of an odd size": {"page": 12},
    "under slopes": {"slopes": torch.rand(HEADS)},
    "under many queries": {"queries": 70},
    # Some queries lie before the first token.
    "short": {"lens": ints(13, 2)},
    "short, in pages": {"lens": ints(13, 2), "page": 16},
    "short, of one length": {"lens": 2},
}
PLAIN = {"lens": ints(13, 80), "queries": 4, "page": None, "index": None, "first": None, "slopes": None}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("causal, window", WINDOWS)
@pytest.mark.parametrize("new", [0, 3])
def test_a_cache_is_written_and_attended_to(kind, causal, window, new):
    lens, q_len, page, index, first, slopes = (PLAIN | CACHES[kind]).values()
    q, k, v = tensors((BATCH, q_len, HEADS, DIM), *[(BATCH, new, 2, dim) for dim in (DIM, 24)])
    caches = tensors(*[(24, page, 2, dim) if page else (4, 96, 2, dim) for dim in (DIM, 24)])
    table = torch.randperm(24, dtype=torch.int32)[:16].view(2, 8) if page else None
    places = table if page else (torch.arange(BATCH) if index is None else index)[:, None]
    held, wanted = [cache[places.long()].flatten(1, 2) for cache in caches], [cache.clone() for cache in caches]
    added, rotary = (k, v) if new else (None, None), (None, None)
    options = None, causal, window, 0.0, True, slopes, 0, True
    out, lse = fa.flash_attn_with_kvcache(q, *caches, *added, *rotary, lens, index, first, table, *options)
    for row, length in enumerate(torch.as_tensor(lens).expand(BATCH).tolist()):
        stop = length + new
        for of_row, tokens in zip(held, (k, v), strict=True):
            of_row[row, length:stop] = tokens[row]
        one = (t[row, None].transpose(1, 2) for t in (q, held[0][:, :stop], held[1][:, :stop]))
        kept = kept_by(q_len, stop, causal, window, 0 if first is None else first[row])
        right = dense_attention(*one, kept, alibi_slopes=slopes)
        assert_alike(out[row], right[0][0].transpose(0, 1))
        assert_alike(lse[row], right[1][0])
    for cache, right, of_rows in zip(caches, wanted, held, strict=True):
        right[places.long()] = of_rows.unflatten(1, (places.shape[1], -1))
        assert torch.equal(cache, right)


def test_a_mask_of_ours_goes_with_every_call():
    q, k, v = tensors(*[(1, 40, HEADS, DIM)] * 3)
    ends, slopes, text = (ints(0, 40), ints(0, 40), 40, 40), torch.rand(HEADS), "strided(3, block=1)"
    kept = kept_by(40, 40, True, (-1, -1)) & ((torch.arange(40)[:, None] - torch.arange(40)) % 3 == 0)
    right = dense_attention(*(t.transpose(1, 2) for t in (q, k, v)), kept)[0].transpose(1, 2)
    comb = sf.from_mask_fn(lambda q, kv: (q - kv) % 3 == 0)
    assert_alike(fa.flash_attn_varlen_func(q[0], k[0], v[0], *ends, causal=True, mask=comb), right[0])
    plain = fa.flash_attn_func(q, k, v, causal=True, window_size=(20, 0), mask=text)
    assert_alike(fa.flash_attn_func(q, k, v, mask=sf.compile_mask(f"window(20, 0) & {text}", 40)), plain)
    assert_alike(fa.flash_attn_with_kvcache(q[:, -3:], k, v, causal=True, window_size=(20, 0), mask=text), plain[:, -3:])
    shared = ends[0], ends[0], 40, 40  # so that a mask may depend on more than distances
    in_rows = fa.flash_attn_varlen_func(q[0], k[0], v[0], *shared, alibi_slopes=slopes, mask="causal & sinks(4)")
    assert_alike(in_rows, fa.flash_attn_func(q, k, v, alibi_slopes=slopes, mask="causal & sinks(4)")[0])


def test_dropout_of_packed_sequences_is_that_of_dense_ones():
    q, k, v = torch.randn(3, 1, 64, HEADS, DIM)
    torch.manual_seed(3)
    right = fa.flash_attn_func(q, k, v, 0.3, causal=True)[0]
    torch.manual_seed(3)
    found = fa.flash_attn_varlen_func(q[0], k[0], v[0], ints(0, 64), ints(0, 64), 64, 64, 0.3, causal=True)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("softcap", [0.0, 5.0], ids=["in place", "copied"])
@pytest.mark.parametrize("page", [-1, 3])
def test_pages_that_do_not_exist_are_refused_where_they_are_read_or_written_and_nowhere_else(page, softcap):
    q, k, v, keys, values = tensors(*[(2, 1, 2, DIM)] * 3, *[(3, 8, 2, DIM)] * 2)
    lens, before = ints(9, 0), keys.clone()
    table = ints([2, 0, page], [page, page, page])
    options = {"cache_seqlens": lens, "softcap": softcap}
    out = fa.flash_attn_with_kvcache(q, keys, values, block_table=table, **options)
    assert torch.equal(out, fa.flash_attn_with_kvcache(q, keys, values, block_table=table.clamp(0, 2), **options))
    said = f"one of the 3 pages for each token of a sequence; sequence 1 has {page} to {page}"
    with pytest.raises(ValueError, match=said):
        fa.flash_attn_with_kvcache(q, keys, values, k, v, block_table=table, **options)
    with pytest.raises(ValueError, match=said):
        fa.flash_attn_with_kvcache(q, keys, values, block_table=table, **options | {"cache_seqlens": lens + 1})
    with pytest.raises(ValueError, match=said):
        fa.flash_attn_varlen_func(q[:, 0], keys, values, ints(0, 1, 2), ints(0, 9, 10), 1, 24, block_table=table)
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
