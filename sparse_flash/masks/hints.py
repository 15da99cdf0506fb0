"""Optional hints of a pattern for the compiler, and the evaluation of its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeAlias

import numpy as np

from .grid import BlockGrid, BlockRuns, SparseMatrix

# The starts and the ends of runs of keys.
Runs: TypeAlias = tuple[np.ndarray, np.ndarray]


class CompilerHints:
    """Optional members of a pattern that make compiling faster. They change no table. The compiler trusts them: each must agree
    with ``token_rule``.

    shift_invariant: the token rule depends only on ``q - kv``, so blocks on one diagonal are equal and one of them is evaluated.
    """

    shift_invariant: ClassVar[bool] = False
    token_rule: Callable[[np.ndarray, np.ndarray], np.ndarray]

    def block_rule(self, grid: BlockGrid) -> BlockRuns | SparseMatrix | None:
        """States of the grid's blocks (1 partial, 2 full) as a (q_blocks, kv_blocks) scipy.sparse matrix or a BlockRuns, or None if
        only the tokens of blocks tell them apart.

        It may call an empty or full block partial: compiling evaluates the tokens of partial blocks.
        """
        return None

    def block_keys(self, grid: BlockGrid, rows: np.ndarray, cols: np.ndarray) -> np.ndarray | None:
        """Keys of these blocks, (blocks, numbers) integers, or None. Blocks with equal keys keep equal pairs: one is evaluated."""
        return None

    def row_runs(self, q: np.ndarray) -> Runs | None:
        """The keys that each query keeps, as runs [first, stop) of positions, or None if that is not a natural form.

        q: any shape S of int64 positions. Returns two int64 arrays of shape (*S, runs); the runs of a query are ascending and
        disjoint; a run with stop <= first is empty.
        """
        return None

    @property
    def shift_period(self) -> int | None:
        """The token rule repeats when both positions move by this many tokens; None if it need not."""
        return 1 if self.shift_invariant else None

    def token_tiles(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        """The token rule on many blocks: q (n, block), kv (n, block) positions -> (n, block, block) bool."""
        shape = (*q.shape, kv.shape[1])
        return evaluate_rule(self, "the token rule", self.token_rule, (q[:, :, None], kv[:, None, :]), shape)


@contextmanager
def explain_array_errors(pattern: object, rule: str) -> Iterator[None]:
    """Errors of a rule that does not take arrays name it and say what to write; others are the user's own, and pass."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if "array" not in str(error):  # as NumPy says it: the truth value of an array, only 0-dimensional arrays
            raise
        raise (TypeError if isinstance(error, TypeError) else ValueError)(
            f"{rule} of {pattern} failed on arrays of positions: {error} (use NumPy's functions, and & | ~ instead of and, or, not)"
        ) from error


def evaluate_rule(
    pattern: object, name: str, rule: Callable[..., Any], positions: tuple[np.ndarray, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """Evaluates a rule at these positions: bool of this shape. Raises TypeError or ValueError for a result of another form."""
    with explain_array_errors(pattern, name):
        # A rule may change its arguments in place, and other rules get the same positions.
        kept = np.asarray(rule(*(one.copy() for one in positions)))
    if kept.dtype != bool:
        raise TypeError(f"{name} of {pattern} must return booleans; got {kept.dtype}; compare, and combine with & | ~")
    try:
        return np.broadcast_to(kept, shape)
    except ValueError:
        raise ValueError(f"{name} of {pattern} must broadcast to {shape}; it returned {kept.shape}") from None
