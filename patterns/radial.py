"""radial: windows within frames that halve each time the distance between frames doubles.

use: long videos: near frames in detail, far frames where they lie at the same spot; the pairs grow as n log n with the frames
formula: (|k - l| + 1) * 2**f <= s, or k == l and apart % ceil(2**f / s) == 0, or layer of kv < anchors (f, k, l, s, apart: below)
source: arXiv:2506.19852 (its rule for tokens, here for tiles)
specimen: radial(video_layout(16, 16, 16, tile=(1, 8, 8)))

    #####.#.#
    ####.#.##        radial(video_layout(4, 1, 2, (1, 1, 1), 1), anchors=0)
    #######.#
    ######.##
    #.#######
    .########
    #.#.#####
    .#.######
    #########
"""

from dataclasses import dataclass

import numpy as np

from ..masks.fields import Natural
from ..masks.registry import register_pattern
from .video_layout import TilePattern


@register_pattern("radial")
@dataclass(frozen=True)
class Radial(TilePattern):
    """Tiles near in space, fewer of them the farther their frames are.

    layout: a VideoLayout or its text; q, k and v are in its order. anchors: the first so many layers of tiles are seen by all, as
    the paper's first frame is. keep_beside: as in ``tile_window``.

    A layer is ``layout.tile[0]`` frames and has s tiles; k and l are the numbers of the query's and the key's tile in their layers,
    row by row. ``apart`` is the distance of these layers. f is floor(log2) of the distance in frames, and 0 up to one frame.
    With ``tile=(1, 1, 1)`` this is the paper's rule for tokens; else s, k and l count tiles, ``apart`` and the first frame layers.
    The authors' code (mit-han-lab/radial-attention) differs from both: its windows are bands of tokens in raster order, rounded to
    powers of two and scaled by ``decay_factor``, and it keeps a block if most of its columns are.
    """

    anchors: Natural = 1

    def tile_rule(self, q, kv):
        _, rows, columns = self.layout.tile_grid
        apart = abs(q[0] - kv[0])
        halvings = np.frexp(np.maximum(apart * self.layout.tile[0], 1))[1] - 1
        shrunk = np.left_shift(1, halvings)
        k, l = (cell[1] * columns + cell[2] for cell in (q, kv))  # noqa: E741
        far = (k == l) & (apart % -(-shrunk // (rows * columns)) == 0)
        return (kv[0] < self.anchors) | ((abs(k - l) + 1) * shrunk <= rows * columns) | far
