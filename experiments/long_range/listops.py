"""ListOps: the value of a nested expression such as [MAX 4 [MIN 2 9 ] [SM 7 8 1 ] ]. (arXiv:1804.06028; arXiv:2011.04006, 2.2.1)

The grammar and its chances are from lra_benchmarks/data/listops.py: an expression is a digit, or with a chance of a quarter an
operator on two or more expressions. Expressions of a wrong length are dropped. MED of an even number of digits is the mean of the
middle two, rounded down; SM is the sum modulo 10.
"""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
SYMBOLS = ("", *map(str, range(10)), *OPERATORS, "]")  # by token; the first is padding
_NUMBER = {symbol: token for token, symbol in enumerate(SYMBOLS)}
_OPERATOR_SHARE = 0.25
_BLOCK = 128


class _TooLong(Exception):
    """Not an error: the expression is dropped before it ends."""


@dataclass(frozen=True)
class ListOps:
    """The task. depth: expressions in each other, digits included. arguments: of an operator, at most. shortest, longest: tokens of
    a whole expression."""

    depth: int = 10
    arguments: int = 10
    shortest: int = 500
    longest: int = 2000
    name: ClassVar[str] = "listops"
    classes: ClassVar[int] = 10
    vocabulary: ClassVar[int] = len(SYMBOLS)
    padding: ClassVar[int | None] = 0
    together: ClassVar[int] = 100
    wavelengths: ClassVar[tuple[float, float]] = 4.0, 4096.0  # of rotary positions, the shortest and the longest, in tokens
    unit: ClassVar[float] = 1.0

    def __post_init__(self):
        if self.depth < 2 or self.arguments < 2:
            raise ValueError(f"depth and arguments must be at least 2; got {self.depth} and {self.arguments}")
        reach = 1
        for _ in range(self.depth - 1):
            reach = 2 + self.arguments * reach
        if not 4 <= self.shortest <= min(self.longest, reach):
            raise ValueError(
                f"shortest must be from 4 to longest, {self.longest}, and to {reach}, the most tokens of an expression of depth "
                f"{self.depth} with {self.arguments} arguments; got {self.shortest}"
            )

    @property
    def shape(self) -> tuple[int]:
        """Tokens, padded to whole blocks of attention."""
        return (-(-self.longest // _BLOCK) * _BLOCK,)

    def make(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (count, length) uint8, padded, and values (count,) uint8."""
        source = random.Random(int(rng.integers(1 << 62)))  # far faster than NumPy's for one number at a time
        inputs, labels = np.zeros((count, *self.shape), np.uint8), np.zeros(count, np.uint8)
        for row in range(count):
            tokens, labels[row] = self.expression(source)
            inputs[row, : len(tokens)] = tokens
        return inputs, labels

    def expression(self, source: random.Random) -> tuple[list[int], int]:
        """Tokens and value of an expression of the right length."""
        while True:
            tokens: list[int] = []
            try:
                value = self._grow(1, tokens, source)
            except _TooLong:
                continue
            if len(tokens) >= self.shortest:
                return tokens, value

    def _grow(self, depth: int, tokens: list[int], source: random.Random) -> int:
        """Appends an expression; returns its value."""
        if len(tokens) >= self.longest:
            raise _TooLong
        if depth == self.depth or source.random() > _OPERATOR_SHARE:
            value = source.randrange(10)
            tokens.append(_NUMBER[str(value)])
            return value
        operator = source.choice(list(OPERATORS))
        tokens.append(_NUMBER[operator])
        values = [self._grow(depth + 1, tokens, source) for _ in range(source.randint(2, self.arguments))]
        if len(tokens) >= self.longest:
            raise _TooLong
        tokens.append(_NUMBER["]"])
        return OPERATORS[operator](values)


def text(tokens) -> str:
    """The expression that tokens stand for, without padding."""
    return " ".join(SYMBOLS[token] for token in tokens if token)
