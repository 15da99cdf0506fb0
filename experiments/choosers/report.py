"""Results: a file, a line, a table, a picture."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from statistics import mean, stdev

from sparse_flash.masks.chooser import RULES

from .rows import CHOOSERS, SHARES, Row, rows

_MARKERS = "osv^D<>P*"


def read(path: Path) -> dict:
    """Raises ValueError for a file that is no result of measure."""
    try:
        found = json.loads(path.read_text())
        return {"setup": found["setup"], "rows": found["rows"]}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no result of measure: {type(error).__name__}: {error}") from error


def write(path: Path, results: dict) -> None:
    """Writes a line for each row. The file is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in results["rows"])
    (new := path.with_suffix(".new")).write_text(f'{{"setup": {json.dumps(results["setup"])},\n"rows": [\n{lines}\n]}}\n')
    os.replace(new, path)


def line(result: dict) -> str:
    """Says in one line what a row keeps and loses at the greatest length."""
    found = _longest(result)
    losses = ", ".join(f"{kind} {mean(of_windows):.3f}" for kind, of_windows in found["loss"].items())
    kept = ", ".join(f"{name} {found[name]:.3f}" for name in ("density", "recall", "error"))
    return f"{result['row']}: {kept}, {losses} nats, needles {found['needles']:.1%}, {result['seconds']:.0f} s"


def _longest(result: dict) -> dict:
    return result["lengths"][max(result["lengths"], key=int)]


def _dense(results: dict) -> dict:
    for result in results["rows"]:
        if result["row"] == "dense":
            return result
    raise ValueError("the results must have the row dense; they have none; run measure with --rows dense")


def above(result: dict, dense: dict, kinds: list[str]) -> tuple[float, float]:
    """By how many nats a token a row's loss is above dense attention's at the greatest length, and the standard error over the
    windows, taken as pairs."""
    found, base = _longest(result)["loss"], _longest(dense)["loss"]
    apart = [one - other for kind in kinds for one, other in zip(found[kind], base[kind], strict=True)]
    return mean(apart), stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0


def table(results: dict, names: list[str]) -> str:
    """Markdown: needles by length, all else at the greatest length. Dense attention has its loss, other rows how far they are above
    it, with the standard error over windows of all kinds."""
    dense = _dense(results)
    kinds, lengths = list(_longest(dense)["loss"]), sorted(dense["lengths"], key=int)
    headings = ["row", "density", "recall", "error", *kinds, "all", "digits", *(f"needles {int(length):,}" for length in lengths)]
    made = [headings, ["---"] * len(headings)]
    for result in (one for one in results["rows"] if one["row"] in names):
        found = _longest(result)
        losses = [*(f"{mean(found['loss'][kind]):.3f}" for kind in kinds), ""]
        if result is not dense:
            of_all = "{:+.3f} ± {:.3f}".format(*above(result, dense, kinds))
            losses = [*(f"{above(result, dense, [kind])[0]:+.3f}" for kind in kinds), of_all]
        kept = [f"{found[name]:.3f}" for name in ("density", "recall", "error")]
        needles = [f"{result['lengths'][length]['needles']:.1%}" for length in lengths]
        made.append([result["row"].replace("|", "\\|"), *kept, *losses, f"{found['digits']:.1%}", *needles])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in made)


def draw(results: dict, target: Path) -> Path:
    """Draws loss above dense attention's, and needles found, against density at the greatest length: a panel for each rule, a line
    for each chooser. Dotted: a window. Dashed: dense attention."""
    from matplotlib import pyplot as plt

    dense, known = _dense(results), rows()
    kinds, points = list(_longest(dense)["loss"]), {}
    for result in results["rows"]:
        row, found = known.get(result["row"]), _longest(result)
        points[row] = found["density"], above(result, dense, kinds)[0], found["needles"]
    figure, panels = plt.subplots(2, len(RULES), figsize=(3 + 3 * len(RULES), 7), layout="constrained", sharex=True, sharey="row")
    drawn = {}
    for column, rule in enumerate(RULES):
        lines = [("window", "local", "black", "o:"), *((one, rule, f"C{n}", f"{_MARKERS[n]}-") for n, one in enumerate(CHOOSERS))]
        for axis, number, best in zip(panels[:, column], (1, 2), (0, _longest(dense)["needles"]), strict=True):
            axis.axhline(best, color="black", linestyle="--", linewidth=1)
            axis.grid(alpha=0.3)
            for chooser, own, color, style in lines:
                if of_line := [points[key] for share in SHARES if (key := Row(chooser, own, share)) in points]:
                    at, *heights = zip(*of_line, strict=True)
                    drawn[chooser] = axis.plot(at, heights[number - 1], style, color=color, markersize=4, label=chooser)[0]
        panels[0, column].set_title(rule, fontsize=10)
        panels[1, column].set_xlabel("blocks kept, of the causal ones")
    panels[0, 0].set_ylabel("nats a token above dense attention")
    panels[1, 0].set_ylabel(f"needles found in {max(map(int, dense['lengths'])):,} tokens")
    figure.legend(handles=list(drawn.values()), loc="outside right center")
    figure.savefig(target, dpi=130)
    plt.close(figure)
    return target
