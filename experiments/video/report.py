"""Results: rows in order, and the table that is made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

from .. import row_files
from .rows import rows

_BEGIN, _END = "<!-- table: written by draw --page -->", "<!-- end of the table -->"


def read(paths: Sequence[Path]) -> dict:
    """The rows of some files that the command rows lists, in its order; otherwise like ``row_files.read``."""
    found = row_files.read(paths)
    by_name = {row["row"]: row for row in found["rows"]}
    return found | {"rows": [by_name[name] for name in rows() if name in by_name]}


def drop_details(results: dict) -> dict:
    """The same without frames."""
    return results | {"rows": [{key: value for key, value in row.items() if key != "strips"} for row in results["rows"]]}


def decibels(errors: Iterable[float]) -> list[float]:
    """PSNR of each mean squared error in pixels of -1 .. 1; inf for 0."""
    return [10 * math.log10(4 / error) if error else math.inf for error in errors]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    return mean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def summary_line(result: dict) -> str:
    """Says in one line what a row is like."""
    truth, dense = (mean(decibels(result[name])) for name in ("truth", "dense"))
    like = f"like the truth {truth:.2f} dB, like dense {dense:.2f} dB"
    return f"{result['row']}: density {result['density']:.3f}, {like}, {result['seconds']:.0f} s"


def table(results: dict, names: Iterable[str]) -> str:
    """Markdown. Errors are standard errors over scenes; differences are taken scene by scene."""
    names = set(names)
    dense = next((row for row in results["rows"] if row["row"] == "dense"), None)
    if dense is None:
        raise ValueError("the results must have the row dense; they have none; run measure with --rows dense")
    made = [["row", "kept", "like dense, dB", "like the truth, dB", "than dense, dB", "flow loss", "steps"]]
    for row in (one for one in results["rows"] if one["row"] in names):
        like_dense, like_truth, of_dense = (decibels(one) for one in (row["dense"], row["truth"], dense["truth"]))
        than = "{:+.2f} ± {:.2f}".format(*mean_and_error([one - other for one, other in zip(like_truth, of_dense, strict=True)]))
        made.append(
            [
                row["row"],
                f"{row['density']:.1%}" if row["training"] else "",
                "" if row is dense else "{:.2f} ± {:.2f}".format(*mean_and_error(like_dense)),
                "{:.2f} ± {:.2f}".format(*mean_and_error(like_truth)),
                "" if row is dense else than,
                f"{mean(row['flow']):.4f}" if row["flow"] else "",
                f"{row['training']['steps']:,}" if row["training"] else "",
            ]
        )
    made.insert(1, ["---"] * len(made[0]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in made)


def replace_table(page: str, table: str) -> str:
    """The page with another table between its two marks. Raises ValueError for a page without them."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"the page must have the lines {_BEGIN} and {_END}; add them where the table goes")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"
