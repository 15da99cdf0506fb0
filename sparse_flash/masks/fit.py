"""Whether a pattern fits the lengths of a call: the tokens that it names, and the end that it may count from."""

from __future__ import annotations

import warnings

import numpy as np

from ..compat.constants import constant_in_graphs
from .memory import cached_until_cleared
from .parsing import parse
from .pattern import Pattern, PerEntry, layout_of, own_name, short_text


def check_fit(pattern: Pattern, q_len: int, kv_len: int) -> None:
    """Raises ValueError for a pattern that names tokens which these lengths have not, or that leaves out some which they have."""
    if isinstance(pattern, PerEntry):
        for one in dict.fromkeys(pattern.patterns):
            try:
                check_fit(one, q_len, kv_len)
            except ValueError as error:
                raise ValueError(f"{pattern.name}: patterns[{pattern.patterns.index(one)}]: {error}") from None
        return
    leaves = list(pattern.leaves())
    _warn_of_causal_tiles(pattern, leaves)
    for leaf in leaves:
        if misfit := leaf.length_refusal(q_len, kv_len):
            raise ValueError(misfit)
    if advice := next((leaf.uncovered_advice for leaf in leaves if leaf.uncovered_advice), None):
        q = np.arange(max(0, kv_len - q_len), kv_len)
        left_out = q[~pattern.named_queries(q, kv_len)]
        if len(left_out):
            raise ValueError(
                f"{short_text(pattern)} must say what each query keeps; it does not for {len(left_out)} of {len(q)}, from "
                f"{left_out[0]} to {left_out[-1]}; {advice}"
            )


def _warn_of_causal_tiles(pattern: Pattern, leaves: list[Pattern]) -> None:
    layout = layout_of(pattern)
    if layout is None or not any(own_name(type(leaf)) == "causal" for leaf in leaves):
        return
    frames = layout.positions[:, 0]
    if (np.diff(frames[frames >= 0]) < 0).any():
        warnings.warn(
            f"causal in {short_text(pattern)} follows the order of tiles, so queries see later frames; take neighborhood(..., "
            "causal=(True, False, False)) with tokens in the usual order, or tiles of one frame",
            stacklevel=6,
        )


def named_len(pattern: Pattern, default: int) -> int:
    """Returns how many tokens the pattern names, as one over a VideoLayout does; ``default`` if it names none."""
    named = filter(None, (leaf.named_tokens() for leaf in pattern.leaves()))
    return max((most for _, most in named), default=default)


@constant_in_graphs
@cached_until_cleared(maxsize=256)
def check_known_end(pattern: Pattern | str) -> None:
    """Raises ValueError for a pattern that counts tokens from the end, beside lengths in tensors."""
    for leaf in (parse(pattern) if isinstance(pattern, str) else pattern).leaves():
        if leaf.bind_length(0) != leaf:
            raise unknown_end_error(leaf)


def unknown_end_error(pattern: Pattern) -> ValueError:
    """The error for a pattern that counts tokens from the end of sequences whose lengths are in tensors."""
    return ValueError(
        f"{pattern} counts from the end of the sequence, whose length is not known here: pass it to attention without q_lens and "
        "kv_lens, or name the tokens from the start, by shifted"
    )


@cached_until_cleared(maxsize=256)
def parse_if_names_tokens(pattern: Pattern | str) -> Pattern | None:
    """The pattern, if it names tokens, so that ``check_fit`` may raise; else None."""
    pattern = parse(pattern) if isinstance(pattern, str) else pattern
    return pattern if pattern.names_tokens() else None
