"""In which order programs take the rows of heads."""

import heapq
from types import SimpleNamespace

import pytest
import torch
from oracle import check

import sparse_flash as sf
from sparse_flash import BlockMask, backends

if reason := backends.get_backend("triton").why_unavailable():
    pytest.skip(reason, allow_module_level=True)

from sparse_flash.kernels.launch import order
from sparse_flash.kernels.launch.order import concurrent_grid_heads, concurrent_heads
from sparse_flash.kernels.portable import configs


def _share_of_time_that_is_idle(tokens: int, lines: int, together: int, programs: int) -> float:
    """Beyond what the longest row takes. Each program takes the next tile once it is done: rows of all heads of a group, the
    longest first, then the next group's."""
    busy, beside_steps = [0] * programs, 2
    for first in range(0, lines, together):
        for row in reversed(range(tokens // 128)):
            for _ in range(min(together, lines - first)):
                heapq.heapreplace(busy, busy[0] + row + 1 + beside_steps)
    return max(busy) / max(sum(busy) / programs, tokens // 128 + beside_steps) - 1


SCATTERED, IN_DOCUMENTS = (SimpleNamespace(starts=None, from_host=False, document_order=ordered) for ordered in (False, True))


@pytest.mark.parametrize(
    "row_bytes, mask, tokens, lines, options, together",
    [
        *((256, mask, 4096, 8, {}, 8) for mask in (None, SCATTERED, IN_DOCUMENTS)),  # the cache holds all
        *((256, mask, 32768, 8, {}, 1 + (mask is IN_DOCUMENTS)) for mask in (None, SCATTERED, IN_DOCUMENTS)),
        (256, IN_DOCUMENTS, 65536, 8, {}, 2),
        *((512, SCATTERED, tokens, 8, {"by_key": True}, most) for tokens, most in ((4096, 4), (16384, 2), (32768, 1))),
        (320, SCATTERED, 8192, 16, {}, 2),  # three would fit, and leave one over
        (256, SCATTERED, 16384, 32, {"group": 8}, 16),  # query heads that share keys come together
        (256, "causal", 16384, 16, {}, 8),  # rows keep much
        *((256, mask, 16384, 16, {}, 2) for mask in ("butterfly", "causal & local(1024)", "random(0.2)")),
        *((512, "causal & documents((0, 15000, 40000, 65536))", 65536, 8, {"by_key": key}, 2) for key in (False, True)),
        *((512, "causal & local(8192)", 65536, 8, {"by_key": key}, 1) for key in (False, True)),
    ],
)
def test_as_many_heads_follow_each_other_as_the_cache_holds_and_rows_need(row_bytes, mask, tokens, lines, options, together):
    mask = sf.compile_mask(mask, tokens) if isinstance(mask, str) else mask
    assert concurrent_heads(row_bytes, tokens, mask, lines, **options) == together


def test_a_table_without_its_mask_is_taken_for_a_scattered_one():
    mask = sf.compile_mask("causal", 16384)
    assert concurrent_heads(256, 16384, BlockMask.from_tensors(*mask.sizes, mask.tensors()), 16) == 2  # may have room for more


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize(
    "tokens, row_bytes, lines, group",
    [(8192, 320, 16, 1), (8192, 512, 16, 1), (4096, 256, 12, 1), (8192, 256, 10, 1), (4096, 256, 28, 7), (8192, 256, 14, 1)],
)
def test_programs_of_a_causal_call_end_at_about_the_same_time(tokens, row_bytes, lines, group, by_key):
    mask = sf.compile_mask("causal", tokens)
    together = concurrent_heads(row_bytes * (2 if by_key else 1), tokens, mask, lines, 1 if by_key else group, by_key)
    assert _share_of_time_that_is_idle(tokens, lines, together, 132) <= 0.1


@pytest.mark.parametrize("tokens, lines", [(4096, 12), (8192, 14), (4096, 28)])
def test_heads_of_a_causal_call_take_turns_in_the_grid(tokens, lines):
    together = concurrent_grid_heads(2 * tokens * 256, tokens, sf.compile_mask("causal", tokens), lines)
    assert lines % together == 0
    assert _share_of_time_that_is_idle(tokens, lines, together, 264) <= 0.1 < _share_of_time_that_is_idle(tokens, lines, 1, 264)


@pytest.mark.parametrize("together, one_launch_tokens", [(2, 0), (4, 1 << 20)])
def test_heads_that_take_turns_are_right(together, one_launch_tokens, monkeypatch, poison):
    monkeypatch.setattr(order, "HEADS_IN_STEP", together)
    monkeypatch.setattr(configs, "ONE_LAUNCH_TOKENS", one_launch_tokens)
    check("triton", "causal", 40, 45, batch=2, heads=4, kv_heads=2, dtype=torch.float16, head_dim=16, block_size=32)
