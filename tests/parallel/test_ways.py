"""The benchmark of one sequence over several ranks: each way is right, and what cannot run says why."""

import json
import subprocess
import sys
from unittest import mock

import on_ranks
import pytest

from sparse_flash.benchmarks import context
from sparse_flash.benchmarks.baselines.context import WAYS

pytestmark = pytest.mark.ranks


def measured(mask: str, names: list[str]) -> dict:
    """On each rank."""
    case = context.ContextCase("a mask", mask, tokens=512, heads=4, kv_heads=2, head_dim=16)
    with mock.patch.object(context, "_LEAST", 1):
        return context.run(case, names, on_ranks.mesh(), context.Effort(seconds=0.0))


@pytest.mark.parametrize("mask", ["causal & local(100)", "global_tokens(64) | local(100)"])
def test_each_strategy_gives_what_one_rank_gives(pools, mask):
    names = ["blocks, two calls", "blocks, one call", "heads", "auto", "queries"]
    first, second = pools(2).run(measured, mask, names)
    assert first == second  # of the slowest rank, everywhere
    ran = {name: result for name, result in first["ways"].items() if "failed" not in result}
    assert ran.keys() >= set(names[:4]) and all(result["error"] < 1e-5 for result in ran.values())
    # Half of the tokens of q and out, 4 heads, and of k and v, 2: for half of them, half of the heads; 16 numbers in float32.
    assert ran["heads"]["received_bytes"] == 256 * (2 * 4 + 2 * 2) / 2 * 16 * 4
    assert all(ran[name]["exchange_ms"] > 0 for name in ("blocks, two calls", "blocks, one call", "heads"))
    time, linear, exchange, received, *_ = context.cells(first, "heads")
    assert time.count("/") == linear.count("/") == 1 and float(exchange) > 0 and received == "0"


def test_what_cannot_run_says_why(pools):
    found = pools(3).run(measured, "butterfly", list(WAYS))[0]["ways"]
    why = {name: result.get("refused") or result.get("failed") for name, result in found.items()}
    assert "3 ranks and 2 kv_heads" in why["heads"]
    assert "3 ranks must divide the 2 key heads" in why["heads around FlashAttention-4"]
    assert "no backward pass on a CPU" in why["all-gather and FlexAttention"] and "causal" in why["PyTorch's ring"]
    assert why["auto"] is None and found["auto"]["error"] < 1e-5


def test_torchrun_writes_the_cases_and_a_table(tmp_path):
    options = ["--tokens", "384", "--heads", "4", "2", "--head-dim", "16", "--way", "auto", "--device", "cpu"]
    options += ["--mask", "causal & documents"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", context.__name__, *options]
    done = subprocess.run([*run, "--out", str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "causal & documents, 384 tokens, 4/2 heads" in done.stdout
    (case,) = json.loads((tmp_path / "context.json").read_text())["cases"]
    assert case["ranks"] == 2 and "& documents(" in case["case"]["mask"] and case["ways"]["auto"]["error"] < 1e-5
    drawn = [sys.executable, "-m", context.__name__, "--draw", str(tmp_path / "context.json"), "--out", str(tmp_path / "plots")]
    assert subprocess.run(drawn, capture_output=True, text=True, timeout=600).returncode == 0
    assert all((tmp_path / "plots" / f"context{theme}.png").stat().st_size > 5000 for theme in ("", "-dark"))
    alone = subprocess.run([sys.executable, "-m", context.__name__], capture_output=True, text=True, timeout=600)
    assert alone.returncode == 2 and "start it by torchrun" in alone.stderr
