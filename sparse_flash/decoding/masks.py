"""The mask of a decoding call: a pattern's table for the cache's capacity, compiled once; a step reads the rows of its
positions."""

import operator
from typing import Any

import torch

from ..compat.constants import constant_in_graphs
from ..compat.pytorch import is_plain_eager, plain_tensors
from ..core.arguments import autocast_applies
from ..core.operators import DEFAULT_BLOCK_SIZE
from ..masks.block_mask import BlockMask, compile_up_to, convert_foreign_mask, fake_mask_if_needed
from ..masks.cache import keep_if_captured, run_in_thread, to_traceable
from ..masks.fit import check_fit, parse_if_names_tokens
from ..masks.memory import cached_until_cleared
from ..masks.parsing import parse
from ..masks.pattern import Pattern
from ..patterns import causal, full, local
from .arguments import MAX_QUERIES, check_decoding_mask


def can_decode(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether ``attention_decode`` supports these queries and keys, given a mask that fits."""
    few = q.shape[2] <= MAX_QUERIES and q.shape[2] <= k.shape[2] and q.dtype == k.dtype
    gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    return few and not (gradient or autocast_applies(q.device))


def resolve_mask(
    mask: BlockMask | Pattern | str | None, capacity: int, q: torch.Tensor, kv_lens: Any = None, kv_starts: Any = None
) -> tuple[BlockMask | None, bool]:
    """(the square mask or None, whether attention without one is causal)."""
    if mask is None:
        return None, False
    if not isinstance(mask, (BlockMask, Pattern, str)):
        mask = convert_foreign_mask(mask)
    if isinstance(mask, BlockMask):
        check_decoding_mask(mask, capacity, q)
        return (None if mask.keeps_all else mask), False
    # index() makes a symbolic capacity a plain number: a compiled graph holds the table of one capacity.
    length = _rounded(operator.index(capacity))
    if torch.compiler.is_compiling():
        is_causal, tensors = _constant_tables(to_traceable(mask), length, q.device)
        table = BlockMask.from_tensors(length, length, DEFAULT_BLOCK_SIZE, tensors) if tensors else None
        if table is not None:
            check_decoding_mask(table, capacity, q)
        return table, is_causal
    if (named := parse_if_names_tokens(mask)) is not None:
        if kv_lens is kv_starts is None:
            check_fit(named, q.shape[2], capacity)
        elif q.device.type == "cpu" and is_plain_eager(q):
            ends = torch.full((1,), capacity) if kv_lens is None else kv_lens.clamp(max=capacity)
            counts = ends if kv_starts is None else ends - kv_starts.clamp(min=0)
            for kv_len in set(counts[counts > 0].tolist()):
                check_fit(named, min(q.shape[2], kv_len - 1), kv_len)  # fewer queries than keys, as later tokens may follow
    table, is_causal = _compiled(mask, length, q.device)
    if table is not None:
        check_decoding_mask(table, capacity, q)
    keep_if_captured(table, q.device)
    return table and fake_mask_if_needed(table), is_causal


def _rounded(capacity: int) -> int:
    """Rounds up to a multiple of an eighth of the power of two below, in whole blocks: a cache that grows with every token compiles
    its pattern eight times per doubling."""
    unit = max(DEFAULT_BLOCK_SIZE, 1 << max(0, capacity.bit_length() - 4))
    return -(-capacity // unit) * unit


@cached_until_cleared(maxsize=64)
def _compiled(pattern: Pattern | str, length: int, device: torch.device) -> tuple[BlockMask | None, bool]:
    pattern = parse(pattern) if isinstance(pattern, str) else pattern
    if pattern in (causal(), full()):
        return None, pattern == causal()
    # No key is later than the last query; blocks of later keys would only cost time.
    pattern = pattern & (causal() | local(MAX_QUERIES))
    return run_in_thread(compile_up_to, pattern, length, length, DEFAULT_BLOCK_SIZE, device), False


@constant_in_graphs
def _constant_tables(pattern: Pattern | str, length: int, device: torch.device) -> tuple[bool, list[torch.Tensor]]:
    """Returns (whether it is causal, the table's tensors) as constants of a compiled graph."""
    with plain_tensors():
        mask, is_causal = _compiled(pattern, length, device)
        return is_causal, [] if mask is None else mask.constants()
