"""BlockSelection: the blocks of keys that each query picked. The class docstring defines its format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from ..compat.dynamo import outside_inference
from ..compat.names import operator_name
from ..compat.pytorch import assert_in_graph, is_recorded
from ..masks.block_mask import BlockMask, Device, MaskLike, resolve_single_mask
from ..masks.grid import BlockGrid, check_index
from ..masks.parsing import parse, text_of
from ..masks.pattern import Pattern

SELECTION_BLOCK_SIZES = (16, 32, 64, 128, 256, 512)
MOST_SHARED = 128  # queries that share a choice
_ALWAYS_BLOCK_SIZE = 128  # of the table of ``always``, or the selection's own if that is smaller
_CHUNK = 1 << 22  # numbers decoded at a time


@dataclass(frozen=True, eq=False)
class BlockSelection:
    """Which blocks of keys each query picked. Pass it to ``attention`` instead of a mask.

    Create one with ``topk_blocks`` or ``BlockSelection.from_picks``. Immutable.

    picks: (batch, kv_heads | heads, groups, n) int32: the blocks that a group of queries picked, ascending, each once, then -1.
    With kv_heads, the query heads that share keys share picks.
    q_len, kv_len: tokens. block_size: keys of a block. every: how many queries share picks: query t is in group t // every.
    own: whether the picks of a group include the blocks in which its queries are.
    always: a BlockMask of one mask, or None: pairs that every head keeps too, to the token.

    The last query is aligned with the last key, as for ``attention``. Three lines decode the format::

        position = t + kv_len - q_len                            # of query t
        picked = j // block_size in picks[b, h, t // every]
        kept = j <= position and (picked or always keeps (t, j))

    So a selection is causal, and a pair that is kept twice counts once.
    """

    picks: torch.Tensor
    q_len: int
    kv_len: int
    block_size: int
    every: int = 1
    own: bool = True
    always: BlockMask | None = None

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling() and self.picks.is_inference():
            object.__setattr__(self, "picks", outside_inference(self.picks.clone)())  # autograd saves no others

    @classmethod
    def from_picks(
        cls,
        picks: torch.Tensor,
        block_size: int,
        *,
        every: int = 1,
        q_len: int | None = None,
        kv_len: int | None = None,
        own: bool = True,
        always: MaskLike | None = None,
        check: bool | None = None,
    ) -> BlockSelection:
        """A selection from picks in any order, on their device.

        picks: (batch, kv_heads | heads, ceil(q_len / every), n) int32 or int64: blocks of keys, -1 for none. Repeated blocks count
        once.
        block_size: keys of a block: 16, 32, 64, 128, 256 or 512. every: how many queries share picks, 1 to 128.
        q_len, kv_len: tokens. q_len is groups x every by default, kv_len is q_len.
        own: add the blocks in which a group's queries are, so that each query keeps its own block up to itself.
        always: a Pattern, its spec text or a BlockMask of one mask, with these lengths, on this device: pairs that all queries
        keep too. Later keys than the query are dropped from it.
        check: whether to check the values of picks, which must be blocks that begin no later than the group's last query. None
        checks them on a CPU, with ValueError. True also checks them on a GPU and in compiled code, without synchronizing: a
        RuntimeError follows. Blocks that are out of range and not checked are dropped.

        Launches only tensor operations of fixed shapes: no host synchronization on a GPU, safe under CUDA graphs. The picks are not
        differentiated. Raises TypeError for wrong types, ValueError for arguments that do not fit together.
        """
        every, block_size = check_every(every), check_selection_block(block_size)
        if not isinstance(picks, torch.Tensor):
            raise TypeError(f"picks must be an int32 tensor; got {type(picks).__name__}; use torch.tensor(..., dtype=torch.int32)")
        if picks.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"picks must be int32 or int64, numbers of blocks; got {picks.dtype}; use .to(torch.int32)")
        if picks.dim() != 4 or 0 in picks.shape[1:3] or not (picks.shape[3] or own):
            raise ValueError(
                "picks must have shape (batch, kv_heads or heads, groups of queries, picks of a group), none but the batch 0; got "
                f"{tuple(picks.shape)}"
            )
        q_len = picks.shape[2] * every if q_len is None else q_len
        grid = BlockGrid(q_len, q_len if kv_len is None else kv_len, min(block_size, _ALWAYS_BLOCK_SIZE))
        if -(-grid.q_len // every) != picks.shape[2]:
            raise ValueError(
                f"{grid.q_len} queries are {-(-grid.q_len // every)} groups of {every}; got picks of {picks.shape[2]} groups, "
                f"shape {tuple(picks.shape)}; pass every= and q_len= that fit"
            )
        given = cls(picks, grid.q_len, grid.kv_len, block_size, every, own)
        given._check_values(check)
        picks = normalize_picks(picks, every, block_size, grid.q_len, grid.kv_len, own)
        return replace(given, picks=picks, always=always_table(always, grid.q_len, grid.kv_len, block_size, picks.device))

    def _check_values(self, check: bool | None) -> None:
        """See ``from_picks``. The picks may be in any order."""
        on_host = self.device.type == "cpu" and not is_recorded(self.device)
        if check is False or (check is None and not on_host):
            return
        last = group_positions(self.groups, self.every, self.q_len, self.kv_len, self.device)[1]
        limit = last.div(self.block_size, rounding_mode="floor")[:, None]
        fits = (self.picks >= -1) & (self.picks <= limit.clamp(min=-1))
        if not on_host:
            assert_in_graph(fits.all(), "a pick is below -1, beyond the keys or after its query")
        elif not bool(fits.all()):
            place = tuple((~fits).nonzero()[0].tolist())
            block, reached, whole = int(self.picks[place]), int(limit[place[2]]), self.kv_blocks
            fault = f"beyond the {whole} blocks of keys" if block >= whole else "below -1" if block < -1 else "after its queries"
            raise ValueError(
                f"picks must be blocks of {self.block_size} keys, or -1; got {block} at {place}, which is {fault}: group "
                f"{place[2]} of {self.every} queries sees blocks up to {reached}; pass -1 where there is nothing to pick, and "
                "q_len= and kv_len= if they differ"
            )

    @property
    def batch(self) -> int:
        return self.picks.shape[0]

    @property
    def heads(self) -> int:
        """How many heads pick: key heads, or query heads."""
        return self.picks.shape[1]

    @property
    def groups(self) -> int:
        return self.picks.shape[2]

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
        return count_selected_pairs(self, self.heads) / (max(1, self.batch) * self.heads * self.q_len * self.kv_len)

    def to(self, device: Device) -> BlockSelection:
        """The same selection on another device (itself if already there)."""
        if torch.empty(0, device=device).device == self.device:  # resolves "cuda" to the current GPU
            return self
        return replace(self, picks=self.picks.to(device), always=self.always and self.always.to(device))

    def select(self, head: int = 0, batch: int = 0) -> BlockSelection:
        """The selection of one head of one batch entry, as a separate selection. head: among the heads that pick. Raises TypeError
        or IndexError for a head or batch entry that does not exist, as ``kept_keys`` and ``kept_pairs`` do."""
        return replace(self, picks=self._picks_of(head, batch)[None, None])

    def _picks_of(self, head: int, batch: int) -> torch.Tensor:
        """(groups, n). Raises TypeError or IndexError."""
        return self.picks[check_index("batch", batch, self.batch), check_index("head", head, self.heads)]

    def to_dense(self) -> torch.Tensor:
        """True where a pair is kept: (batch, kv_heads | heads, q_len, kv_len) bool.

        Takes q_len x kv_len bytes per head: for inspecting short selections and for tests.
        """
        size = (*self.picks.shape[:3], self.kv_blocks + 1)
        picked = torch.zeros(size, dtype=torch.bool, device=self.device)
        picked.scatter_(3, torch.where(self.picks < 0, self.kv_blocks, self.picks).long(), True)
        query, key = (torch.arange(length, device=self.device) for length in (self.q_len, self.kv_len))
        kept = picked[:, :, query // self.every][..., key // self.block_size]
        kept = kept if self.always is None else kept | self.always.to_dense()
        return kept & (key <= query[:, None] + self.offset)

    def kept_keys(self, query: int, batch: int = 0, head: int = 0) -> torch.Tensor:
        """Which keys a query keeps: (kv_len,) bool on the CPU, in memory and time linear in kv_len."""
        query = check_index("query", query, self.q_len)
        picks = self._picks_of(head, batch)[query // self.every].cpu().long()
        kept = torch.zeros(self.kv_blocks, self.block_size, dtype=torch.bool, device="cpu")
        kept[picks[picks >= 0]] = True
        kept = kept.flatten()[: self.kv_len]
        kept = kept if self.always is None else kept | self.always.kept_keys(query).cpu()
        return kept & (torch.arange(self.kv_len, device="cpu") <= query + self.offset)

    def kept_pairs(self, head: int = 0, batch: int = 0, unit: int | None = None) -> np.ndarray:
        """How many pairs one head keeps, in each cell of unit x unit tokens: (rows, cols) int64; one cell for all by default.

        unit: a multiple of the block size and of the block size of the table of ``always``, otherwise ValueError. Takes time in
        proportion to the picks and to the entries of that table.
        """
        sizes = [self.block_size, *([] if self.always is None else [self.always.block_size])]
        if unit is not None and (unit < 1 or any(unit % size for size in sizes)):
            raise ValueError(f"unit must be a multiple of {' and of '.join(map(str, sizes))}, the sizes of blocks; got {unit}")
        unit = max(self.q_len, self.kv_len) if unit is None else unit
        rows, cols = -(-self.q_len // unit), -(-self.kv_len // unit)
        counts = np.zeros(rows * cols)
        picks = self._picks_of(head, batch).cpu().numpy().astype(np.int64)
        for query, key, pairs in chain(self._picked_pairs(picks), self._pairs_of_always(picks)):
            # Past the lengths there are tokens of the table of ``always``, and no pairs.
            cell = np.minimum(query // unit, rows - 1) * cols + np.minimum(key // unit, cols - 1)
            counts += np.bincount(cell.ravel(), pairs.ravel(), rows * cols)
        return counts.astype(np.int64).reshape(rows, cols)

    def _picked_pairs(self, picks: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(query, first key, how many pairs) of each query and pick of one head, some at a time."""
        step = max(1, _CHUNK // max(1, picks.shape[1]))
        for low in range(0, self.q_len, step):
            query = np.arange(low, min(low + step, self.q_len))[:, None]
            block = picks[query[:, 0] // self.every]
            first = np.maximum(block, 0) * self.block_size
            pairs = np.clip(query + self.offset + 1 - first, 0, self.block_size) * (block >= 0)
            yield np.broadcast_to(query, block.shape), first, pairs

    def _pairs_of_always(self, picks: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Like ``_picked_pairs``, of the pairs that ``always`` alone keeps."""
        if self.always is None:
            return
        size = self.always.block_size
        width = min(size, self.block_size)  # of columns that are picked together
        rows, cols, kind, tile = self.always.entries()
        step = max(1, _CHUNK // (size * size * max(1, picks.shape[1])))
        for low in range(0, len(rows), step):
            part = slice(low, low + step)
            query = rows[part, None] * size + np.arange(size)
            key = cols[part, None] * size + np.arange(size)
            kept = self.always.tile_pairs(kind[part], tile[part])
            kept &= (key[:, None] <= query[..., None] + self.offset) & (query < self.q_len)[..., None]
            first = key[:, None, ::width]
            of_query = picks[np.minimum(query, self.q_len - 1) // self.every]
            picked = (of_query[..., None, :] == (first // self.block_size)[..., None]).any(-1)
            pairs = kept.reshape(*kept.shape[:2], -1, width).sum(-1) * ~picked
            yield np.broadcast_to(query[..., None], pairs.shape), np.broadcast_to(first, pairs.shape), pairs

    def __repr__(self) -> str:
        always = "" if self.always is None else f"always={self.always}, "
        return (
            f"BlockSelection(q_len={self.q_len}, kv_len={self.kv_len}, block_size={self.block_size}, every={self.every}, "
            f"own={self.own}, {always}picks={tuple(self.picks.shape)}, device={str(self.device)!r})"
        )


def count_selected_pairs(selection: BlockSelection, heads: int) -> int:
    """How many pairs a selection keeps, over batch and query heads."""
    entries, picking = range(selection.batch), range(selection.heads)
    kept = sum(int(selection.kept_pairs(head, batch).sum()) for batch in entries for head in picking)
    return kept * (heads // selection.heads)


def check_every(every: object) -> int:
    """How many queries share a choice. Raises TypeError or ValueError where that many cannot."""
    if isinstance(every, bool) or not isinstance(every, (int, np.integer)):
        raise TypeError(f"every must be an int, how many queries share a choice; got {type(every).__name__}")
    if not 1 <= every <= MOST_SHARED:
        raise ValueError(f"every must be 1 to {MOST_SHARED} queries that share a choice; got {every}")
    return int(every)


def check_selection_block(block_size: object) -> int:
    """The block size of a selection. Raises ValueError for one that selections do not have."""
    if not isinstance(block_size, (int, np.integer)) or block_size not in SELECTION_BLOCK_SIZES:
        sizes = ", ".join(map(str, SELECTION_BLOCK_SIZES))
        raise ValueError(f"block_size of a selection must be one of {sizes} keys; got {block_size!r}; try 64")
    return int(block_size)


def most_own_blocks(every: int, block_size: int, offset: int) -> int:
    """In how many blocks the queries of one group are, at most. offset: the position of the first query."""
    # Groups begin at offset modulo the powers of two that divide both sizes.
    step = min(every & -every, block_size)
    return (block_size - step + offset % step + every - 1) // block_size + 1


def group_positions(groups: int, every: int, q_len: int, kv_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions of the first and the last query of each group: two (groups,) int64."""
    first = torch.arange(groups, device=device) * every
    return first + (kv_len - q_len), (first + (every - 1)).clamp(max=q_len - 1) + (kv_len - q_len)


# An operator, so that activation checkpointing can keep its result.
@torch.library.custom_op(operator_name("normalized_picks"), mutates_args=())
def normalize_picks(picks: torch.Tensor, every: int, block_size: int, q_len: int, kv_len: int, own: bool) -> torch.Tensor:
    """Picks in the format of ``BlockSelection``: int32, ascending, each once, with each group's own blocks if ``own``; what is
    beyond the keys or after the group's last query is dropped. Tensor operations of fixed shapes.

    picks: (batch, heads, groups, n) int32 or int64 -> (batch, heads, groups, n, and ``most_own_blocks`` more if own).
    """
    first, last = group_positions(picks.shape[2], every, q_len, kv_len, picks.device)
    picks, last = picks.long(), last[:, None]
    if own:
        block = first.clamp(min=0).div(block_size, rounding_mode="floor")[:, None]
        block = block + torch.arange(most_own_blocks(every, block_size, kv_len - q_len), device=picks.device)
        picks = torch.cat([picks, block.expand(*picks.shape[:2], -1, -1)], 3)
    beyond = -(-kv_len // block_size)
    picks = torch.where((picks >= 0) & (picks * block_size <= last), picks, beyond).to(torch.int32).sort(3).values
    again = torch.nn.functional.pad(picks[..., 1:] == picks[..., :-1], (1, 0))
    picks = torch.where(again, beyond, picks).sort(3).values
    return torch.where(picks == beyond, -1, picks)


@normalize_picks.register_fake
def _(picks: torch.Tensor, every: int, block_size: int, q_len: int, kv_len: int, own: bool) -> torch.Tensor:
    width = picks.shape[3] + (most_own_blocks(every, block_size, kv_len - q_len) if own else 0)
    return picks.new_empty(*picks.shape[:3], width, dtype=torch.int32)


def always_table(always: MaskLike | None, q_len: int, kv_len: int, block_size: int, device: torch.device) -> BlockMask | None:
    """The table of ``always``, without later keys if it is a pattern's. Raises ValueError or TypeError if it does not fit."""
    if always is None:
        return None
    if isinstance(always, BlockMask):
        return resolve_single_mask("always", always, BlockGrid(q_len, kv_len, always.block_size), device)
    causal = without_later_keys(always) if isinstance(always, (str, Pattern)) else always
    return resolve_single_mask("always", causal, BlockGrid(q_len, kv_len, min(block_size, _ALWAYS_BLOCK_SIZE)), device)


def without_later_keys(always: Pattern | str) -> Pattern | str:
    """Returns what ``always`` keeps under causal. Text stays text, and an error about it shows it as it was given."""
    return f"causal & ({text_of(always)})" if isinstance(always, str) else parse("causal") & always


# Lets torch.load read a saved selection without weights_only=False.
torch.serialization.add_safe_globals([BlockSelection])


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


def check_cached_selection(
    selection: BlockSelection, q: torch.Tensor, k: torch.Tensor, capacity: int, kv_lens: torch.Tensor | None
) -> None:
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
