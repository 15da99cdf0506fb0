"""PyTorch's CPU attention kernel, which runs scaled_dot_product_attention, on whole tensors and on the blocks of a table.

Threads wait for each other at the end of every operation, which takes milliseconds if other programs compete for the processors. So
few, long kernel calls cover a table. A row that visits many blocks is cut into pieces. Pieces of equal width, from many rows and
units, form the batch of one call, on copies of their keys.
"""

from typing import NamedTuple

import numpy as np
import torch

from ..compat.pytorch import cpu_attention, cpu_attention_backward
from ..masks.tiles import unique_rows
from .results import merge_results

_WIDEST = 2048  # keys per piece: merging a row's pieces takes a synchronizing operation per piece
_GATHERED = 1 << 21  # key elements that a call copies, per thread: 20 ms of work at head_dim 64 and blocks of 128
_MOST_THREADS = 16  # counted for _GATHERED
_ALIKE = 4  # from so many pieces with equal tiles on, they get a separate call, with one mask


def forward(q, k, v, scale: float, causal: bool = False, bias=None):
    """(out, lse): out like q in any memory order. causal: query i sees keys 0 .. i. bias: None, or (batch | 1, heads | 1, q_len,
    kv_len) of q's dtype, added to the scores. If a query's biases are all -inf, its out is 0 and its lse is undefined."""
    q, k, v = (_make_rows_contiguous(t) for t in (q, k, v))
    return cpu_attention(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)


def backward(dout, q, k, v, out, lse, scale: float, causal: bool = False, bias=None):
    """(dq, dk, dv) in any memory order, of a loss that does not depend on lse. lse may cover more keys than these."""
    dout, q, k, v, out = (_make_rows_contiguous(t) for t in (dout, q, k, v, out))
    return cpu_attention_backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)


def _make_rows_contiguous(x):
    """Makes the last dimension contiguous, as the kernel assumes."""
    return x if x.stride(-1) == 1 else x.contiguous()


def loop_forward(q, k, v, loop, scale: float):
    """One part of a call: q (units, q_blocks, rows, head_dim), k and v (units, kv_blocks, block, head_dim) -> out like q, lse
    (units, q_blocks, rows, 1)."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    lse = q.new_full(q.shape[:3], float("-inf"))
    out = torch.empty_like(q) if sum(len(rows) for rows, *_ in loop.groups) == q.shape[1] else torch.zeros_like(q)
    for units in _unit_slices(k):
        for call in _calls(loop, q[units], copied=False):
            rows, keys, values = call.queries(q[units]), call.keys(k[units]), call.keys(v[units])
            here, log = (x.transpose(0, 1) for x in forward(rows, keys, values, scale, bias=call.bias))
            if call.bias is not None:
                log = log.masked_fill(call.empty, float("-inf"))
            if call.merges:
                here, log = merge_results(out[units, call.rows], lse[units, call.rows], here, log)
            out[units, call.rows], lse[units, call.rows] = here, log
    return out, lse[..., None]


def loop_backward(dout, q, k, v, out, lse, loop, scale: float):
    """(dq, dk, dv) of one part, like ``loop_forward``. lse: (units, q_blocks, rows, 1), +inf for queries that keep nothing."""
    dout, q, k, v, out, lse = (x.contiguous() for x in (dout, q, k, v, out, lse))
    parts = []
    for units in _unit_slices(k):
        # In the memory order of the kernel's results.
        dq, dk, dv = (x.new_zeros(*x.shape[1:3], len(x[units]), x.shape[3]) for x in (q, k, v))
        for call in _calls(loop, q[units], copied=True):
            rows = [call.queries(x[units]) for x in (dout, q, out)]
            keys, values = call.keys(k[units]), call.keys(v[units])
            log = call.queries(lse[units])[..., 0]
            grads = backward(rows[0], rows[1], keys, values, rows[2], log, scale, bias=call.bias)
            of_q, *of_keys = (grad.transpose(1, 2) for grad in grads)
            dq[call.rows] = dq[call.rows] + of_q if call.merges else of_q
            for total, grad in zip((dk, dv), of_keys, strict=True):
                call.add_blocks(total, grad)
        parts.append([grad.permute(2, 0, 1, 3) for grad in (dq, dk, dv)])
    return parts[0] if len(parts) == 1 else [torch.cat(grads) for grads in zip(*parts, strict=True)]


class _Call(NamedTuple):
    """One call of the kernel. rows: (pieces,) distinct block rows. cols: (pieces, width), their key blocks. bias: of ``forward``,
    or None. empty: (1, pieces | 1, rows) bool, the queries that keep nothing in this call, or None. merges: whether these rows
    already have results from other pieces."""

    rows: slice | np.ndarray
    cols: np.ndarray
    bias: torch.Tensor | None
    empty: torch.Tensor | None
    merges: bool

    def queries(self, x):
        """(units, q_blocks, rows, head_dim) -> (pieces, units, rows, head_dim)."""
        if isinstance(self.rows, slice):
            return x[:, self.rows].transpose(0, 1)
        return _gathered(x, self.rows[:, None])

    def keys(self, x):
        """(units, kv_blocks, block, head_dim) -> (pieces, units, width * block, head_dim)."""
        step = _find_column_step(self.cols)
        if step is None:
            return _gathered(x, self.cols)
        _, _, block, dim = x.shape
        sizes = len(self.cols), len(x), self.cols.shape[1] * block, dim
        strides = step * x.stride(1), x.stride(0), dim, 1
        return x.as_strided(sizes, strides, x.storage_offset() + int(self.cols[0, 0]) * x.stride(1))

    def add_blocks(self, total, blocks):
        """Adds (pieces, width * block, units, head_dim) to columns of total, in an order that depends only on the table."""
        cols = self.cols.ravel()
        order = np.argsort(cols, kind="stable")
        touched, first = np.unique(cols[order], return_index=True)
        blocks = blocks.reshape(len(cols), -1)
        sums = torch.nn.functional.embedding_bag(torch.from_numpy(order), blocks, torch.from_numpy(first), mode="sum")
        target = total.view(len(total), -1)
        if len(touched) == touched[-1] - touched[0] + 1:
            target[touched[0] : touched[-1] + 1].add_(sums)
        else:
            target[torch.from_numpy(touched)] += sums


def _find_column_step(cols: np.ndarray) -> int | None:
    """The constant distance between the columns of successive pieces, if each piece's are consecutive: such keys need no copy."""
    if (np.diff(cols, axis=1) != 1).any():
        return None
    steps = np.diff(cols[:, 0])
    step = int(steps[0]) if len(steps) else 0
    return step if step >= 0 and (steps == step).all() else None


