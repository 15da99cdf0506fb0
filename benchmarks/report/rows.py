"""Rows for tables and plots, from only the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..measure.noise import doubts
from ..results import has_numbers
from ..workload.cases import OURS, Shape

TEXT_COLUMNS = ("mask", "by", "over", "why", "as")  # left-aligned; numbers are right-aligned


@dataclass(frozen=True)
class Row:
    """One case as tables and plots see it. key: of the case. variant: "plain", "padded"
    and so on for cells of the paper's tables, else empty."""

    shape: str
    tokens: int
    label: str
    variant: str
    peer: str
    result: dict
    key: str = ""

    @property
    def problem(self) -> tuple[str, str, str]:
        """Equal for rows that may be compared."""
        return self.shape, self.label, self.variant

    @property
    def is_ours(self) -> bool:
        return self.peer.startswith(OURS)

    @property
    def has_numbers(self) -> bool:
        return has_numbers(self.result)

    @property
    def counts(self) -> bool:
        """Whether it has numbers, and its result is right."""
        return self.has_numbers and self.result["correct"]

    @property
    def doubtful(self) -> bool:
        """Whether its numbers are unreliable: see ``noise``."""
        return bool(doubts(self.result))

    @property
    def total_ms(self) -> float | None:
        """Forward and backward together, or None if there is no backward pass."""
        return self.result["forward_ms"] + self.result["backward_ms"] if "backward_ms" in self.result else None

    @property
    def name(self) -> str:
        return f"{self.label}, {self.peer}"


@dataclass(frozen=True)
class ReportTable:
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def drop_if_empty(self, column: str) -> ReportTable:
        """The table without a column that is empty in every row; itself if it is not."""
        place = self.columns.index(column)
        if any(row[place] for row in self.rows):
            return self
        shorter = [[cell for number, cell in enumerate(row) if number != place] for row in self.rows]
        return replace(self, columns=[name for name in self.columns if name != column], rows=shorter)


def retimed_rivals(mine: Row, others: Sequence[Row]) -> list[Row]:
    """The others that were timed again around this row, with the means of those times; if none was, all of them as timed alone."""
    again = mine.result.get("around", {})
    facts = {other.key: {k: v for k, v in other.result.items() if not k.endswith("_spread")} for other in others}
    found = [
        replace(other, result=facts[other.key] | {name: sum(pair) / 2 for name, pair in again[other.key].items()})
        for other in others
        if other.key in again
    ]
    return found or list(others)


def rows(data: dict, suite: str, every: bool = False) -> list[Row]:
    """The suite's cases of attention that have numbers, or with ``every`` all that were tried, in the order of the suite."""
    found = []
    for key in data["suites"].get(suite, []):
        entry = data["cases"].get(key)
        if entry and entry["case"]["kind"] != "compile" and (every or has_numbers(entry["result"])):
            case = entry["case"]
            shape = Shape(**case["shape"])
            found.append(Row(str(shape), shape.tokens, case["label"], case.get("how", ""), case["peer"], entry["result"], key))
    return found
