"""sparse_flash: block-sparse attention whose cost is proportional to what the mask keeps."""

from .attention import attention
from .block_mask import BlockMask
from .check import CheckError, check
from .compiler import compile_mask
from .decode import attention_decode
from .layer import KeyValueCache, SparseAttention
from .pattern import Pattern, list_patterns, parse, register_pattern
from .patterns import *  # noqa: F403  (the built-in patterns, by the names in patterns/__init__.py)
from .patterns import __all__ as _patterns
from .selection import topk_blocks
from .terms import ScoreFunction
from .tools.draw import draw
from .tools.explain import explain
from .varlen import attention_varlen

__version__ = "0.1.0"
__all__ = [
    "BlockMask",
    "CheckError",
    "KeyValueCache",
    "Pattern",
    "ScoreFunction",
    "SparseAttention",
    "attention",
    "attention_decode",
    "attention_varlen",
    "check",
    "compile_mask",
    "draw",
    "explain",
    "list_patterns",
    "parse",
    "register_pattern",
    "topk_blocks",
    *_patterns,
]
