"""The cost of choosing blocks: cases are checked before they are timed, and what is said of packages that are missing."""

import pytest
import torch
from problems import run_program

import sparse_flash as sf
from sparse_flash.benchmarks import choosers
from sparse_flash.benchmarks.choosers import ChooserCase
from sparse_flash.benchmarks.workload.cases import Shape

CPU = torch.device("cpu")
CASE = ChooserCase("sampled(8, floor=0.02)", 64, Shape(1, 8, 2048, 32, kv_heads=2), True)
SIZES = "--tokens 256 --heads 4 2 --head-dim 16 --block 64"


def test_the_command_checks_and_times_each_chooser_and_writes_a_table(tmp_path, capsys):
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
    assert (
        status == 1
        and "choose_ms" not in found
        and "2.00% of blocks differ" in found["failed"]
        and found["failed"] in capsys.readouterr().out
    )


def test_density_is_of_causal_blocks_and_planted_heads_need_unequal_numbers():
    q, k, _ = CASE.dense(CPU, torch.float32).leaves
    mask = sf.choose_blocks(CASE.spec, q, k)
    of_heads = choosers.densities(CASE, mask)
    assert (of_heads * (32 * 33 / 2)).round(9).tolist() == mask.kept_blocks()[0].sum((1, 2)).tolist()
    assert of_heads.max() > 1.3 * of_heads.min()


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
