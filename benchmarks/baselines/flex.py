"""PyTorch's FlexAttention, compiled, with the same table of blocks as ours."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch

import sparse_flash
from sparse_flash.compat.dynamo import keep_saved_tensors
from sparse_flash.masks.block_mask import BlockMask
from sparse_flash.masks.pattern import And, Not, Or, Pattern
from sparse_flash.masks.tiles import unpack_bits, unpack_runs

from ..workload.problem import Problem
from .base import Peer

LEAST_BLOCK = 128  # the tile of its kernels at head_dim 128, which must divide the table's block


@dataclass(frozen=True)
class Flex(Peer):
    """backend: its kernels, "TRITON" or "FLASH", which are FlashAttention-4's; None for its own choice."""

    backend: str | None = None

    def refuses(self, problem: Problem) -> str | None:
        if len(problem.patterns) > 1:
            return "masks of each head are not measured"
        if problem.sinks is not None:
            return "sinks would be PyTorch operations on its lse"
        return "it has no dropout" if problem.dropout_p else None

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        from torch.nn.attention.flex_attention import flex_attention

        # Graphs of earlier cases would each add a check to every call.
        torch.compiler.reset()
        # The backward pass is timed alone, repeatedly over one graph, which must keep what it saved.
        keep_saved_tensors()
        options: dict[str, Any] = {
            "block_mask": None if problem.mask.keeps_all and problem.kv_lens is None else flex_block_mask(_coarsen_table(problem)),
            "kernel_options": {"BACKEND": self.backend} if self.backend else None,
            "enable_gqa": problem.grouped,
            "score_mod": problem.change.score,
        }
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(*problem.leaves, **options)


def _coarsen_table(problem: Problem) -> Problem:
    """The problem with a table that the kernels accept: the same pairs, on blocks no smaller than their tile."""
    mask = problem.mask
    if mask.block_size >= LEAST_BLOCK:
        return problem
    coarse = sparse_flash.compile_mask(problem.patterns[0], mask.q_len, mask.kv_len, LEAST_BLOCK, mask.device)
    return replace(problem, mask=coarse)


def flex_block_mask(problem: Problem):
    """FlexAttention's BlockMask with our blocks: what its own builder finds, without the tokens x tokens pass."""
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    mask = problem.mask
    rows, cols, kind, _ = mask.by_query.entries()
    partial, full = np.zeros((2, 1, 1, *mask.grid.shape), bool)
    partial[0, 0, rows, cols], full[0, 0, rows, cols] = kind > 0, kind == 0
    if problem.kv_lens is not None:
        first = np.arange(mask.grid.kv_blocks) * mask.block_size
        length = problem.kv_lens.cpu().numpy()[:, None, None, None]
        cut = first + mask.block_size > length
        partial, full = (partial | (full & cut)) & (first < length), full & ~cut
    lists = []
    for kept in (partial, full):
        # The columns of kept blocks first, in order; the rest is never read.
        order = np.argsort(~kept, axis=-1, kind="stable")
        lists += [torch.from_numpy(a.astype(np.int32)).to(mask.device) for a in (kept.sum(-1), order)]
    lengths = mask.q_len, mask.kv_len
    partial_count, partial_cols, full_count, full_cols = lists
    return FlexMask.from_kv_blocks(
        partial_count, partial_cols, full_count, full_cols, mask.block_size, mask_mod(problem), seq_lengths=lengths
    )


def mask_mod(problem: Problem) -> Callable:
    """The mask as FlexAttention takes it."""
    inner, lengths = mask_function(problem.patterns[0], problem.mask), problem.kv_lens
    return inner if lengths is None else lambda b, h, q, k: inner(b, h, q, k) & (k < lengths[b])


def mask_function(pattern: Pattern, mask: BlockMask) -> Callable:
    """The cheapest form of a mask: a closed form if there is one, a block map if all blocks are full, else a lookup in the mask
    tiles."""
    if closed := _closed_form(pattern, mask):
        return closed
    rows, cols, kind, tile = mask.by_query.entries()
    size, device = mask.block_size, mask.device
    if not kind.any():
        kept = torch.zeros(mask.grid.shape, dtype=torch.bool)
        kept[rows, cols] = True
        kept = kept.to(device)
        return lambda b, h, q, k: kept[q // size, k // size]
    runs, bits = (t.cpu().numpy() for t in mask.tiles)
    first, stop = unpack_runs(runs)
    column = np.arange(size)
    in_runs = (column >= first[:, :, None]) & (column < stop[:, :, None])
    none_and_all = np.stack([np.zeros((size, size), bool), np.ones((size, size), bool)])
    tiles = torch.from_numpy(np.concatenate([none_and_all, in_runs, unpack_bits(bits, size)])).to(device)
    number_of_tile = np.zeros(mask.grid.shape, np.int32)
    number_of_tile[rows, cols] = np.where(kind == 0, 1, tile + np.where(kind == 1, 2, 2 + len(runs)))
    tile_at = torch.from_numpy(number_of_tile).to(device)
    return lambda b, h, q, k: tiles[tile_at[q // size, k // size], q % size, k % size]


def _closed_form(pattern: Pattern, mask: BlockMask) -> Callable | None:
    offset = mask.kv_len - mask.q_len
    if isinstance(pattern, (And, Or)):
        parts = [_closed_form(p, mask) for p in pattern.operands]
        return None if None in parts else reduce(_both if isinstance(pattern, And) else _either, parts)
    if isinstance(pattern, Not):
        inner = _closed_form(pattern.operand, mask)
        return inner and (lambda b, h, q, k: ~inner(b, h, q, k))
    if pattern.name == "causal":
        return lambda b, h, q, k: q + offset >= k
    if isinstance(pattern, sparse_flash.local):
        window = pattern.window
        return lambda b, h, q, k: (q + offset - k < window) & (k - q - offset < window)
    if isinstance(pattern, sparse_flash.global_tokens):
        tokens = pattern.tokens
        return lambda b, h, q, k: ((q + offset >= 0) & (q + offset < tokens)) | (k < tokens)
    if isinstance(pattern, sparse_flash.documents):
        bounds = torch.tensor(pattern.cu_seqlens)
        document = torch.bucketize(torch.arange(mask.kv_len), bounds, right=True).to(mask.device)
        return lambda b, h, q, k: document[q + offset] == document[k]
    return None


def _both(a, b):
    return lambda batch, head, q, k: a(batch, head, q, k) & b(batch, head, q, k)


def _either(a, b):
    return lambda batch, head, q, k: a(batch, head, q, k) | b(batch, head, q, k)
