"""The benchmark of one sequence over several ranks: each way is right, and what cannot run says why."""

import json
import subprocess
import sys

import pytest
import ways_on_ranks

from sparse_flash.benchmarks import context
from sparse_flash.benchmarks.baselines.context import WAYS

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("mask", ["causal & local(100)", "global_tokens(64) | local(100)"])
def test_each_strategy_gives_what_one_rank_gives_beside_its_floor(pools, mask):
    names = ["blocks, two calls", "blocks, one call", "heads", "auto", "queries"]
    first, second = pools(2).run(ways_on_ranks.run, mask, names)
    assert first == second  # of the slowest rank, everywhere
    ran = {name: result for name, result in first["ways"].items() if "refused" not in result}
    assert ran.keys() >= set(names[:4]) and all(result["error"] < 1e-5 for result in ran.values())
    assert all(result["received_bytes"] >= first["fewest_bytes"] > 0 for result in ran.values())
    for name in ("forward_ms", "both_ms"):
        assert first["floor_ms"][name] >= first["one"][name] / 2 and min(result[name] for result in ran.values()) > 0
    assert first["link_ms"] > 0 and "/" in context.said(first, "heads")


@pytest.mark.parametrize(
    "name, mask",
    [
        ("heads around FlashAttention-4", "causal"),
        ("heads around FlashAttention-4", "causal & local(100)"),
        ("all-gather and FlexAttention", "causal"),
        ("all-gather and FlexAttention", "butterfly(block=64)"),
    ],
)
def test_other_ways_give_what_one_rank_gives(pools, name, mask):
    assert max(pools(2).run(ways_on_ranks.error_of, name, mask)) < 1e-5


def test_what_cannot_run_says_why(pools):
    found = pools(3).run(ways_on_ranks.run, "butterfly", list(WAYS))[0]
    refused = {name: result["refused"] for name, result in found["ways"].items() if "refused" in result}
    assert "3 ranks and 2 key heads" in refused["heads"]
    assert "3 ranks must divide the 2 key heads" in refused["heads around FlashAttention-4"]
    assert "no backward pass on a CPU" in refused["all-gather and FlexAttention"] and "causal" in refused["PyTorch's ring"]
    assert found["ways"]["auto"]["error"] < 1e-5


def test_torchrun_writes_the_cases_and_a_table(tmp_path):
    options = ["--tokens", "384", "--heads", "4", "2", "--head-dim", "16", "--way", "auto", "--device", "cpu", "--mask", "causal"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", context.__name__, *options]
    done = subprocess.run([*run, "--out", str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "causal, 384 tokens, 4/2 heads" in done.stdout
    (case,) = json.loads((tmp_path / "context.json").read_text())["cases"]
    assert case["ranks"] == 2 and case["ways"]["auto"]["error"] < 1e-5
    alone = subprocess.run([sys.executable, "-m", context.__name__], capture_output=True, text=True, timeout=100)
    assert alone.returncode == 2 and "start it by torchrun" in alone.stderr
