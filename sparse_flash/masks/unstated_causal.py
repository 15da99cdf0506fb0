"""Finds expressions under which no query sees a later key, though they do not say causal: their choosers compare later keys."""

from __future__ import annotations

import numpy as np

from .chooser import choices_of, is_causal
from .fit import named_len
from .memory import cached_until_cleared
from .pattern import Pattern

_TOKENS = 1 << 17  # of the sequence that is sampled, if the mask names no number of tokens
_PAIRS = 1 << 16


@cached_until_cleared(maxsize=256)
def find_unstated_causal(spec: Pattern | str) -> str | None:
    """The text of what limits an expression's choosers, if it does not say causal, so that choosers compare later keys too, and no
    sampled query sees a later key under it; otherwise None."""
    within = choices_of(spec)[0].within
    if within is None or is_causal(within):
        return None
    tokens = named_len(within, _TOKENS)
    drawn = np.random.default_rng(0)
    q = drawn.integers(0, tokens, _PAIRS)
    kv = q + (float(tokens) ** drawn.random(_PAIRS)).astype(np.int64)  # as many distances in each octave
    q, kv = q[kv < tokens], kv[kv < tokens]
    try:
        kept = np.asarray(within.bind_length(tokens).token_rule(q, kv))
    except Exception:  # of a user's own rule: for tokens that it does not know, or as it has only a block rule
        return None
    return None if kept.any() else str(within)
