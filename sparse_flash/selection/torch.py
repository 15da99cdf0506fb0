"""Attention over picked blocks in PyTorch operations, on any device, in chunks of queries that memory bounds.

A chunk lists its picks by block of keys, as pieces of equal size, and gathers queries, not keys. A block of which ``always`` keeps
pairs is one more pick of the queries that did not pick it. Each pick gives a partial result, and these are merged by their lse. The
backward pass recomputes the probabilities from lse (arXiv:2307.08691, Alg. 2). float16 and bfloat16 are computed in float32.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.description import Call
from ..core.results import QueryRows, compute_dtype, lse_to_subtract, zero_keyless_queries
from ..core.torch import repeatable, without_autocast
from ..kernels.common.layout import empty_out
from .block_selection import BlockSelection

_CHUNK_CPU, _CHUNK_GPU = 1 << 23, 1 << 27  # numbers of parts, and of scores, held at a time
_MOST_ENTRIES = 64  # of a piece


def supports(call: Call, selection: BlockSelection) -> str | None:
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    out, lse = empty_out(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=compute_dtype(q))
    with without_autocast(q):
        for chunk in _ChunkedCall(q, k, v, selection, scale):
            scores = chunk.scores()
            logs = scores.logsumexp(-1, keepdim=True)
            partial = chunk.scatter(_softmax_weights(scores, logs) @ chunk.values, 0.0)
            logs = chunk.scatter(logs, float("-inf"))
            total = logs.logsumexp(1, keepdim=True)
            chunk.unpack((_softmax_weights(logs, total) * partial).sum(1), out)
            chunk.unpack(total[:, 0], lse[..., None])
    return out, lse


def backward(rows: QueryRows, k: Tensor, v: Tensor, selection: BlockSelection, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    q, dout, dlse, out, lse = rows
    dq, dout = torch.empty_like(q), zero_keyless_queries(dout, lse)
    with without_autocast(q):
        call = _ChunkedCall(q, k, v, selection, scale)
        dk, dv = _KeyGradient(k, call), _KeyGradient(v, call)
        for chunk in call:
            logs, upstream = chunk.pack(lse[..., None]), chunk.pack(dout)
            delta = (upstream * chunk.pack(out)).sum(-1, keepdim=True)
            delta = delta if dlse is None else delta - chunk.pack(dlse[..., None])
            weights = _softmax_weights(chunk.scores(), chunk.gather(logs))
            incoming = chunk.gather(upstream)
            dscores = weights * (incoming @ chunk.values.mT - chunk.gather(delta))
            dv.add_blocks(chunk.block, weights.mT @ incoming)
            dk.add_blocks(chunk.block, scale * dscores.mT @ chunk.gather(chunk.queries))
            chunk.unpack(scale * chunk.scatter(dscores @ chunk.keys, 0.0).sum(1), dq)
    return dq, dk.total(), dv.total()


def block_lse(q: Tensor, k: Tensor, selection: BlockSelection, scale: float) -> Tensor:
    """(batch, heads, q_len, n): see ``operators``. selection: without ``always``."""
    result = q.new_empty(*q.shape[:3], selection.picks.shape[3], dtype=compute_dtype(q))
    with without_autocast(q):
        for chunk in _ChunkedCall(q, k, k, selection, scale):
            logs = chunk.scatter(chunk.scores().logsumexp(-1, keepdim=True), float("-inf"))
            chunk.unpack(logs[..., 0].mT, result)
    return result


def block_lse_backward(
    dblock_lse: Tensor, q: Tensor, k: Tensor, block_lse: Tensor, selection: BlockSelection, scale: float
) -> tuple[Tensor, Tensor]:
    """(dq, dk)."""
    dq = torch.empty_like(q)
    with without_autocast(q):
        call = _ChunkedCall(q, k, k, selection, scale)
        dk = _KeyGradient(k, call)
        for chunk in call:
            logs, incoming = (chunk.gather_picks(t) for t in (block_lse, dblock_lse))
            dscores = _softmax_weights(chunk.scores(), logs) * incoming
            dk.add_blocks(chunk.block, scale * dscores.mT @ chunk.gather(chunk.queries))
            chunk.unpack(scale * chunk.scatter(dscores @ chunk.keys, 0.0).sum(1), dq)
    return dq, dk.total()


def _softmax_weights(scores: Tensor, logs: Tensor) -> Tensor:
    return (scores - lse_to_subtract(logs)).exp()


class _ChunkedCall:
    """The chunks of a call."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, scale: float):
        self.q, self.scale, self.selection = q, scale, selection
        self.size, self.heads = selection.block_size, selection.heads
        self.shared = q.shape[1] // self.heads  # query heads that share picks
        # The key head of each head that picks.
        self.key_head = torch.arange(self.heads, device=q.device) * k.shape[1] // self.heads
        self.tensors = k, v
        # Each is (batch * kv_heads * kv_blocks, block_size, head_dim), with zeros past the last key.
        self.beyond = selection.kv_blocks * self.size - selection.kv_len
        padded = (torch.nn.functional.pad(t, (0, 0, 0, self.beyond)) for t in self.tensors)
        self.blocks = [t.reshape(-1, self.size, t.shape[3]) for t in padded]

    def __iter__(self) -> Iterator["_Chunk"]:
        batch, heads, q_len, n = self.selection.picks.shape
        step = q_len
        if (table := self.selection.always) is not None:
            # A chunk's queries meet the keys of all of them: many more than a row has keys would mostly meet keys of others.
            step = max(1, table.block_size * int(table.by_query.row_ptr.diff().max()))
            n += 2 * step // self.size + 1
        numbers = n * (self.size + self.q.shape[3] + self.tensors[1].shape[3])
        most = _CHUNK_GPU if self.q.is_cuda else _CHUNK_CPU
        step = min(step, max(1, most // (batch * heads * self.shared * numbers)))
        for low in range(0, q_len, step):
            yield _Chunk(self, low, min(low + step, q_len))


class _Chunk:
    """Some queries, packed as (batch, heads that pick, queries, shared heads, head_dim), and the pieces of their picks' lists::

        piece 0: block 3 of keys   entries: (query 0, slot 1)  (query 4, slot 0)
        piece 1: block 3 of keys   entries: (query 7, slot 2)  not valid: pads the piece

    entry, valid: (pieces, entries of a piece) int64 and bool. An entry is a pick: flat query * n + slot, where flat queries count
    (batch, heads that pick, queries). block: (pieces,) among the blocks of all key heads. keys: (pieces, block_size, head_dim).
    """

    def __init__(self, call: _ChunkedCall, low: int, high: int):
        self.call, self.low, self.high, selection = call, low, high, call.selection
        picks = selection.picks[:, :, low:high].long()
        self.position = torch.arange(low, high, device=picks.device) + selection.offset
        self.picked, self.added = picks.shape[3], None
        if selection.always is not None:
            kept = selection.always.kept_by_queries(0, low, high).to(picks.device)
            picks = torch.cat([picks, self._blocks_of_always(kept, picks)], 3)
        self.slots = picks.shape[3]
        batch_heads = torch.arange(len(picks), device=picks.device)[:, None] * call.tensors[0].shape[1] + call.key_head
        block = torch.where(picks < 0, -1, batch_heads[:, :, None, None] * selection.kv_blocks + picks).flatten()
        self.queries = self.pack(call.q)
        self._cut_lists(block, len(call.blocks[0]))
        self.keys, self.values = (call.blocks[which][self.block].to(compute_dtype(call.q)) for which in (0, 1))

    def _blocks_of_always(self, kept: Tensor, picks: Tensor) -> Tensor:
        """(batch, heads that pick, queries, m): blocks of ``always`` that a query did not pick, -1 for none. Sets ``added``."""
        kept &= torch.arange(kept.shape[1], device=kept.device) <= self.position[:, None]
        by_block = torch.nn.functional.pad(kept, (0, self.call.beyond)).unflatten(1, (-1, self.call.size))
        number = by_block.any(2).any(0).nonzero()[:, 0]
        by_block = by_block[:, number]
        added = by_block.any(2) & ~(picks[..., None] == number).any(3)
        column = added.byte().argsort(dim=3, descending=True, stable=True)[..., : int(added.sum(3).max())]
        self.added = by_block[torch.arange(len(kept), device=kept.device)[:, None], column].flatten(0, 2)
        return torch.where(added.gather(3, column), number[column], -1)

    def _cut_lists(self, block: Tensor, blocks: int) -> None:
        """Sets entry, valid, flat_query and block: lists by block, cut into equal pieces. block: of each entry, -1 for none."""
        order = block.argsort(stable=True)
        counts = torch.bincount(block + 1, minlength=blocks + 1)
        start, counts = counts.cumsum(0)[:-1], counts[1:]
        most = min(_MOST_ENTRIES, 1 << max(0, len(order) // max(1, int((counts > 0).sum())) - 1).bit_length())
        pieces = (counts + most - 1).div(most, rounding_mode="floor")
        self.block = torch.repeat_interleave(pieces)
        number = torch.arange(len(self.block), device=block.device) - (pieces.cumsum(0) - pieces)[self.block]
        place = number[:, None] * most + torch.arange(most, device=block.device)
        self.valid = place < counts[self.block, None]
        self.entry = order[torch.where(self.valid, start[self.block, None] + place, 0)]
        self.flat_query = self.entry // self.slots

    def pack(self, x: Tensor) -> Tensor:
        """(batch, heads, q_len, width) -> rows of the chunk's queries."""
        rows = torch.unflatten(x[:, :, self.low : self.high], 1, (self.call.heads, self.call.shared)).transpose(2, 3)
        return rows.to(compute_dtype(x))

    def unpack(self, rows: Tensor, result: Tensor) -> None:
        """The reverse, of rows by flat query, into the chunk's queries of ``result``."""
        rows = rows.unflatten(0, (len(result), self.call.heads, -1)).transpose(2, 3)
        result[:, :, self.low : self.high] = rows.flatten(1, 2).to(result.dtype)

    def gather(self, packed: Tensor) -> Tensor:
        """The rows of the entries of each piece, (pieces, entries * rows, width)."""
        return packed.flatten(0, 2)[self.flat_query].flatten(1, 2)

    def gather_picks(self, x: Tensor) -> Tensor:
        """Numbers of queries and picks, (batch, heads, q_len, n), in the order of ``gather``: (pieces, entries * rows, 1)."""
        by_entry = self.pack(x).flatten(0, 2).mT.flatten(0, 1)
        return by_entry[self.entry].flatten(1, 2)[..., None]

    def scatter(self, values: Tensor, fill: float) -> Tensor:
        """Orders results of the rows of pieces, (pieces, entries * rows, width), by pick: (flat queries, n, rows, width)."""
        values = torch.unflatten(values, 1, (self.entry.shape[1], -1))
        by_pick = values.new_full((self.queries.shape[:3].numel() * self.slots, *values.shape[2:]), fill)
        by_pick[self.entry[self.valid]] = values[self.valid]
        return torch.unflatten(by_pick, 0, (-1, self.slots))

    def scores(self) -> Tensor:
        """(pieces, entries * rows, block_size): scores of each piece's rows with its keys, -inf for pairs that are not kept."""
        call = self.call
        scores = self.gather(self.queries) @ self.keys.mT * call.scale
        first = self.block % call.selection.kv_blocks * call.size
        key = first[:, None] + torch.arange(call.size, device=first.device)
        position = torch.where(self.valid, self.position[self.flat_query % len(self.position)], -1)
        kept = key[:, None] <= position[..., None]
        if self.added is not None and self.added.shape[1]:
            slot = self.entry % self.slots - self.picked
            kept &= self.added[self.flat_query, slot.clamp(min=0)] | (slot < 0)[..., None]
        by_query = scores.view(*self.entry.shape, call.shared, call.size)
        return by_query.masked_fill_(~kept[:, :, None], float("-inf")).view_as(scores)


class _KeyGradient:
    """A gradient of keys or values, summed over chunks in order."""

    def __init__(self, like: Tensor, call: _ChunkedCall):
        self.like = like
        self.sums = like.new_zeros(len(call.blocks[0]), call.size, like.shape[3], dtype=compute_dtype(like))

    def add_blocks(self, block: Tensor, products: Tensor) -> None:
        """products: (pieces, block_size, head_dim), of these blocks."""
        with repeatable(self.sums, True):
            self.sums.index_add_(0, block, products)

    def total(self) -> Tensor:
        by_token = self.sums.view(*self.like.shape[:2], -1, self.like.shape[3])
        return torch.empty_like(self.like).copy_(by_token[:, :, : self.like.shape[2]])
