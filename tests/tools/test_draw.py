"""Pictures of masks: their cells against the dense mask, their text and files."""

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

import sparse_flash as sf
from sparse_flash.tools import draw


@settings(max_examples=40)
@given(
    pattern=strategies.expressions,
    lengths=strategies.lengths,
    block=strategies.block_sizes,
    level=st.sampled_from(["tokens", "blocks"]),
)
def test_a_picture_has_the_shares_of_the_dense_mask(pattern, lengths, block, level):
    mask, (q_len, kv_len) = sf.compile_mask(pattern, *lengths, block), lengths
    picture = draw.make_picture(mask, 9, 11, level)
    dense, unit = mask.to_dense().numpy(), picture.unit
    assert picture.shares.shape == (-(-q_len // unit), -(-kv_len // unit))
    assert picture.shares.shape[0] <= 9 and picture.shares.shape[1] <= 11
    for (row, col), share in np.ndenumerate(picture.shares):
        cell = dense[row * unit : (row + 1) * unit, col * unit : (col + 1) * unit]
        assert share == pytest.approx(cell.mean())


@pytest.mark.parametrize("name", ["mask.png", "mask.svg"])
def test_the_same_mask_gives_the_same_file(tmp_path, name):
    drawing = sf.draw(sf.compile_mask("causal & local(100)", 512, 600, 64), title="a title")
    first = drawing.save(tmp_path / name).read_bytes()
    assert first[:4] == b"\x89PNG" if name.endswith("png") else b"<svg" in first
    assert drawing.save(tmp_path / "again" / name).read_bytes() == first


TITLES = {"many commas": f"documents({tuple(range(0, 512, 7))})", "no spaces": "9" * 3000, "no formula": r"$\frac$"}


@pytest.mark.parametrize(
    "title, shape", list(zip(TITLES.values(), [(1024, 128), (128, 1024), (512, 512)], strict=True)), ids=TITLES
)
def test_titles_stay_within_the_picture(tmp_path, monkeypatch, title, shape):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    sf.draw(sf.compile_mask("local(100)", *shape, 64), tmp_path / "mask.png", title=title)
    (figure,) = figures
    figure.draw_without_rendering()
    whole, box = figure.bbox, figure._suptitle.get_window_extent()
    assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and box.y1 <= whole.y1
    assert box.y0 >= figure.axes[0].get_tightbbox().y1 - 1 and title[:40] in figure._suptitle.get_text()


def test_a_drawing_is_text_where_it_is_printed_and_an_image_in_a_notebook(tmp_path):
    drawing = sf.draw("causal & local(3)", q_len=8)
    assert "causal & local(3)" in str(drawing) and "8 x 8 tokens; a cell is 1 x 1 tokens (tokens)" in str(drawing)
    assert "██████··········" in str(drawing) and repr(drawing) == str(drawing)
    assert drawing._repr_png_()[:4] == b"\x89PNG"
    path = tmp_path / "mask.svg"
    assert str(sf.draw(sf.compile_mask("causal", 300, 200), path, title="mine")).startswith("mine\n") and path.stat().st_size


def test_empty_partial_and_full_cells_have_different_signs(monkeypatch):
    monkeypatch.setenv("LINES", "16")  # for 8 lines of cells, each of 5 x 5 tokens
    kept = torch.zeros(40, 40, dtype=torch.bool)
    for column, pairs in enumerate((0, 5, 12, 24, 25)):
        kept[:5, 5 * column : 5 * column + 5] = (torch.arange(25) < pairs).view(5, 5)
    assert "\n··░░▒▒▓▓██······\n" in str(sf.draw(sf.BlockMask.from_dense(kept, 16)))
