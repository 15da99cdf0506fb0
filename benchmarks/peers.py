"""Against whom: each peer computes attention for a problem, or says why it cannot.

A peer has ``refuses(problem) -> str | None`` and ``prepare(problem) -> fn``; ``fn()`` runs one forward pass and returns
out, (batch, heads, tokens, head_dim), differentiable in ``problem.leaves``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np
import torch

import sparse_flash
from sparse_flash import backends
from sparse_flash.block_mask import BlockMask
from sparse_flash.pattern import And, Not, Or, Pattern
from sparse_flash.tiles import unpack_bits, unpack_runs


@dataclass(frozen=True)
class Problem:
    """q, k, v: leaves, (batch, heads, tokens, head_dim). mask: the compiled pattern, on their device."""

    pattern: Pattern
    mask: BlockMask
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    @property
    def name(self) -> str:
        return str(self.pattern)

    def memory_order(self, *order: int) -> Problem:
        """The same values with dimensions in another order in memory."""
        back = [order.index(d) for d in range(4)]
        tensors = [t.detach().permute(order).contiguous().permute(back).requires_grad_(t.requires_grad) for t in self.leaves]
        return replace(self, q=tensors[0], k=tensors[1], v=tensors[2])


@dataclass(frozen=True)
class SparseFlash:
    backend: str = "auto"

    def refuses(self, problem: Problem) -> str | None:
        return None if self.backend == "auto" else backends.backend(self.backend).supports(self.call(problem))

    def call(self, problem: Problem) -> backends.Call:
        q = problem.q
        block_size = None if problem.mask.keeps_all else problem.mask.block_size
        return backends.Call(
            q.device, q.dtype, *q.shape[:2], problem.k.shape[1], q.shape[2], problem.k.shape[2], q.shape[3], block_size
        )

    def runs_on(self, problem: Problem) -> str:
        """The back end that takes the call."""
        return backends.choose(self.backend, self.call(problem))

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        mask = None if problem.mask.keeps_all else problem.mask
        return lambda: sparse_flash.attention(*problem.leaves, mask, backend=self.backend)


@dataclass(frozen=True)
class Sdpa:
    """PyTorch's dense attention. Any other mask than full and causal would be an array of tokens x tokens."""

    backend: str
    most_tokens: int | None = None  # what builds the score matrix runs out of memory beyond

    def refuses(self, problem: Problem) -> str | None:
        if problem.name not in ("full", "causal"):
            return "it is dense: any mask but causal would be an array of tokens x tokens"
        if self.most_tokens and problem.q.shape[2] > self.most_tokens:
            return f"it builds the score matrix, which is left out beyond {self.most_tokens} tokens"
        return None

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend, causal = getattr(SDPBackend, self.backend), problem.name == "causal"

        def run():
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*problem.leaves, is_causal=causal)

        return run


@dataclass(frozen=True)
class Flex:
    """PyTorch's FlexAttention, compiled, with the same table of blocks as ours."""

    kernel_options: dict = field(default_factory=dict)

    def refuses(self, problem: Problem) -> str | None:
        return None

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        import torch._functorch.config
        from torch.nn.attention.flex_attention import flex_attention

        # Graphs of earlier cases would each add a check to every call.
        torch._dynamo.reset()
        # The backward pass is timed alone, again and again over one graph, which must then keep what it saved.
        torch._functorch.config.donated_buffer = False
        block_mask = None if problem.mask.keeps_all else flex_block_mask(problem.mask, problem.pattern)
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(*problem.leaves, block_mask=block_mask, kernel_options=self.kernel_options or None)


