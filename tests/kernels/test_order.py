"""In which order programs take the rows of heads."""

import heapq

import pytest
import torch
from oracle import check, tiles

import sparse_flash as sf
from sparse_flash import backends

if reason := backends.get_backend("triton").why_unavailable():
    pytest.skip(reason, allow_module_level=True)

from sparse_flash.kernels.launch import order
from sparse_flash.kernels.launch.order import concurrent_grid_heads, concurrent_heads

parametrize = pytest.mark.parametrize


def _share_of_time_that_is_idle(tokens: int, lines: int, together: int, programs: int) -> float:
    """Beyond what the longest row takes. Each program takes the next tile once it is done: rows of all heads of a group, the
    longest first, then the next group's."""
    busy, beside_steps = [0] * programs, 2
    for first in range(0, lines, together):
        for row in reversed(range(tokens // 128)):
            for _ in range(min(together, lines - first)):
                heapq.heapreplace(busy, busy[0] + row + 1 + beside_steps)
    return max(busy) / max(sum(busy) / programs, tokens // 128 + beside_steps) - 1


SCATTERED = "random(0.2)"


@parametrize(
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


@parametrize("by_key", [False, True])
@parametrize("tokens, row_bytes, lines, group", [(8192, 320, 16, 1), (8192, 512, 16, 1), (4096, 256, 12, 1), (4096, 256, 28, 7)])
def test_programs_of_a_causal_call_end_at_about_the_same_time(tokens, row_bytes, lines, group, by_key):
    mask = sf.compile_mask("causal", tokens)
    together = concurrent_heads(row_bytes * (2 if by_key else 1), tokens, mask, lines, 1 if by_key else group, by_key)
    assert _share_of_time_that_is_idle(tokens, lines, together, 132) <= 0.1


@parametrize("tokens, lines", [(4096, 12), (8192, 14), (4096, 28)])
def test_heads_of_a_causal_call_take_turns_in_the_grid(tokens, lines):
    together = concurrent_grid_heads(2 * tokens * 256, tokens, sf.compile_mask("causal", tokens), lines)
    assert lines % together == 0
    assert _share_of_time_that_is_idle(tokens, lines, together, 264) <= 0.1 < _share_of_time_that_is_idle(tokens, lines, 1, 264)


@parametrize("together, short", [(2, False), (4, True)])
def test_heads_that_take_turns_are_right(together, short, monkeypatch, poison):
    monkeypatch.setattr(order, "HEADS_IN_STEP", together)
    with tiles(short=short):
        check("triton", "causal", 40, 45, batch=2, heads=4, kv_heads=2, dtype=torch.float16, head_dim=16, block_size=32)
