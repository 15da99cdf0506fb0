"""BlockSelection: the blocks of keys that each query picked. The class docstring defines its format."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..compat.dynamo import outside_inference
from ..compat.names import operator_name
from ..masks.block_mask import BlockMask, Device, MaskLike, resolve_single_mask
from ..masks.grid import BlockGrid, check_index
from ..masks.parsing import parse, text_of
from ..masks.pattern import Pattern

SELECTION_BLOCK_SIZES = (16, 32, 64, 128, 256, 512)
_ALWAYS_BLOCK_SIZE = 128  # of the table of ``always``, or the selection's own if that is smaller
_CHUNK = 1 << 26  # pairs held at a time


@dataclass(frozen=True, eq=False)
class BlockSelection:
    """Which blocks of keys each query picked. Pass it to ``attention`` instead of a mask.

    Create one with ``topk_blocks`` or ``BlockSelection.from_picks``. Immutable.

    picks: (batch, kv_heads | heads, q_len, n) int32: the blocks that a query picked, ascending, each once, then -1. With kv_heads,
    the query heads that share keys share picks.
    q_len, kv_len: tokens. block_size: keys of a block.
    always: a BlockMask of one mask, or None: pairs that every head keeps too, to the token.

    The last query is aligned with the last key, as for ``attention``. Three lines decode the format::

        position = t + kv_len - q_len                            # of query t
        picked = j // block_size in picks[b, h, t]
        kept = j <= position and (picked or always keeps (t, j))

    So a selection is causal, and a pair that is kept twice counts once.
    """

    picks: Tensor
    q_len: int
    kv_len: int
    block_size: int
    always: BlockMask | None = None

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling() and self.picks.is_inference():
            object.__setattr__(self, "picks", outside_inference(self.picks.clone)())  # autograd saves no others

    @classmethod
    def from_picks(
        cls, picks: Tensor, block_size: int, *, kv_len: int | None = None, own: bool = True, always: MaskLike | None = None
    ) -> "BlockSelection":
        """A selection from picks in any order, on their device.

        picks: (batch, kv_heads | heads, q_len, n) int32 or int64: blocks of keys, -1 for none. Repeated blocks count once. Blocks
        that begin after the query are dropped.
        block_size: keys of a block: 16, 32, 64, 128, 256 or 512. kv_len: tokens, q_len by default.
        own: add the block in which each query is, so that it keeps its own block up to itself.
        always: a Pattern, its spec text or a BlockMask of one mask, with these lengths, on this device: pairs that all queries
        keep too. Later keys than the query are dropped from it.

        Launches only tensor operations of fixed shapes: no host synchronization on a GPU, safe under CUDA graphs. The picks are not
        differentiated. Raises TypeError for wrong types, ValueError for arguments that do not fit together.
        """
        block_size = check_selection_block(block_size)
        if not isinstance(picks, Tensor):
            raise TypeError(f"picks must be an int32 tensor; got {type(picks).__name__}; use torch.tensor(..., dtype=torch.int32)")
        if picks.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"picks must be int32 or int64, numbers of blocks; got {picks.dtype}; use .to(torch.int32)")
        if picks.dim() != 4 or 0 in picks.shape[1:3] or not (picks.shape[3] or own):
            raise ValueError(
                "picks must have shape (batch, kv_heads or heads, q_len, picks of a query), none but the batch 0; got "
                f"{tuple(picks.shape)}"
            )
        grid = BlockGrid(picks.shape[2], picks.shape[2] if kv_len is None else kv_len, min(block_size, _ALWAYS_BLOCK_SIZE))
        picks = normalize_picks(picks, block_size, grid.kv_len, own)
        table = always_table(always, grid.q_len, grid.kv_len, block_size, picks.device)
        return cls(picks, grid.q_len, grid.kv_len, block_size, table)

    @property
    def batch(self) -> int:
        return self.picks.shape[0]

    @property
    def heads(self) -> int:
        """How many heads pick: key heads, or query heads."""
        return self.picks.shape[1]

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_len // self.block_size)

    @property
    def offset(self) -> int:
        """The position of the first query (negative when there are more queries than keys)."""
        return self.kv_len - self.q_len

    @property
    def device(self) -> torch.device:
        return self.picks.device

    @property
    def nbytes(self) -> int:
        """Bytes of the picks and of the table of ``always``."""
        return self.picks.numel() * self.picks.element_size() + (0 if self.always is None else self.always.nbytes)

    @property
    def density(self) -> float:
        """Kept pairs / all pairs, averaged over batch and heads; 0 of no sequence."""
        kept = sum(self.kept_pairs(head, batch) for batch in range(self.batch) for head in range(self.heads))
        return kept / (max(1, self.batch) * self.heads * self.q_len * self.kv_len)

    def to(self, device: Device) -> "BlockSelection":
        """The same selection on another device (itself if already there)."""
        if torch.empty(0, device=device).device == self.device:  # resolves "cuda" to the current GPU
            return self
        return replace(self, picks=self.picks.to(device), always=self.always and self.always.to(device))

    def select(self, head: int = 0, batch: int = 0) -> "BlockSelection":
        """The selection of one picking head and batch entry. Raises TypeError or IndexError for other indices."""
        return replace(self, picks=self._picks_of(head, batch)[None, None])

    def _picks_of(self, head: int, batch: int) -> Tensor:
        """(q_len, n). Raises TypeError or IndexError."""
        return self.picks[check_index("batch", batch, self.batch), check_index("head", head, self.heads)]

    def to_dense(self) -> Tensor:
        """True where a pair is kept: (batch, kv_heads | heads, q_len, kv_len) bool. For short selections."""
        return torch.cat(list(self._iter_kept(self.picks, 0, self.q_len)), -2)

    def kept_keys(self, query: int, batch: int = 0, head: int = 0) -> Tensor:
        """Which keys a query keeps: (kv_len,) bool on the CPU, in memory and time linear in kv_len."""
        query = check_index("query", query, self.q_len)
        return next(self._iter_kept(self._picks_of(head, batch), query, query + 1))[0].cpu()

    def kept_pairs(self, head: int = 0, batch: int = 0) -> int:
        """How many pairs one head keeps, in time in proportion to q_len x kv_len and bounded memory."""
        return sum(int(kept.sum()) for kept in self._iter_kept(self._picks_of(head, batch), 0, self.q_len))

    def _iter_kept(self, picks: Tensor, first: int, stop: int) -> Iterator[Tensor]:
        """Where queries first .. stop - 1 keep a pair, some at a time: (.., queries, kv_len) bool. picks: (.., q_len, n)."""
        step = max(1, _CHUNK // (self.kv_len * max(1, picks.shape[:-2].numel())))
        for low in range(first, stop, step):
            some = picks[..., low : min(low + step, stop), :].long()
            picked = torch.zeros((*some.shape[:-1], self.kv_blocks + 1), dtype=torch.bool, device=self.device)
            picked.scatter_(-1, torch.where(some < 0, self.kv_blocks, some), True)
            query, key = torch.arange(low, low + some.shape[-2], device=self.device), torch.arange(self.kv_len, device=self.device)
            kept = picked[..., key // self.block_size]
            if self.always is not None:
                kept = kept | self.always.kept_by_queries(0, low, low + len(query)).to(self.device)
            yield kept & (key <= query[:, None] + self.offset)

    def __repr__(self) -> str:
        always = "" if self.always is None else f"always={self.always}, "
        return (
            f"BlockSelection(q_len={self.q_len}, kv_len={self.kv_len}, block_size={self.block_size}, {always}"
            f"picks={tuple(self.picks.shape)}, device={str(self.device)!r})"
        )


def check_selection_block(block_size: object) -> int:
    """The block size of a selection. Raises ValueError for one that selections do not have."""
    if not isinstance(block_size, (int, np.integer)) or block_size not in SELECTION_BLOCK_SIZES:
        sizes = ", ".join(map(str, SELECTION_BLOCK_SIZES))
        raise ValueError(f"block_size of a selection must be one of {sizes} keys; got {block_size!r}; try 64")
    return int(block_size)


def order_picks(picks: Tensor) -> Tensor:
    """Picks in ascending order, then -1, in int32."""
    last = torch.iinfo(torch.int32).max
    picks = torch.where(picks < 0, last, picks).to(torch.int32).sort(3).values
    return torch.where(picks == last, -1, picks)


# An operator, so that activation checkpointing can keep its result.
@torch.library.custom_op(operator_name("normalized_picks"), mutates_args=())
def normalize_picks(picks: Tensor, block_size: int, kv_len: int, own: bool) -> Tensor:
    """Picks of ``BlockSelection.from_picks`` in its format, by operations of fixed shapes: (batch, heads, q_len, n + own) int32."""
    position = torch.arange(picks.shape[2], device=picks.device)[:, None] + (kv_len - picks.shape[2])
    if own:
        block = position.div(block_size, rounding_mode="floor")
        picks = torch.cat([picks.long(), block.expand(*picks.shape[:3], 1)], 3)
    picks = order_picks(torch.where(picks.long() * block_size <= position, picks, -1))
    again = torch.nn.functional.pad(picks[..., 1:] == picks[..., :-1], (1, 0))
    return order_picks(torch.where(again, -1, picks))


@normalize_picks.register_fake
def _(picks: Tensor, block_size: int, kv_len: int, own: bool) -> Tensor:
    return picks.new_empty(*picks.shape[:3], picks.shape[3] + int(own), dtype=torch.int32)


def always_table(always: MaskLike | None, q_len: int, kv_len: int, block_size: int, device: torch.device) -> BlockMask | None:
    """The table of ``always``, without later keys if it is a pattern's. Raises ValueError or TypeError if it does not fit."""
    if always is None:
        return None
    size = always.block_size if isinstance(always, BlockMask) else min(block_size, _ALWAYS_BLOCK_SIZE)
    causal = without_later_keys(always) if isinstance(always, (str, Pattern)) else always
    return resolve_single_mask("always", causal, BlockGrid(q_len, kv_len, size), device)


