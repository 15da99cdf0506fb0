"""sparse_flash: block-sparse attention whose cost is proportional to what the mask keeps."""

from .attention import attention
from .block_mask import BlockMask
from .check import CheckError, check
from .compiler import compile_mask
from .layer import KeyValueCache, SparseAttention
from .pattern import Pattern, list_patterns, parse, register_pattern
from .patterns import *  # noqa: F403  (the built-in patterns, by the names in patterns/__init__.py)
from .patterns import __all__ as _patterns
from .terms import ScoreFunction

__version__ = "0.1.0"
__all__ = [
    "BlockMask",
    "CheckError",
    "KeyValueCache",
    "Pattern",
    "ScoreFunction",
    "SparseAttention",
    "attention",
    "check",
    "compile_mask",
    "list_patterns",
    "parse",
    "register_pattern",
    *_patterns,
]
