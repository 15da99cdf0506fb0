"""The benchmark of decoding times calls that compute what it says."""

import torch
from problems import run_program

from sparse_flash.benchmarks import decoding

CPU = torch.device("cpu")


def test_a_run_measures_every_cache_and_keeps_what_it_measured(tmp_path, capsys):
    status, data = run_program(decoding, tmp_path, "--tokens 128 --batch 2 --page 0 --page 16 --heads 4 2 --head-dim 16")
    rows = data["rows"]
    assert status == 0 and "times as fast" in capsys.readouterr().out
    assert {(row["what"], row["page"], row["cache"]) for row in rows} == {
        (what, page, cache) for what in decoding.WHAT for page in (0, 16) for cache in ("float32", "e4m3", "e4m3 by token")
    }
    for row in rows:
        assert row["us"] > 0 and row["error"] < 1e-5
        assert row["total"] < 1e-5 if row["cache"] == "float32" else 1e-3 < row["total"] < 0.1
