"""Whether a pattern fits the lengths of a call: the tokens that it names, and the end that it may count from."""

from ..compat.constants import constant_in_graphs
from .memory import cached_until_cleared
from .parsing import parse
from .pattern import Pattern


def check_fit(pattern: Pattern, q_len: int, kv_len: int) -> None:
    """Raises ValueError for a pattern that names a number of tokens which these lengths have not."""
    for leaf in pattern.leaves():
        if misfit := leaf.length_refusal(q_len, kv_len):
            raise ValueError(misfit)


def named_len(pattern: Pattern, default: int) -> int:
    """Returns how many tokens the pattern names, as one over a VideoLayout does; ``default`` if it names none."""
    named = filter(None, (leaf.named_tokens() for leaf in pattern.leaves()))
    return max((most for _, most in named), default=default)


@constant_in_graphs
@cached_until_cleared(maxsize=256)
def check_known_end(pattern: Pattern | str) -> None:
    """Raises ValueError for a pattern that counts tokens from the end, if lengths are tensors."""
    for leaf in (parse(pattern) if isinstance(pattern, str) else pattern).leaves():
        if leaf.bind_length(0) != leaf:
            raise ValueError(
                f"{leaf} counts from the end of the sequence, whose length is not known here: pass it to attention without q_lens "
                "and kv_lens, or name the tokens from the start, by shifted"
            )


@cached_until_cleared(maxsize=256)
def parse_if_names_tokens(pattern: Pattern | str) -> Pattern | None:
    """The pattern, if it names tokens, so that ``check_fit`` may raise; else None."""
    pattern = parse(pattern) if isinstance(pattern, str) else pattern
    return pattern if any(leaf.named_tokens() for leaf in pattern.leaves()) else None
