"""Rows drawn at random: masks of all kinds, uneven ones and one for each head among them, with any heads, lengths and head dims."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from .cases import OURS, Case, Mask, Shape
from .problem import build_problem

_HEADS, _GROUPS, _BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 64), (1, 1, 1, 4, 8), (1, 1, 1, 2, 4, 8, 16)
_HEAD_DIMS = (32, 64, 64, 96, 128, 128, 128, 128, 192, 256)
_BLOCKS = (128, 128, 128, 64, 32)
_MOST_ELEMENTS, _MOST_FLOPS = 2**29, 2e13  # of a tensor; of a forward pass, about 40 ms on an H200


def draw_cases(seed: int, count: int) -> Iterator[Case]:
    """``count`` cases, the same for the same seed."""
    rng, made = np.random.default_rng(seed), 0
    while made < count:
        case = _case(rng)
        shape = case.shape
        if shape.batch * shape.heads * shape.tokens * shape.head_dim > _MOST_ELEMENTS:
            continue
        one = replace(
            shape, batch=1, heads=len(case.mask.spec) if isinstance(case.mask.spec, tuple) else 1, kv_heads=None, head_dim=1
        )
        pairs = build_problem(replace(case, shape=one), torch.device("cpu"), torch.float32, False).kept_pairs
        if pairs / one.heads * shape.batch * shape.heads * shape.flops[0] <= _MOST_FLOPS:
            made += 1
            yield case


def _case(rng: np.random.Generator) -> Case:
    tokens = int(2 ** rng.uniform(10, 17))
    if rng.random() < 0.7:
        tokens -= tokens % 1024
    heads = int(rng.choice(_HEADS))
    group = int(rng.choice(_GROUPS))
    kv_heads = heads // group if heads % group == 0 else heads
    shape = Shape(int(rng.choice(_BATCHES)), heads, tokens, int(rng.choice(_HEAD_DIMS)), kv_heads)
    if heads > 1 and rng.random() < 0.2:
        kinds = [_spec(rng, tokens, 128) for _ in range(int(rng.integers(2, 4)))]
        spec: str | tuple[str, ...] = tuple(kinds[int(rng.integers(len(kinds)))] for _ in range(heads))
        return Case(shape, Mask("; ".join(spec), spec), OURS)
    block = int(rng.choice(_BLOCKS))
    spec = _spec(rng, tokens, block)
    return Case(shape, Mask(f"{spec}, blocks of {block}", spec, block), OURS)


def _spec(rng: np.random.Generator, tokens: int, block: int) -> str:
    """block: tokens of the units of patterns that have units."""

    def size(least: int, most: int) -> int:
        return int(least * (max(most, least) / least) ** rng.random())

    window, few = size(64, tokens // 2), size(4, 512)
    share = 0.02 * 25 ** rng.random()
    cuts = sorted({0, tokens, *rng.integers(1, tokens, size(2, max(2, tokens // 512))).tolist()})
    specs = (
        "full",
        "causal",
        f"causal & local({window})",
        f"local({window})",
        f"causal & (local({window}) | sinks({few}))",
        f"causal & (local({window}) | power_of_two(block={block}))",
        f"causal & documents({tuple(cuts)})",
        f"causal & local({window}) & documents({tuple(cuts)})",
        f"butterfly(block={block})",
        f"strided({size(2, max(2, tokens // block // 4))}, block={block})",
        f"random({share:.3f}, block={block})",
        f"causal & random({share:.3f}, block={block})",
        f"bigbird(block={block})",
        f"longformer({window}, tokens={few})",
        f"global_tokens({few}) | local({window})",
    )
    return specs[int(rng.integers(len(specs)))]
