"""Checks the arguments of ``topk_blocks``, and a selection beside the queries and keys of a call."""

from __future__ import annotations

import torch

from ..masks.chooser import check_keep
from ..selection.block_selection import BlockSelection, check_every, check_selection_block
from ..selection.choice import COMPRESSED, SCORES
from ..variant.variant import check_counts


def check_selection(selection: BlockSelection, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises ValueError where a selection was not made for these queries and keys."""
    if (selection.q_len, selection.kv_len) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"the selection is of q_len={selection.q_len}, kv_len={selection.kv_len}; q and k have {q.shape[2]} and {k.shape[2]} "
            "tokens; pass q_len= and kv_len= to BlockSelection.from_picks, or choose again for these"
        )
    check_selected_heads(selection, q, k)


def check_selected_heads(selection: BlockSelection, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises ValueError where a selection is of another device, batch or number of heads than these queries and keys."""
    if selection.device != q.device:
        raise ValueError(f"the selection is on {selection.device} and q on {q.device}; use selection.to({str(q.device)!r})")
    if selection.batch != q.shape[0] or selection.heads not in (k.shape[1], q.shape[1]):
        raise ValueError(
            f"picks must be of batch {q.shape[0]} and of {k.shape[1]} key heads or {q.shape[1]} query heads; got "
            f"{tuple(selection.picks.shape)}"
        )


def check_choice(keep: object, every: object, block_size: object, score: str) -> tuple[int, int, int]:
    """(keep, every, block_size). Raises TypeError or ValueError for arguments of ``topk_blocks`` by which no query can choose."""
    keep, every, block_size = check_keep(keep), check_every(every), check_selection_block(block_size)
    if isinstance(keep, float):
        raise TypeError(f"keep of a selection must be an int, how many blocks; got {keep}, a share; pass every=None for shares")
    if score not in (*SCORES, COMPRESSED):
        names = ", ".join(map(repr, (*SCORES, COMPRESSED)))
        raise ValueError(f"score must be one of {names}; got {score!r}; pass scores= for others")
    return keep, every, block_size


def check_compression(
    compression: object, k: torch.Tensor, lse: torch.Tensor | None, q: torch.Tensor, block_size: int, kv_len: int
) -> tuple[int, int]:
    """(length, stride) of compressed keys. Raises TypeError or ValueError for what does not fit k or the block size."""
    if compression is None:
        compression = block_size, block_size
    if not (isinstance(compression, tuple) and len(compression) == 2 and all(type(number) is int for number in compression)):
        raise TypeError(
            "compression must be two ints, tokens of a compressed key and tokens from one to the next; got "
            f"{compression!r}; pass compression=(32, 16) for NSA's"
        )
    length, stride = compression
    if not (stride > 0 and length > 0 and length % stride == 0 and block_size % stride == 0):
        raise ValueError(f"compression=(length, stride): stride must divide length and blocks of {block_size}; got {compression}")
    check_counts(kv_len=kv_len)
    count = max(0, (kv_len - length) // stride + 1)
    if k.shape[2] != count:
        raise ValueError(
            f"{kv_len} tokens have {count} compressed keys of {length} tokens, {stride} from one to the next; got k of "
            f"{k.shape[2]}, shape {tuple(k.shape)}; pass kv_len= and compression= that fit"
        )
    if lse is not None and not (isinstance(lse, torch.Tensor) and lse.is_floating_point() and lse.device == q.device):
        found = f"{lse.dtype} on {lse.device}" if isinstance(lse, torch.Tensor) else type(lse).__name__
        raise TypeError(f"lse must be a floating-point tensor on {q.device}; got {found}")
    if lse is not None and lse.shape != q.shape[:3]:
        raise ValueError(f"lse must have shape {tuple(q.shape[:3])}, (batch, heads, q_len); got {tuple(lse.shape)}")
    return length, stride
