"""Attention over picked key blocks on kernels for any GPU that Triton supports; under TRITON_INTERPRET=1 on a CPU, slowly.

A tile of queries visits the blocks that most of its queries picked. The other picks give partial results, computed for each key
block and the queries that picked it. A call is computed in rounds, which bounds their memory.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..core import triton as backend_of_masks
from ..core.description import Call
from ..core.results import QueryRows
from ..kernels.common.config import padded_head_dim
from ..kernels.common.layout import as_addressable, empty_out, restore_layout, restore_out
from ..kernels.common.streams import current_device
from ..masks.block_mask import BlockMask
from .block_selection import BlockSelection
from .kernels import division
from .kernels.division import TILE_ROWS, Round, SelectionSizes

if TYPE_CHECKING:
    from .kernels.lists import Pieces

MOST_PICKS = 2**31 - 1
MOST_TOGETHER = 8192  # picks of a tile's queries, which one program sorts


def supports(call: Call, selection: BlockSelection) -> str | None:
    reason = backend_of_masks.supports(call)
    if reason is not None:
        return reason
    if call.features:
        return f"it takes no {', '.join(sorted(call.features))} with a selection"
    batch, pickers, q_len, slots = selection.picks.shape
    members = call.heads // pickers
    if members > TILE_ROWS:
        return f"it runs up to {TILE_ROWS} query heads that share picks; got {members}"
    if batch * pickers * q_len * slots > MOST_PICKS:
        return f"it runs up to {MOST_PICKS:,} picks; got {batch} x {pickers} x {q_len:,} x {slots}"
    together = TILE_ROWS // members * slots
    if together > MOST_TOGETHER:
        return f"it runs up to {MOST_TOGETHER:,} picks of the queries of a tile; got {together:,}"
    return None


def _sizes(q: Tensor, k: Tensor, selection: BlockSelection) -> SelectionSizes:
    (batch, heads, q_len), (kv_heads, kv_len) = q.shape[:3], k.shape[1:3]
    pickers, slots = selection.picks.shape[1] // kv_heads, selection.picks.shape[3]
    return SelectionSizes(batch, heads, kv_heads, q_len, kv_len, slots, pickers, selection.block_size)


def forward(
    q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, scale: float, *, parts_kernel: Callable[..., None] | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse), out in q's memory order. parts_kernel: instead of ``picked_parts``."""
    from .kernels import lists
    from .kernels.forward import picked_parts, visit_blocks
    from .kernels.tiles import SelectionOperands

    picks, always, sizes = selection.picks, selection.always, _sizes(q, k, selection)
    ready = [as_addressable(t) for t in (q, k, v)]
    operands = SelectionOperands(*ready)
    rows, dim_v = sizes.members, padded_head_dim(ready[2].shape[3])
    rounds = division.plan_rounds(sizes, rows * (dim_v * q.element_size() + 4), 0)
    entries = division.count_entries(sizes, rounds)
    parts, part_lse = q.new_empty(entries, rows, dim_v), q.new_empty(entries, rows, dtype=torch.float32)
    out = empty_out(ready[0], ready[2].shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    with current_device(q.device):
        visited = lists.visited_blocks(picks, sizes)
        columns = lists.column_lists(picks, visited, sizes, rounds, division.forward_piece_size(sizes))
        for each in rounds:
            (parts_kernel or picked_parts)(operands, columns, parts, part_lse, sizes, each, scale)
            visit_blocks(operands, picks, visited, columns.counts, parts, part_lse, always, out, lse, sizes, each, scale)
    return restore_out(out, ready[0], q, v), lse


def backward(
    rows: QueryRows, k: Tensor, v: Tensor, selection: BlockSelection, scale: float, *, gathering: ModuleType | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (dq, dk, dv). Without atomics, gradients repeat bit for bit. gathering: the module of another ``picked_grads``."""
    from .kernels import backward as kernels
    from .kernels import lists
    from .kernels.tiles import SelectionOperands

    q, dout, dlse, out, lse = rows
    picks, always, sizes = selection.picks, selection.always, _sizes(q, k, selection)
    dout, out = as_addressable(dout), as_addressable(out)
    ready = [as_addressable(t) for t in (q, k, v)]
    dq, dk, dv = (torch.empty_like(t) for t in ready)
    log2_sum, delta = torch.empty_like(lse), torch.empty_like(lse)
    operands = SelectionOperands(ready[0], ready[1], ready[2], dout, log2_sum, delta)
    gathering = gathering or kernels
    space = _backward_workspace(ready, sizes, always, gathering)
    with current_device(q.device):
        kernels.preprocess_backward(out, dout, lse, None if dlse is None else dlse.contiguous(), log2_sum, delta)
        columns = lists.column_lists(picks, None, sizes, space.rounds, space.most)
        for each in space.rounds:
            gathering.picked_grads(operands, columns, space.parts, space.k_sums.pieces, space.v_sums.pieces, sizes, each, scale)
            if always is not None and each.query == 0:
                of_always = space.always, space.k_sums.always, space.v_sums.always
                kernels.always_grads(operands, picks, always, *of_always, sizes, each, scale)
            kernels.sum_key_grads(dk, space.k_sums, columns, space.always, always, sizes, each, scale)
            kernels.sum_key_grads(dv, space.v_sums, columns, space.always, always, sizes, each, 1.0)
            kernels.sum_query_grads(operands, picks, columns, space.parts, always, dq, sizes, each, scale)
    return restore_layout(dq, ready[0], q), restore_layout(dk, ready[1], k), restore_layout(dv, ready[2], v)


def block_lse(q: Tensor, k: Tensor, selection: BlockSelection, scale: float) -> Tensor:
    """Returns (batch, heads, q_len, n) float32."""
    from .kernels import lists
    from .kernels.forward import picked_parts
    from .kernels.tiles import SelectionOperands

    sizes = _sizes(q, k, selection)
    ready = [as_addressable(t) for t in (q, k)]
    operands = SelectionOperands(ready[0], ready[1], ready[1])
    masses = q.new_full((*q.shape[:3], sizes.slots), float("-inf"), dtype=torch.float32)
    rounds = division.plan_rounds(sizes, 0, 0)
    with current_device(q.device):
        columns = lists.column_lists(selection.picks, None, sizes, rounds, division.forward_piece_size(sizes))
        for each in rounds:
            picked_parts(operands, columns, None, masses, sizes, each, scale)
    return masses


def block_lse_backward(
    dmasses: Tensor, q: Tensor, k: Tensor, masses: Tensor, selection: BlockSelection, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns (dq, dk). masses: of ``block_lse``. dmasses: its gradient."""
    from .kernels import backward as kernels
    from .kernels import lists
    from .kernels.tiles import SelectionOperands

    picks, sizes = selection.picks, _sizes(q, k, selection)
    ready = [as_addressable(t) for t in (q, k)]
    dq, dk = (torch.empty_like(t) for t in ready)
    operands = SelectionOperands(ready[0], ready[1], ready[1], None, masses, dmasses.contiguous())
    space = _backward_workspace((*ready, ready[1]), sizes, None, kernels)
    with current_device(q.device):
        columns = lists.column_lists(picks, None, sizes, space.rounds, space.most)
        for each in space.rounds:
            kernels.picked_grads(operands, columns, space.parts, space.k_sums.pieces, space.k_sums.pieces, sizes, each, scale)
            kernels.sum_key_grads(dk, space.k_sums, columns, None, None, sizes, each, scale)
            kernels.sum_query_grads(operands, picks, columns, space.parts, None, dq, sizes, each, scale)
    return restore_layout(dq, ready[0], q), restore_layout(dk, ready[1], k)


class _Sums(NamedTuple):
    """Sums of dK or dV over pieces of lists and of ``always``, and those a round leaves the next: (keys, padded head_dim) each."""

    pieces: Tensor
    always: Tensor | None
    before: Tensor | None


class _BackwardWorkspace(NamedTuple):
    """most: entries of a piece. parts: of dQ, (entries of a round, steps of a block, members, padded head_dim)."""

    rounds: list[Round]
    most: int
    always: "Pieces | None"
    parts: Tensor
    k_sums: _Sums
    v_sums: _Sums


def _backward_workspace(
    ready: Sequence[Tensor], sizes: SelectionSizes, always: BlockMask | None, gathering: ModuleType
) -> _BackwardWorkspace:
    """ready: q, k and v. gathering: the module of ``picked_grads``."""
    from .kernels import lists
    from .kernels.backward import keys_per_sum

    q, k, v = ready
    dim, dim_v = (padded_head_dim(t.shape[3]) for t in (k, v))
    keys = gathering.keys_per_part(q, v, sizes)
    steps = sizes.block // keys
    # At most half as many pieces again as there are key blocks: see ``division.backward_piece_size``.
    of_keys = sizes.key_blocks * sizes.block * (dim + dim_v) * 6
    rounds = division.plan_rounds(sizes, steps * sizes.members * dim * q.element_size(), of_keys)
    heads, entries, most = rounds[0].heads, division.count_entries(sizes, rounds), division.backward_piece_size(sizes, rounds)
    parts = q.new_empty(entries, steps, sizes.members, dim)
    pieces = None if always is None else lists.always_pieces(always, sizes.heads // sizes.kv_heads)
    rows = (heads * sizes.key_blocks + entries // most) * sizes.block
    of_always = None if pieces is None or always is None else heads * pieces.items.shape[1] * always.block_size
    unit = keys_per_sum(sizes, always)
    of_head = heads * -(-sizes.kv_len // unit) * unit if rounds[0].stride < sizes.q_len else None

    def sums(width: int) -> _Sums:
        made: Any = (None if of is None else q.new_empty(of, width, dtype=torch.float32) for of in (rows, of_always, of_head))
        return _Sums(*made)

    return _BackwardWorkspace(rounds, most, pieces, parts, sums(dim), sums(dim_v))
