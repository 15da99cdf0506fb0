"""Steps of video transformers: each case is checked and timed, or says why not; windows are what they are called."""

import pytest
from problems import run_program

from sparse_flash.benchmarks import video
from sparse_flash.benchmarks.workload.video import ALL_PAIRS, MODELS, StepCase


def run(folder, arguments):
    if "steps" in arguments:
        pytest.importorskip("diffusers", minversion="0.42", reason="diffusers is not installed: pip install 'diffusers>=0.42.1'")
    return run_program(video, folder, f"--seconds 0 {arguments}")


def test_a_step_is_timed_each_way_and_all_pairs_in_tiles_equal_dense(tmp_path, capsys):
    code, data = run(tmp_path, "--part steps --how eager")
    rows = {found["name"]: found for found in data["steps"]}
    assert code == 0 and data["environment"]["source"] and not data["kernels"]
    assert rows[ALL_PAIRS]["difference"] < 1e-5 and {"sdpa", "chosen 10%"} < set(rows)
    dense = min(found["step_ms"] for found in data["steps"] if found["spec"] is None)
    for found in data["steps"]:
        assert found["step_ms"] > 0 and found["steps"] >= 3
        if found["spec"]:
            assert found["speedup"] == pytest.approx(dense / found["step_ms"])
    assert "window 20%, tile (1, 16, 8)" in capsys.readouterr().out


def test_ways_that_are_missing_fail_or_differ_are_rows_and_a_difference_is_an_error(tmp_path, monkeypatch):
    window, differing = "tile_window(layout, (9, 9))", "tile_window(layout, 1)"
    found = [StepCase("sdpa"), StepCase("fa4"), StepCase("window", window), StepCase(ALL_PAIRS, differing)]
    monkeypatch.setattr(video, "step_cases", lambda *_: found)
    code, data = run(tmp_path, "--part steps")
    assert code == 1 and data["steps"][3]["difference"] > 1e-3
    assert "not installed" in data["steps"][1]["refused"] and "window must be" in data["steps"][2]["failed"]


def test_windows_are_checked_beside_dense_and_no_part_begins_after_the_limit(tmp_path, capsys):
    code, data = run(tmp_path, "--part kernels --only sparse_flash")
    assert code == 0 and all(found["correct"] and found["backward_ms"] > 0 for found in data["kernels"])
    assert [found["label"] for found in data["kernels"]] == ["toy", "toy", "toy, ragged", "toy, ragged"] * 2
    code, data = run(tmp_path, "--limit -1")
    assert code == 0 and not data["steps"] + data["kernels"] + data["permutation"]
    assert "the rest was not begun" in capsys.readouterr().out


def test_the_permutation_is_timed_beside_a_copy_in_bytes_read_and_written(tmp_path):
    _, data = run(tmp_path, "--part permutation")
    layout = MODELS["toy"].layout("auto")
    assert [found["what"] for found in data["permutation"]] == ["copy", "to_tiles", "to_raster"] * 2
    for found in data["permutation"]:
        rows = 2 * layout.tokens if found["what"] == "copy" else layout.tokens + layout.length
        assert found["bytes"] == rows * 32 * 4 and min(found["forward_gb_s"], found["backward_gb_s"]) > 0
