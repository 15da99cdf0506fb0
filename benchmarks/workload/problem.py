"""A peer's task: tensors, and the mask in both of its forms."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
import torch

import sparse_flash
from sparse_flash.masks.block_mask import BlockMask, check_batch_and_heads
from sparse_flash.masks.compiler import entry_patterns
from sparse_flash.masks.pattern import And, Pattern, PerBatch

from .cases import Case, CompileCase, Mask, Shape
from .changes import CHANGES, Change


class Terms(NamedTuple):
    """Holds a mask as dense libraries take it. window: tokens that a query sees, itself included; None: no window. bounds: where
    documents start, and where the last one ends; None: no documents."""

    causal: bool
    window: int | None
    bounds: tuple[int, ...] | None


@dataclass(frozen=True)
class Problem:
    """q: a leaf, (batch, heads, tokens, head_dim). k, v: leaves, (batch, kv_heads, tokens, head_dim); v's may be another.
    patterns: one for all query heads, or one for each. mask: what they compile to, on the tensors' device.
    dropout_p: of the attention probabilities. kv_lens: (batch,) int32, the number of keys of each sequence; None: all. change: see
    ``changes``. sinks: (heads,), a leaf, if the change has them."""

    patterns: tuple[Pattern, ...]
    mask: BlockMask
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dropout_p: float = 0.0
    kv_lens: torch.Tensor | None = None
    change: Change = CHANGES[""]
    sinks: torch.Tensor | None = None

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    @property
    def trained(self) -> tuple[torch.Tensor, ...]:
        """The leaves, and sinks if there are any."""
        return self.leaves if self.sinks is None else (*self.leaves, self.sinks)

    @property
    def plain(self) -> bool:
        """Whether the call has a mask and nothing else."""
        return not self.dropout_p and self.kv_lens is None and self.change is CHANGES[""]

    @property
    def name(self) -> str:
        """The spec text of each pattern; just the text of one that all heads share."""
        return "; ".join(map(str, self.patterns))

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a head of keys and values."""
        return self.q.shape[1] != self.k.shape[1]

    @property
    def kept_pairs(self) -> int:
        """Kept (query, key) pairs, over batch and heads."""
        each = torch.from_numpy(self.mask.kept_pairs())[self.mask.mask_index.cpu().long()]
        return int(each.expand(self.q.shape[:2]).sum())

    def kept(self, batch: int, head: int, queries: torch.Tensor) -> torch.Tensor:
        """(queries, kv_len) bool: the pairs of some queries that are kept, from the pattern's definition, not its table. queries:
        numbers, on the tensors' device."""
        kv_len = self.k.shape[2]
        positions = tuple((queries + kv_len - self.q.shape[2]).tolist())
        pairs = _apply_rule(self.patterns[head if len(self.patterns) > 1 else 0], positions, kv_len).to(self.q.device)
        return pairs if self.kv_lens is None else pairs & (torch.arange(kv_len, device=pairs.device) < self.kv_lens[batch])

    @property
    def terms(self) -> Terms | None:
        """The mask's terms if it is full, or causal with at most a window and documents."""
        (pattern, *others) = self.patterns
        given = {p.name: p for p in (pattern.operands if isinstance(pattern, And) else (pattern,))}
        if others or (given.keys() != {"full"} and not {"causal"} <= given.keys() <= {"causal", "local", "documents"}):
            return None
        window, documents = given.get("local"), given.get("documents")
        return Terms("causal" in given, getattr(window, "window", None), getattr(documents, "cu_seqlens", None))

    def pack(self, bounds: tuple[int, ...]) -> tuple[torch.Tensor, int]:
        """Returns (cu_seqlens of the documents of all sequences, (documents + 1,) int32, the tokens of the longest)."""
        batch, _, tokens, _ = self.q.shape
        starts = [b * tokens + start for b in range(batch) for start in bounds[:-1]]
        cu_seqlens = torch.tensor([*starts, batch * tokens], dtype=torch.int32, device=self.q.device)
        return cu_seqlens, max(stop - start for start, stop in pairwise(bounds))

    def packed_leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as (batch * tokens, heads, head_dim)."""
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in self.leaves)
        return q, k, v

    def unpack(self, out: torch.Tensor) -> torch.Tensor:
        """(batch, heads, tokens, head_dim) of the result for packed leaves."""
        return out.unflatten(0, (len(self.q), -1)).transpose(1, 2)

    def with_memory_order(self, order: tuple[int, ...]) -> Self:
        """The same values with dimensions in another order in memory."""
        q, k, v = (reorder_memory(t.detach(), order).requires_grad_(t.requires_grad) for t in self.leaves)
        return replace(self, q=q, k=k, v=v)


@lru_cache(8)  # heads and sequences ask for the same
def _apply_rule(pattern: Pattern, positions: tuple[int, ...], kv_len: int) -> torch.Tensor:
    kept = pattern.token_rule(np.array(positions)[:, None], np.arange(kv_len)[None])
    return torch.from_numpy(np.broadcast_to(kept, (len(positions), kv_len)).copy())


def reorder_memory(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same values with dimensions in another order in memory."""
    return tensor.permute(order).contiguous().permute([order.index(d) for d in range(tensor.dim())])


