"""neighborhood: windows over a line, an image or a volume whose cells are the tokens, row by row.

use: images, video and volumes: each patch sees the patches around it
formula: start <= kv < start + window on each axis, with start = clip(q - window // 2, 0, extent - window)
source: arXiv:2204.07143, sec. 3; causal as NATTEN defines it (arXiv:2504.16922)
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

from ..masks.fields import Positive, set_fields
from ..masks.grid import cells_of
from ..masks.registry import register_pattern
from ..masks.rules import RunPattern


@register_pattern("neighborhood")
@dataclass(frozen=True)
class Neighborhood(RunPattern):
    """The window about each cell. At the borders it shifts inward, so every query keeps exactly the window's cells.

    shape: cells on each axis, 1 to 3 axes, the last one varying fastest: (height, width) of an image.
    window: cells on each axis, or one number for all of them; at most shape. An even window has one cell more before the
    query than after it. The grid must hold all tokens of the sequence; ``shifted`` places one that has other tokens
    beside it, such as text, which keep nothing and are seen by nothing. A VideoLayout has them as prefix and suffix.
    causal: whether an axis is causal, or True or False for all; None is False. There the window ends at the query, and is cut off
    at the border.
    """

    shape: tuple[Positive, ...]
    window: tuple[Positive, ...]
    causal: tuple[bool, ...] | None = None

    def __post_init__(self):
        given = {name: getattr(self, name) for name in ("shape", "window", "causal")}
        given = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in given.items()}
        if isinstance(shape := given["shape"], (tuple, list)):
            for name, value in given.items():
                if value is not None and not isinstance(value, (tuple, list)):
                    set_fields(self, **{name: (value,) * len(shape)})
        if self.causal is not None:
            if not isinstance(self.causal, (tuple, list)) or not all(isinstance(one, bool) for one in self.causal):
                raise ValueError(f"neighborhood: causal must be True or False, or one of them for each axis; got {self.causal!r}")
            set_fields(self, causal=tuple(self.causal))
        super().__post_init__()
        shape, window = self.shape, self.window
        if not 1 <= len(shape) <= 3:
            raise ValueError(f"neighborhood: shape must have 1 to 3 axes; got {shape}")
        if len(window) != len(shape) or any(w > s for w, s in zip(window, shape, strict=True)):
            raise ValueError(
                f"neighborhood: window must have one number for each axis of shape={shape}, none larger than the axis; got {window}"
            )
        if self.causal is not None and len(self.causal) != len(shape):
            raise ValueError(f"neighborhood: causal must have one value for each axis of shape={shape}; got {self.causal}")
        if self.causal is not None and not any(self.causal):
            set_fields(self, causal=None)  # so that patterns of one meaning are equal

    def named_tokens(self):
        return (prod(self.shape),) * 2

    def _windows(self, q):
        """On each axis (first, stop): a query keeps cells first .. stop - 1."""
        causal_axes = self.causal or (False,) * len(self.shape)
        for cell, extent, window, causal in zip(cells_of(q, self.shape), self.shape, self.window, causal_axes, strict=True):
            first = np.maximum(cell - window + 1, 0) if causal else np.clip(cell - window // 2, 0, extent - window)
            yield first, cell + 1 if causal else first + window

    def _within(self, position):
        return (position >= 0) & (position < prod(self.shape))

    def token_rule(self, q, kv):
        # Axis by axis takes fewer comparisons than run by run: a window of three axes has many runs.
        q, kv = np.asarray(q), np.asarray(kv)
        kept = self._within(q) & self._within(kv)
        for (first, stop), cell in zip(self._windows(q), cells_of(kv, self.shape), strict=True):
            kept = kept & (cell >= first) & (cell < stop)
        return kept

    def row_runs(self, q):
        *axes, (last_first, last_stop) = self._windows(q)
        firsts, stops = [], []
        # A run is a line's cells on the last axis.
        for steps in product(*map(range, self.window[:-1])):
            line, kept = 0, self._within(q)
            for step, extent, (first, stop) in zip(steps, self.shape, axes, strict=False):
                line = line * extent + first + step
                kept = kept & (first + step < stop) if self.causal else kept
            line = line * self.shape[-1]
            firsts.append(line + last_first)
            stops.append(np.where(kept, line + last_stop, line + last_first))
        return np.stack(firsts, axis=-1), np.stack(stops, axis=-1)
