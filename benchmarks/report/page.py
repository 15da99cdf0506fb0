"""One self-contained HTML page from only the JSON: tables, plots, environment, method."""

import base64
from pathlib import Path

from sparse_flash.compat.extras import naming_extra

from ..measure.noise import MARK, MOST_SPREAD
from ..results import Results
from . import plots
from .peer_tables import ratios_to_best
from .rows import TEXT_COLUMNS
from .tables import gains, tables

with naming_extra():
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

PAGE = "report.html"
_CAPTIONS = {
    "speedup": "How many times as fast as the dense call in a mask's place (causal attention, where no query sees a later key), "
    "against the share of its pairs that the mask keeps. On the dashed line, time is proportional to what is kept.",
    "length": "Time and memory against length. A mask of fixed row length costs time in proportion to the tokens; dense attention, "
    "to their square.",
}


def write(results: Results) -> Path:
    """Draws the plots and writes the page next to the JSON; returns the page's path."""
    drawn = plots.draw(results.data, results.folder)
    embedded = {name: {theme: _data_uri(path) for theme, path in themes.items()} for name, themes in drawn.items()}
    templates = Environment(
        loader=PackageLoader(__package__, "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = templates.get_template("report.html.j2").render(
        headlines=headlines(results.data),
        environment=[(name.replace("_", " "), value) for name, value in results.data["environment"].items() if value],
        settings=results.data["settings"],
        plots=[(_CAPTIONS[name], themes) for name, themes in embedded.items()],
        tables=tables(results.data),
        style=lambda cell, column: Markup(f' class="{name}"') if (name := _style(cell, column)) else "",
        mark=MARK,
        most_spread=MOST_SPREAD,
        device=results.data["environment"]["device"],
        on_gpu=results.data["settings"]["device"] == "cuda",
        date=results.data["environment"]["date"][:10],
    )
    path = results.folder / PAGE
    path.write_text(page, encoding="utf-8")
    return path


def _style(cell: str, column: str) -> str:
    """The class of a cell in the page."""
    names = {"left": column in TEXT_COLUMNS, "no": cell == "NO", "doubtful": cell.endswith(f" {MARK}")}
    return " ".join(name for name, holds in names.items() if holds)


def headlines(data: dict) -> list[tuple[str, str]]:
    """(figure, what it says) for the top of the page; only reliable figures."""
    found = []
    compared = [gain for gain in gains(data) if gain.total]
    sure = [gain for gain in compared if not gain.doubtful]
    if compared:
        best = max(sure or compared, key=lambda gain: gain.total or 0.0)
        dense = "causal attention" if best.dense == "causal" else "attention of all pairs"
        said = f"as fast as dense {dense} ({best.rivals[1]}), forward and backward, with {best.row.label}"
        figure = f"{best.total:.1f}x"
        if best.doubtful and best.between:
            figure = " to ".join(f"{end:.1f}x" for end in best.between)
            said += ": times changed meanwhile; sparse-flash bench --retry measures again what is marked, best on an idle machine"
        found.append((figure, said))
    if sure:
        shares = sorted(gain.total * gain.visited for gain in sure if gain.total and 0 < gain.visited < 0.5)
        if shares:
            said = "of the ideal speed-up (blocks of the dense call / visited blocks), median of masks that visit less than half"
            found.append((f"{shares[len(shares) // 2]:.0%}", said))
    if checked := [e["result"]["correct"] for e in data["cases"].values() if "correct" in e["result"]]:
        said = "attention results agree with float64 attention of sampled queries, gradients included"
        found.append((f"{sum(checked)} of {len(checked)}", said))
    ratios = ratios_to_best(data)
    if ratios:
        ends = dict.fromkeys(f"{ratio:.2f}x" for ratio in (min(ratios), max(ratios)))
        found.append((" to ".join(ends), "the speed of the fastest peer of each row, forward and backward each for itself"))
    return found


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