def _gathered(x, blocks: np.ndarray):
    """Gathers blocks, (pieces, width), of a contiguous (units, blocks, tokens, head_dim), for ``_Call.keys``."""
    units, count, _, dim = x.shape
    index = np.arange(units)[:, None] * count + blocks[:, None]
    taken = x.flatten(0, 1).index_select(0, torch.from_numpy(index.ravel()))
    return taken.view(len(blocks), units, -1, dim)


def _unit_slices(k):
    """Slices of the units, small enough to gather one piece's keys."""
    size = max(1, _gather_limit() // (min(k.shape[1] * k.shape[2], _WIDEST) * k.shape[3]))
    return [slice(first, first + size) for first in range(0, len(k), size)]


def _gather_limit() -> int:
    return _GATHERED * min(torch.get_num_threads(), _MOST_THREADS)


def _calls(loop, q, copied: bool):
    """Yields the calls for all rows: each row's last piece, then the others. copied: whether keys or their gradients always are."""
    widest = max(1, _WIDEST // loop.block)
    rounds: list[dict[int, list]] = [{}]
    for rows, cols, tiles in loop.groups:
        before = (cols.shape[1] - 1) // widest
        rounds += [{} for _ in range(before + 1 - len(rounds))]
        for number in range(before + 1):
            # The last piece comes first: it is the shortest, and under a causal mask it has the diagonal's tile.
            piece = slice(before * widest, None) if number == 0 else slice((number - 1) * widest, number * widest)
            rounds[number].setdefault(cols[:, piece].shape[1], []).append((rows, cols[:, piece], tiles[:, piece]))
    for number, widths in enumerate(rounds):
        for width, pieces in widths.items():
            rows, cols, tiles = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
            for chosen, shared in _group_equal_tiles(tiles):
                numbers = len(q) * q.shape[3] if copied or _find_column_step(cols[chosen]) is None else 0
                numbers += 0 if shared else q.shape[2]
                height = max(1, _gather_limit() // (numbers * width * loop.block)) if numbers else len(chosen)
                masked = _bias(loop.tiles, tiles[chosen[:1]], q.shape[2]) if shared else None
                for first in range(0, len(chosen), height):
                    some = chosen[first : first + height]
                    bias, empty = masked or _bias(loop.tiles, tiles[some], q.shape[2])
                    yield _Call(slice_or_array(rows[some]), cols[some], bias, empty, number > 0)


def slice_or_array(rows: np.ndarray) -> slice | np.ndarray:
    """A slice if the block numbers are consecutive."""
    follow = (np.diff(rows) == 1).all()
    return slice(int(rows[0]), int(rows[-1]) + 1) if follow else rows


def _group_equal_tiles(tiles: np.ndarray):
    """Yields ((n,) indices of pieces, whether their tiles are equal). tiles: (pieces, width)."""
    first, number = unique_rows(tiles)
    count = np.bincount(number)
    shared = (count >= _ALIKE) | (tiles[first] < 0).all(1)
    order = np.argsort(number, kind="stable")
    bounds = np.cumsum(count)
    for one in np.flatnonzero(shared):
        yield order[bounds[one] - count[one] : bounds[one]], True
    rest = np.flatnonzero(~shared[number])
    if len(rest):
        yield rest, False


def _bias(known, tiles: np.ndarray, rows: int):
    """(bias, empty) for a ``_Call``, from tiles (pieces, width); (None, None) if all pairs are kept."""
    if (tiles < 0).all():
        return None, None
    block = known.block
    blocks = known.bounds(tiles.ravel()).clamp(max=0.0).expand(tiles.size, -1, -1)
    # The same for each member of a group of heads.
    blocks = blocks.view(*tiles.shape, 1, block, block).expand(-1, -1, rows // block, -1, -1)
    bias = blocks.permute(0, 2, 3, 1, 4).reshape(len(tiles), 1, rows, -1)
    return bias, (bias.amax(-1) == float("-inf")).transpose(0, 1)
