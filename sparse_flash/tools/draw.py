"""Pictures of masks: text for a terminal, and PNG or SVG files. A picture is an array of cells, each a share of kept pairs."""

import io
import os
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..compat.extras import naming_extra
from ..masks.block_mask import BlockMask
from . import resolve_mask

DEFAULT_LEN = 4096
_MOST_DENSE_PAIRS = 1 << 24  # masks of up to this many pairs are drawn from their tokens
_MOST_CELLS = 512  # on a side of a file's picture
SIGNS = "·░▒▓█"  # empty, up to a third, two thirds, all but all, all
_EMPTY_RGB, _LEAST_RGB, _MOST_RGB, _FULL_RGB = np.array([(233, 236, 241), (246, 194, 119), (217, 106, 29), (31, 78, 156)])
_TITLE_LINES = 4


@dataclass(frozen=True, eq=False, repr=False)
class Drawing:
    """A picture of a mask: text when printed, an image in a notebook. title: the line above it. level: see ``draw``."""

    mask: BlockMask
    title: str
    level: str

    def save(self, path: str | Path) -> Path:
        """Writes a .png or .svg file; returns its path. Raises ValueError for another extension."""
        return _write(self._figure(), check_path(path))

    def __str__(self):
        size, signs = shutil.get_terminal_size((130, 72)), SIGNS  # as many cells as fit the terminal
        picture = make_picture(self.mask, max(8, size.lines - 8), max(8, size.columns // 2 - 1), self.level)
        shares, unit = picture.shares, f"{picture.unit:,} x {picture.unit:,}"
        levels = np.where(shares <= 0, 0, np.where(shares >= 1, 4, 1 + np.minimum((shares * 3).astype(int), 2)))
        cells = "\n".join("".join(2 * signs[level] for level in row) for row in levels)
        legend = f"{signs[0]} empty   {signs[1:4]} partial, by the share kept   {signs[4]} full"
        lengths = f"{self.mask.q_len:,} x {self.mask.kv_len:,} tokens; a cell is {unit} tokens ({picture.level})\n"
        return "\n".join([self.title] * bool(self.title) + [lengths, cells, legend, _summary(self.mask)])

    __repr__ = __str__

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self._figure().savefig(image, format="png", facecolor="white")
        return image.getvalue()

    @naming_extra()
    def _figure(self):
        from matplotlib.figure import Figure

        lines = [*_wrapped(self.title, 76), _summary(self.mask)]
        figure = Figure(figsize=(6.2, 6.4 + 0.17 * len(lines)), dpi=160, layout="constrained")
        axes = figure.subplots()
        _draw(axes, self.mask, make_picture(self.mask, _MOST_CELLS, _MOST_CELLS, self.level))
        # On the figure, because the axes are narrow when there are many more queries than keys.
        figure.suptitle("\n".join(lines), x=0.02, ha="left", fontsize=9, family="monospace", parse_math=False)
        axes.set(xlabel="key", ylabel="query")
        _legend(figure)
        return figure


def draw(
    mask,
    path: str | Path | None = None,
    *,
    q_len: int | None = None,
    kv_len: int | None = None,
    block_size: int | None = None,
    level: str = "auto",
    title: str | None = None,
) -> Drawing:
    """A picture of a mask, queries downwards and keys to the right; ``print`` it, or view it in a notebook.

    mask: a BlockMask of one mask (``mask.select(head)`` of several), a Pattern or its spec text.
    path: a .png or .svg file to write.
    q_len, kv_len, block_size: lengths for compiling a pattern, in tokens; as many as the pattern names or 4096, q_len and 128 by
    default. A BlockMask has its own.
    level: "tokens" or "blocks", the finest cell size; "auto" uses tokens if they all fit the picture.
    title: the pattern's spec text by default.

    Raises ValueError for another file type, for masks that differ between heads, and for too many tokens to draw one by one.
    """
    path = None if path is None else check_path(path)
    mask, text = resolve_mask(mask, q_len, kv_len, block_size, DEFAULT_LEN)
    make_picture(mask, 1, 1, level)  # raises now if something is wrong
    drawing = Drawing(mask, text if title is None else title, level)
    if path is not None:
        drawing.save(path)
    return drawing


class Picture(NamedTuple):
    """shares: (rows, cols) float64, of kept pairs in each cell. unit: tokens on a side of a cell. level: "tokens" or "blocks"."""

    shares: np.ndarray
    unit: int
    level: str


def make_picture(mask: BlockMask, height: int, width: int, level: str = "auto") -> Picture:
    """The picture of a mask (of one stored mask) in at most height x width square cells. level: as for ``draw``."""
    if level not in ("auto", "tokens", "blocks"):
        raise ValueError(f"level must be one of auto, tokens, blocks; got {level!r}")
    q_len, kv_len, side = mask.q_len, mask.kv_len, mask.block_size
    few = q_len * kv_len <= _MOST_DENSE_PAIRS
    if level == "auto":
        level = "tokens" if few and q_len <= (height - 1) * side and kv_len <= (width - 1) * side else "blocks"
    if level == "tokens":
        if not few:
            raise ValueError(f"{q_len} x {kv_len} tokens are too many to draw one by one; use level='blocks'")
        side = 1
    unit = side * max(-(-q_len // (side * height)), -(-kv_len // (side * width)))
    top, left = np.arange(0, q_len, unit), np.arange(0, kv_len, unit)
    if level == "tokens":
        dense = mask.to_dense().cpu().view(q_len, kv_len).numpy()
        kept = np.add.reduceat(np.add.reduceat(dense, top, axis=0, dtype=np.int64), left, axis=1)
    else:
        group, (full, partial) = unit // side, mask.kept()
        kept = full.count_by_square(group) * float(side**2)
        np.add.at(kept, (partial.rows // group, partial.cols // group), mask.pairs_of(partial.kinds, partial.tiles))
    return Picture(kept / np.outer(np.diff(top, append=q_len), np.diff(left, append=kv_len)), unit, level)


def rgb_of(shares: np.ndarray) -> np.ndarray:
    """(rows, cols) -> (rows, cols, 3) uint8: grey for empty, amber to orange for partial, blue for full."""
    rgb = _LEAST_RGB + np.clip(shares, 0, 1)[..., None] * (_MOST_RGB - _LEAST_RGB)
    rgb = np.where((shares <= 0)[..., None], _EMPTY_RGB, np.where((shares >= 1)[..., None], _FULL_RGB, rgb))
    return rgb.round().astype(np.uint8)


@naming_extra()
def gallery(drawings: Sequence[Drawing], path: str | Path, columns: int = 4) -> Path:
    """Small pictures of the blocks of several masks, each with its title, in one .png or .svg file."""
    path = check_path(path)
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows, titles = -(-len(drawings) // columns), [_wrapped(drawing.title, 44) for drawing in drawings]
    size = min(8.5, 265 / max(len(line) for lines in titles for line in lines))  # points; the longest line fits its picture
    height = 2.73 + 0.12 * max(map(len, titles))
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(2.6 * columns, height * rows + 0.35), dpi=160, layout=layout)
    for axes in (flat := figure.subplots(rows, columns, squeeze=False).ravel())[len(drawings) :]:
        axes.set_axis_off()
    for axes, lines, mask in zip(flat, titles, (drawing.mask for drawing in drawings)):
        _draw(axes, mask, make_picture(mask, 64, 64, "blocks"))
        axes.set(xticks=[], yticks=[])
        place = "left" if mask.q_len <= mask.kv_len else "center"  # a narrow picture is centred
        axes.set_title("\n".join(lines), fontsize=size, family="monospace", loc=place, parse_math=False)
        axes.set_xlabel(f"keeps {mask.density:.1%}, visits {mask.block_density:.1%}", fontsize=8, color="#555555", loc="left")
    _legend(figure)
    return _write(figure, path)


def check_path(path: str | Path) -> Path:
    """The path of a picture. Raises TypeError or ValueError for others."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be the name of a picture to write; got {path!r}; lengths are q_len= and kv_len=")
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"a picture must be a .png or .svg file; got {str(path)!r}; try {str(path.with_suffix('.png'))!r}")
    return path


def _wrapped(title: str, width: int) -> list[str]:
    """The title in lines of at most ``width`` characters; an ellipsis replaces text beyond ``_TITLE_LINES``."""
    return textwrap.wrap(title[: width * (_TITLE_LINES + 1)], width, max_lines=_TITLE_LINES, placeholder="...")


def _summary(mask: BlockMask) -> str:
    return f"keeps {mask.density:.2%} of the pairs, visits {mask.block_density:.2%} of the blocks of {mask.block_size}"


def _draw(axes, mask: BlockMask, picture: Picture) -> None:
    (rows, cols), unit = picture.shares.shape, picture.unit
    axes.imshow(rgb_of(picture.shares), extent=(0, cols * unit, rows * unit, 0), interpolation="nearest", aspect="auto")
    axes.set_box_aspect(min(max(mask.q_len / mask.kv_len, 0.25), 4))
    if max(rows, cols) <= 64:
        # Grid lines only between few cells; among many they would hide the picture.
        axes.vlines(np.arange(cols + 1) * unit, 0, mask.q_len, color="white", linewidth=0.4)
        axes.hlines(np.arange(rows + 1) * unit, 0, mask.kv_len, color="white", linewidth=0.4)
    axes.set(xlim=(0, mask.kv_len), ylim=(mask.q_len, 0))
    axes.spines[:].set_color("#bbbbbb")
    axes.tick_params(labelsize=8, color="#bbbbbb")


def _legend(figure) -> None:
    from matplotlib.patches import Patch

    colors = zip(rgb_of(np.array([[0.0, 0.5, 1.0]]))[0] / 255, ("empty", "partial", "full"))
    patches = [Patch(facecolor=color, edgecolor="#bbbbbb", label=name) for color, name in colors]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=8)


def _write(figure, path: Path) -> Path:
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.patch.set_facecolor("white")
    # Without a date and with fixed ids, the same mask always gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "sparse_flash"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    return path
