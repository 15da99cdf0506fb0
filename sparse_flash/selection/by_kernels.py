"""Attention over picked key blocks on the portable kernels: any GPU that Triton supports; under TRITON_INTERPRET=1 a CPU, slowly.

Picks that most queries of a tile share are walked by the tile; the others come as parts, computed for each key block and the
queries that picked it. Parts take bounded memory: a call is computed in turns, of key heads and ranges of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..backends import Call
from ..backends import triton as portable
from ..backends.triton import addressable, current_device, restored, restored_out
from ..kernels.common.config import padded_head_dim
from ..kernels.common.layout import empty_out
from ..masks.block_mask import BlockMask
from .block_selection import BlockSelection
from .lists import (
    Pieces,
    Turns,
    always_pieces,
    backward_most,
    column_lists,
    forward_most,
    least_walked,
    tile_walks,
    turns_of,
    walks_alone,
)

if TYPE_CHECKING:
    from ..kernels.selection.tiles import SelectionSizes

# Bytes that parts of results may take. With a quarter, the prototype's forward pass took 6 % longer (H200, 65,536 tokens, 32 heads
# over 8, blocks of 128).
WORKSPACE = 512 << 20
MOST_PICKS = 2**31 - 1
# Picks of a tile's queries, which one program sorts.
MOST_TOGETHER = 8192


def supports(call: Call, selection: BlockSelection) -> str | None:
    reason = portable.supports(call)
    if reason is not None:
        return reason
    if call.features:
        return f"it takes no {', '.join(sorted(call.features))} beside a selection"
    from ..kernels.selection.tiles import ROWS

    batch, pickers, choices, slots = selection.picks.shape
    members = call.heads // pickers
    if members > ROWS.value:
        return f"it runs up to {ROWS.value} query heads that share a choice; got {members}"
    if batch * pickers * choices * slots > MOST_PICKS:
        return f"it runs up to {MOST_PICKS:,} picks; got {batch} x {pickers} x {choices:,} x {slots}"
    together = max(1, ROWS.value // members // selection.every) * slots
    if together > MOST_TOGETHER:
        return f"it runs up to {MOST_TOGETHER:,} picks of the queries of a tile; got {together:,}"
    return None


def _sizes(q: torch.Tensor, k: torch.Tensor, selection: BlockSelection) -> SelectionSizes:
    from ..kernels.selection.tiles import SelectionSizes

    (batch, heads, q_len), (kv_heads, kv_len) = q.shape[:3], k.shape[1:3]
    pickers, slots = selection.picks.shape[1] // kv_heads, selection.picks.shape[3]
    return SelectionSizes(batch, heads, kv_heads, q_len, kv_len, selection.every, slots, pickers, selection.block_size)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: BlockSelection,
    scale: float,
    parts_kernel: Callable[..., None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), out in q's memory order. parts_kernel: in place of ``picked_parts``."""
    from ..kernels.selection.forward import picked_parts, walk_picks
    from ..kernels.selection.tiles import SelectionOperands

    picks, always = selection.picks, selection.always
    sizes = _sizes(q, k, selection)
    ready = [addressable(t) for t in (q, k, v)]
    operands = SelectionOperands(*ready)
    rows, dim_v = sizes.rows_of_choice, padded_head_dim(ready[2].shape[3])
    alone = walks_alone(sizes)
    turns = turns_of(sizes, 0 if alone else rows * (dim_v * q.element_size() + 4), 0, WORKSPACE)
    out = empty_out(ready[0], ready[2].shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    with current_device(q.device):
        walks = tile_walks(picks, sizes, least_walked(sizes))
        if alone:
            for turn in turns.all:
                walk_picks(operands, picks, walks, None, None, None, always, out, lse, sizes, turn, scale)
            return restored_out(out, ready[0], q, v), lse
        lists = column_lists(picks, walks, sizes, turns, forward_most(sizes))
        entries = turns.lines * sizes.pickers * turns.choices * sizes.slots
        parts = q.new_empty(entries, rows, dim_v)
        part_lse = lse.new_empty(entries, rows)
        for turn in turns.all:
            (parts_kernel or picked_parts)(operands, lists, parts, part_lse, sizes, turn, scale)
            walk_picks(operands, picks, walks, lists.counts, parts, part_lse, always, out, lse, sizes, turn, scale)
    return restored_out(out, ready[0], q, v), lse


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    selection: BlockSelection,
    scale: float,
    gathering: ModuleType | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv). There are no atomics: gradients repeat bit for bit. gathering: the module of another ``picked_grads``."""
    from ..kernels.selection import backward as kernels
    from ..kernels.selection.tiles import SelectionOperands

    picks, always = selection.picks, selection.always
    sizes = _sizes(q, k, selection)
    dout, out = addressable(dout), addressable(out)
    ready = [addressable(t) for t in (q, k, v)]
    dq, dk, dv = (torch.empty_like(t) for t in ready)
    log2_sum, delta = torch.empty_like(lse), torch.empty_like(lse)
    operands = SelectionOperands(ready[0], ready[1], ready[2], dout, log2_sum, delta)
    alone = walks_alone(sizes)
    gathering = gathering or kernels
    room = _backward_room(ready, sizes, always, not alone, gathering)
    with current_device(q.device):
        kernels.rows_of_softmax(out, dout, lse, None if dlse is None else dlse.contiguous(), log2_sum, delta)
        walks = tile_walks(picks, sizes, 1) if alone else None
        lists = column_lists(picks, None, sizes, room.turns, room.most)
        for turn in room.turns.all:
            gathering.picked_grads(operands, lists, room.parts, room.k_sums.pieces, room.v_sums.pieces, sizes, turn, scale)
            if always is not None and turn.choice == 0:
                columns = room.columns, room.k_sums.columns, room.v_sums.columns
                kernels.always_grads(operands, picks, always, *columns, sizes, turn, scale)
            kernels.sum_key_grads(dk, room.k_sums, lists, room.columns, always, sizes, turn, scale)
            kernels.sum_key_grads(dv, room.v_sums, lists, room.columns, always, sizes, turn, 1.0)
            kernels.sum_query_grads(operands, picks, walks, lists, room.parts, always, dq, sizes, turn, scale)
    return restored(dq, ready[0], q), restored(dk, ready[1], k), restored(dv, ready[2], v)


def block_lse(q: torch.Tensor, k: torch.Tensor, selection: BlockSelection, scale: float) -> torch.Tensor:
    """(batch, heads, q_len, n) float32."""
    from ..kernels.selection.forward import picked_masses
    from ..kernels.selection.tiles import SelectionOperands

    picks, sizes = selection.picks, _sizes(q, k, selection)
    ready = [addressable(t) for t in (q, k)]
    operands = SelectionOperands(ready[0], ready[1], ready[1])
    masses = q.new_full((*q.shape[:3], sizes.slots), float("-inf"), dtype=torch.float32)
    turns = turns_of(sizes, 0, 0, WORKSPACE)
    with current_device(q.device):
        lists = column_lists(picks, None, sizes, turns, forward_most(sizes))
        for turn in turns.all:
            picked_masses(operands, lists, masses, sizes, turn, scale)
    return masses


def block_lse_backward(
    dmasses: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    masses: torch.Tensor,
    selection: BlockSelection,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dq, dk). masses: of ``block_lse``. dmasses: its gradient."""
    from ..kernels.selection import backward as kernels
    from ..kernels.selection.tiles import SelectionOperands

    picks, sizes = selection.picks, _sizes(q, k, selection)
    ready = [addressable(t) for t in (q, k)]
    dq, dk = (torch.empty_like(t) for t in ready)
    operands = SelectionOperands(ready[0], ready[1], ready[1], None, masses, dmasses.contiguous())
    room = _backward_room((*ready, ready[1]), sizes, None, True, kernels)
    with current_device(q.device):
        lists = column_lists(picks, None, sizes, room.turns, room.most)
        for turn in room.turns.all:
            kernels.picked_grads(operands, lists, room.parts, room.k_sums.pieces, room.k_sums.pieces, sizes, turn, scale)
            kernels.sum_key_grads(dk, room.k_sums, lists, None, None, sizes, turn, scale)
            kernels.sum_query_grads(operands, picks, None, lists, room.parts, None, dq, sizes, turn, scale)
    return restored(dq, ready[0], q), restored(dk, ready[1], k)


