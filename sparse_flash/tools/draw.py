"""Pictures of masks: text for a terminal, and PNG or SVG files.

A picture is an array of cells, each the share of its pairs that the mask keeps; 0, 1 and the shares in between look different.
Cells come from the lookup table, so a picture of a million tokens costs no more than the table.
"""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..masks.block_mask import BlockMask
from ..masks.grid import check_index
from ..selection.block_selection import BlockSelection
from .interactive import Page, page_of
from .paths import FORMATS, PAGE, check_path
from .subject import resolve_mask

_MOST_DENSE_PAIRS = 1 << 24  # masks of up to this many pairs are drawn from their tokens
_SHADES = {True: "·░▒▓█", False: ".-+*#"}  # empty, up to a third, two thirds, all but all, all
_TITLE_WIDTH, _SMALL_TITLE_WIDTH, _TITLE_LINES = 76, 44, 4  # characters of a line that fits its picture, and lines
_EMPTY_RGB, _LEAST_RGB, _MOST_RGB, _FULL_RGB = (0xE9, 0xEC, 0xF1), (0xF6, 0xC2, 0x77), (0xD9, 0x6A, 0x1D), (0x1F, 0x4E, 0x9C)
DEFAULT_LEN = 4096


@dataclass(frozen=True, eq=False, repr=False)
class Drawing:
    """A picture of a mask: text when printed or shown by an interactive Python, an image in a notebook.

    mask: the mask. title: the line above it. level: "tokens", "blocks" or "auto", see ``draw``.
    """

    mask: BlockMask | BlockSelection
    title: str
    level: str

    def save(self, path: str | Path) -> Path:
        """Writes a .png or .svg file; returns its path."""
        return save(self.mask, path, self.title, self.level)

    def __str__(self):
        unicode, (columns, lines) = can_draw("".join(_SHADES[True])), picture_size()
        picture = make_picture(self.mask, min(columns // 2, lines), columns // 2, self.level)
        drawn = render_terminal(picture.shares, False, unicode).plain + legend(False, unicode).plain
        head = [self.title] if self.title else []
        return "\n".join([*head, caption(self.mask, picture), "", drawn, _summary(self.mask)])

    __repr__ = __str__

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        _figure(self.mask, self.title, self.level).savefig(image, format="png", facecolor="white")
        return image.getvalue()


def draw(
    mask,
    path: str | Path | None = None,
    *,
    q_len: int | None = None,
    kv_len: int | None = None,
    block_size: int | None = None,
    level: str = "auto",
    title: str | None = None,
    interactive: bool = False,
    heads: Sequence[int] | None = None,
    batch: int = 0,
) -> Drawing | Page:
    """A picture of a mask, queries downwards and keys to the right; ``print`` it, or view it in a notebook.

    mask: a BlockMask of one mask or a BlockSelection of one head (``mask.select(head)`` of several), a Pattern or its spec text.
    path: a .png or .svg file to write; a .html file if interactive.
    q_len, kv_len, block_size: lengths for compiling a pattern, in tokens; as many as the pattern names or 4096, q_len and 128 by
    default. A BlockMask has its own.
    level: "tokens" or "blocks", the finest cell size; "auto" uses tokens if they all fit the picture.
    title: the pattern's spec text by default.
    interactive: return a ``Page`` instead, which zooms from the whole mask to single tokens and needs no server. It takes a
    BlockMask or pattern of several heads and shows them side by side. heads, batch: which of them; all heads of the first batch
    entry by default.

    Raises ValueError for another file type, for masks or patterns that differ between heads unless interactive, and for more tokens
    than can be drawn one by one. If interactive, ValueError for a BlockSelection and for a mask that is too large for a page, and
    IndexError for heads or a batch entry that do not exist.
    """
    if path is not None:
        path = check_path(path, [PAGE] if interactive else (*FORMATS, PAGE))
        if path.suffix.lower() == PAGE and not interactive:
            raise ValueError(f"a {PAGE} file must come with interactive=True; got {str(path)!r}; add it, or name a .png file")
    if not interactive and (heads is not None or batch != 0):
        raise ValueError("heads and batch must come with interactive=True; a picture shows one mask; pass mask.select(head, batch)")
    if interactive and level != "auto":
        raise ValueError(f"level must be 'auto' for an interactive picture, which shows all levels; got {level!r}; leave it out")
    mask, text = resolve_mask(mask, q_len, kv_len, block_size, DEFAULT_LEN, one_head=not interactive)
    title = text if title is None else title
    if interactive:
        if isinstance(mask, BlockSelection):
            raise ValueError("an interactive picture must be of a BlockMask; got a BlockSelection; leave out interactive")
        page = page_of(mask, title, heads, batch)
        if path is not None:
            page.save(path)
        return page
    drawing = Drawing(mask, title, level)
    make_picture(mask, 1, 1, level)  # raises now if something is wrong
    if path is not None:
        drawing.save(path)
    return drawing


class Picture(NamedTuple):
    """shares: (rows, cols) float64, the share of kept pairs in each cell. unit: tokens on a side of a cell; the last row and column
    may be cut off. level: "tokens" or "blocks", the source of the cells."""

    shares: np.ndarray
    unit: int
    level: str


def make_picture(mask: BlockMask | BlockSelection, height: int, width: int, level: str = "auto") -> Picture:
    """The picture of a mask (of one stored mask) in at most height x width square cells.

    level: "tokens" or "blocks", the finest cell size; "auto" uses tokens if blocks would be coarser than the picture and there are
    few enough tokens.
    """
    masks = mask.batch * mask.heads if isinstance(mask, BlockSelection) else mask.masks
    if masks != 1:
        raise ValueError(f"a picture shows one mask; got {masks}; draw them one by one, as mask.select(head)")
    if level not in ("auto", "tokens", "blocks"):
        raise ValueError(f"level must be 'auto', 'tokens' or 'blocks'; got {level!r}")
    q_len, kv_len, always = mask.q_len, mask.kv_len, mask.always if isinstance(mask, BlockSelection) else None
    side = mask.block_size if always is None else max(mask.block_size, always.block_size)  # of the smallest cell in blocks
    few = q_len * kv_len <= _MOST_DENSE_PAIRS
    if level == "auto":
        level = "tokens" if few and q_len <= (height - 1) * side and kv_len <= (width - 1) * side else "blocks"
    if level == "tokens":
        if not few:
            raise ValueError(f"{q_len} x {kv_len} tokens are too many to draw one by one; use level='blocks'")
        side = 1
    rows, cols = -(-q_len // side), -(-kv_len // side)
    unit = side * max(-(-rows // height), -(-cols // width))
    top, left = np.arange(0, q_len, unit), np.arange(0, kv_len, unit)
    if level == "tokens":
        dense = mask.to_dense().cpu().view(q_len, kv_len).numpy()
        kept = np.add.reduceat(np.add.reduceat(dense, top, axis=0, dtype=np.int64), left, axis=1)
    else:
        kept = mask.kept_pairs(unit=unit) if isinstance(mask, BlockSelection) else _count_by_square(mask, unit // side)
    return Picture(kept / np.outer(np.diff(top, append=q_len), np.diff(left, append=kv_len)), unit, level)


def _count_by_square(mask: BlockMask, group: int) -> np.ndarray:
    """(squares of queries, squares of keys): how many pairs a mask keeps in each square of group x group blocks."""
    full, partial = mask.kept()
    kept = (full.count_by_square(group) * mask.block_size**2).astype(np.float64)
    np.add.at(kept, (partial.rows // group, partial.cols // group), mask.pairs_of(partial.kinds, partial.tiles))
    return kept


def caption(mask: BlockMask | BlockSelection, picture: Picture) -> str:
    """The size of the mask and of a cell of its picture."""
    return f"{mask.q_len:,} x {mask.kv_len:,} tokens; a cell is {picture.unit:,} x {picture.unit:,} tokens ({picture.level})"


def can_draw(text: str) -> bool:
    """Whether standard output's encoding has these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def picture_size() -> tuple[int, int]:
    """Characters and lines available for a picture."""
    size = shutil.get_terminal_size((130, 64))
    return max(16, size.columns - 2), max(8, size.lines - 8)


def render_terminal(shares: np.ndarray, colour: bool, unicode: bool = True):
    """Cells as rich Text: with colour two cells per character, one above the other; otherwise two shaded characters per cell."""
    from rich.style import Style
    from rich.text import Text

    text = Text(no_wrap=True)
    if not (colour and unicode):
        shades = np.array(list(_SHADES[unicode]))
        levels = np.where(shares <= 0, 0, np.where(shares >= 1, 4, 1 + np.minimum((shares * 3).astype(int), 2)))
        for line in shades[levels]:
            text.append("".join(c * 2 for c in line) + "\n")
        return text
    rgb = _rgb(shares)
    for y in range(0, len(rgb), 2):
        for x in range(rgb.shape[1]):
            below = "#{:02x}{:02x}{:02x}".format(*rgb[y + 1, x]) if y + 1 < len(rgb) else None
            text.append("▀", Style(color="#{:02x}{:02x}{:02x}".format(*rgb[y, x]), bgcolor=below))
        text.append("\n")
    return text


def legend(colour: bool, unicode: bool = True):
    """The legend of ``render_terminal``'s symbols, as rich Text."""
    from rich.text import Text

    if not (colour and unicode):
        shades = _SHADES[unicode]
        return Text(f"{shades[0]} empty   {shades[1:4]} partial, by the share kept   {shades[4]} full")
    text = Text()
    for shares, name in (([0.0], "empty"), ([0.05, 0.35, 0.65, 0.95], "partial, by the share kept"), ([1.0], "full")):
        for colour_of in _rgb(np.array([shares]))[0]:
            text.append("█", "#{:02x}{:02x}{:02x}".format(*colour_of))
        text.append(f" {name}   ")
    return text


def _rgb(shares: np.ndarray) -> np.ndarray:
    """(rows, cols) -> (rows, cols, 3) uint8: grey for empty, amber to orange for partial, blue for full."""
    least, most = np.array(_LEAST_RGB), np.array(_MOST_RGB)
    rgb = least + np.clip(shares, 0, 1)[..., None] * (most - least)
    rgb = np.where((shares <= 0)[..., None], _EMPTY_RGB, np.where((shares >= 1)[..., None], _FULL_RGB, rgb))
    return rgb.round().astype(np.uint8)


def save(mask: BlockMask | BlockSelection, path: str | Path, title: str = "", level: str = "auto", most_cells: int = 512) -> Path:
    """Writes the picture of a mask to a .png or .svg file. Raises ValueError for another extension."""
    path = check_path(path)
    return _write(_figure(mask, title, level, most_cells), path)


def _figure(mask: BlockMask | BlockSelection, title: str, level: str, most_cells: int = 512):
    from matplotlib.figure import Figure

    lines = [*_wrapped(title, _TITLE_WIDTH, _TITLE_LINES), _summary(mask)]
    figure = Figure(figsize=(6.2, 6.4 + 0.17 * len(lines)), dpi=160, layout="constrained")
    axes = figure.subplots()
    _draw(axes, make_picture(mask, most_cells, most_cells, level), mask.q_len, mask.kv_len)
    # On the figure, because the axes are narrow when there are many more queries than keys.
    figure.suptitle("\n".join(lines), x=0.02, ha="left", fontsize=9, family="monospace", parse_math=False)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    _legend(figure)
    return figure


def gallery(patterns: list[tuple[str, BlockMask]], path: str | Path, columns: int = 4) -> Path:
    """Small pictures of the blocks of several masks, each with its title, in one .png or .svg file."""
    path = check_path(path)
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = -(-len(patterns) // columns)
    titles = [_wrapped(title, _SMALL_TITLE_WIDTH, _TITLE_LINES) for title, _ in patterns]
    longest = max(len(line) for lines in titles for line in lines)
    size = min(8.5, 265 / longest)  # points; the longest line fits its picture
    height = 2.73 + 0.12 * max(map(len, titles))
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(2.6 * columns, height * rows + 0.35), dpi=160, layout=layout)
    for axes in (flat := figure.subplots(rows, columns, squeeze=False).ravel())[len(patterns) :]:
        axes.set_axis_off()
    for axes, lines, (_, mask) in zip(flat, titles, patterns):
        _draw(axes, make_picture(mask, 64, 64, "blocks"), mask.q_len, mask.kv_len)
        axes.set_xticks([])
        axes.set_yticks([])
        place = "left" if mask.q_len <= mask.kv_len else "center"  # a narrow picture is centred
        axes.set_title("\n".join(lines), fontsize=size, family="monospace", loc=place, parse_math=False)
        caption = f"keeps {mask.density:.1%}, visits {mask.block_density:.1%}"
        axes.set_xlabel(caption, fontsize=8, color="#555555", loc="left")
    _legend(figure)
    return _write(figure, path)


def frames(mask, layout, query: tuple[int, int, int], path: str | Path, columns: int = 7, *, title: str | None = None) -> Path:
    """Draws which tokens of a video one query sees, frame by frame, in one .png or .svg file.

    mask: as in ``draw``, in the layout's order. layout: the VideoLayout, whose tiles are outlined. query: (frame, row, column).
    title: the pattern's spec text by default.
    """
    path = check_path(path)
    from matplotlib.figure import Figure

    for name, cell, extent in zip(("frame", "row", "column"), query, layout.grid, strict=True):
        check_index(f"{name} of query", cell, extent)
    mask, text = resolve_mask(mask, None, None, None, layout.length)
    title = text if title is None else title
    if not mask.q_len == mask.kv_len == layout.length:
        raise ValueError(f"mask must be of the layout's {layout.length} tokens; got {mask.q_len} x {mask.kv_len}")
    video = layout.position_of[layout.prefix : layout.tokens - layout.suffix].reshape(layout.grid)
    rgb = _rgb(mask.kept_keys(int(video[tuple(query)])).numpy()[video.ravel()]).reshape(*layout.grid, 3)
    rows = -(-layout.frames // columns)
    head = [*_wrapped(title, 16 * columns, _TITLE_LINES), f"what frame {query[0]}, row {query[1]}, column {query[2]} (orange) sees"]
    height = 0.3 + 1.5 * layout.height / layout.width
    figure = Figure(figsize=(1.5 * columns, height * rows + 0.3 * len(head)), dpi=160, layout="constrained")
    for frame, axes in enumerate(figure.subplots(rows, columns, squeeze=False).ravel()):
        axes.set_axis_off()
        if frame < layout.frames:
            axes.imshow(rgb[frame], interpolation="nearest")
            axes.set_title(f"frame {frame}", fontsize=8)
            if frame == query[0]:
                axes.plot(query[2], query[1], "o", color=np.array(_MOST_RGB) / 255, markersize=4)
            for draw_line, extent, side in zip((axes.axhline, axes.axvline), layout.grid[1:], layout.tile[1:], strict=True):
                for place in range(side, extent, side):
                    draw_line(place - 0.5, color="white", linewidth=0.5)
    figure.suptitle("\n".join(head), x=0.02, ha="left", fontsize=9, family="monospace", parse_math=False)
    return _write(figure, path)


def thumbnail(mask: BlockMask, most_cells: int = 64) -> bytes:
    """A PNG of the mask's cells alone, one pixel each, at most most_cells on a side."""
    from matplotlib.image import imsave

    image = io.BytesIO()
    imsave(image, _rgb(make_picture(mask, most_cells, most_cells).shares), format="png")
    return image.getvalue()


def _wrapped(title: str, width: int, most: int) -> list[str]:
    """The title in lines of at most ``width`` characters; an ellipsis replaces text beyond ``most`` lines."""
    lines = textwrap.wrap(title[: width * (most + 1)], width)
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1][: width - 3] + "..."]
    return lines


def _summary(mask: BlockMask | BlockSelection) -> str:
    if isinstance(mask, BlockSelection):
        return f"keeps {mask.density:.2%} of the pairs, blocks of {mask.block_size} picked by query"
    return f"keeps {mask.density:.2%} of the pairs, visits {mask.block_density:.2%} of the blocks"


def _draw(axes, picture: Picture, q_len: int, kv_len: int) -> None:
    rows, cols = picture.shares.shape
    extent = (0, cols * picture.unit, rows * picture.unit, 0)
    axes.imshow(_rgb(picture.shares), extent=extent, interpolation="nearest", aspect="auto")
    axes.set_box_aspect(min(max(q_len / kv_len, 0.25), 4))
    if max(rows, cols) <= 64:
        # Grid lines only between few cells; among many they would hide the picture.
        axes.vlines(np.arange(cols + 1) * picture.unit, 0, q_len, color="white", linewidth=0.4)
        axes.hlines(np.arange(rows + 1) * picture.unit, 0, kv_len, color="white", linewidth=0.4)
    axes.set_xlim(0, kv_len)
    axes.set_ylim(q_len, 0)
    for side in axes.spines.values():
        side.set_color("#bbbbbb")
    axes.tick_params(labelsize=8, color="#bbbbbb")


def _legend(figure) -> None:
    from matplotlib.patches import Patch

    names = (("empty", 0.0), ("partial", 0.5), ("full", 1.0))
    patches = [Patch(facecolor=_rgb(np.array([[share]]))[0, 0] / 255, edgecolor="#bbbbbb", label=name) for name, share in names]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=8)


def _write(figure, path: Path) -> Path:
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.patch.set_facecolor("white")
    # Without a date and with fixed ids, the same mask always gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "sparse_flash"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    return path
