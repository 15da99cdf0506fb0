"""The cost of choosing blocks, with other packages that choose: cases are checked before they are timed, what packages are given,
and what is said if they are missing or fail."""

import math

import pytest
import torch
from problems import provide, run_program

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


PROBLEM = ChooserCase("pooled(keep=2)", 128, Shape(1, 4, 2048, 16, kv_heads=2), True).dense(CPU, torch.float32)
LONG = "--tokens 2048 --heads 4 2 --head-dim 16 --block 128 --drawn --density 0.4"


def nearest(q, share):
    """The nearest blocks, a share of all."""
    rows = torch.arange(q.shape[2] // 128)
    return (rows[:, None] - rows < max(1, round(share * len(rows)))).tril().expand(1, q.shape[1], -1, -1)


@pytest.fixture
def prism(monkeypatch):
    def estimate(q, k, block_size, low_freq_threshold, high_freq_threshold):
        assert q.shape == k.shape and block_size == 128 and low_freq_threshold == high_freq_threshold
        return nearest(q, low_freq_threshold)

    def attend(q, k, v, blocks, **_):
        return sf.attention(q, k, v, sf.BlockMask.from_blocks(blocks, 128, within="causal"))

    return provide(monkeypatch, "prism.prism", prism_block_estimate=estimate, block_sparse_attention=attend)


def test_packages_are_timed_beside_ours_at_the_wanted_density_and_missing_ones_are_named(prism, tmp_path, capsys):
    status, data = run_program(choosers, tmp_path, f"{LONG} --spec 'pooled(keep=2)' --peer prism --peer minference")
    assert status == 1  # one is missing
    measured, missing = data["peers"]
    assert measured["source"].startswith("xinghaow99/prism@") and measured["shape"]["tokens"] == 2048 and measured["drawn"]
    assert measured["density"] == pytest.approx(0.4, abs=0.05) and 0 < measured["knob"]["threshold"] < 1
    assert min(measured[name] for name in ("choose_ms", "attend_ms", "both_ms", "speedup")) > 0
    assert measured["dense_density"] == 1 and measured["dense_error"] < 1e-5 < measured["loss"] < 1.5
    assert 0 < data["cases"][0]["loss"] < 1.5
    assert "No module named 'minference'" in missing["failed"] and "both_ms" not in missing
    said = capsys.readouterr().out
    assert "prism; B1 H4/2 N2048 D16; choose" in said and missing["failed"] in said


def test_ours_are_brought_to_the_density_of_packages(tmp_path):
    status, data = run_program(choosers, tmp_path, f"{LONG} --spec 'sampled(8, mass=?)'")
    (found,) = data["cases"]
    assert status == 0 and found["density"] == pytest.approx(0.4, abs=0.02) and "?" not in found["spec"] + found["case"]["chooser"]


def test_a_package_that_fails_or_returns_nan_is_a_result(prism, monkeypatch):
    monkeypatch.setattr(prism, "block_sparse_attention", lambda q, *_, **__: q * math.nan)
    assert "not finite" in choosers.run_package("prism", PROBLEM, PROBLEM, 0.3, CPU)["failed"]
    monkeypatch.setattr(prism, "prism_block_estimate", lambda *_, **__: 1 / 0)
    found = choosers.run_package("prism", PROBLEM, PROBLEM, 0.3, CPU)
    assert "ZeroDivisionError" in found["failed"] and found["source"].startswith("xinghaow99/prism@")
