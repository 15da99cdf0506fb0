"""Choosers: immutable values that say how blocks of keys are chosen from q and k, where patterns say it by position.

Expressions and spec text take a chooser like a pattern: ``causal & (sampled(8, floor=0.01) | sinks(64) | local(256))``. This module
declares them and takes expressions apart; room ``choosers`` has the built-in ones, and computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import numpy as np

from ..compat.constants import constant_in_graphs
from .fields import Positive, Share, set_fields
from .grid import BlockGrid
from .memory import cached_until_cleared
from .parsing import parse, text_of
from .pattern import And, DerivedPattern, Or, Pattern, PerBatch, PerHead, short_text
from .registry import list_registered, register_pattern

CHOOSER = TypeVar("CHOOSER", bound="Chooser")
RULES = ("keep", "mass", "floor", "budget")
BLOCK_SIZES = (64, 128)
DEFAULT_BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class Chooser(Pattern):
    """Base class of choosers. Subclass it as a frozen dataclass and define ``scores``.

        @sparse_flash.register_chooser("mine")
        @dataclass(frozen=True)
        class Mine(sparse_flash.Chooser):
            def scores(self, q, k, grid):
                ...  # (batch, heads, q_blocks, kv_blocks)

    Exactly one rule says which blocks of a row, a block of queries of one head, are kept:

    keep: the best so many (an int), or this share of the row's blocks, rounded up (a float).
    mass: the fewest blocks that have this share of the row's scores together.
    floor: the blocks with at least this score.
    budget: the best blocks of all heads together, this share of the blocks of their rows, so that heads compete.

    A row's blocks are those in which the expression's other operands of ``&``, such as causal, keep a pair. The row's own blocks
    and the blocks of patterns joined by ``|`` are kept in any case, and count first under ``keep`` and ``budget``.

    block: tokens on a side of a block, 64 or 128; None: 128.
    """

    keep: int | float | None = None
    mass: Share | None = None
    floor: Share | None = None
    budget: Share | None = None
    block: Positive | None = None

    chooses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).name or type(self).__qualname__
        given = [rule for rule in RULES if getattr(self, rule) is not None]
        if len(given) != 1:
            got = " and ".join(f"{rule}={getattr(self, rule)}" for rule in given) or "none"
            raise ValueError(f"{name} must have one rule of {', '.join(f'{rule}=' for rule in RULES)}; got {got}; pass one of them")
        if self.keep is not None:
            set_fields(self, keep=check_keep(self.keep, f"{name}: keep"))
        if self.block is not None and self.block not in BLOCK_SIZES:
            raise ValueError(f"{name}: block must be one of {', '.join(map(str, BLOCK_SIZES))}; got {self.block}")

    @property
    def rule(self) -> tuple[str, int | float]:
        """The name and the number of the rule."""
        return next((rule, value) for rule in RULES if (value := getattr(self, rule)) is not None)

    @property
    def block_size(self) -> int:
        return self.block or DEFAULT_BLOCK

    def scores(self, q: Any, k: Any, grid: BlockGrid) -> Any:
        """Returns scores of the blocks of keys for each block of queries, higher for blocks that matter more.

        q: (batch, heads, q_len, head_dim). k: (batch, kv_heads, kv_len, head_dim). grid: lengths and blocks; the last query has the
        position of the last key. Returns (batch, heads, q_blocks, kv_blocks), floating-point. The rules ``mass`` and ``floor`` take
        them for shares of a row; -inf and NaN are never kept. Use operations of fixed shapes, without host synchronization.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no scores; define scores(self, q, k, grid)")

    def compared_features(self, content: Any) -> Any:
        """Returns what a built-in chooser compares, from a ``Content``; None: it defines ``scores``, or a caller passes them."""
        return None

    def token_rule(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        raise self.missing_content_error()

    def missing_content_error(self) -> ValueError:
        """The error for uses that have no q and k."""
        return ValueError(
            f"{short_text(self)} chooses blocks from q and k, and has no table without them; pass the expression to attention, or "
            "make a mask for it by choose_blocks(spec, q, k). attention_varlen and attention_decode take no choosers: pad the "
            "documents and pass attention their kv_lens and q_lens; decode without the chooser"
        )

    def __invert__(self) -> NoReturn:
        raise ValueError(f"~{short_text(self)}: what a chooser leaves out is no mask; write the expression without ~")


def check_keep(keep: object, what: str = "keep") -> int | float:
    """``keep`` as a number of blocks or as a share. Raises TypeError or ValueError for other values. what: the error's subject."""
    if isinstance(keep, (bool, np.bool_)) or not isinstance(keep, (Real, np.integer, np.floating)):
        raise TypeError(f"{what} must be an int, blocks a row, or a float, a share of them; got {keep!r}")
    number = int(keep) if isinstance(keep, (int, np.integer)) else float(keep)
    if not (number >= 1 if isinstance(number, int) else 0 < number <= 1):
        raise ValueError(f"{what} must be at least one block a row, an int, or a share in (0, 1], a float; got {keep}")
    return number


def register_chooser(name: str) -> Callable[[type[CHOOSER]], type[CHOOSER]]:
    """Class decorator: makes a chooser available to spec text under ``name``; as ``register_pattern``, which shares its names."""
    register = register_pattern(name)

    def decorate(cls: type[CHOOSER]) -> type[CHOOSER]:
        if not (isinstance(cls, type) and issubclass(cls, Chooser)):
            raise TypeError(f"@register_chooser({name!r}) must decorate a subclass of sparse_flash.Chooser; got {cls!r}")
        return register(cls)

    return decorate


def list_choosers() -> list[str]:
    """Returns the registered names of choosers, sorted: built-in choosers and the user's."""
    return list_registered(chooses=True)


class HeadChoice(NamedTuple):
    """``within & (choosers | always)``, of one head or of all. within: None for all pairs. always: None for nothing."""

    within: Pattern | None
    choosers: tuple[Chooser, ...]
    always: Pattern | None


@constant_in_graphs
def has_choosers(spec: object) -> bool:
    """Whether a mask is an expression with choosers, or spec text of one."""
    return isinstance(spec, (Pattern, str)) and _has_choosers(spec)


@cached_until_cleared(maxsize=1024)
def _has_choosers(spec: Pattern | str) -> bool:
    return any(leaf.chooses for leaf in (parse(spec) if isinstance(spec, str) else spec).leaves())


@cached_until_cleared(maxsize=256)
def choices_of(spec: Pattern | str) -> tuple[HeadChoice, ...]:
    """The choice of all heads, or of each for ``per_head``. Raises ValueError for other than ``within & (chooser | always)``."""
    pattern = (parse(spec) if isinstance(spec, str) else spec).map_leaves(_expand_choosers)
    if isinstance(pattern, PerBatch):
        raise ValueError(f"per_batch takes patterns without choosers; got {short_text(pattern)}; call once for each sequence")
    heads = pattern.patterns if isinstance(pattern, PerHead) else (pattern,)
    chosen = {head: _choice_of(head) for head in heads if _has_choosers(head)}
    choosers = [chooser for choice in chosen.values() for chooser in choice.choosers]
    if not choosers:
        raise ValueError(f"{short_text(pattern)} has no chooser; known: {', '.join(list_choosers())}; compile_mask takes patterns")
    if len({chooser.block_size for chooser in choosers}) > 1:
        raise ValueError(f"all choosers of {short_text(pattern)} must have one block; pass the same block= to each")
    limits = {choice.within for choice in chosen.values()}
    within = next(iter(limits))
    made = [chosen[head] if head in chosen else _parse_chooserless(head, within) for head in heads]
    choices = tuple(choice for choice in made if choice is not None)
    if len(limits) > 1 or len(choices) < len(heads):
        raise ValueError(
            f"all heads of {short_text(pattern)} must have the same pattern before their chooser, such as causal; write "
            "per_head([causal & (... | ...), causal & (... | ...)])"
        )
    if len(set(choices)) > 1 and any(chooser.budget is not None for chooser in choosers):
        raise ValueError(f"heads of {short_text(pattern)} compete for a budget, so all must have one chooser; use keep= by head")
    return choices


@constant_in_graphs
@cached_until_cleared(maxsize=256)
def without_choosers(spec: Pattern | str) -> Pattern | str:
    """Returns what limits an expression's choosers, for calls that do not choose; of a head without choosers, its pattern."""

    def drop_choosers(choice: HeadChoice) -> Pattern:
        patterns = [one for one in (choice.within, None if choice.choosers else choice.always) if one is not None]
        return And.of(*patterns) if patterns else parse("full")

    return map_heads(spec, drop_choosers)


def map_heads(spec: Pattern | str, change: Callable[[HeadChoice], Pattern]) -> Pattern | str:
    """Returns the expression of the changed choice of all heads, or of each; as text if it has one."""
    heads = [change(choice) for choice in choices_of(spec)]
    joined = heads[0] if len(set(heads)) == 1 else PerHead(tuple(heads))
    return text_of(joined) or joined


def chooser_block_size(spec: Pattern | str) -> int:
    """The block size of an expression's choosers."""
    return next(chooser.block_size for choice in choices_of(spec) for chooser in choice.choosers)


def _expand_choosers(leaf: Pattern) -> Pattern:
    """A pattern that a user named, and that has choosers, written out."""
    return (
        leaf.expand_expression().map_leaves(_expand_choosers) if isinstance(leaf, DerivedPattern) and _has_choosers(leaf) else leaf
    )


def _choice_of(pattern: Pattern) -> HeadChoice:
    operands = pattern.operands if isinstance(pattern, And) else (pattern,)
    patterns = [one for one in operands if not _has_choosers(one)]
    chosen = [one for one in operands if _has_choosers(one)]
    inner = chosen[0].operands if isinstance(chosen[0], Or) else (chosen[0],)
    choosers = tuple(one for one in inner if isinstance(one, Chooser))
    always = [one for one in inner if not _has_choosers(one)]
    if len(chosen) > 1 or len(choosers) + len(always) < len(inner) or not choosers:
        raise ValueError(f"choosers and what is always kept are joined by |, as in within & (chooser | always); got {pattern}")
    choice = HeadChoice(_join_patterns(And, patterns), choosers, _join_patterns(Or, always))
    if any(map(_says_causal, always)) and not is_causal(choice.within):
        raise ValueError(
            f"causal must stand before choosers: joined by |, it does not keep them from later keys; got {short_text(pattern, 120)}"
            f"; write causal & ({' | '.join(map(str, choosers))} | ...)"
        )
    return choice


def _says_causal(pattern: Pattern) -> bool:
    return any(map(_says_causal, pattern.operands)) if isinstance(pattern, (And, Or)) else is_causal(pattern)


def _parse_chooserless(pattern: Pattern, within: Pattern | None) -> HeadChoice | None:
    """The choice of a head without choosers, if its expression begins with ``within`` like the expressions of others; else None."""
    operands = pattern.operands if isinstance(pattern, And) else (pattern,)
    limits = () if within is None else within.operands if isinstance(within, And) else (within,)
    others = [one for one in operands if one not in limits]
    if len(others) + len(limits) > len(operands) or is_causal(_join_patterns(And, others)):
        return None
    return HeadChoice(within, (), _join_patterns(And, others) if others else within)


def _join_patterns(kind: Any, patterns: list[Pattern]) -> Pattern | None:
    return kind.of(*patterns) if patterns else None


def is_causal(within: Pattern | None) -> bool:
    """Whether an expression's pairs are limited to keys up to each query, as its text says."""
    return within is not None and "causal" in map(str, within.operands if isinstance(within, And) else (within,))