class _Sums(NamedTuple):
    """Sums of dK or dV over pieces of lists and of columns of ``always``, and what a turn leaves to the next one of its lines:
    (keys, padded head_dim) float32 each, or None."""

    pieces: torch.Tensor
    columns: torch.Tensor | None
    before: torch.Tensor | None


class _BackwardRoom(NamedTuple):
    """most: entries of a piece. columns: the pieces of ``always``. parts: of dQ, (entries of a turn, steps of a block, rows of a
    choice, padded head_dim), or None."""

    turns: Turns
    most: int
    columns: Pieces | None
    parts: torch.Tensor | None
    k_sums: _Sums
    v_sums: _Sums


def _backward_room(
    ready: Sequence[torch.Tensor], sizes: SelectionSizes, always: BlockMask | None, with_parts: bool, gathering: ModuleType
) -> _BackwardRoom:
    """ready: q, k and v. with_parts: whether dQ comes as parts. gathering: the module of ``picked_grads``."""
    from ..kernels.selection.backward import keys_of_sum

    q, k, v = ready
    dim, dim_v = (padded_head_dim(t.shape[3]) for t in (k, v))
    steps = sizes.block // gathering.keys_of_part(q, v, sizes)
    of_entry = steps * sizes.rows_of_choice * dim * q.element_size() if with_parts else 0
    # At most half as many pieces again as there are key blocks: see ``backward_most``.
    turns = turns_of(sizes, of_entry, sizes.key_blocks * sizes.block * (dim + dim_v) * 6, WORKSPACE)
    entries, most = turns.lines * sizes.pickers * turns.choices * sizes.slots, backward_most(sizes, turns)
    parts = q.new_empty(entries, steps, sizes.rows_of_choice, dim) if with_parts else None
    columns = None if always is None else always_pieces(always, sizes.heads // sizes.kv_heads)
    rows = (turns.lines * sizes.key_blocks + entries // most) * sizes.block
    of_columns = None if columns is None or always is None else turns.lines * columns.items.shape[1] * always.block_size
    unit = keys_of_sum(sizes, always)
    of_line = turns.lines * -(-sizes.kv_len // unit) * unit if turns.choices < sizes.choices else None

    def sums(width: int) -> _Sums:
        made: Any = (None if of is None else q.new_empty(of, width, dtype=torch.float32) for of in (rows, of_columns, of_line))
        return _Sums(*made)

    return _BackwardRoom(turns, most, columns, parts, sums(dim), sums(dim_v))
