"""Each program that measures runs in its smallest size, checks what it times, writes its rows, and says why one has no figures."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from problems import run_program

import sparse_flash as sf
from sparse_flash.benchmarks import calls, checkouts, choosers, decoding, precision, selection, video
from sparse_flash.benchmarks.baselines.selection import SparseFlashSelection
from sparse_flash.benchmarks.choosers import ChooserCase
from sparse_flash.benchmarks.selection import PicksCase
from sparse_flash.benchmarks.workload.cases import Shape
from sparse_flash.benchmarks.workload.video import ALL_PAIRS, MODELS, NVIDIA, StepCase, step_cases

CPU, ROOT = torch.device("cpu"), Path(__file__).parents[2]
CHOOSER = ChooserCase("sampled(8, floor=0.02)", 64, Shape(1, 8, 2048, 32, kv_heads=2), True)
PICKS = PicksCase(tokens=320, heads=4, kv_heads=2, head_dim=16, block_size=32, picks=4, alike=0.5)
SIZES = "--tokens 256 --heads 4 2 --head-dim 16 --block 64"  # of choosers


def test_host_times_of_calls_are_measured_with_and_without_gradients(tmp_path):
    _, data = run_program(calls, tmp_path, "--tokens 128 --heads 2 --head-dim 16 --seconds 0")
    rows = data["rows"]
    assert len(rows) == 23 and all(row["host_us"] > 0 and row["each_us"] > 0 for row in rows)
    assert [row["gradients"] for row in rows if row["call"] == "packed documents"] == [False, True]


def test_each_chooser_is_checked_and_timed_and_a_table_is_written(tmp_path, capsys):
    specs = ["sampled(8, budget=0.5)", "pooled(keep=2)"]
    status, data = run_program(choosers, tmp_path, f"{SIZES} --spec '{specs[0]}' --spec '{specs[1]}'")
    assert status == 0 and data["environment"]["source"] and [case["case"]["chooser"] for case in data["cases"]] == specs
    for found in data["cases"]:
        assert found["differing"] == 0 and found["checked_tokens"] == 256 and found["dense"]["sparse_flash"]["correct"]
        assert min(found["choose_ms"], found["attend_ms"], found["both_ms"], found["speedup"]) > 0
        assert found["density"] == pytest.approx(sum(found["density_of_heads"]) / 4) and 0 < found["density"] <= 1
    said = capsys.readouterr().out
    assert "pooled(keep=2), blocks of 64, B1 H4/2 N256 D16" in said and "speed-up" in said


def test_a_choice_unlike_the_definitions_is_an_error_and_not_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(choosers, "share_differing", lambda *_: 0.02)
    status, data = run_program(choosers, tmp_path, f"{SIZES} --spec 'pooled(keep=2)'")
    (found,) = data["cases"]
    assert status == 1 and "2.00% of blocks differ" in found["failed"] and "choose_ms" not in found
    assert found["failed"] in capsys.readouterr().out


def test_no_case_begins_after_the_limit_and_only_choosers_are_taken(tmp_path, capsys):
    assert run_program(choosers, tmp_path, f"{SIZES} --limit -1")[0] == 0
    assert "7 cases were not begun" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_program(choosers, tmp_path, f"{SIZES} --spec 'local(8)'")
    assert "must be one chooser" in capsys.readouterr().err


def test_ours_are_brought_to_the_wanted_density_and_a_package_that_is_missing_is_a_result(tmp_path, capsys):
    sizes = "--tokens 2048 --heads 4 2 --head-dim 16 --block 128 --drawn --density 0.4"
    status, data = run_program(choosers, tmp_path, f"{sizes} --spec 'sampled(8, mass=?)' --peer prism")
    (ours,), (missing,) = data["cases"], data["peers"]
    assert ours["density"] == pytest.approx(0.4, abs=0.02) and "?" not in ours["spec"] + ours["case"]["chooser"]
    assert 0 < ours["loss"] < 1.5
    assert status == 1 and "No module named 'prism'" in missing["failed"] and "both_ms" not in missing
    assert missing["source"].startswith("xinghaow99/prism@") and missing["failed"] in capsys.readouterr().out


@pytest.mark.parametrize("alike", [0.0, 0.8])
def test_picks_are_earlier_blocks_and_change_as_often_as_asked(alike):
    case = PicksCase(tokens=4096, heads=2, kv_heads=2, head_dim=16, block_size=16, picks=8, alike=alike)
    picks = selection.draw_picks(case, CPU)
    own = (torch.arange(case.tokens) // case.block_size)[None, None, :, None]
    assert bool((picks <= own).all()) and bool((picks[..., -1:] == own).all()) and picks.dtype == torch.int32
    others = picks[:, :, 2048:, :-1]
    assert bool((others >= 0).all()) and bool((others < own[:, :, 2048:]).all())
    kept = (others[:, :, 1:] == others[:, :, :-1]).double().mean()
    assert float(kept) == pytest.approx(alike + (1 - alike) / 192, abs=0.02)  # 128 to 256 earlier blocks: some are drawn again
    assert bool((picks[:, :, 40] >= 0).sum(-1).eq(3).all())  # two earlier blocks, both kept, and its own


def test_attention_over_picks_is_timed_and_missing_peers_are_named(tmp_path, capsys):
    sizes = "--tokens 192 --heads 4 2 --head-dim 16 --block 32 --picks 3"
    status, data = run_program(selection, tmp_path, f"{sizes} --peer sparse_flash --peer nsa-triton --peer dense-sdpa-cudnn")
    cases = data["cases"]
    assert status == 0 and ["independent" in case["name"] for case in cases] == [True, False]
    for case in cases:
        ours, library, dense = case["results"].values()
        assert ours["correct"] and min(ours["forward_ms"], ours["backward_tflops"], case["tflop"]) > 0
        assert "does not load" in library["refused"] and dense == {"refused": "cuDNN runs on GPUs"}
    said = capsys.readouterr()
    assert "4/2 3 of 32 independent, 192 tokens" in said.out and "does not load" in said.err


def test_an_indexer_chooses_a_querys_block_and_the_choice_is_timed():
    chosen, time = selection.choose(replace(PICKS, alike=None), CPU, torch.float32)
    own = torch.arange(PICKS.tokens) // PICKS.block_size
    assert chosen.picks.shape == (1, 2, 320, 4) and (chosen.picks == own[:, None]).any(-1).all() and time["choose_ms"] > 0
    assert selection.run(replace(PICKS, alike=None), ["sparse_flash"], CPU, torch.float32)["results"]["sparse_flash"]["correct"]


def test_a_wrong_result_over_picks_is_seen_and_pairs_are_those_that_queries_keep(monkeypatch):
    picks = selection.draw_picks(PICKS, CPU)
    right, wrong = (sf.BlockSelection.from_picks(some, PICKS.block_size) for some in (picks, picks[..., 1:]))
    assert selection.kept_pairs(PICKS, right) == 2 * int(right.to_dense().sum())
    monkeypatch.setattr(SparseFlashSelection, "prepare", lambda _, given: lambda: sf.attention(*given.leaves, wrong))
    found = selection.run(PICKS, ["sparse_flash"], CPU, torch.float32)["results"]["sparse_flash"]
    assert not found["correct"] and "wrong" in selection.format_result(found)


def test_decoding_over_every_cache_is_checked_and_timed(tmp_path, capsys):
    status, data = run_program(decoding, tmp_path, "--tokens 128 --batch 2 --page 0 --page 16 --heads 4 2 --head-dim 16")
    rows = data["rows"]
    assert status == 0 and "times as fast" in capsys.readouterr().out
    assert {(row["what"], row["page"], row["cache"]) for row in rows} == {
        (what, page, cache) for what in decoding.WHAT for page in (0, 16) for cache in ("float32", "e4m3", "e4m3 by token")
    }
    for row in rows:
        assert row["us"] > 0 and row["error"] < 1e-5
        assert row["total"] < 1e-5 if row["cache"] == "float32" else 1e-3 < row["total"] < 0.1


def test_a_row_that_fails_in_eight_bits_is_a_result_and_the_rest_run():
    # On a CPU no back end and no kernel computes in e4m3, and neither peer runs.
    row = precision.PrecisionRow("small", "causal", None, 128, 256, 4, 2, 64, choice="causal & sampled(8, keep=0.5)")
    results = precision.measure_row(row, 60, CPU)["results"]
    assert results.pop("rounding")  # which Triton's interpreter runs
    assert {name for name, result in results.items() if "ms" in result} == {"bf16", "choice and bf16", "choice"}
    failed = {name: result["failed"] for name, result in results.items() if "ms" not in result}
    assert set(failed) == {"fp8", "choice and fp8", "kernel", "FlashAttention-3 fp8", "cuDNN fp8"}
    assert "is installed" in failed["FlashAttention-3 fp8"] and "no back end can run this call" in failed["fp8"]
    assert results["bf16"]["speedup"] == 1.0 and results["choice and bf16"]["from_bf16"] == 0.0
    assert 0.2 < results["choice"]["density"] < 0.6
    assert all(precision.format_result(result) for result in results.values())


def run_video(folder, arguments):
    if "steps" in arguments:
        pytest.importorskip("diffusers", minversion="0.42", reason="diffusers is not installed: pip install 'diffusers>=0.42.1'")
    return run_program(video, folder, f"--seconds 0 {arguments}")


def test_a_video_models_step_is_timed_each_way_and_all_pairs_in_tiles_equal_dense(tmp_path, capsys):
    code, data = run_video(tmp_path, "--part steps --how eager")
    rows = {found["name"]: found for found in data["steps"]}
    assert code == 0 and data["environment"]["source"] and not data["kernels"]
    assert rows[ALL_PAIRS]["difference"] < 1e-5 and {"sdpa", "chosen 10% by 8 queries"} < set(rows)
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
    code, data = run_video(tmp_path, "--part steps")
    assert code == 1 and data["steps"][3]["difference"] > 1e-3
    assert "not installed" in data["steps"][1]["refused"] and "window must be" in data["steps"][2]["failed"]


def attend_to_listed_blocks(q, k, v, index, q2k_block_nums, sparse_block_size):
    """In place of NVIDIA's, by its signature."""
    listed = torch.arange(index.shape[-1]) < q2k_block_nums[..., None]
    kept = torch.zeros(*index.shape[:3], k.shape[2] // sparse_block_size, dtype=torch.bool).scatter(-1, index.long(), listed)
    kept = kept.repeat_interleave(sparse_block_size, 2).repeat_interleave(sparse_block_size, 3)
    return {"o_tensor": torch.nn.functional.scaled_dot_product_attention(q, k, v, kept)}


def test_nvidias_blocks_in_a_step_equal_ours_in_whole_tiles_and_minimax_h3s_inputs_are_right(tmp_path, monkeypatch):
    small = {"attention_head_dim": 16, "hidden_size": 24, "num_refiner_layers": 1, "ffn_dim": 32, "text_dim": 8, "freq_dim": 16}
    small |= {"time_embed_hidden_dim": 16, "time_embed_dim": 16, "rope_freq_dim": 2}
    sizes = {"latents": (4, 32, 32), "tile": (2, 8, 8), "heads": 2, "layers": {"num_layers": 2}, "text": 80, "audio": 48}
    monkeypatch.setitem(MODELS, "h3-31k", replace(MODELS["h3-31k"], config=small, **sizes))
    bsa = SimpleNamespace(BSA=SimpleNamespace(block_sparse_attention_forward=attend_to_listed_blocks))
    monkeypatch.setitem(sys.modules, "cudnn.block_sparse_attention", bsa)
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(block_sparse_attention=bsa))
    of_gpus = step_cases(MODELS["h3-31k"], "eager", torch.device("cuda"))
    monkeypatch.setattr(video, "step_cases", lambda *_: [StepCase("sdpa"), *of_gpus[2:]])
    monkeypatch.setattr(video, "_attend_by_torch", Mock(wraps=video._attend_by_torch))
    code, data = run_video(tmp_path, "--part steps --model h3-31k")
    rows = {found["name"]: found for found in data["steps"]}
    assert code == 0 and rows["sdpa"]["tokens"] == 1152 and video._attend_by_torch.call_count == 2 * (rows["sdpa"]["steps"] + 2)
    assert min(found["difference"] for found in rows.values() if found["spec"] not in (None, "layout")) > 1e-3
    assert rows[ALL_PAIRS]["difference"] < 1e-5
    assert rows[NVIDIA]["difference"] == pytest.approx(data["steps"][2]["difference"], rel=1e-4)


