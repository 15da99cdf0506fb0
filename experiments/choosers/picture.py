"""The picture: loss and retrieval against the blocks that are kept."""

import math
from pathlib import Path
from typing import NamedTuple

from ..row_files import dense_row, rows_by_name
from .report import at_longest, loss_above_dense
from .rows import SHARES, Row
from .tables import TEXTS

_LINEAR, _LOSSES = 0.01, (-0.01, 0, 0.01, 0.03, 0.1, 0.3)  # the axis of losses is linear up to this, in nats; its ticks


class Line(NamedTuple):
    chooser: str
    rule: str
    said: str
    color: str
    style: str


# A color for each chooser, and a style for each rule. Okabe and Ito chose the colors so that people of all color vision tell them
# apart. Some are darker here, so that text in them can be read.
LINES = (
    Line("true_mass(reduce='max')", "budget", "true mass budget", "black", "*-"),
    Line("sampled(32)", "budget", "sampled(32) budget", "#7A4FBF", "p-"),
    Line("sampled(16)", "mass", "sampled(16) mass", "#0B3C7D", "o--"),
    Line("sampled(16)", "budget", "sampled(16) budget", "#0B3C7D", "o-"),
    Line("sampled(8)", "budget", "sampled(8) budget", "#2F8FD0", "s-"),
    Line("antidiagonal(8)", "budget", "antidiagonal(8) budget", "#D55E00", "^-"),
    Line("antidiagonal(8)", "mass", "antidiagonal(8) mass", "#D55E00", "^--"),
    Line("pooled", "keep", "pooled keep", "#BF5F95", "D-."),
    Line("last_queries(64)", "mass", "last_queries(64) mass", "#008560", "P--"),
    Line("window", "local", "window", "#6A6A6A", "X-."),
)


def draw(results: dict, target: Path) -> Path:
    """Draws loss above dense attention's, and needles found, against density at the greatest length. Lines without results are left
    out. The axis of losses is logarithmic above 0.01 nats and linear below, as a loss may be 0 or less."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    dense, by_name = dense_row(results), rows_by_name(results)
    length, questions = max(map(int, dense["lengths"])), results["setup"]["needles"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    lines = []
    for line in LINES:
        names = [Row(line.chooser, line.rule, share).name for share in SHARES]
        if found := [by_name[name] for name in names if name in by_name]:
            kept = [at_longest(one)["density"] for one in found]
            lost = [loss_above_dense(one, dense, TEXTS)[0] for one in found]
            needles = [at_longest(one)["needles"] for one in found]
            for axis, heights in ((left, lost), (right, needles)):
                drawn = axis.plot(kept, heights, line.style, color=line.color, markersize=6, linewidth=1.6, label=line.said)
            lines += drawn
    whole = at_longest(dense)["needles"]
    error = math.sqrt(whole * (1 - whole) / questions)
    right.axhspan(whole - error, whole + error, color="black", alpha=0.08, linewidth=0)
    right.axhline(whole, color="black", linewidth=1)
    right.text(0.095, whole + error + 0.01, "dense attention ± its standard error", fontsize=9, va="bottom")
    left.axhline(0, color="black", linewidth=1)
    left.set_yscale("symlog", linthresh=_LINEAR, linscale=0.6)
    left.set_ylim(min(_LOSSES[0], left.dataLim.y0), 1.2 * max(_LOSSES[-1], left.dataLim.y1))
    left.set_yticks(_LOSSES)
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.set_title("Nats a token above dense attention", loc="left", fontsize=11)
    right.set_ylim(0, max(0.9, whole + 0.1))
    right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    right.set_title(f"Needles found in {length:,} tokens", loc="left", fontsize=11)
    for axis in (left, right):
        axis.set_xlim(0.09, 0.26)
        axis.set_xticks(SHARES)
        axis.set_xlabel("blocks kept, of the causal ones")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=lines, loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(target, dpi=130)
    plt.close(figure)
    return target
