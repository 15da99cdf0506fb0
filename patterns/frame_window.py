"""frame_window: frames near in time, and the first frames, which all see.

use: heads of video diffusion models that look within a frame and its neighbours; long videos with the first frames as anchors
formula: tile of kv in the first anchors layers, or start <= layer of kv < start + window, with start as in tile_window
source: arXiv:2502.01776 (spatial heads, the first frame); arXiv:2309.17453 (first tokens as sinks)
specimen: frame_window(video_layout(16, 16, 16, tile=(1, 8, 8)), 5)

    ##......#
    ##......#        frame_window(video_layout(4, 1, 2, (1, 1, 2), 1), 1)
    ####....#
    ####....#
    ##..##..#
    ##..##..#
    ##....###
    ##....###
    #########
"""

from dataclasses import dataclass

from ..masks.fields import Natural, Positive
from ..masks.registry import register_pattern
from .video_layout import TilePattern, in_window


@register_pattern("frame_window")
@dataclass(frozen=True)
class FrameWindow(TilePattern):
    """Layers of tiles near in time. A layer is as many frames as a tile has, ``layout.tile[0]``.

    layout: a VideoLayout or its text; q, k and v are in its order. window: layers, that of the query included; at the borders it
    shifts inward, and a larger one has all layers. anchors: the first so many layers are seen by all tiles. keep_beside: as in
    ``tile_window``.
    """

    window: Positive
    anchors: Natural = 1

    def tile_rule(self, q, kv):
        return (kv[0] < self.anchors) | in_window(q[0], kv[0], self.window, self.layout.tile_grid[0])
