"""Advice for keywords that other libraries' attention takes."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from ..compat.dynamo import outside_graphs
from ..masks.cache import ACCEPTS_ONLY_TEXT, ONLY_TEXT
from ..masks.pattern import Pattern

P = ParamSpec("P")
R = TypeVar("R")

_BOOL_MASK = "pass mask=BlockMask.from_dense(...) for a bool tensor, made once; for numbers that are added to scores, rel_bias"
_ADVICE = {
    "is_causal": 'pass mask="causal"',
    "causal": 'pass mask="causal"',
    "attn_mask": _BOOL_MASK,
    "attention_mask": f"{_BOOL_MASK}; for padding, kv_lens",
    "block_mask": "pass it as mask=",
    "block_size": "pass mask=compile_mask(pattern, q_len, kv_len, block_size=...)",
    "enable_gqa": "leave it out: k and v may have fewer heads than q",
    "window_size": 'pass mask="window(left, right)"',
    "softmax_scale": "pass scale=",
    "dropout": "pass dropout_p=",
    "cu_seqlens_q": "call attention_varlen for packed documents",
}


def advises(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: adds advice to Python's error for unknown keywords. Type checkers see the function's signature."""
    known = tuple(inspect.signature(function).parameters)

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        for name in keywords:
            if name not in known:
                advice = _ADVICE.get(name, f"it takes {', '.join(known)}")
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}; {advice}")
        needs_text = ACCEPTS_ONLY_TEXT and torch.compiler.is_compiling()
        if needs_text and any(isinstance(one, Pattern) for one in (*arguments, *keywords.values())):
            return outside_graphs(function, ONLY_TEXT)(*arguments, **keywords)
        return function(*arguments, **keywords)

    return call
