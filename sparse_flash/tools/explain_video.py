"""Computes figures of a mask over a VideoLayout: padding, pairs of the video's tokens, windows in tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..masks.block_mask import BlockMask
from ..masks.pattern import Pattern, layout_of
from ..masks.table import FullBlocks
from ..masks.tiles import decode_tiles, unique_rows
from ..patterns import video_layout as VideoLayout


@dataclass(frozen=True)
class VideoExplanation:
    """Figures of a mask over one layout. layout: the VideoLayout. Shares are of all pairs of the video's tokens.

    kept: the share of these pairs that the mask keeps. visited: the pairs of the visited blocks that hold tokens of the video, as a
    share; padding counts as visited, so it may be above 1. seen: how many kept pairs have padding as their key; only patterns of
    the user's own keep any.
    windows: frames x rows x columns of tokens in a window, for each pattern that has windows; those at ragged edges have fewer.
    block_size: tokens of a block of the table.
    """

    layout: VideoLayout
    kept: float
    visited: float
    seen: int
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
        seen = f"{self.seen:,} kept pairs have one as key" if self.seen else "no query sees them"
        lines = {
            "video": f"{_sides(layout.grid)} tokens in {_sides(layout.tile_grid)} tiles of {_sides(layout.tile)}{beside}",
            "tile order": f"q, k and v have {layout.length:,} tokens, as layout.to_tiles(x, dim) returns them; "
            f"before it {layout.tokens:,}",
            "padding": f"{self.padding:,} positions, {self.padding / video:.1%} of the video's tokens; {seen}",
            "pairs of the video": f"{self.kept:.3%} kept, {self.visited:.3%} visited",
        }
        if self.windows:
            lines["window"] = ", ".join(f"{_sides(window)} tokens" for window in self.windows) + " (frames x rows x columns)"
        return lines


def explain_video(pattern: Pattern, mask: BlockMask) -> VideoExplanation | None:
    """The figures of a pattern's mask, if the pattern has one layout and the mask has its length; otherwise None."""
    layout = layout_of(pattern)
    if layout is None or not mask.q_len == mask.kv_len == layout.length:
        return None
    windows = filter(None, (getattr(leaf, "window_in_tiles", None) for leaf in pattern.leaves()))
    inside = (tuple(min(n * side, most) for n, side, most in zip(window, layout.tile, layout.grid)) for window in windows)
    position = np.arange(layout.length)
    video, there = position < layout.tiled, layout.exists(position)
    pairs = (layout.tokens - layout.prefix - layout.suffix) ** 2
    kept, seen = _count_kept(mask, video & there, video & there), _count_kept(mask, np.ones_like(there), ~there)
    return VideoExplanation(
        layout, kept / pairs, _count_visited(mask, video) / pairs, seen, tuple(dict.fromkeys(inside)), mask.block_size
    )


def _count_kept(mask: BlockMask, queries: np.ndarray, keys: np.ndarray) -> int:
    """How many pairs of these the mask keeps. queries, keys: (length,) bool."""
    size, (full, partial) = mask.block_size, mask.kept()
    q, kv = _split_blocks(mask, queries), _split_blocks(mask, keys)
    kept = _count_in_runs(full, q, kv)
    # Partial blocks with the same tile, and with queries and keys at the same positions of them, are counted once.
    keys_of = partial.kinds, partial.tiles, unique_rows(q)[1][partial.rows], unique_rows(kv)[1][partial.cols]
    some, alike = unique_rows(np.column_stack(keys_of))
    times = np.bincount(alike, minlength=len(some))
    for kind, tiles in ((1, mask.tile_runs), (2, mask.tile_bits)):
        chosen = np.flatnonzero(partial.kinds[some] == kind)
        which = some[chosen]
        for part, dense in decode_tiles(tiles.cpu().numpy()[partial.tiles[which]], kind, size):
            held = (dense & q[partial.rows[which[part]], :, None] & kv[partial.cols[which[part]], None, :]).sum((1, 2))
            kept += (held * times[chosen[part]]).sum()
    return int(kept)


def _count_visited(mask: BlockMask, positions: np.ndarray) -> int:
    """How many pairs of these positions lie in visited blocks. positions: (length,) bool."""
    (full, partial), blocks = mask.kept(), _split_blocks(mask, positions)
    counts = blocks.sum(1)
    return int(_count_in_runs(full, blocks, blocks) + (counts[partial.rows] * counts[partial.cols]).sum())


def _count_in_runs(full: FullBlocks, q: np.ndarray, kv: np.ndarray) -> int:
    before = np.append(0, kv.sum(1).cumsum())
    return (q.sum(1)[full.rows] * (before[full.stop] - before[full.first])).sum()


def _split_blocks(mask: BlockMask, positions: np.ndarray) -> np.ndarray:
    padded = np.zeros(mask.grid.q_blocks * mask.block_size, bool)
    padded[: len(positions)] = positions
    return padded.reshape(-1, mask.block_size)


def _sides(numbers: tuple[int, ...]) -> str:
    return " x ".join(map(str, numbers))
