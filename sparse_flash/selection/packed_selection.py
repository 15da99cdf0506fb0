"""Blocks of keys picked by the tokens of packed documents: a document's blocks begin at its first token. Attention runs on an axis
where each document starts in a new block: there picks of a document's blocks are picks like any other.

Tensor operations of fixed shapes: on a GPU nothing synchronizes with the host.
"""

from dataclasses import dataclass

import torch

from ..compat.pytorch import is_plain_eager
from ..masks.block_mask import compile_mask
from ..masks.pattern import Pattern
from ..packed.arguments import resolve_longest
from ..packed.documents import Axis, PackedDocuments, TokenPositions, lay_out_blocks, most_blocks, put_rows
from ..packed.moved import move_documents
from .block_selection import BlockSelection, without_later_keys

# The most queries of a kernels' tile. A tile visits the blocks that any of its queries picked, and a weight of 0 times NaN is
# NaN: a document that starts where a tile does gets no NaN of its neighbours.
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
    def documents(self) -> PackedDocuments:
        return PackedDocuments(self.cu_seqlens, self.picks.shape[1], self.longest)

    def to_dense(self) -> torch.Tensor:
        """True where a pair is kept: (kv_heads | heads, tokens, tokens) bool. For inspecting short documents and for tests."""
        place = self.documents.locate()
        block = torch.where(place.exists, place.within // self.block_size, -2)
        picked = (self.picks[..., None] == block).any(2)
        if self.always is not None:
            table = compile_mask(without_later_keys(self.always), self.longest, device=self.picks.device)
            picked |= table.to_dense()[..., place.within[:, None], place.within]
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
        place, table = self.documents.locate(), None
        if self.always is None:
            axis = block_axis(self.documents, max(self.block_size, _TILE))
        else:
            packed = move_documents(without_later_keys(self.always), self.documents, None)
            axis, table = packed.queries, packed.mask
        first = ((axis.row_of_token - place.within) // self.block_size)[:, None]
        # Counted from 1, so that rows without a token, which get 0, pick none.
        none = (self.picks < 0) | ~place.exists[:, None]
        picks = torch.where(none, 0, self.picks + first + 1).to(torch.int32)
        picks = put_rows(picks, 1, axis.row_of_token, axis.rows)[None] - 1
        return BlockSelection(picks, axis.rows, axis.rows, self.block_size, table), axis


# Lets torch.load read a saved selection without weights_only=False, if ``always`` is text or None.
torch.serialization.add_safe_globals([PackedSelection])


def block_axis(side: PackedDocuments, block: int) -> Axis:
    """An axis where each document starts in a new block of this size."""
    blocks = most_blocks(side.tokens, side.cu_seqlens.shape[0] - 1, block=block) + 1
    return lay_out_blocks(side, blocks, block)[0]


def find_block_bounds(axis: Axis, place: TokenPositions, block: int) -> torch.Tensor:
    """(tokens, 2) int32: on the axis, the first block of each token's document, and the token's own; past the axis and -1 for a
    token of no document."""
    first, own = (axis.row_of_token - place.within) // block, axis.row_of_token // block
    return torch.stack([torch.where(place.exists, first, axis.rows), torch.where(place.exists, own, -1)], 1).to(torch.int32)


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
    tokens = selection.picks.shape[1]
    if selection.picks.device != q.device or (tokens, len(ours)) != (len(q), len(cu_seqlens_q)):
        raise ValueError(
            f"the selection is of {tokens} tokens in {len(ours) - 1} documents on {selection.picks.device}; got "
            f"{len(q)} in {len(cu_seqlens_q) - 1} on {q.device}; choose again for these"
        )
    if selection.heads not in (k.shape[1], q.shape[1]):
        raise ValueError(f"picks must be of {k.shape[1]} key heads or {q.shape[1]} query heads; got {tuple(selection.picks.shape)}")
    # On a GPU the values are not known to the host.
    if q.device.type == "cpu" and is_plain_eager(q, ours) and ours.tolist() != cu_seqlens_q.tolist():
        raise ValueError("cu_seqlens_q must be the documents that the selection was made for; got others; choose again for these")
