"""What explain and draw say of a selection."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from oracle import tensor

import sparse_flash as sf
from sparse_flash.tools.draw import make_picture


def selection():
    generator = torch.Generator().manual_seed(2)
    q, k = tensor((2, 4, 150, 8), generator=generator), tensor((2, 2, 150, 8), generator=generator)
    return sf.topk_blocks(q, k, 4, every=1, block_size=16, always="sinks(2) | local(20)", share_group=True)


def test_the_numbers_of_explain_are_those_of_the_picks():
    chosen = selection()
    e, kept, causal = sf.explain(chosen, heads=8, head_dim=8), chosen.to_dense().sum().item() / 4, 150 * 151 / 2
    assert (e.density, e.causal_density) == pytest.approx((kept / 150**2, kept / causal))
    assert (e.flops, e.dense_flops) == pytest.approx((4 * 2 * 8 * 8 * kept, 4 * 2 * 8 * 8 * causal))
    rows = [[set(row[row >= 0].tolist()) for row in line] for line in chosen.picks.flatten(0, 1)]
    assert e.picks == pytest.approx(sum(len(row) for line in rows for row in line) / (4 * chosen.q_len))
    alike = sum(len(a & b) for line in rows for a, b in pairwise(line))
    assert e.alike == pytest.approx(alike / sum(len(row) for line in rows for row in line[1:]))
    with torch.device("meta"):  # which is not that of the selection
        assert sf.explain(chosen, heads=4).density == chosen.density


def test_picks_that_are_alike_are_told():
    alike = sf.BlockSelection.from_picks(torch.zeros(1, 1, 400, 1, dtype=torch.int32), 16)
    assert "every=" in str(sf.explain(alike)) and not sf.explain(selection(), heads=2).hints
    empty = sf.topk_blocks(*[torch.zeros(0, 2, 32, 8)] * 2, 1, every=1, block_size=16)
    assert sf.explain(empty, heads=2).flops == sf.explain(empty, heads=2).picks == 0


@pytest.mark.parametrize("level", ["tokens", "blocks"])
def test_a_picture_shows_the_share_of_kept_pairs(level, tmp_path):
    one = selection().select(1, 1)
    picture, kept = make_picture(one, 5, 5, level), one.to_dense()[0, 0].double().cpu().numpy()
    starts = range(0, 150, picture.unit)
    cells, sizes = np.add.reduceat(np.add.reduceat(kept, starts, 0), starts, 1), np.diff([*starts, 150])
    np.testing.assert_allclose(picture.shares, cells / np.outer(sizes, sizes))
    drawing = sf.draw(one, tmp_path / "one.png")
    assert "blocks of 16 picked by query" in str(drawing) and (tmp_path / "one.png").exists()
