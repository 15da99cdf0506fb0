"""Tables that follow from what blocks cost, against measured calls."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import sparse_flash as sf

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "kernels"


def rows_of(name: str) -> list[dict]:
    return json.loads((RESULTS / name).read_text())["rows"]


@cache
def compile_row(spec: str | tuple[str, ...], tokens: int, block_size: int) -> sf.BlockMask:
    if isinstance(spec, tuple):
        return sf.BlockMask.per_head(list(spec), tokens, block_size=block_size)
    return sf.compile_mask(spec, tokens, block_size=block_size)


def test_choices_between_tables_lose_little_over_the_best():
    """Options of close calls on an H200. "dense" is a warning, so it is no choice."""
    losses = []
    for row in rows_of("h200-2026-11-27-choices.json"):
        spec = row["spec"]
        mask = compile_row(spec if isinstance(spec, str) else tuple(spec), row["tokens"], row["block_size"])
        chosen = "blocks of 128" if mask.coarse else "by document" if mask.by_document else "own"
        times = {name: sum(passes) for name, passes in row["ms"].items()}
        losses.append(times[chosen] / min(times.values()) - 1)
    assert len(losses) == 40 and np.mean(losses) < 0.06


def test_warnings_point_at_the_callers_line():
    transposed = torch.randn(1, 300, 4, 16)
    call = lambda: sf.attention(transposed, transposed, transposed)  # noqa: E731
    sf.clear_caches()
    with pytest.warns(UserWarning, match="tokens come before heads") as said:
        call()
    assert [(one.filename, one.lineno) for one in said] == [(__file__, call.__code__.co_firstlineno)]
