"""The public names, and where they live."""

from .api.attention import attention
from .api.caches import clear_caches
from .api.choose import choose_blocks
from .api.decode import attention_decode
from .api.layer import SparseAttention
from .api.topk import topk_blocks
from .api.varlen import attention_varlen
from .choosers import built_in as built_in
from .choosers.report import ChoiceReport
from .core.variant import ScoreFunction
from .decoding.cache import KeyValueCache
from .integrations import masks_of, record_masks
from .masks.block_mask import BlockMask, compile_mask
from .masks.chooser import Chooser, list_choosers, register_chooser
from .masks.fields import positive_int
from .masks.parsing import parse
from .masks.pattern import DerivedPattern, Pattern
from .masks.pattern import PerBatch as per_batch
from .masks.pattern import PerHead as per_head
from .masks.registry import list_patterns, register_pattern
from .masks.rules import DistancePattern, RunPattern, UnitPattern
from .patterns import *  # noqa: F403  (the built-in patterns, by the names in patterns/__init__.py)
from .patterns import __all__ as _patterns
from .patterns import video_layout as VideoLayout
from .selection.block_selection import BlockSelection
from .selection.choice import keep_picks
from .selection.packed_selection import PackedSelection
from .tools.draw import draw
from .tools.explain import explain

__all__ = [
    "BlockMask",
    "BlockSelection",
    "ChoiceReport",
    "Chooser",
    "DerivedPattern",
    "DistancePattern",
    "KeyValueCache",
    "PackedSelection",
    "Pattern",
    "RunPattern",
    "ScoreFunction",
    "SparseAttention",
    "UnitPattern",
    "VideoLayout",
    "attention",
    "attention_decode",
    "attention_varlen",
    "choose_blocks",
    "clear_caches",
    "compile_mask",
    "draw",
    "explain",
    "keep_picks",
    "list_choosers",
    "list_patterns",
    "masks_of",
    "parse",
    "per_batch",
    "per_head",
    "positive_int",
    "record_masks",
    "register_chooser",
    "register_pattern",
    "topk_blocks",
    *_patterns,
]
