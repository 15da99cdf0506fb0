"""The built-in patterns, one per file; ``sparse_flash`` exports them all."""

from .bigbird import BigBird as bigbird
from .block_diagonal import BlockDiagonal as block_diagonal
from .butterfly import Butterfly as butterfly
from .causal import Causal as causal
from .dilated import Dilated as dilated
from .documents import Documents as documents
from .fixed import Fixed as fixed
from .frame_window import FrameWindow as frame_window
from .from_blocks import FromBlocks as from_blocks
from .from_mask_fn import FromMaskFn as from_mask_fn
from .full import Full as full
from .global_tokens import GlobalTokens as global_tokens
from .last_tokens import LastTokens as last_tokens
from .local import Local as local
from .longformer import Longformer as longformer
from .neighborhood import Neighborhood as neighborhood
from .power_of_two import PowerOfTwo as power_of_two
from .prefix import Prefix as prefix
from .radial import Radial as radial
from .random import Random as random
from .shifted import Shifted as shifted
from .sinks import Sinks as sinks
from .strided import Strided as strided
from .tile_window import TileWindow as tile_window
from .video_layout import VideoLayout as video_layout
from .window import Window as window

__all__ = [
    "bigbird",
    "block_diagonal",
    "butterfly",
    "causal",
    "dilated",
    "documents",
    "fixed",
    "frame_window",
    "from_blocks",
    "from_mask_fn",
    "full",
    "global_tokens",
    "last_tokens",
    "local",
    "longformer",
    "neighborhood",
    "power_of_two",
    "prefix",
    "radial",
    "random",
    "shifted",
    "sinks",
    "strided",
    "tile_window",
    "video_layout",
    "window",
]
