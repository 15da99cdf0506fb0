"""Suggests what to write here for keywords of other libraries' attention."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_BOOL_MASK = (
    "pass mask=BlockMask.from_dense(...) for a bool tensor of pairs (made once, outside of the loop), or a pattern that says what "
    "it keeps; for numbers that are added to scores, alibi_slopes, rel_bias or score_mod"
)
_BLOCK = "a chooser has its own, as in sampled(8, keep=0.1, block=64)"

# Advice on what to write in ``attention``, and the keywords of other libraries that get it.
_ADVICE = {
    'pass mask="causal", which aligns the last query with the last key': "is_causal causal",
    _BOOL_MASK: "attn_mask attn_bias bias",
    _BOOL_MASK + "; for padding of keys, kv_lens; for padding of queries, q_lens": "attention_mask",
    "pass it as mask=: masks of FlexAttention are taken as they are": "block_mask",
    f"pass a table with such blocks, mask=compile_mask(pattern, q_len, kv_len, block_size=...); {_BLOCK}": "block_size",
    _BLOCK: "block",
    "pass mask=create_block_mask(mask_mod, ...) of FlexAttention, made once, outside of the loop": "mask_mod",
    "leave it out: k and v may have fewer heads than q, a number that divides q's": "enable_gqa",
    'pass mask="local(w)", which keeps |query - key| < w, or "causal & local(w)"; a window (left, right) of FlashAttention is '
    '"window(left, right)"': "window_size",
    'pass mask="causal & local(w)", in which a query sees w keys, its own among them': "sliding_window",
    "pass scale=": "softmax_scale sm_scale scaling",
    "pass dropout_p=": "dropout p",
    "pass kv_lens=, the number of tokens of each sequence; q_lens= for queries, kv_starts= and q_starts= for padding on the left": (
        "key_padding_mask padding_mask"
    ),
    "pass kv_lens=": "seqused_k cache_seqlens",
    "documents packed one after another are taken by sparse_flash.attention_varlen": "cu_seqlens max_seqlen seqlens_k",
    "the matrix of weights is never formed; return_lse=True returns the logarithm of each query's softmax sum": (
        "return_attn_probs need_weights output_attentions"
    ),
    "pass return_lse=True": "return_softmax_lse",
    "leave it out: tile sizes are chosen for each GPU; SPARSE_FLASH_AUTOTUNE=1 measures others": "kernel_options",
    "leave it out: the kernel chooses how many programs share the keys of a sequence": "num_splits",
    "call attention_decode(k_scale=, v_scale=) for a cache in e4m3, attention(precision='fp8') for products in e4m3": (
        "q_descale k_descale v_descale"
    ),
    "rotate q and k before the call": "rotary_cos rotary_sin",
    "pass sinks=": "s_aux learnable_sink",
    "pass rel_bias=, by head and distance": "position_bias",
}
_WRITE_INSTEAD = {keyword: advice for advice, keywords in _ADVICE.items() for keyword in keywords.split()}


def answers_unknown_keywords(error: Callable[[str, list[str], list[str]], Exception]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: raises ``error(function's name, names of its arguments, unknown keywords)`` if a call passes keywords that the
    function does not take. Signatures stay as they are, so type checkers reject such a call too."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = list(inspect.signature(function).parameters)

        @wraps(function)
        def call(*arguments: P.args, **keywords: P.kwargs) -> R:
            for name in keywords:
                if name not in known:
                    raise error(function.__name__, known, [name for name in keywords if name not in known])
            return function(*arguments, **keywords)

        return call

    return decorate


def keyword_error(function: str, known: list[str], unknown: list[str]) -> TypeError:
    """Python's own error for unknown keywords, plus the name that was meant, or all names. With advice for ``attention`` and
    the calls of flash-attn."""
    parts = [f"{function}() got an unexpected keyword argument {unknown[0]!r}"]
    advised = _WRITE_INSTEAD if function == "attention" or function.startswith("flash_attn") else {}
    for name in unknown:
        if name in advised:  # first: torch.compile can trace no further
            parts.append(f"{name}: {advised[name]}")
        elif near := difflib.get_close_matches(name, [*known, *advised], n=1, cutoff=0.7):
            parts.append(" ".join([f"{name}: did you mean {near[0]!r}?", *filter(None, [advised.get(near[0])])]))
        else:
            parts.append(f"{name}: it takes {', '.join(known)}")
    return TypeError("; ".join(parts))


def chooser_keyword_error(function: str, known: list[str], unknown: list[str]) -> TypeError:
    """The error of functions whose expressions have choosers: blocks are the choosers' own, and other keywords have no advice."""
    way_out = _BLOCK if unknown[0] in ("block", "block_size") else f"it takes {', '.join(known)}"
    return TypeError(f"{function}() got an unexpected keyword argument {unknown[0]!r}; {way_out}")
