"""video_layout: the order of a video's tokens by tiles, as a pattern: all see every token, and nothing sees padding.

use: videos and images of diffusion models, with text or audio before and after them; the patterns of tiles have it as a field
formula: kv is no padding: the tokens of a tile come first in it, and those outside the video after all tiles
source: arXiv:2502.04507 (tokens of a tile are consecutive)
specimen: video_layout(7, 15, 31)

    ######..#
    ######..#        video_layout(1, 2, 3, tile=(1, 2, 2), prefix=1)
    ######..#
    ######..#
    ######..#
    ######..#
    ######..#
    ######..#
    ######..#
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod

import numpy as np

from ..masks.fields import Natural, Positive, set_fields
from ..masks.grid import BLOCK_SIZES, FULL, BlockRuns, cells_of
from ..masks.parsing import parse
from ..masks.pattern import short_text
from ..masks.registry import register_pattern
from ..masks.rules import UnitPattern
from ..masks.tiles import unique_rows


class OverTiles(UnitPattern):
    """The rule applies to tiles of a ``layout``: define ``tile_rule(q, kv)``, of the cells of tiles, an array for each axis. The
    units are its tiles, and after them the tokens outside the video."""

    keep_beside = True
    hides_padding = True

    @property
    def block(self):
        return prod(self.layout.tile)

    def named_tokens(self):
        return (self.layout.length,) * 2

    def length_refusal(self, q_len, kv_len):
        found, layout = super().length_refusal(q_len, kv_len), self.layout
        if found and kv_len == layout.tokens:
            return (
                f"tensors under {short_text(self)} must be in tile order, with {layout.length} tokens; got {kv_len}, as many as "
                "before it; pass layout.to_tiles(q, dim), and k and v likewise"
            )
        return found

    def unit_rule(self, i, j):
        tiles = self.layout.tiled // self.block
        cells = (self.layout.cells(np.clip(unit, 0, tiles - 1)) for unit in (i, j))
        return np.where((i >= tiles) | (j >= tiles), self.keep_beside, self.tile_rule(*cells))

    def token_rule(self, q, kv):
        return super().token_rule(q, kv) & self.layout.has_position(q) & self.layout.exists(kv)

    def token_tiles(self, q, kv):
        kept = super().token_tiles(q, kv)  # it may look only at the first token of each tile
        return kept & self.layout.has_position(q)[:, :, None] & self.layout.exists(kv)[:, None, :]

    def block_keys(self, grid, rows, cols):
        if grid.offset % self.block:  # else a block is whole tiles, or within one
            return None
        q, kv = grid.q_positions(np.arange(grid.q_blocks)), grid.kv_positions(np.arange(grid.kv_blocks))
        there = [unique_rows(one)[1][of] for one, of in ((self.layout.has_position(q), rows), (self.layout.exists(kv), cols))]
        i, j = (one[of, :: self.block] // self.block for one, of in ((q, rows), (kv, cols)))
        return np.column_stack([*there, self.unit_rule(i[:, :, None], j[:, None, :]).reshape(len(rows), -1)])

    def block_rule(self, grid):
        states = super().block_rule(grid)
        if states is None:
            return None
        q, kv = (of(np.arange(n)) for of, n in zip((grid.q_positions, grid.kv_positions), grid.shape))
        row, col = (there.any(1).astype(np.int8) + there.all(1) for there in (self.layout.has_position(q), self.layout.exists(kv)))
        if min(row.min(), col.min()) == FULL:
            return states
        blocks = [(r, c, np.minimum(s, np.minimum(row[r], col[c]))) for r, c, s in states.blocks()]
        rows, cols, states = map(np.concatenate, zip(*blocks, strict=True))
        return BlockRuns.from_row_runs(grid.shape, rows, cols, cols + 1, states)


@register_pattern("video_layout")
@dataclass(frozen=True)
class VideoLayout(OverTiles):
    """The order of tokens by tiles, for sequences of [prefix | video | suffix].

    frames, height, width: of the video's grid of tokens; an image is one frame. tile: the same three numbers of a tile. A tile has
    a power of two of tokens, at most 256, so that blocks of a table hold whole tiles. prefix, suffix: tokens before and after the
    video, such as text, condition frames and audio.

    In tile order the tiles come first, row by row, then prefix and suffix. Every tile has as many positions; one at the edge that
    has fewer tokens has them first. The other positions are padding and hold copies of the tile's own tokens. Nothing sees such a
    key, under any expression over the layout: ``~tile_window(layout, 1)`` is ``layout & ~tile_window(layout, 1)``. Such a query
    keeps what its token keeps. VSA (arXiv:2505.13389) has the same order, with zeros as padding.

    Before a chooser it keeps padding out: ``video_layout(21, 30, 52) & (sampled(16, budget=0.1) | last_tokens(512))``.
    """

    frames: Positive
    height: Positive
    width: Positive
    tile: tuple[Positive, ...] = (4, 4, 8)
    prefix: Natural = 0
    suffix: Natural = 0

    def __post_init__(self):
        super().__post_init__()
        if len(self.tile) != 3:
            raise ValueError(f"video_layout: tile must be (frames, height, width); got {self.tile}")
        if self.block & (self.block - 1) or self.block > max(BLOCK_SIZES):
            raise ValueError(
                f"video_layout: tile must have a power of two of tokens, at most {max(BLOCK_SIZES)}, as blocks of a table hold "
                f"whole tiles; got {self.tile}, {self.block} tokens; VideoLayout.of(frames, height, width) proposes one"
            )

    @classmethod
    def of(cls, frames, height, width, *, block_size=128, prefix=0, suffix=0):
        """The layout whose tile has ``block_size`` tokens, 64 or 128, with the least padding, then the least sum of sides.

        A tile's height and width differ by at most four times, and it has no more frames than rows or columns. Axes of one cell
        do not count; there the side is 1, except for a single cell.
        """
        if block_size not in (64, 128):
            raise ValueError(f"block_size must be 64 or 128 tokens of a tile; got {block_size!r}; pass tile= for others")
        grid = cls(frames, height, width, (1, 1, 1), prefix, suffix).grid
        sides = [[1] if extent == 1 else [2**k for k in range(8)] for extent in grid]
        tiles = [tile for tile in product(*sides) if prod(tile) == block_size] or [(1, 1, block_size)]

        def cost(tile):
            plane = [side for side, extent in zip(tile[1:], grid[1:]) if extent > 1] or [block_size]
            return max(plane) > 4 * min(plane) or tile[0] > min(plane), cls(*grid, tile).tiled, sum(tile)

        return cls(*grid, min(tiles, key=cost), prefix, suffix)

    @property
    def layout(self):
        return self

    @property
    def grid(self):
        """(frames, height, width)."""
        return self.frames, self.height, self.width

    @property
    def tile_grid(self):
        """Tiles on each axis."""
        return tuple(-(-extent // side) for extent, side in zip(self.grid, self.tile))

    @property
    def block_size(self):
        """The least block of a table that holds whole tiles: the tokens of a tile, or 16."""
        return max(self.block, min(BLOCK_SIZES))

    @property
    def tokens(self):
        """Tokens of the user's order: prefix, video and suffix."""
        return self.prefix + prod(self.grid) + self.suffix

    @property
    def length(self):
        """Tokens in tile order, padding included."""
        return self.tiled + self.prefix + self.suffix

    @property
    def tiled(self):
        """The first position in tile order that is outside the video."""
        return prod(self.tile_grid) * self.block

    @property
    def positions(self):
        """(length, 3) int64: frame, row and column of each token in tile order; -1 for padding and tokens outside the video."""
        position = np.arange(self.length)
        token, grid = self.token_at - self.prefix, np.full((self.length, 3), -1)
        some = self.exists(position) & (position < self.tiled)
        grid[some] = np.column_stack(cells_of(token[some], self.grid))
        return grid

    def to_tiles(self, x, dim):
        """A tensor in tile order. x: any dtype, with ``tokens`` tokens in dimension ``dim``; then ``length``. Differentiable.
        Raises ValueError for other lengths."""
        from ..masks.reorder import reorder_tensor  # patterns are listed without PyTorch

        return reorder_tensor(x, dim, self, "to_tiles", self.tokens)

    def to_raster(self, x, dim):
        """The reverse of ``to_tiles``: padding is left out, so its values do not matter."""
        from ..masks.reorder import reorder_tensor

        return reorder_tensor(x, dim, self, "to_raster", self.length)

    @cached_property
    def token_at(self):
        """(length,) int64: which of the user's tokens each position of the tile order holds."""
        tile, place = np.divmod(np.arange(self.tiled), self.block)
        sizes = self._sizes(tile)
        inner = cells_of(place % prod(sizes), sizes)
        frame, row, column = (cell * side + step for cell, side, step in zip(self.cells(tile), self.tile, inner))
        video = self.prefix + (frame * self.height + row) * self.width + column
        beside = np.r_[: self.prefix, self.tokens - self.suffix : self.tokens]
        return np.concatenate([video, beside])

    @cached_property
    def position_of(self):
        """(tokens,) int64: where in the tile order each of the user's tokens is."""
        position = np.arange(self.length)
        exist = position[self.exists(position)]
        found = np.empty(self.tokens, np.int64)
        found[self.token_at[exist]] = exist
        return found

    def cells(self, tile):
        """The cell of each tile on each axis of ``tile_grid``."""
        return cells_of(tile, self.tile_grid)

    def _sizes(self, tile):
        """How many tokens of each axis these tiles have."""
        return [np.minimum(side, extent - cell * side) for cell, side, extent in zip(self.cells(tile), self.tile, self.grid)]

    def exists(self, position):
        """Which positions of the tile order hold a token, and no padding."""
        tile, place = np.divmod(position, self.block)
        whole = place < prod(self._sizes(np.clip(tile, 0, self.tiled // self.block - 1)))
        return self.has_position(position) & (whole | (position >= self.tiled))

    def has_position(self, position):
        """Which positions the tile order has, padding included."""
        return (position >= 0) & (position < self.length)

    def tile_rule(self, q, kv):
        return np.True_


@dataclass(frozen=True)
class TilePattern(OverTiles):
    """Base class of the patterns of tiles. layout: a VideoLayout or its text. keep_beside: see ``tile_window``."""

    layout: VideoLayout
    keep_beside: bool = field(default=True, kw_only=True)

    def __post_init__(self):
        set_fields(self, layout=parse(self.layout) if isinstance(self.layout, str) else self.layout)
        if not isinstance(self.layout, VideoLayout):
            raise TypeError(f"{self.name}: layout must be a VideoLayout or its text; got {self.layout!r}")
        super().__post_init__()


def in_window(q, kv, window, tiles):
    """Whether kv is in q's window on an axis of so many tiles. At the borders the window shifts inward; a larger one has all."""
    window = min(window, tiles)
    start = np.clip(q - window // 2, 0, tiles - window)
    return (kv >= start) & (kv < start + window)
