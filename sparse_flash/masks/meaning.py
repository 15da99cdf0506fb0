"""Digests of what masks keep. Saved beside spec text, they tell that the text means something else where it is read again."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator

import numpy as np

from ..compat.names import PACKAGE
from .chooser import choices_of, has_choosers, is_causal
from .fit import named_len
from .memory import cached_until_cleared
from .parsing import parse
from .pattern import Pattern, PerHead, short_text

_TOKENS = 1 << 17  # of the sequence that is sampled, if the mask names no number of tokens
_QUERIES = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@cached_until_cleared(maxsize=256)
def digest_of(mask: Pattern | str) -> str | None:
    """Returns 12 hex digits that depend on which pairs the mask keeps; None if its token rules cannot be evaluated.

    A fixed sample is evaluated: 256 queries, and 1,024 keys of each, as many in each octave of the distances from the query, from
    the first token and from the last. So a change of many pairs is noticed, and one by a token at distances up to some 2,000 or at
    a power of two. A change of a few pairs elsewhere may be missed. A chooser counts by its text, the patterns beside it by their
    pairs. All releases must have the same sample, as digests are saved.
    """
    pattern, found = parse(mask) if isinstance(mask, str) else mask, hashlib.sha256()
    try:
        for part in _parts_of(pattern):
            found.update(part.encode() if isinstance(part, str) else _sample_pairs(part))
    except Exception:  # of a user's own rule: for tokens that it does not know, or as it has only a block rule
        return None
    return found.hexdigest()[:12]


def why_changed(text: str, saved: str) -> str | None:
    """Says that spec text means something else than when its digest was saved; None if it does not."""
    if (now := digest_of(text)) == saved:
        return None
    return (
        f"the mask {short_text(text)!r} means something else than when it was saved: its digest is {now} here, with sparse_flash "
        f"{sys.modules[PACKAGE].__version__}, and {saved} there; install the releases of sparse_flash, and of other packages whose "
        "patterns it has, by which it was saved"
    )


def _parts_of(pattern: Pattern) -> Iterator[Pattern | str]:
    if has_choosers(pattern):
        for choice in choices_of(pattern):
            for part in (choice.within, *choice.choosers, choice.always):
                yield part if isinstance(part, Pattern) and not part.chooses else str(part)
    else:
        yield from pattern.patterns if isinstance(pattern, PerHead) else (pattern,)


def _sample_pairs(pattern: Pattern) -> bytes:
    """Whether each pair of the sample is kept, as bits."""
    tokens = named_len(pattern, _TOKENS)
    near = _distances(tokens, 1, _QUERIES)[0]
    q = np.concatenate([near[:128] - 1, tokens - near[128:]])[:, None] % tokens
    back, ahead, first, last = np.split(_distances(tokens, _QUERIES, 1024), [512, 640, 896], axis=1)
    kv = np.concatenate([q - back + 1, q + ahead, first - 1, tokens - last], axis=1) % tokens
    kept = np.asarray(pattern.bind_length(tokens).token_rule(q, kv))
    return np.packbits(np.broadcast_to(kept.astype(bool), kv.shape)).tobytes()


@cached_until_cleared(maxsize=256)
def find_unstated_causal(spec: Pattern | str) -> str | None:
    """The text of what limits an expression's choosers, if it does not say causal, so that choosers compare later keys too, and no
    sampled query sees a later key under it; otherwise None."""
    within = choices_of(spec)[0].within
    if within is None or is_causal(within):
        return None
    tokens = named_len(within, _TOKENS)
    q = (_distances(tokens, 1, _QUERIES)[0] % tokens)[:, None]
    kv = q + _distances(tokens, _QUERIES, 256)
    try:
        kept = np.broadcast_to(np.asarray(within.bind_length(tokens).token_rule(q, np.minimum(kv, tokens - 1))), kv.shape)
    except Exception:  # as in ``digest_of``
        return None
    return None if (kept & (kv < tokens)).any() else str(within)


def _distances(tokens: int, rows: int, count: int) -> np.ndarray:
    """Returns (rows, count) int64 of 1 and more, as many in each octave below ``tokens``: some its ends, the others anywhere."""
    number = np.arange(rows * count, dtype=np.uint64)
    octaves = np.uint64(max(1, (tokens - 1).bit_length()))
    octave, repeat = number % octaves, number // octaves
    ends = np.where(repeat % np.uint64(8) == 0, np.uint64(0), ~np.uint64(0))
    within = np.where(repeat % np.uint64(8) < 2, ends, repeat * _GOLDEN) >> np.uint64(1)
    return ((np.uint64(1) << octave) + (within >> (np.uint64(63) - octave))).astype(np.int64).reshape(rows, count)
