"""``sf.bench``: rows of figures for a user's masks and sizes."""

import pytest
import torch

import sparse_flash as sf
from sparse_flash.benchmarks.measure import throughput


def test_a_row_has_the_figures_of_a_mask_and_of_the_dense_call_that_it_replaces():
    masks = ["causal & local(64)", sf.local(64), ["causal & local(64)", "local(32)"]]
    rows = sf.bench(masks, 512, heads=2, kv_heads=1, head_dim=16, batch=2, dtype=torch.float64, device="cpu", quick=True)
    assert [row.mask for row in rows] == ["causal & local(64)", "local(64)", "per_head([causal & local(64), local(32)])"]
    assert [row.over for row in rows] == ["causal, sdpa-flash", "full, sdpa-flash", "full, sdpa-flash"]
    for row, mask in zip(rows, masks, strict=True):
        heads = mask if isinstance(mask, list) else [mask] * 2
        assert row.kept == pytest.approx(sum(sf.compile_mask(head, 512).density for head in heads) / 2)
        assert row.correct and not row.failed and row.memory > 0 and row.backend == "torch"
        assert row.forward_speedup == pytest.approx(row.dense_forward_ms / row.forward_ms)
        dense = row.dense_forward_ms + row.dense_backward_ms
        assert row.speedup == pytest.approx(dense / (row.forward_ms + row.backward_ms))
        assert f"{row.speedup:.2f} times as fast as dense attention ({row.over})" in str(row)
    assert rows[0].at_best == pytest.approx(10 / 7)  # of 4 x 4 blocks, causal attention visits 10 and this window 7


def test_a_single_mask_without_spec_text_is_measured_and_no_file_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (row,) = sf.bench(sf.causal() & sf.from_mask_fn(lambda q, kv: q - kv < 64), 256, quick=True, device="cpu")
    assert row.correct and row.speedup and row.over.startswith("causal") and not list(tmp_path.iterdir())


def test_a_failure_is_a_row_that_says_why(monkeypatch):
    measured = throughput.run
    fails = {"out_of_memory": "no memory left"}
    monkeypatch.setattr(throughput, "run", lambda case, *rest: fails if "local" in case.key else measured(case, *rest))
    row, other = sf.bench(["causal & local(64)", "causal"], 256, quick=True, device="cpu")
    assert row.failed == "no memory left" and row.speedup is None and str(row).endswith("no result: no memory left")
    assert other.correct and not other.failed
