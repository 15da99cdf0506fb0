"""The benchmark of one sequence over several ranks: each way is right, what cannot run says why, and results are drawn."""

import json
import subprocess
import sys

import pytest

from sparse_flash.benchmarks import context

pytestmark = pytest.mark.ranks
OURS = ["blocks, two calls", "blocks, one call", "heads", "auto"]
OTHERS = {"all-gather and FlexAttention": "no backward pass on a CPU", "PyTorch's ring": "causal"}


def started(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=600)


def test_torchrun_measures_each_way_and_a_plot_is_drawn_of_its_file(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    sizes = ["--tokens", "512", "--heads", "4", "2", "--head-dim", "16", "--device", "cpu", "--seconds", "0"]
    ways = [word for name in (*OURS, *OTHERS) for word in ("--way", name)]
    done = started(*launcher, context.__name__, *sizes, *ways, "--mask", "causal & documents", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "causal & documents, 512 tokens, 4/2 heads" in done.stdout
    (case,) = json.loads((tmp_path / "context.json").read_text())["cases"]
    assert case["ranks"] == 2 and "& documents(" in case["case"]["mask"]
    for name in OURS:
        found = case["ways"][name]
        assert found["error"] < 1e-5 and found["both_ms"] > 0 and (name == "auto" or found["exchange_ms"] > 0)
    # Half of the tokens of q and out, 4 heads, and of k and v, 2: for half of them, half of the heads; 16 numbers in float32.
    assert case["ways"]["heads"]["received_bytes"] == 256 * (2 * 4 + 2 * 2) / 2 * 16 * 4
    assert all(why in case["ways"][name]["refused"] for name, why in OTHERS.items())
    assert started("-m", context.__name__, "--draw", tmp_path / "context.json", "--out", tmp_path / "plots").returncode == 0
    assert all((tmp_path / "plots" / f"context{theme}.png").stat().st_size > 5000 for theme in ("", "-dark"))
    alone = started("-m", context.__name__)
    assert alone.returncode == 2 and "start it by torchrun" in alone.stderr
