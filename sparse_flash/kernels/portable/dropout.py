"""Dropout's mask of a tile, computed again where it is needed: see ``core.definition.kept_by_dropout``."""

import triton
import triton.language as tl

from ..common.philox import draw_words, stream_of_batch_head


@triton.jit
def dropout_stream(variant, tile):
    """Three scalars that make a batch-head's draws distinct; () without dropout."""
    stream = ()
    if variant.seed is not None:
        stream = stream_of_batch_head(variant.seed, tile.batch_head)
    return stream


@triton.jit
def kept_by_dropout(variant, stream, place, sizes):
    """The pairs of a step that dropout keeps, in the shape of its scores. stream: from ``dropout_stream``. The step's first query
    and key are multiples of the tile's sides, which are powers of two, at least 16."""
    threshold = tl.full([1, 1], variant.dropout_p * 4294967296.0, tl.float32).to(tl.uint32)
    query, token = tl.arange(0, sizes.TILE_M).to(tl.uint32), tl.arange(0, sizes.TILE_N).to(tl.uint32)
    if sizes.BY_KEY:
        query, token = query[None, :], token[:, None]
    else:
        query, token = query[:, None], token[None, :]
    word = draw_words(stream, query, token, place.first_query, place.first_key)
    return tl.where(query // 8 % 2 == 0, word << 16, word) >= threshold
