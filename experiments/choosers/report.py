"""Says what a row of results is like."""

from collections.abc import Sequence
from statistics import mean

from .. import row_files
from .rows import rows


def drop_details(results: dict) -> dict:
    """The rows that the command rows lists, in its order, without lists by layer and head."""
    return row_files.drop_fields(row_files.order_rows(results, rows(recorded=True)), "by_head", "shares")


def summary_line(result: dict) -> str:
    """Says in one line what a row keeps and loses at the greatest length."""
    found = at_longest(result)
    losses = ", ".join(f"{kind} {mean(of_windows):.3f}" for kind, of_windows in found["loss"].items())
    kept = ", ".join(f"{name} {found[name]:.3f}" for name in ("density", "recall", "error"))
    return f"{result['row']}: {kept}, {losses} nats, needles {found['needles']:.1%}, {result['seconds']:.0f} s"


def at_longest(result: dict) -> dict:
    return result["lengths"][max(result["lengths"], key=int)]


def loss_above_dense(result: dict, dense: dict, kinds: Sequence[str], length: str | None = None) -> tuple[float, float]:
    """By how many nats a token a row's loss is above dense attention's, and the standard error of the differences over windows.
    length: in tokens; the greatest by default."""
    found, base = (one["lengths"][length] if length else at_longest(one) for one in (result, dense))
    pairs = (pair for kind in kinds for pair in zip(found["loss"][kind], base["loss"][kind], strict=True))
    return row_files.mean_and_error([loss - of_dense for loss, of_dense in pairs])
