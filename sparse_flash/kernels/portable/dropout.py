"""Dropout's mask of a tile, regenerated wherever it is needed: see ``variant.definition.kept_by_dropout``."""

import triton
import triton.language as tl

from ..common.philox import stream_of_line, words_of_pairs


@triton.jit
def dropout_stream(variant, line):
    """Three scalars that distinguish a line's draws from others'; empty without dropout. line: batch * heads + head."""
    stream = ()
    if variant.seed is not None:
        if variant.lines is not None:
            line = tl.load(variant.lines + line)
        stream = stream_of_line(variant.seed, line)
    return stream


@triton.jit
def kept_by_dropout(variant, stream, place, sizes):
    """Which pairs of a step dropout keeps, in the shape of its scores. stream: from ``dropout_stream``. The step's first query and
    key are multiples of the tile's sides, which are powers of two, at least 16."""
    threshold = tl.full([1, 1], variant.dropout_p * 4294967296.0, tl.float32).to(tl.uint32)
    query, token = tl.arange(0, sizes.TILE_M).to(tl.uint32), tl.arange(0, sizes.TILE_N).to(tl.uint32)
    query, token = (query[None, :], token[:, None]) if sizes.BY_KEY else (query[:, None], token[None, :])
    first_query = _in_sequence(variant.q_places, place.first_query)
    first_key = _in_sequence(variant.kv_places, place.first_key)
    word = words_of_pairs(stream, query, token, first_query, first_key)
    return tl.where(query // 8 % 2 == 0, word << 16, word) >= threshold


@triton.jit
def _in_sequence(places, first):
    """Where a tile's first token stands in the whole sequence; the others follow it, as tiles divide the blocks of a table."""
    if places is not None:
        first = tl.load(places + first // 16)
    return first