def without_later_keys(always: Pattern | str) -> Pattern | str:
    """Returns what ``always`` keeps under causal. Text stays text, and an error about it shows it as it was given."""
    return f"causal & ({text_of(always)})" if isinstance(always, str) else parse("causal") & always


# Lets torch.load read a saved selection without weights_only=False.
torch.serialization.add_safe_globals([BlockSelection])


def check_selection(selection: BlockSelection, q: Tensor, k: Tensor) -> None:
    """Raises ValueError where a selection was not made for these queries and keys."""
    if (selection.q_len, selection.kv_len) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"the selection is of q_len={selection.q_len}, kv_len={selection.kv_len}; q and k have {q.shape[2]} and {k.shape[2]} "
            "tokens; pass kv_len= to BlockSelection.from_picks, or choose again for these"
        )
    check_selected_heads(selection, q, k)


def check_selected_heads(selection: BlockSelection, q: Tensor, k: Tensor) -> None:
    """Raises ValueError where a selection is of another device, batch or number of heads than these queries and keys."""
    if selection.device != q.device:
        raise ValueError(f"the selection is on {selection.device} and q on {q.device}; use selection.to({str(q.device)!r})")
    if selection.batch != q.shape[0] or selection.heads not in (k.shape[1], q.shape[1]):
        raise ValueError(
            f"picks must be of batch {q.shape[0]} and of {k.shape[1]} key heads or {q.shape[1]} query heads; got "
            f"{tuple(selection.picks.shape)}"
        )


def check_cached_selection(selection: BlockSelection, q: Tensor, k: Tensor, capacity: int, kv_lens: Tensor | None) -> None:
    """Raises ValueError where the selection does not fit."""
    if selection.always is not None:
        raise ValueError("attention_decode takes no selection with always=; choose without it, or use sparse_flash.attention")
    check_selected_heads(selection, q, k)
    # Without lengths the cache's capacity tells positions, here and where the queries chose.
    fits = selection.kv_len == capacity if kv_lens is None else selection.kv_len <= capacity
    if selection.q_len != q.shape[2] or not fits:
        raise ValueError(
            f"the selection is of q_len={selection.q_len} and a cache of {selection.kv_len} tokens; got {q.shape[2]} queries and a "
            f"cache of {capacity}{', without kv_lens' * (kv_lens is None)}; choose again for these, or pass kv_lens"
        )
