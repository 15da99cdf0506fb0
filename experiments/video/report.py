"""Results: rows in order, and the table that is made of them."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

from .. import row_files
from ..row_files import dense_row, markdown_table, mean_and_error
from .rows import rows


def read(paths: Sequence[Path]) -> dict:
    """The rows of some files that the command rows lists, in its order; otherwise like ``row_files.read``."""
    return row_files.order_rows(row_files.read(paths), rows())


def decibels(errors: Iterable[float]) -> list[float]:
    """PSNR of each mean squared error in pixels of -1 .. 1; inf for 0."""
    return [10 * math.log10(4 / error) if error else math.inf for error in errors]


def summary_line(result: dict) -> str:
    """Says in one line what a row is like."""
    truth, dense = (mean(decibels(result[name])) for name in ("truth", "dense"))
    like = f"like the truth {truth:.2f} dB, like dense {dense:.2f} dB"
    return f"{result['row']}: density {result['density']:.3f}, {like}, {result['seconds']:.0f} s"


def table(results: dict, names: Iterable[str]) -> str:
    """Markdown. Errors are standard errors over scenes; differences are taken scene by scene."""
    names = set(names)
    dense = dense_row(results)
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
    return markdown_table(made)
