"""Interactive pictures of masks: one HTML file that needs no server, from the whole mask to single tokens.

The file holds the lookup table, not its picture: ``interactive.html`` counts the pairs of the cells that it shows. Equal neighbours
in a row are one run, so causal at a million tokens takes 16,383 runs.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from ..masks.block_mask import BlockMask
from ..masks.grid import check_index, runs_of
from ..masks.tiles import pack_bits, tile_ids
from .paths import PAGE, check_path

MOST_NUMBERS = 1 << 23  # int32 of a page before compression: 32 MiB
_HEIGHT = 820  # pixels of a page within a notebook


@dataclass(frozen=True, repr=False)
class Page:
    """An interactive picture: a page in a notebook, or a file.

    html: the whole page. title: the line above the picture.
    """

    html: str
    title: str

    def save(self, path: str | Path) -> Path:
        """Writes a .html file; returns its path. Raises TypeError or ValueError for another path."""
        path = check_path(path, [PAGE])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.html, encoding="utf-8")
        return path

    def __repr__(self) -> str:
        return f"Page({self.title!r}, {len(self.html):,} characters); save it as an .html file, or view it in a notebook"

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self.html)}" style="width: 100%; height: {_HEIGHT}px; border: 0"></iframe>'


def page_of(mask: BlockMask, title: str, heads: Sequence[int] | None = None, batch: int = 0) -> Page:
    """The interactive picture of some heads of a mask, side by side; heads with the same mask are one.

    heads: None for all. batch: the batch entry. Raises TypeError or IndexError for heads or a batch entry that do not exist, and
    ValueError for a mask that is too large for a page.
    """
    panels, tables, space = [], [], MOST_NUMBERS
    for number, names in _heads_by_mask(mask, heads, batch).items():
        counts, *runs = _runs(mask, number, space)
        space -= 3 * len(runs[0])
        panels.append({"name": _heads_text(names), "heads": max(1, len(names)), "runs": len(runs[0])})
        tables.append([counts, *runs])
    used = np.unique(np.concatenate([[0], *(tiles for *_, tiles in tables)]))  # numbered anew; full blocks are the first
    _check_space(space - len(used) * mask.block_size * -(-mask.block_size // 32))
    kept = pack_bits(mask.tile_pairs(np.where(used, 2 - used % 2, 0), np.maximum(used - 1, 0) // 2))
    axes = [axis for *runs, tiles in tables for axis in (*runs, np.searchsorted(used, tiles))]
    numbers = np.diff(np.concatenate([*axes, kept.ravel()]), prepend=0)  # which compress well
    head = {"q_len": mask.q_len, "kv_len": mask.kv_len, "block": mask.block_size, "panels": panels}
    filled = {
        "@HEAD@": json.dumps(head),
        "@DATA@": base64.b64encode(zlib.compress(numbers.astype("<i4").tobytes())).decode(),
        "@TITLE@": html.escape(title or f"{mask.q_len:,} x {mask.kv_len:,} tokens"),  # the last, as it may hold anything
    }
    text = files(__package__).joinpath("interactive.html").read_text(encoding="utf-8")
    for name, value in filled.items():
        text = text.replace(name, value)
    return Page(text, title)


def _heads_by_mask(mask: BlockMask, heads: Sequence[int] | None, batch: int) -> dict[int, list[int]]:
    """The stored masks of these heads, in order of appearance, and the heads of each."""
    batches, count = mask.mask_index.shape
    batch = check_index("batch", batch, batches)
    chosen = range(count) if heads is None else [check_index("head", head, count) for head in heads]
    if not chosen:
        raise ValueError("heads must have one head at least; got none; leave it out for all")
    stored: dict[int, list[int]] = {}
    for head in dict.fromkeys(chosen):
        stored.setdefault(mask.stored_index(batch, head), []).append(head)
    return stored if count > 1 else {number: [] for number in stored}


def _heads_text(heads: list[int]) -> str:
    """Returns the name of a panel: "heads 0, 2-5"; "" for a mask that has one head."""
    number = np.array(heads, np.int64)
    _, first, stop = runs_of(np.zeros_like(number), np.sort(number))
    parts = [f"{low}" if low + 1 == high else f"{low}-{high - 1}" for low, high in zip(first, stop, strict=True)]
    return f"head{'s' * (len(heads) > 1)} {', '.join(parts)}" if heads else ""


def _runs(mask: BlockMask, number: int, space: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A stored mask as runs of blocks with one tile, by row: how many runs each row has, (q_blocks,); and by run, its blocks first
    .. stop - 1 and its ``tile_ids``, (runs,) each. space: how many numbers the page can still hold."""
    parts = []
    for full, partial in mask.bands(number):
        of_full = np.stack([full.rows, full.first, full.stop, np.zeros_like(full.rows)])
        of_partial = np.stack([partial.rows, partial.cols, partial.cols + 1, tile_ids(partial.kinds, partial.tiles)])
        runs = np.concatenate([of_full, of_partial], axis=1)
        rows, first, stop, tile = runs = runs[:, np.argsort(runs[0] * mask.grid.kv_blocks + runs[1])]
        new = np.ones(len(rows) + 1, bool)
        new[1:-1] = (rows[1:] != rows[:-1]) | (first[1:] != stop[:-1]) | (tile[1:] != tile[:-1])
        begins, ends = new[:-1], new[1:]
        parts.append(np.stack([rows[begins], first[begins], stop[ends], tile[begins]]))
        space -= 3 * parts[-1].shape[1]
        _check_space(space)
    rows, first, stop, tile = np.concatenate(parts, axis=1)
    return np.bincount(rows, minlength=mask.grid.q_blocks), first, stop, tile


def _check_space(left: int) -> None:
    if left < 0:
        raise ValueError(
            f"the runs and tiles of a page must be at most {MOST_NUMBERS:,} numbers; got a mask that needs more; pass a larger "
            "block_size, fewer heads or shorter lengths"
        )
