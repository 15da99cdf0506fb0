"""Dropout's mask of a tile, regenerated wherever it is needed: see ``variant.definition.kept_by_dropout``."""

import triton
import triton.language as tl

from ..common.philox import stream_of_line, words_of_pairs


@triton.jit
def dropout_stream(variant, line):
    """Three scalars that distinguish a line's draws from others'; empty without dropout. line: batch * heads + head."""
    stream = ()
    if variant.seed is not None:
        stream = stream_of_line(variant.seed, line)
    return stream


@triton.jit
def kept_by_dropout(variant, stream, place, sizes):
    """Which pairs of a step dropout keeps, in the shape of its scores. stream: from ``dropout_stream``. The step's first query and
    key are multiples of the tile's sides, which are powers of two, at least 16."""
    threshold = tl.full([1, 1], variant.dropout_p * 4294967296.0, tl.float32).to(tl.uint32)
    query, token = tl.arange(0, sizes.TILE_M).to(tl.uint32), tl.arange(0, sizes.TILE_N).to(tl.uint32)
    query, token = (query[None, :], token[:, None]) if sizes.BY_KEY else (query[:, None], token[None, :])
    word = words_of_pairs(stream, query, token, place.first_query, place.first_key)
    return tl.where(query // 8 % 2 == 0, word << 16, word) >= threshold
