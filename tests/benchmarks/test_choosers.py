"""The cost of choosing blocks: cases are checked before they are timed, and planted inputs differ by head."""

import json

import pytest
import torch

import sparse_flash as sf
from sparse_flash.benchmarks import choosers
from sparse_flash.benchmarks.choosers import ChooserCase
from sparse_flash.benchmarks.workload.cases import Shape

CPU = torch.device("cpu")
CASE = ChooserCase("sampled(8, floor=0.02)", 64, Shape(1, 8, 2048, 32, kv_heads=2), True)
SIZES = ["--tokens", "256", "--heads", "4", "2", "--head-dim", "16", "--block", "64", "--device", "cpu"]


def test_the_command_checks_and_times_each_chooser_and_writes_a_table(tmp_path, capsys):
    specs = ["--spec", "sampled(8, budget=0.5)", "--spec", "pooled(keep=2)"]
    assert choosers.main([*SIZES, *specs, "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "choosers.json").read_text())
    assert data["environment"]["source"] and [case["case"]["chooser"] for case in data["cases"]] == specs[1::2]
    for found in data["cases"]:
        assert found["differing"] == 0 and found["checked_tokens"] == 256 and found["dense"]["sparse_flash"]["correct"]
        assert min(found["choose_ms"], found["attend_ms"], found["both_ms"], found["speedup"]) > 0
        assert found["density"] == pytest.approx(sum(found["density_of_heads"]) / 4) and 0 < found["density"] <= 1
    said = capsys.readouterr().out
    assert "pooled(keep=2), blocks of 64, B1 H4/2 N256 D16" in said and "speed-up" in said


def test_a_choice_unlike_the_definitions_is_an_error_and_not_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(choosers, "share_differing", lambda *_: 0.02)
    assert choosers.main([*SIZES, "--spec", "pooled(keep=2)", "--out", str(tmp_path)]) == 1
    (found,) = json.loads((tmp_path / "choosers.json").read_text())["cases"]
    assert "choose_ms" not in found and "2.00% of blocks differ" in found["failed"] and found["failed"] in capsys.readouterr().out


def test_density_is_of_causal_blocks_and_planted_heads_need_unequal_numbers():
    q, k, _ = CASE.dense(CPU, torch.float32).leaves
    mask = sf.choose_blocks(CASE.spec, q, k)
    of_heads = choosers.densities(CASE, mask)
    assert (of_heads * (32 * 33 / 2)).round(9).tolist() == mask.kept_blocks()[0].sum((1, 2)).tolist()
    assert of_heads.max() > 1.3 * of_heads.min()


def test_no_case_begins_after_the_limit_and_only_choosers_are_taken(tmp_path, capsys):
    assert choosers.main([*SIZES, "--limit", "-1", "--out", str(tmp_path)]) == 0
    assert "7 cases were not begun" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        choosers.main([*SIZES, "--spec", "local(8)", "--out", str(tmp_path)])
    assert "must be one chooser" in capsys.readouterr().err
