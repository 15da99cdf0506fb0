"""Runs on each rank of a pool to test the benchmark of context parallelism."""

from unittest import mock

import on_ranks
import torch

from sparse_flash.benchmarks import context


def case(mask: str) -> context.ContextCase:
    return context.ContextCase("a mask", mask, tokens=512, heads=4, kv_heads=2, head_dim=16)


def run(mask: str, names: list[str]) -> dict:
    with mock.patch.object(context, "_LEAST", 1):
        return context.run(case(mask), names, on_ranks.mesh(), context.Effort(seconds=0.0))


def failing(ranks: list[int]) -> dict | str:
    """Returns what comes of a way that fails on some ranks."""

    def measured(*_):
        if torch.distributed.get_rank() in ranks:
            raise ValueError("of this test")
        return {}

    sequence = context.sequence_of(case("causal"), torch.device("cpu"), torch.float32, 2)
    with mock.patch.object(context, "measure_way", measured):
        try:
            return context.try_way("auto", sequence, None, on_ranks.mesh(), context.Effort())
        except RuntimeError as error:
            return str(error)
