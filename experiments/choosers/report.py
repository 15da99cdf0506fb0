"""Says what a row of results is like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev

from .rows import rows

_BY_HEAD = "by_head", "shares"  # lists by layer and head


def drop_details(results: dict) -> dict:
    """The same without lists by layer and head and without rows that the command rows does not list, in its order."""
    by_name = {row["row"]: {key: value for key, value in row.items() if key not in _BY_HEAD} for row in results["rows"]}
    return results | {"rows": [by_name[name] for name in rows() if name in by_name]}


def summary_line(result: dict) -> str:
    """Says in one line what a row keeps and loses at the greatest length."""
    found = at_longest(result)
    losses = ", ".join(f"{kind} {mean(of_windows):.3f}" for kind, of_windows in found["loss"].items())
    kept = ", ".join(f"{name} {found[name]:.3f}" for name in ("density", "recall", "error"))
    return f"{result['row']}: {kept}, {losses} nats, needles {found['needles']:.1%}, {result['seconds']:.0f} s"


def at_longest(result: dict) -> dict:
    return result["lengths"][max(result["lengths"], key=int)]


def dense_of(results: dict) -> dict:
    for result in results["rows"]:
        if result["row"] == "dense":
            return result
    raise ValueError("the results must have the row dense; they have none; run measure with --rows dense")


def loss_above_dense(result: dict, dense: dict, kinds: Sequence[str], length: str | None = None) -> tuple[float, float]:
    """By how many nats a token a row's loss is above dense attention's, and the standard error over the windows, taken as pairs.
    length: in tokens; the greatest by default."""
    found, base = (one["lengths"][length] if length else at_longest(one) for one in (result, dense))
    apart = [one - other for kind in kinds for one, other in zip(found["loss"][kind], base["loss"][kind], strict=True)]
    return mean(apart), stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
