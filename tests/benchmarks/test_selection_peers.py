"""Attention over picks: they are as drawn, and each peer has its figures or says why not."""

import pytest
import torch
from problems import run_program

import sparse_flash as sf
from sparse_flash.benchmarks import selection
from sparse_flash.benchmarks.baselines import selection as peers
from sparse_flash.benchmarks.selection import PicksCase

CPU = torch.device("cpu")
CASE = PicksCase(tokens=320, heads=4, kv_heads=2, head_dim=16, block_size=32, picks=4, alike=0.5)


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


def test_counted_pairs_are_those_that_queries_keep():
    chosen = sf.BlockSelection.from_picks(selection.draw_picks(CASE, CPU), CASE.block_size)
    assert selection.kept_pairs(CASE, chosen) == 2 * int(chosen.to_dense().sum())


def test_the_command_writes_its_cases_and_a_table_and_says_which_peers_are_missing(tmp_path, capsys):
    sizes = "--tokens 192 --heads 4 2 --head-dim 16 --block 32 --picks 3"
    status, data = run_program(selection, tmp_path, f"{sizes} --peer sparse_flash --peer nsa-triton --peer sdpa-cudnn")
    cases = data["cases"]
    assert status == 0 and [case["name"] for case in cases] == ["4/2 3 of 32 independent", "4/2 3 of 32 80% alike"]
    for case in cases:
        ours, library, dense = case["results"].values()
        assert ours["correct"] and min(ours["forward_ms"], ours["backward_tflops"], case["tflop"]) > 0
        assert "does not load" in library["refused"] and dense == {"refused": "cuDNN runs on GPUs"}
    said = capsys.readouterr()
    assert "4/2 3 of 32 independent" in said.out and "does not load" in said.err


def test_a_wrong_result_is_seen(monkeypatch):
    wrong = sf.BlockSelection.from_picks(selection.draw_picks(CASE, CPU)[..., 1:], CASE.block_size)  # a pick fewer
    monkeypatch.setattr(peers.SparseFlashSelection, "prepare", lambda _, given: lambda: sf.attention(*given.leaves, wrong))
    found = selection.run(CASE, ["sparse_flash"], CPU, torch.float32)["results"]["sparse_flash"]
    assert not found["correct"] and "wrong" in selection.format_result(found)