def test_windows_of_tiles_are_checked_against_dense_within_the_time_limit(tmp_path, capsys):
    code, data = run_video(tmp_path, "--part kernels --only sparse_flash")
    assert code == 0 and all(found["correct"] and found["backward_ms"] > 0 for found in data["kernels"])
    assert [found["label"] for found in data["kernels"]] == ["toy", "toy", "toy, ragged", "toy, ragged"] * 2
    code, data = run_video(tmp_path, "--limit -1")
    assert code == 0 and not data["steps"] + data["kernels"]
    assert "the rest was not begun" in capsys.readouterr().out


DOUBLED = """
attention_of_base = attention
def attention(*arguments, **options):
    return 2 * attention_of_base(*arguments, **options)
"""


@pytest.mark.ranks  # it starts processes
def test_each_checkout_runs_its_code_and_different_results_are_named(tmp_path):
    for name in ("sparse_flash", "patterns"):
        shutil.copytree(ROOT / name, tmp_path / "doubled" / name, ignore=shutil.ignore_patterns("__pycache__", "benchmarks"))
    with open(tmp_path / "doubled" / "sparse_flash" / "__init__.py", "a") as file:
        file.write(DOUBLED)
    folders = [str(ROOT), str(tmp_path / "doubled"), str(ROOT)]
    case = "1 4/2 300 64 causal & local(50)"
    assert checkouts.main([*folders, "--case", case, "--rounds", "2", "--out", str(tmp_path)]) == 1
    (row,) = json.loads((tmp_path / "checkouts.json").read_text())["rows"]
    assert row["case"] == case and row["differing"] == ["doubled"]
    assert [len(ms) for ms in row["ms"]] == [2, 2, 2] and all(one > 0 for ms in row["ms"] for one in ms)


def test_a_folder_without_the_package_and_a_backward_pass_in_fp8_are_refused(tmp_path, capsys):
    for arguments, text in (([str(tmp_path)], "no checkout of sparse_flash"), ([str(ROOT), "--precision", "fp8"], "add --forward")):
        with pytest.raises(SystemExit):
            checkouts.main(arguments)
        assert text in capsys.readouterr().err