@dataclass(frozen=True)
class FlashAttention4:
    def refuses(self, problem: Problem) -> str | None:
        if self.arguments(problem) is None:
            return "its block-sparse call is not measured; it has dense, causal and window"
        try:
            import flash_attn.cute  # noqa: F401
        except ImportError as error:
            return f"flash_attn.cute is not installed ({error})"
        return None

    def arguments(self, problem: Problem) -> dict | None:
        window = re.fullmatch(r"causal & local\((\d+)\)", problem.name)
        if window:
            return {"causal": True, "window_size": (int(window[1]) - 1, 0)}
        return {"full": {"causal": False}, "causal": {"causal": True}}.get(problem.name)

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        import flash_attn.cute

        arguments = self.arguments(problem)

        def run():
            out = flash_attn.cute.flash_attn_func(*(t.transpose(1, 2) for t in problem.leaves), **arguments)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return run


def peer(name: str):
    """The peer of a case. Raises ValueError for an unknown name."""
    if name.startswith("sparse_flash:"):
        return SparseFlash(name.partition(":")[2])
    if name not in PEERS:
        raise ValueError(f"unknown peer {name!r}; known: {', '.join(PEERS)} and sparse_flash:BACKEND")
    return PEERS[name]


PEERS = {
    "sparse_flash": SparseFlash(),
    "sdpa-flash": Sdpa("FLASH_ATTENTION"),
    "sdpa-cudnn": Sdpa("CUDNN_ATTENTION"),
    "sdpa-efficient": Sdpa("EFFICIENT_ATTENTION"),
    "sdpa-math": Sdpa("MATH", most_tokens=8192),
    "flex": Flex(),
    "flex-fa4": Flex({"BACKEND": "FLASH"}),
    "fa4": FlashAttention4(),
}


def flex_block_mask(mask: BlockMask, pattern: Pattern):
    """FlexAttention's BlockMask with the blocks of ours: what its own builder finds, without its tokens x tokens pass."""
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    rows, cols, kind, _ = mask.entries()
    lists = []
    for chosen in (kind > 0, kind == 0):
        row, col = rows[chosen], cols[chosen]
        count = np.bincount(row, minlength=mask.grid.q_blocks)
        index = np.zeros(mask.grid.shape, np.int32)
        order = np.lexsort((col, row))
        place = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        index[row[order], place] = col[order]
        lists += [torch.from_numpy(a.astype(np.int32))[None, None].to(mask.device) for a in (count, index)]
    return FlexMask.from_kv_blocks(
        *lists, BLOCK_SIZE=mask.block_size, mask_mod=mask_mod(pattern, mask), seq_lengths=(mask.q_len, mask.kv_len)
    )


def mask_mod(pattern: Pattern, mask: BlockMask) -> Callable:
    """The pattern as FlexAttention takes it, in the cheapest form: closed where there is one; a map of blocks where all
    are full; else a look into the mask tiles."""
    closed = _closed_form(pattern, mask)
    if closed:
        return closed
    rows, cols, kind, tile = mask.entries()
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
    tiles = torch.from_numpy(np.concatenate([np.ones((1, size, size), bool), in_runs, unpack_bits(bits, size)])).to(device)
    which = np.zeros(mask.grid.shape, np.int32)
    which[rows, cols] = np.where(kind == 0, 0, tile + np.where(kind == 1, 1, 1 + len(runs)))
    which = torch.from_numpy(which).to(device)
    return lambda b, h, q, k: tiles[which[q // size, k // size], q % size, k % size]


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
    if pattern.name == "local":
        window = pattern.window
        return lambda b, h, q, k: (q + offset - k < window) & (k - q - offset < window)
    if pattern.name == "documents":
        bounds = torch.tensor(pattern.cu_seqlens)
        document = torch.bucketize(torch.arange(mask.kv_len), bounds, right=True).to(mask.device)
        return lambda b, h, q, k: document[q + offset] == document[k]
    return None


def _both(a, b):
    return lambda batch, head, q, k: a(batch, head, q, k) & b(batch, head, q, k)


def _either(a, b):
    return lambda batch, head, q, k: a(batch, head, q, k) | b(batch, head, q, k)
