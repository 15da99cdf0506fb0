"""Grids: calls of more than 65,535 batch-heads, which is CUDA's limit for all axes but the first, and the order of heads."""

from functools import partial

import pytest
import torch
from calls import ENTRIES, assert_right, name_of, sizes_for
from oracle import DEVICE, tiles, unless_refused
from picked import check_selected

import sparse_flash as sf
from sparse_flash.core import backends

if reason := backends.get_backend("triton").why_unavailable():
    pytest.skip(reason, allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction

from sparse_flash.kernels.launch import order
from sparse_flash.selection.kernels import division

parametrize = pytest.mark.parametrize
MOST = 6


@pytest.fixture
def few(monkeypatch):
    """Lowers the limit of the second axis. Interpreted launches beyond it fail, as others would."""
    launched = InterpretedFunction.run

    def launch(kernel, *arguments, grid, **given):
        assert grid[1] <= MOST, f"{kernel.fn.__name__} on {grid}"
        return launched(kernel, *arguments, grid=grid, **given)

    monkeypatch.setattr(InterpretedFunction, "run", launch)
    for module in (order, division):
        monkeypatch.setattr(module, "SECOND_AXIS", MOST)
    order._least_divisor.cache_clear()
    yield
    order._least_divisor.cache_clear()


ROWS = [("attention", False, None), ("attention", False, "causal"), ("attention", True, "local(20)")]
ROWS += [(entry, False, "causal") for entry in ("decode_in_pages", "decode_selection")]


@parametrize("entry, short, spec", ROWS)
def test_more_heads_than_the_second_axis_has_are_right(few, entry, short, spec):
    sizes = {"batch": 7, "heads": 6, "kv_heads": 3, "q_len": 20, "kv_len": 25}  # a prime number of batches
    with tiles(short=short):
        assert_right(ENTRIES[entry](sizes_for("triton", spec=spec, dtype=torch.float16, **sizes)), "triton")


def test_a_selection_with_more_heads_than_the_second_axis_has_is_right(few):
    check_selected("triton", 8, 4, 8, 18, 20, 16, 2, always="sinks(4)")


# batch, heads, key heads, tokens: windows of images, frames, rows of tables.
SHAPES = [(70_000, 1, 1, 64), (4_096, 32, 8, 128)]
SAMPLE = [0, 1, 2_047, 2_048, -2, -1]  # of the batch; heads 65,535 and 65,536 of the second shape are in 2,047 and 2,048


def attention_over_blocks(q, k, v, block_size):
    return sf.attention(q, k, v, sf.topk_blocks(q, k, 2, every=1, block_size=block_size))


WAYS = [
    partial(sf.attention, mask=mask, deterministic=told, backend=backend)
    for backend in ("triton", "hopper")
    for mask in (None, "causal")
    for told in (False, True)
]
WAYS += [partial(attention_over_blocks, block_size=block) for block in (16, 64)]


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@parametrize("shape", SHAPES, ids=str)
@parametrize("way", WAYS, ids=lambda way: name_of(way.keywords))
def test_results_of_a_sequence_do_not_depend_on_the_size_of_the_batch(way, shape):
    batch, heads, kv_heads, tokens = shape
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    shapes = [(batch, n, tokens, 64) for n in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(size, dtype=torch.bfloat16, device=DEVICE, generator=generator) for size in shapes]

    def outcome(*inputs):
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = way(*leaves)
        return [out, *torch.autograd.grad(out, leaves, leaves[0].detach())]

    with unless_refused():
        for mine, alone in zip(outcome(*inputs), outcome(*(t[SAMPLE] for t in inputs)), strict=True):
            torch.testing.assert_close(mine[SAMPLE], alone, atol=2e-2, rtol=2e-2)


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
def test_as_many_heads_run_at_once_as_fit_in_the_cache_and_rows_need(row_bytes, mask, tokens, lines, options, together):
    assert order.concurrent_heads(row_bytes, tokens, mask and sf.compile_mask(mask, tokens), lines, **options) == together
