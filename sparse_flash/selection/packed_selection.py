"""Blocks of keys picked by the tokens of packed documents: a document's blocks begin at its first token. Attention runs on an axis
where each document starts in a new block: there picks of a document's blocks are picks like any other.

Tensor operations of fixed shapes: on a GPU nothing synchronizes with the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..compat.pytorch import is_plain_eager
from ..masks.block_mask import compile_mask
from ..masks.pattern import Pattern
from ..packed.arguments import resolve_longest
from ..packed.repack import Axis, PackedDocuments, most_blocks, repack_documents
from .block_selection import BlockSelection, without_later_keys

# The most queries of a kernels' tile. A tile visits the blocks that any of its queries picked, and a weight of 0 times NaN is
# NaN: a document that starts where a tile does gets none of its neighbours'.
_TILE = 64


@dataclass(frozen=True, eq=False)
class PackedSelection:
    """Which blocks of keys each token of packed documents picked, in its own document. Pass it to ``attention_varlen`` instead of
    a mask. Create one with ``topk_blocks(..., cu_seqlens_q=...)``. Immutable.

    picks: (kv_heads | heads, tokens, n) int32: blocks of the token's document, counted from its first token, ascending, each once,
    then -1. With kv_heads, the query heads that share keys share picks. Tokens of no document pick none.
    cu_seqlens: (documents + 1,) int32 or int64, as for ``attention_varlen``. longest: tokens; no document is longer.
    block_size: keys of a block.
    always: a Pattern or its spec text, or None: pairs of a document that every head keeps too, to the token.

    A token keeps no key after it, and none of another document.
    """

    picks: torch.Tensor
    cu_seqlens: torch.Tensor
    longest: int
    block_size: int
    always: Pattern | str | None = None

    @property
    def heads(self) -> int:
        """How many heads pick: key heads, or query heads."""
        return self.picks.shape[0]

    @property
    def tokens(self) -> int:
        return self.picks.shape[1]

    @property
    def documents(self) -> PackedDocuments:
        return PackedDocuments(self.cu_seqlens, self.tokens, self.longest)

    def to_dense(self) -> torch.Tensor:
        """True where a pair is kept: (kv_heads | heads, tokens, tokens) bool. For inspecting short documents and for tests."""
        place = locate_tokens(self.documents)
        block = torch.where(place.exists, place.within // self.block_size, -2)
        picked = (self.picks[..., None] == block).any(2)
        if self.always is not None:
            table = compile_mask(without_later_keys(self.always), self.longest, device=self.picks.device)
            picked |= table.to_dense()[..., place.within[:, None], place.within].reshape(-1, self.tokens, self.tokens)
        alike = (place.document == place.document[:, None]) & (place.within <= place.within[:, None])
        return picked & alike & place.exists & place.exists[:, None]

    def __repr__(self) -> str:
        always = "" if self.always is None else f"always={str(self.always)!r}, "
        return (
            f"PackedSelection(documents={len(self.cu_seqlens) - 1}, longest={self.longest}, block_size={self.block_size}, "
            f"{always}picks={tuple(self.picks.shape)}, device={str(self.picks.device)!r})"
        )

    def to_block_axis(self) -> tuple[BlockSelection, Axis]:
        """The picks on an axis of whole blocks, and that axis."""
        place, table = locate_tokens(self.documents), None
        if self.always is None:
            axis = block_axis(self.documents, place, max(self.block_size, _TILE))
        else:
            packed = repack_documents(without_later_keys(self.always), self.documents, None)
            axis, table = packed.queries, packed.mask
        first = ((axis.row_of_token - place.within) // self.block_size)[:, None]
        picks = torch.where(self.picks < 0, -1, self.picks + first)
        token = axis.token_of_row
        picks = torch.where((token < 0)[:, None], -1, picks[:, token.clamp(min=0)]).to(torch.int32)[None]
        return BlockSelection(picks, len(token), len(token), self.block_size, own=False, always=table), axis


# Lets torch.load read a saved selection without weights_only=False, if ``always`` is text or None.
torch.serialization.add_safe_globals([PackedSelection])


class TokenPositions(NamedTuple):
    """Each (tokens,): the token's document and its position there, int64, and whether it is of one."""

    document: torch.Tensor
    within: torch.Tensor
    exists: torch.Tensor


