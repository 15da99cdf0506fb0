"""In which order programs take the rows of heads. ``test_grids`` shows that results are right in any."""

import pytest

import sparse_flash as sf

pytest.importorskip("triton")

from sparse_flash.kernels.launch.order import concurrent_heads

SCATTERED = "random(0.2)"


@pytest.mark.parametrize(
    "row_bytes, mask, tokens, lines, options, together",
    [
        (256, None, 4096, 8, {}, 8),  # the cache holds all
        (256, SCATTERED, 32768, 8, {}, 1),
        (256, "causal & documents((0, 15000, 40000, 65536))", 65536, 8, {}, 2),
        (512, SCATTERED, 16384, 8, {"by_key": True}, 2),
        (320, SCATTERED, 8192, 16, {}, 2),  # three would fit, and leave one over
        (256, SCATTERED, 16384, 32, {"group": 8}, 16),  # query heads that share keys come together
        (256, "causal", 16384, 16, {}, 8),  # rows keep much
    ],
)
def test_as_many_heads_follow_each_other_as_the_cache_holds_and_rows_need(row_bytes, mask, tokens, lines, options, together):
    assert concurrent_heads(row_bytes, tokens, mask and sf.compile_mask(mask, tokens), lines, **options) == together