def build_problem(case: Case, device: torch.device, dtype: torch.dtype, gradients: bool = True) -> Problem:
    """A case's problem, its tensors random and the same for every peer."""
    kv_lens = padded_lengths(case.shape).to(device) if case.padded else None
    s = case.shape
    patterns, mask = parse_and_compile(case.mask, s.tokens, device)
    generator = torch.Generator(device).manual_seed(0)
    kv_heads = s.kv_heads or s.heads
    shapes = (s.heads, s.head_dim), (kv_heads, s.head_dim), (kv_heads, s.v_head_dim or s.head_dim)
    q, k, v = (
        torch.randn((s.batch, heads, s.tokens, dim), generator=generator, device=device, dtype=dtype).requires_grad_(gradients)
        for heads, dim in shapes
    )
    change = CHANGES[case.mask.change]
    sinks = torch.linspace(-1, 1, s.heads, device=device).requires_grad_(gradients) if change.sinks else None
    return Problem(patterns, mask, q, k, v, case.dropout_p, kv_lens, change, sinks)


def parse_and_compile(mask: Mask, tokens: int, device: torch.device) -> tuple[tuple[Pattern, ...], BlockMask]:
    specs = mask.spec if isinstance(mask.spec, tuple) else (mask.spec,)
    patterns = tuple(sparse_flash.parse(spec) if isinstance(spec, str) else spec for spec in specs)
    if isinstance(patterns[0], PerBatch):
        raise ValueError(f"the benchmark's mask must be that of all sequences; got {patterns[0]}; pass one of its patterns")
    if len(patterns) == 1:
        patterns = entry_patterns(patterns[0])
    if len(patterns) == 1:
        return patterns, sparse_flash.compile_mask(patterns[0], tokens, block_size=mask.block_size, device=device)
    return patterns, BlockMask.per_head(patterns, q_len=tokens, block_size=mask.block_size, device=device)


def check_fits(mask: Mask, cases: Iterable[Case | CompileCase]) -> None:
    """Raises the ValueError of the last of these cases if none can have the mask, for its heads or the tokens that it names."""
    refusal = None
    for case in cases:
        try:
            entries = parse_and_compile(mask, case.tokens, torch.device("cpu"))[1].mask_index.shape
            if isinstance(case, Case):
                check_batch_and_heads(entries, case.shape.batch, case.shape.heads)
            return
        except ValueError as error:
            refusal = error
    if refusal:
        raise refusal


@cache
def is_causal(mask: Mask, tokens: int) -> bool:
    """Whether no query sees a later key, so a user without the mask would run causal attention."""
    try:
        return parse_and_compile(mask, tokens, torch.device("cpu"))[1].is_causal
    except ValueError:  # a mask of other lengths: its cases fail, and say so
        return False


def padded_lengths(shape: Shape) -> torch.Tensor:
    """(batch,) int32: uniform from half of the tokens to all of them."""
    draws = torch.Generator().manual_seed(0)
    return torch.randint(max(1, shape.tokens // 2), shape.tokens + 1, (shape.batch,), generator=draws, dtype=torch.int32)
