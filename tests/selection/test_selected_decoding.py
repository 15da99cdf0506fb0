"""Each step of decoding over blocks that its queries choose from the cache is the row of the training call."""

import math

import pytest
import torch
from accepted import needs_triton
from calls import in_pages
from oracle import DEVICE, dense_attention, tensor
from picked import drawn_picks, tensors

import sparse_flash as sf
from sparse_flash.selection import decode as module

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize
BLOCK, KEEP = 16, 3
on_each = parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])


def inputs(tokens, heads=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    return [tensor((3, h, tokens, 32), dtype=dtype, generator=generator) for h in (heads, 2, 2)]


def trained(q, k, v, share_group):
    return sf.attention(q, k, v, sf.topk_blocks(q, k, KEEP, every=1, block_size=BLOCK, share_group=share_group), return_lse=True)


def chosen_from(q, k, lens, share_group=False):
    """What the last queries of sequences of these lengths choose from a cache, each sequence by itself."""
    options = {"every": 1, "block_size": BLOCK, "share_group": share_group}
    picks = [sf.topk_blocks(q[b : b + 1], k[b : b + 1, :, : max(n, 1)], KEEP, **options).picks for b, n in enumerate(lens)]
    picks = torch.cat([torch.nn.functional.pad(one, (0, KEEP - one.shape[3]), value=-1) for one in picks])
    return sf.BlockSelection.from_picks(picks, BLOCK, kv_len=k.shape[2], own=False)


@parametrize(
    "backend, share_group, page_size, chunk",
    [("torch", shares, *how) for shares in (True, False) for how in ((None, 1), (8, 1 << 27), (64, 1 << 27))]
    + [pytest.param("triton", True, 8, 1, marks=needs_triton)],
)
def test_each_step_of_sequences_of_different_lengths_is_the_row_of_training(share_group, backend, page_size, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    q, k, v = inputs(100)
    out, lse = trained(q, k, v, share_group)
    room, lens = 128, torch.tensor([40, 0, 13], device=DEVICE)
    cache = [torch.full((3, 2, room, 32), float("nan"), device=DEVICE) for _ in range(2)]
    options = {}
    steps = [1, 1, 5, 1, 16, 1, 33, 2]
    for new in steps if backend == "torch" else steps[:4]:  # each crosses a border of a block for some sequence or other
        for b, start in enumerate(lens.tolist()):
            for held, given in zip(cache, (k, v), strict=True):
                held[b, :, : start + new] = given[b, :, : start + new]
        lens = lens + new
        held = cache
        if page_size:
            (keys, table), (values, _) = (in_pages(t, page_size, math.nan) for t in cache)
            held, options = [keys, values], {"block_table": table}
        rows = torch.stack([q[b, :, n - new : n] for b, n in enumerate(lens.tolist())])
        chosen = chosen_from(rows, cache[0], lens.tolist(), share_group)
        found = sf.attention_decode(rows, *held, chosen, kv_lens=lens, return_lse=True, backend=backend, **options)
        for b, n in enumerate(lens.tolist()):
            for ours, row in zip(found, (out, lse), strict=True):
                torch.testing.assert_close(ours[b], row[b, :, n - new : n])


DECODED = {
    # heads, key heads, heads that pick, queries, capacity, block, n, every, head_dim, v's, programs that share a query, pages
    "a group of 4, odd lengths": ((4, 1, 1, 1, 131, 16, 5, 1, 24, 40), (1, 3), (None, 8, 64)),
    "a group of 3, several queries": ((6, 2, 2, 5, 100, 16, 4, 1, 16, 16), (1, 2), (None, 64)),
    "a group of 16, longer blocks than a step": ((16, 1, 1, 2, 700, 256, 2, 1, 16, 16), (1, 5), (None, 64)),
    "heads that pick for themselves": ((4, 2, 4, 3, 90, 32, 2, 1, 16, 16), (2,), (None, 8)),
    "a choice for 3 queries": ((4, 2, 2, 7, 90, 32, 2, 3, 16, 16), (2,), (8,)),
    "more heads than rows of a tile": ((80, 1, 1, 1, 60, 16, 2, 1, 16, 16), (1, 2), (64,)),
    "more programs than picks": ((2, 1, 1, 1, 60, 16, 1, 1, 16, 16), (1, 7), (None,)),
}


@needs_triton
@parametrize("name, paged_by", [(name, size) for name, (*_, sizes) in DECODED.items() for size in sizes])
def test_the_kernel_equals_dense_attention_over_the_picked_pairs_and_repeats(name, paged_by):
    from sparse_flash.kernels.selection.decode import selection_decode

    (heads, kv_heads, pickers, q_len, capacity, block, n, every, dim, v_dim), counts, _ = DECODED[name]
    q, k, v, _ = tensors(2, heads, kv_heads, q_len, capacity, dim, v_dim=v_dim)
    lens = torch.tensor([capacity, capacity // 2 + 1], dtype=torch.int32, device=DEVICE)
    # Picks of the longer sequence: some are past the end of the shorter one.
    picks = drawn_picks((2, pickers, -(-q_len // every), n), every, block, q_len, capacity)
    key, position = torch.arange(capacity, device=DEVICE), lens[:, None] - q_len + torch.arange(q_len, device=DEVICE)
    of_query = picks.repeat_interleave(every, 2)[:, :, :q_len]
    kept = (of_query[..., None] == key // block).any(3) & (key <= position[:, None, :, None])
    kept = kept.repeat_interleave(heads // pickers, 1)
    wanted, wanted_lse = dense_attention(q.double(), k.double(), v.double(), kept, 0.3)
    held, options = [k, v], {"kv_lens": lens}
    past = key >= lens[:, None]
    for x in held:
        x.masked_fill_(past[:, None, :, None], float("nan"))
    if paged_by:
        (keys, table), (values, _) = (in_pages(x, paged_by, math.nan) for x in held)
        # Blocks that no query picked are in pages that do not exist.
        unread = ~torch.nn.functional.pad(kept.any(1).any(1), (0, -capacity % paged_by)).unflatten(1, (-1, paged_by)).any(2)
        held, options["block_table"] = [keys, values], torch.where(unread, 1 << 20, table).to(torch.int32)
    for splits in counts:
        options["splits"] = splits
        found = selection_decode(q, *held, picks, block, every, 0.3, **options)
        torch.testing.assert_close(found[0].double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1].double(), wanted_lse, rtol=1e-5, atol=1e-5)
    again = selection_decode(q, *held, picks, block, every, 0.3, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@on_each
def test_queries_before_the_first_key_keep_nothing(backend):
    q, k, v = (t[:2] for t in inputs(20))
    lens = torch.tensor([2, 0], device=DEVICE)
    k[1], v[1] = float("nan"), float("nan")
    chosen = chosen_from(q[:, :, :5], k, lens.tolist())
    out, lse = sf.attention_decode(q[:, :, :5], k, v, chosen, kv_lens=lens, return_lse=True, backend=backend)
    assert not out[0, :, :3].any() and lse[0, :, :3].isneginf().all() and lse[0, :, 3:].isfinite().all()
    assert not out[1].any() and lse[1].isneginf().all()


@on_each
def test_lengths_past_the_cache_are_its_capacity(backend):
    q, k, v = (t[:1] for t in inputs(64))
    step, chosen = q[:, :, -2:], chosen_from(q[:, :, -2:], k, [64])
    past = torch.full((1,), 900, device=DEVICE)
    found, whole = (sf.attention_decode(step, k, v, chosen, kv_lens=lens, backend=backend) for lens in (past, None))
    assert torch.equal(found, whole)
