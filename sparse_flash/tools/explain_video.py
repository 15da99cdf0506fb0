"""Computes figures of a mask over a VideoLayout: padding, pairs of the video's tokens, windows in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..masks.block_mask import BlockMask
from ..masks.pattern import Pattern
from ..masks.tiles import decoded, unique_rows
from ..patterns import video_layout as VideoLayout


@dataclass(frozen=True)
class VideoExplanation:
    """Figures of a mask over one layout. layout: the VideoLayout. Shares are of all pairs of the video's tokens.

    kept: the share of these pairs that the mask keeps. visited: the pairs of the visited blocks that hold tokens of the video, as a
    share; padding counts as visited, so it may be above 1.
    windows: frames x rows x columns of tokens in a window, for each pattern that has windows; those at ragged edges have fewer.
    block_size: tokens of a block of the table.
    """

    layout: VideoLayout
    kept: float
    visited: float
    windows: tuple[tuple[int, int, int], ...]
    block_size: int

    @property
    def padding(self) -> int:
        """Positions in tile order that hold no token."""
        return self.layout.length - self.layout.tokens

    @property
    def hints(self) -> list[str]:
        """Suggestions, as sentences."""
        least, size = self.layout.block_size, self.block_size
        if size > least >= 64:
            return [f"A block of {size} tokens holds {size // least} tiles; block_size={least} visits less."]
        return []

    def lines(self) -> dict[str, str]:
        """The numbers as sentences, by name."""
        layout, video = self.layout, self.layout.tokens - self.layout.prefix - self.layout.suffix
        beside = f"; prefix {layout.prefix:,}, suffix {layout.suffix:,}" if layout.prefix + layout.suffix else ""
        lines = {
            "video": f"{_sides(layout.grid)} tokens in {_sides(layout.tile_grid)} tiles of {_sides(layout.tile)}{beside}",
            "tile order": f"q, k and v have {layout.length:,} tokens, as layout.to_tiles(x, dim) returns them; "
            f"before it {layout.tokens:,}",
            "padding": f"{self.padding:,} positions, {self.padding / video:.1%} of the video's tokens; no query sees them",
            "pairs of the video": f"{self.kept:.3%} kept, {self.visited:.3%} visited",
        }
        if self.windows:
            lines["window"] = ", ".join(f"{_sides(window)} tokens" for window in self.windows) + " (frames x rows x columns)"
        return lines


def layout_of(pattern: Pattern) -> VideoLayout | None:
    """The layout of all the patterns of tiles in an expression; None if there is none, or more than one."""
    layouts = {leaf.layout for leaf in _over_tiles(pattern)}
    return layouts.pop() if len(layouts) == 1 else None


def _over_tiles(pattern: Pattern) -> list[Any]:
    return [leaf for leaf in pattern.leaves() if isinstance(getattr(leaf, "layout", None), VideoLayout)]


def explain_video(pattern: Pattern, mask: BlockMask) -> VideoExplanation | None:
    """The figures of a pattern's mask, if the pattern has one layout and the mask has its length; otherwise None."""
    layout = layout_of(pattern)
    if layout is None or not mask.q_len == mask.kv_len == layout.length:
        return None
    windows = (leaf.window_in_tiles for leaf in _over_tiles(pattern) if leaf.window_in_tiles is not None)
    inside = (tuple(min(n * side, most) for n, side, most in zip(window, layout.tile, layout.grid)) for window in windows)
    position = np.arange(layout.length)
    video = position < layout.tiled
    pairs = (layout.tokens - layout.prefix - layout.suffix) ** 2
    kept, visited = _pairs(mask, video & layout.exists(position), video)
    return VideoExplanation(layout, kept / pairs, visited / pairs, tuple(dict.fromkeys(inside)), mask.block_size)


def _pairs(mask: BlockMask, tokens: np.ndarray, positions: np.ndarray) -> tuple[int, int]:
    """(the kept pairs among ``tokens``, the pairs among ``positions`` in visited blocks). tokens, positions: (length,) bool."""
    size, (full, partial) = mask.block_size, mask.kept()
    padded = np.zeros((2, mask.grid.q_blocks * size), bool)
    padded[:, : len(tokens)] = tokens, positions
    blocks = padded.reshape(2, -1, size)
    counts = blocks.sum(2)  # (2, blocks)
    before = np.column_stack([np.zeros(2, np.int64), counts.cumsum(1)])
    kept, visited = (counts[:, full.rows] * (before[:, full.stop] - before[:, full.first])).sum(1)
    visited += (counts[1, partial.rows] * counts[1, partial.cols]).sum()
    # Partial blocks with the same tile, and tokens at the same positions of their rows and columns, are counted once.
    _, like = unique_rows(blocks[0])
    some, alike = unique_rows(np.column_stack([partial.kinds, partial.tiles, like[partial.rows], like[partial.cols]]))
    times = np.bincount(alike, minlength=len(some))
    for kind, tiles in ((1, mask.tile_runs), (2, mask.tile_bits)):
        chosen = np.flatnonzero(partial.kinds[some] == kind)
        which = some[chosen]
        for part, dense in decoded(tiles.cpu().numpy()[partial.tiles[which]], kind, size):
            queries, keys = (blocks[0, index[which[part]]] for index in (partial.rows, partial.cols))
            held = (dense & queries[:, :, None] & keys[:, None, :]).sum((1, 2))
            kept += (held * times[chosen[part]]).sum()
    return int(kept), int(visited)


def _sides(numbers: tuple[int, ...]) -> str:
    return " x ".join(map(str, numbers))