def locate_tokens(side: PackedDocuments) -> TokenPositions:
    """Returns where tokens are. A token of no document has position 0."""
    bounds = _borders(side)
    token = torch.arange(side.tokens, device=bounds.device)
    document = torch.searchsorted(bounds[1:], token, right=True).clamp(max=len(bounds) - 2)
    within = token - bounds[document]
    exists = (within >= 0) & (token < bounds[document + 1]) & (within < side.longest)
    return TokenPositions(document, torch.where(exists, within, 0), exists)


def _borders(side: PackedDocuments) -> torch.Tensor:
    """(documents + 1,) int64, ascending, within the tokens, whatever cu_seqlens holds."""
    return side.cu_seqlens.long().clamp(0, side.tokens).cummax(0).values


def block_axis(side: PackedDocuments, place: TokenPositions, block: int) -> Axis:
    """An axis where each document starts in a new block of this size."""
    bounds = _borders(side)
    blocks = (bounds.diff().clamp(max=side.longest) + block - 1) // block
    first = (blocks.cumsum(0) - blocks) * block
    rows = most_blocks(side.tokens, len(blocks), block=block) * block
    row = first[place.document] + place.within
    # Tokens of no document go to one row more, which is then dropped.
    token_of_row = torch.full((rows + 1,), -1, dtype=torch.int32, device=row.device)
    token_of_row[torch.where(place.exists, row, rows)] = torch.arange(side.tokens, dtype=torch.int32, device=row.device)
    return Axis(token_of_row[:rows], torch.where(place.exists, row, -1).to(torch.int32))


def find_block_bounds(axis: Axis, place: TokenPositions, block: int) -> torch.Tensor:
    """(tokens, 2) int32: on the axis, the first block of each token's document, and the token's own."""
    row = torch.where(place.exists, axis.row_of_token, 0)
    return torch.stack([(row - place.within) // block, row // block], 1).to(torch.int32)


def check_packed_selection(
    selection: PackedSelection,
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    longest_q: int | None,
    longest_k: int | None,
) -> None:
    """Raises ValueError where a selection was not made for these documents, TypeError for wrong types."""
    given_lengths = {"q": longest_q} if longest_k is None else {"q": longest_q, "k": longest_k}
    for name, given in given_lengths.items():
        longest = resolve_longest(name, q, cu_seqlens_q, given)
        if given is not None and longest != selection.longest:
            raise ValueError(f"max_seqlen_{name} must be the selection's, {selection.longest}; got {longest}; leave it out")
    ours, same = selection.cu_seqlens, cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q
    if not same or len(k) != len(q):
        raise ValueError(
            f"a PackedSelection is of queries and keys of the same tokens; got {len(q)} and {len(k)}; leave cu_seqlens_k out"
        )
    if selection.picks.device != q.device or (selection.tokens, len(ours)) != (len(q), len(cu_seqlens_q)):
        raise ValueError(
            f"the selection is of {selection.tokens} tokens in {len(ours) - 1} documents on {selection.picks.device}; got "
            f"{len(q)} in {len(cu_seqlens_q) - 1} on {q.device}; choose again for these"
        )
    if selection.heads not in (k.shape[1], q.shape[1]):
        raise ValueError(f"picks must be of {k.shape[1]} key heads or {q.shape[1]} query heads; got {tuple(selection.picks.shape)}")
    # On a GPU the values are not known to the host.
    if q.device.type == "cpu" and is_plain_eager(q, ours) and ours.tolist() != cu_seqlens_q.tolist():
        raise ValueError("cu_seqlens_q must be the documents that the selection was made for; got others; choose again for these")
