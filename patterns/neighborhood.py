"""neighborhood: windows over a line, an image or a volume whose cells are the tokens, row by row.

use: images, video and volumes: each patch sees the patches around it
formula: start <= kv < start + window on each axis, with start = clip(q - window // 2, 0, extent - window)
source: arXiv:2204.07143, sec. 3; stride, dilation and causal as NATTEN defines them (arXiv:2209.15001, arXiv:2504.16922)
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
    query than after it. The grid must hold all tokens of the sequence; ``shifted`` places one among other tokens.
    stride, dilation: cells on each axis, or one number for all; None is 1. So many neighbours have one window, that of the middle
    one, of the later one of two. A window has every so many cells, those with the query's remainder. window * dilation is at most
    shape, stride at most window. causal: for each axis, or for all; None is False. There the window ends at the query, begins where
    that of the last of its stride begins, and is cut off at the border.
    """

    shape: tuple[Positive, ...]
    window: tuple[Positive, ...]
    stride: tuple[Positive, ...] | None = None
    dilation: tuple[Positive, ...] | None = None
    causal: tuple[bool, ...] | None = None

    def __post_init__(self):
        given = {name: getattr(self, name) for name in ("shape", "window", "stride", "dilation", "causal")}
        given = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in given.items()}
        if isinstance(shape := given["shape"], (tuple, list)):
            for name, value in given.items():
                if value is not None and not isinstance(value, (tuple, list)):
                    set_fields(self, **{name: (value,) * len(shape)})
        if self.causal is not None:
            set_fields(self, causal=tuple(map(bool, self.causal)))
        super().__post_init__()
        shape, window = self.shape, self.window
        if not 1 <= len(shape) <= 3:
            raise ValueError(f"neighborhood: shape must have 1 to 3 axes; got {shape}")
        most_dilated = tuple(s // w for s, w in zip(shape, window))
        for name, most in (("window", shape), ("stride", window), ("dilation", most_dilated), ("causal", window)):
            value = getattr(self, name)
            if value is not None and (len(value) != len(shape) or any(one > limit for one, limit in zip(value, most, strict=True))):
                raise ValueError(f"neighborhood: {name} must have one number for each axis, at most {most}; got {value}")
            if name != "window" and value is not None and not any(one > (name != "causal") for one in value):
                set_fields(self, **{name: None})  # so that patterns of one meaning are equal

    def named_tokens(self):
        return (prod(self.shape),) * 2

    def _windows(self, q):
        """On each axis (dilation, remainder, first, stop): a query keeps cells remainder + dilation * c, first <= c < stop."""
        ones = (1,) * len(self.shape)
        options = self.stride or ones, self.dilation or ones, self.causal or (0,) * len(ones)
        for cell, extent, window, stride, dilation, causal in zip(cells_of(q, self.shape), self.shape, self.window, *options):
            own, remainder = np.divmod(cell, dilation) if dilation > 1 else (cell, 0)
            last = (extent - 1 - remainder) // dilation
            leader = np.minimum(own // stride * stride + (stride - 1 if causal else stride // 2), last) if stride > 1 else own
            first = np.maximum(leader - window + 1, 0) if causal else np.clip(leader - window // 2, 0, last + 1 - window)
            yield dilation, remainder, first, own + 1 if causal else first + window

    def _within(self, position):
        return (position >= 0) & (position < prod(self.shape))

    def token_rule(self, q, kv):
        # Axis by axis takes fewer comparisons than run by run: a window of three axes has many runs.
        q, kv = np.asarray(q), np.asarray(kv)
        kept = self._within(q) & self._within(kv)
        for (dilation, remainder, first, stop), cell in zip(self._windows(q), cells_of(kv, self.shape), strict=True):
            kept = kept & (cell % dilation == remainder) if dilation > 1 else kept
            cell = cell // dilation if dilation > 1 else cell
            kept = kept & (cell >= first) & (cell < stop)
        return kept

    def row_runs(self, q):
        axes = list(self._windows(q))
        *_, (dilated, _, _, _) = axes
        firsts, stops = [], []
        # A run is a line's cells on the last axis, or one cell where these lie apart.
        for steps in product(*map(range, self.window[:-1]), range(self.window[-1]) if dilated > 1 else (0,)):
            line, kept = 0, self._within(q)
            for step, extent, (dilation, remainder, first, stop) in zip(steps, self.shape, axes, strict=True):
                line = line * extent + remainder + dilation * (first + step)
                kept = kept & (first + step < stop) if self.causal else kept
            length = 1 if dilated > 1 else stop - first
            firsts.append(line)
            stops.append(np.where(kept, line + length, line))
        return np.stack(firsts, axis=-1), np.stack(stops, axis=-1)
