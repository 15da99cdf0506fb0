"""Tables and warnings that follow from what blocks cost, against measured calls."""

import json
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import sparse_flash as sf
from sparse_flash.masks import memory

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


@pytest.mark.parametrize(
    "spec, kv_len, slow",
    [
        ("causal & strided(3, block=1)", 1024, True),
        ("causal & local(1000)", 1024, False),  # keeps nearly all pairs
        ("causal & local(100)", 1024, False),
        ("causal", 1500, False),
        ("full", 1024, False),
    ],
)
def test_a_mask_that_gains_nothing_is_said_once_and_by_auto_alone(spec, kv_len, slow):
    mask = sf.compile_mask(spec, 1024, kv_len)
    assert mask.to("meta").slow == mask.to("meta").to("meta").slow == slow
    here = replace(mask, slow=mask.to("meta").slow)  # as on a GPU
    q, k = torch.zeros(1, 1, 1024, 16), torch.zeros(1, 1, kv_len, 16)
    memory.clear_memories()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sf.attention(q, k, k, here, backend="torch")
        assert not said
        for _ in range(2):
            sf.attention(q, k, k, here)
            sf.attention(q, k, k, replace(here), dropout_p=0.5)
    assert [str(one.message)[:32] for one in said] == ["this mask is predicted to take a"] * slow
    assert not said or said[0].filename == __file__


def test_warnings_point_at_the_users_line_whatever_calls_attention():
    slow = replace(sf.compile_mask("causal & local(250)", 256), slow=True)
    layer, x, q = sf.SparseAttention(32, 2, mask=slow), torch.randn(1, 256, 32), torch.randn(1, 2, 256, 16)
    transposed = torch.randn(1, 300, 4, 16)
    calls = {
        "call": lambda: sf.attention(q, q, q, slow),
        "layer": lambda: layer(x),
        "layer in a layer": lambda: torch.nn.Sequential(layer)(x),
        "tensors": lambda: sf.attention(transposed, transposed, transposed),
    }
    for name, call in calls.items():
        sf.clear_caches()
        with pytest.warns(UserWarning, match="predicted to take|tokens come before heads") as said:
            call()
        assert [(one.filename, one.lineno) for one in said] == [(__file__, call.__code__.co_firstlineno)], name
