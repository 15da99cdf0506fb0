"""Dropout's mask of a tile, computed again where it is needed: see ``core.definition.kept_by_dropout``."""

import triton
import triton.language as tl

from ..common.philox import draw_words, stream_of_batch_head


@triton.jit
def dropout_stream(variant, tile, sizes):
    """(three scalars that make a batch-head's draws distinct, the tile's first token in the sequence); () without dropout."""
    stream = ()
    if variant.seed is not None:
        batch_head = tile.batch_head if variant.batch_heads is None else tl.load(variant.batch_heads + tile.batch_head)
        own = _load_position(variant.kv_positions if sizes.BY_KEY else variant.q_positions, tile.first)
        stream = stream_of_batch_head(variant.seed, batch_head), own
    return stream


@triton.jit
def kept_by_dropout(variant, stream, place, sizes):
    """The pairs of a step that dropout keeps, in the shape of its scores. stream: from ``dropout_stream``. The step's first query
    and key are multiples of the tile's sides, which are powers of two, at least 16."""
    of_batch_head, own = stream
    threshold = tl.full([1, 1], variant.dropout_p * 4294967296.0, tl.float32).to(tl.uint32)
    query, token = tl.arange(0, sizes.TILE_M).to(tl.uint32), tl.arange(0, sizes.TILE_N).to(tl.uint32)
    if sizes.BY_KEY:
        query, token = query[None, :], token[:, None]
        first_query, first_key = _load_position(variant.q_positions, place.first_query), own
    else:
        query, token = query[:, None], token[None, :]
        first_query, first_key = own, _load_position(variant.kv_positions, place.first_key)
    word = draw_words(of_batch_head, query, token, first_query, first_key)
    return tl.where(query // 8 % 2 == 0, word << 16, word) >= threshold


@triton.jit
def _load_position(positions, first):
    """The position of a tile's first token in the whole sequence. The tile's tokens are consecutive, as tiles divide table
    blocks."""
    if positions is not None:
        first = tl.load(positions + first // 16)
    return first
