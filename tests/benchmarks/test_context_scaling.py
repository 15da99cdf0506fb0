"""The simulation of context parallelism: what it says follows from plans and rates."""

import json

import pytest

import sparse_flash as sf
from sparse_flash.benchmarks import context_scaling

RATES = {"link_rate": 1e11, "between_rate": 1e10, "flop_rate": 5e14, "node": 8}


def rows(text: str, **changes: float) -> list[dict]:
    return context_scaling.simulated(sf.compile_mask(text, 1 << 15), 8, 8, [1, 8, 16], **RATES | changes)


def test_one_rank_is_linear_and_none_is_faster_than_linear():
    for text in ("causal", "causal & local(1024)", "butterfly"):
        found = rows(text)
        assert found[0]["scaling"] == 1 and found[0]["received"] == 0
        assert all(row["scaling"] <= 1.001 for row in found)


def test_slower_links_slow_the_ranks_that_they_join():
    within, between = rows("butterfly", link_rate=1e10), rows("butterfly", between_rate=1e9)
    plain = rows("butterfly")
    assert within[1]["seconds"] > plain[1]["seconds"] and within[2]["seconds"] >= plain[2]["seconds"]
    assert between[1]["seconds"] == plain[1]["seconds"] and between[2]["seconds"] > plain[2]["seconds"]


def test_one_rank_takes_as_long_as_its_rows_and_products_at_their_rate():
    mask = sf.compile_mask("causal", 1 << 15)
    visited = int(mask.by_query.row_ptr[0, -1])
    products = visited * 128**2 * 4 * 128 * 8 / 5e14
    assert products < rows("causal")[0]["seconds"] < 1.05 * products
    assert rows("causal", flop_rate=1e15)[0]["seconds"] == pytest.approx(rows("causal")[0]["seconds"] / 2)


def test_masks_scale_up_to_the_first_number_of_ranks_below_half():
    points = [{"ranks": ranks, "scaling": scaling} for ranks, scaling in ((1, 1.0), (2, 0.9), (4, 0.4), (8, 0.6))]
    assert context_scaling.last_scaling(points) == 2
    assert context_scaling.last_scaling(points[:2]) == 2


def test_the_command_writes_figures_and_plots_and_says_that_they_are_simulated(tmp_path, capsys):
    context_scaling.main(["--out", str(tmp_path), "--tokens", "16384", "--ranks", "1", "8", "64"])
    data = json.loads((tmp_path / "context-scaling.json").read_text())
    assert list(data["masks"]) == list(context_scaling.masks(16384)) and len(data["masks"]["butterfly"]) == 3
    assert all((tmp_path / f"context-scaling{theme}.png").stat().st_size > 20_000 for theme in ("", "-dark"))
    assert "Simulated, not measured: 16,384 tokens" in capsys.readouterr().out
