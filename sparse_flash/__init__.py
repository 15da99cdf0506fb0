"""sparse_flash: block-sparse attention whose cost is proportional to what the mask keeps."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from .api.attention import attention
from .api.caches import clear_caches
from .api.decode import attention_decode
from .api.layer import KeyValueCache, SparseAttention
from .api.means import BlockMeans
from .api.topk import topk_blocks
from .api.varlen import attention_varlen
from .integrations import masks_of
from .masks.block_mask import BlockMask
from .masks.block_selection import BlockSelection
from .masks.compiler import compile_mask
from .masks.pattern import DerivedPattern, Pattern, list_patterns, parse, register_pattern
from .masks.pattern import PerHead as per_head
from .masks.rules import DistancePattern, RunPattern, UnitPattern, positive_int
from .packed.picks import PackedSelection
from .patterns import *  # noqa: F403  (the built-in patterns, by the names in patterns/__init__.py)
from .patterns import __all__ as _patterns
from .selection.choice import keep_picks
from .tools.draw import draw
from .tools.explain import explain
from .tools.shadow_check import CheckError, check
from .variant.variant import ScoreFunction

if TYPE_CHECKING:
    from .parallel import ContextParallel, ContextPlan, ContextPlans, context_parallel, measured_link_rate

__version__ = "0.1.0"
__all__ = [
    "BlockMask",
    "BlockMeans",
    "BlockSelection",
    "CheckError",
    "ContextParallel",
    "ContextPlan",
    "ContextPlans",
    "DerivedPattern",
    "DistancePattern",
    "KeyValueCache",
    "PackedSelection",
    "Pattern",
    "RunPattern",
    "ScoreFunction",
    "SparseAttention",
    "UnitPattern",
    "attention",
    "attention_decode",
    "attention_varlen",
    "check",
    "clear_caches",
    "compile_mask",
    "context_parallel",
    "draw",
    "explain",
    "keep_picks",
    "list_patterns",
    "masks_of",
    "measured_link_rate",
    "parse",
    "per_head",
    "positive_int",
    "register_pattern",
    "topk_blocks",
    *_patterns,
]

# Imported at their first use: most programs need no groups of processes.
_LATE = dict.fromkeys(("ContextParallel", "ContextPlan", "ContextPlans", "context_parallel", "measured_link_rate"), "parallel")


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f".{_LATE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
