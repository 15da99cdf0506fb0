"""Runs on each rank of a pool to test the benchmark of context parallelism."""

from unittest import mock

import on_ranks

from sparse_flash.benchmarks import context


def case(mask: str) -> context.ContextCase:
    return context.ContextCase("a mask", mask, tokens=512, heads=4, kv_heads=2, head_dim=16)


def run(mask: str, names: list[str]) -> dict:
    with mock.patch.object(context, "_LEAST", 1):
        return context.run(case(mask), names, on_ranks.mesh(), context.Effort(seconds=0.0))
