"""Constants of attention in e4m3, shared by its kernels and its definition (``core.eight_bits``). Imports no Triton."""

from .config import padded_head_dim

QUERIES = 64  # that share a scale
KEYS = 128  # of a tile that a program rounds; values are padded to whole tiles
E4M3_MAX = 448.0  # of e4m3
MIN_AMAX = 1e-15  # the least largest number of a block that scales are computed from, so that no scale is 0
# The exponent of a row's largest weight, 64. A later weight may be up to 448, 7 times that, before a step is computed again.
# Weights of at least 2^-12 of the largest are normal numbers. Maxima are integers, so rounding does not depend on the running
# maximum.
TOP_EXPONENT = 6


def columns_of_eight_bits(head_dim: int, v_head_dim: int) -> int:
    """Returns the columns to which q, k and v are padded: 64 or 128, more only in the definition."""
    return max(64, padded_head_dim(max(head_dim, v_head_dim)))
