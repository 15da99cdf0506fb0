"""What explain and draw say of a selection."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from oracle import tensor

import sparse_flash as sf
from sparse_flash.tools.draw import make_picture


def selection(every=1, always=None):
    generator = torch.Generator().manual_seed(2)
    q, k = tensor((2, 4, 150, 8), generator=generator), tensor((2, 2, 150, 8), generator=generator)
    return sf.topk_blocks(q, k, 4, every=every, block_size=16, always=always, share_group=True)


@pytest.mark.parametrize("every", [1, 4])
def test_the_numbers_of_explain_are_those_of_the_picks(every):
    chosen = selection(every, "sinks(2) | local(20)")
    e = sf.explain(chosen, heads=8, head_dim=8)
    dense = chosen.to_dense()
    causal = 150 * 151 / 2
    assert e.density == pytest.approx(dense.float().mean().item())
    assert e.causal_density == pytest.approx(dense.sum().item() / 4 / causal)
    assert e.flops == pytest.approx(4 * 2 * 8 * 8 * dense.sum().item() / 4) and e.dense_flops == 4 * 2 * 8 * 8 * causal
    rows = [[set(row[row >= 0].tolist()) for row in line] for line in chosen.picks.flatten(0, 1)]
    count = sum(len(row) for line in rows for row in line)
    assert e.picks == pytest.approx(count / (4 * chosen.groups))
    alike = sum(len(a & b) for line in rows for a, b in pairwise(line))
    assert e.alike == pytest.approx(alike / sum(len(row) for line in rows for row in line[1:]))
    assert "a choice on average" in str(e) and e.table_bytes == chosen.nbytes
    with torch.device("meta"):  # which is not that of the selection
        assert sf.explain(chosen, heads=4).density == chosen.density
        assert torch.equal(chosen.kept_keys(70, 1), dense[1, 0, 70].cpu())


def test_picks_that_are_alike_are_told():
    alike = sf.BlockSelection.from_picks(torch.zeros(1, 1, 400, 1, dtype=torch.int32), 16)
    assert "every=" in str(sf.explain(alike)) and not sf.explain(selection(), heads=2).hints
    empty = sf.topk_blocks(*[torch.zeros(0, 2, 32, 8)] * 2, 1, every=1, block_size=16)
    assert sf.explain(empty, heads=2).flops == sf.explain(empty, heads=2).picks == 0


@pytest.mark.parametrize("level", ["tokens", "blocks"])
def test_a_picture_shows_the_share_of_kept_pairs(level, tmp_path):
    one = selection(always="sinks(2) | local(20)").select(1, 1)
    picture = make_picture(one, 5, 5, level)
    kept = torch.nn.functional.pad(one.to_dense()[0, 0].double().cpu(), (0, -150 % picture.unit, 0, -150 % picture.unit))
    totals = kept.unfold(0, picture.unit, picture.unit).unfold(1, picture.unit, picture.unit).sum((2, 3)).numpy()
    rows, cols = picture.shares.shape
    sizes = [min(picture.unit, 150 - i * picture.unit) for i in range(rows)]
    assert (rows, cols) == totals.shape and picture.level == level
    np.testing.assert_allclose(picture.shares, totals / np.outer(sizes, sizes))
    drawing = sf.draw(one, tmp_path / "one.png")
    assert "blocks of 16 picked by query" in str(drawing) and (tmp_path / "one.png").exists()


def test_pairs_are_counted_in_cells_of_whole_blocks():
    one = selection(always="sinks(2) | local(20)").select(1, 1)
    size = max(one.block_size, one.always.block_size)
    assert one.kept_pairs(unit=size).sum() == one.kept_pairs().sum() == one.to_dense().sum()
    for unit in (0, 3, size + 1):
        with pytest.raises(ValueError, match=f"the sizes of blocks; got {unit}"):
            one.kept_pairs(unit=unit)
