"""Attention over picks beside another library: picks are as drawn, its call gets them, and wrong results are seen."""

import pytest
import torch
from problems import provide, run_program

import sparse_flash as sf
from sparse_flash.benchmarks import selection
from sparse_flash.benchmarks.baselines import selection as peers
from sparse_flash.benchmarks.selection import PicksCase

CPU = torch.device("cpu")
CASE = PicksCase(tokens=320, heads=4, kv_heads=2, head_dim=16, block_size=32, picks=4, alike=0.5)


def attention(q, k, v, picks, block_size):
    """q, k, v: (1, heads, tokens, head_dim). picks: (1, kv_heads, tokens, picks)."""
    return sf.attention(q, k, v, sf.BlockSelection.from_picks(picks, block_size), backend="reference")


def packed(q, k, v, picks, block_size, cu_seqlens):
    assert cu_seqlens.tolist() == [0, len(q)] and cu_seqlens.dtype == picks.dtype == torch.int32
    return attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), picks[None], block_size)[0].transpose(0, 1)


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


def one_pick_fewer(q, k, v, picks, block_size, cu_seqlens):
    return packed(q, k, v, picks[..., 1:], block_size, cu_seqlens)


def test_the_library_gives_the_same_results_and_a_wrong_one_is_seen(monkeypatch):
    provide(monkeypatch, peers._NSA, topk_sparse_attention=packed)
    found = selection.run(CASE, ["nsa-triton", "sparse_flash"], CPU, torch.float64)["results"]
    for result in found.values():
        assert result["correct"] and max(result["errors"].values()) < 1e-9
        assert result["forward_ms"] > 0 and result["backward_tflops"] > 0
    provide(monkeypatch, peers._NSA, topk_sparse_attention=one_pick_fewer)
    found = selection.run(CASE, ["nsa-triton"], CPU, torch.float32)["results"]["nsa-triton"]
    assert not found["correct"] and "wrong" in selection.format_result(found)


def test_a_failure_is_a_result_and_what_a_library_cannot_do_is_said(monkeypatch):
    found = selection.run(CASE, ["nsa-triton", peers.DENSE], CPU, torch.float32)["results"]
    assert f"{peers._NSA} does not load" in found["nsa-triton"]["refused"]
    assert found[peers.DENSE] == {"refused": "cuDNN runs on GPUs"}
    provide(monkeypatch, peers._NSA, topk_sparse_attention=lambda *_: 1 / 0)
    found = selection.run(CASE, ["nsa-triton"], CPU, torch.float32)["results"]
    assert found == {"nsa-triton": {"failed": "ZeroDivisionError: division by zero"}}


def test_counted_pairs_are_those_that_queries_keep():
    chosen = selection.selection_of(CASE, CPU)
    assert selection.kept_pairs(CASE, chosen) == 2 * int(chosen.to_dense().sum())


def test_the_command_writes_its_cases_and_a_table(tmp_path, capsys):
    sizes = "--tokens 192 --heads 4 2 --head-dim 16 --block 32 --picks 3"
    status, data = run_program(selection, tmp_path, f"{sizes} --peer sparse_flash --peer nsa-triton")
    cases = data["cases"]
    assert status == 0 and [case["name"] for case in cases] == ["4/2 3 of 32 independent", "4/2 3 of 32 80% alike"]
    assert all(case["results"]["sparse_flash"]["correct"] and case["tflop"] > 0 for case in cases)
    said = capsys.readouterr()
    assert "4/2 3 of 32 independent" in said.out and "does not load" in said.err
