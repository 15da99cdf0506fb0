"""neighborhood: windows over a line, an image or a volume whose cells are the tokens, row by row.

use: images, video and volumes: each patch sees the patches around it
formula: start <= kv < start + window on each axis, with start = clip(q - window // 2, 0, extent - window)
source: arXiv:2204.07143, sec. 3
specimen: neighborhood((64, 64), 13)

    ##.##....
    ##.##....        neighborhood((3, 3), 2)
    .##.##...
    ##.##....
    ##.##....
    .##.##...
    ...##.##.
    ...##.##.
    ....##.##
"""

from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from sparse_flash.masks.fields import Positive, settle
from sparse_flash.masks.pattern import register_pattern
from sparse_flash.masks.rules import RunPattern


@register_pattern("neighborhood")
@dataclass(frozen=True)
class Neighborhood(RunPattern):
    """The window about each cell. At the borders it shifts inward, so every query keeps exactly the window's cells.

    shape: cells on each axis, 1 to 3 axes, the last one varying fastest: (height, width) of an image.
    window: cells on each axis, or one number for all of them; at most shape. An even window has one cell more before the
    query than after it. The grid must hold all tokens of the sequence; ``shifted`` places one that has other tokens
    beside it, such as text, which keep nothing and are seen by nothing.
    """

    shape: tuple[Positive, ...]
    window: tuple[Positive, ...]

    def __post_init__(self):
        shape, window = (given.tolist() if hasattr(given, "tolist") else given for given in (self.shape, self.window))
        if isinstance(shape, (tuple, list)) and not isinstance(window, (tuple, list)):
            settle(self, window=(window,) * len(shape))
        super().__post_init__()
        shape, window = self.shape, self.window
        if not 1 <= len(shape) <= 3:
            raise ValueError(f"neighborhood: shape must have 1 to 3 axes; got {shape}")
        if len(window) != len(shape) or any(w > s for w, s in zip(window, shape, strict=True)):
            raise ValueError(
                f"neighborhood: window must have one number for each axis of shape={shape}, none larger than the axis; got {window}"
            )

    def named_tokens(self):
        return (prod(self.shape),) * 2

    def _cells(self, position):
        """The cell of each position on each axis. (numpy 2.4's unravel_index is wrong for some arrays of over 8,192 numbers.)"""
        cells = []
        for extent in self.shape[:0:-1]:
            position, cell = np.divmod(position, extent)
            cells.insert(0, cell)
        return [position, *cells]

    def _starts(self, q):
        """On each axis, the first cell of each query's window."""
        return [np.clip(c - w // 2, 0, s - w) for c, w, s in zip(self._cells(q), self.window, self.shape, strict=True)]

    def _within(self, position):
        return (position >= 0) & (position < prod(self.shape))

    def token_rule(self, q, kv):
        # Axis by axis takes fewer comparisons than run by run: a window of three axes has many runs.
        q, kv = np.asarray(q), np.asarray(kv)
        kept = self._within(q) & self._within(kv)
        for start, cell, window in zip(self._starts(q), self._cells(kv), self.window, strict=True):
            kept = kept & (cell >= start) & (cell < start + window)
        return kept

    def row_runs(self, q):
        *outer, last = self._starts(q)
        first = []
        for steps in product(*map(range, self.window[:-1])):
            line = np.zeros_like(last)
            for start, step, extent in zip(outer, steps, self.shape[:-1], strict=True):
                line = line * extent + start + step
            first.append(line * self.shape[-1] + last)
        first = np.stack(first, axis=-1)
        return first, np.where(self._within(q)[..., None], first + self.window[-1], first)
