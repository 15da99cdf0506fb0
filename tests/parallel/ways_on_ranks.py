"""Runs on each rank of a pool to test the benchmark of context parallelism."""

import sys
import time
import types
from unittest import mock

import on_ranks
import torch

from sparse_flash.benchmarks import context
from sparse_flash.benchmarks.baselines import context as ways

CPU = torch.device("cpu")


def case(mask: str, heads: int = 4, kv_heads: int = 2) -> context.ContextCase:
    return context.ContextCase("a mask", mask, tokens=512, heads=heads, kv_heads=kv_heads, head_dim=16)


def run(mask: str, names: list[str], seconds: float = 60.0) -> dict:
    with mock.patch.object(context, "_LEAST", 1):
        return context.run(case(mask), names, on_ranks.mesh(), context.Effort(seconds=0.0, until=time.monotonic() + seconds))


def calls_timed(warm: bool, longest: float) -> int:
    """How often a call is made to time it, where calls of over ``longest`` seconds are long."""
    made = []
    with mock.patch.object(context, "_LONG", longest):
        context.time_on_ranks(lambda: made.append(None), CPU, 0.0, warm)
    return len(made)


def failing(ranks: list[int]) -> dict | str:
    """Returns what comes of a way that fails on some ranks."""

    def measured(*_):
        if torch.distributed.get_rank() in ranks:
            raise ValueError("of this test")
        return {}

    sequence = context.sequence_of(case("causal"), CPU, torch.float32, 2)
    with mock.patch.object(context, "measure_way", measured):
        try:
            return context.try_way("auto", sequence, None, on_ranks.mesh(), context.Effort())
        except RuntimeError as error:
            return str(error)


def _dense(q, k, v, kept):
    """(batch, heads, tokens, head_dim). kept: (queries, keys) bool."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept, enable_gqa=True)


def _flash_attn_func(q, k, v, causal, window_size=(None, None)):
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    kept = (distance >= 0) & ((window_size[0] is None) | (distance <= (window_size[0] or 0)))
    assert causal
    return _dense(*(t.transpose(1, 2) for t in (q, k, v)), kept).transpose(1, 2)


def _flex_attention(q, k, v, block_mask, enable_gqa):
    query, key = (torch.arange(t.shape[2]) for t in (q, k))
    return _dense(q, k, v, block_mask.mask_mod(0, 0, query[:, None], key[None]))


def error_of(name: str, mask: str) -> float:
    """Returns the error of a way whose library is replaced by PyTorch's operations."""
    cute = types.ModuleType("flash_attn.cute")
    cute.flash_attn_func = _flash_attn_func
    package = types.ModuleType("flash_attn")
    package.cute = cute
    sequence = context.sequence_of(case(mask), CPU, torch.float32, 2)
    leaves = tuple(t.detach().requires_grad_() for t in (sequence.q, sequence.k, sequence.v))
    exact = context.run_both_passes(leaves, lambda: context.sf.attention(*leaves, sequence.mask))
    with (
        mock.patch.dict(sys.modules, {"flash_attn": package, "flash_attn.cute": cute}),
        mock.patch("torch.nn.attention.flex_attention.flex_attention", _flex_attention),
        mock.patch.object(ways.GatheredKeys, "refuses", lambda *_: None),
        mock.patch.object(context, "_LEAST", 1),
    ):
        return context.measure_way(ways.WAYS[name], sequence, exact, on_ranks.mesh(), context.Effort(0.0))["error"]
