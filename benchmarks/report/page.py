"""One self-contained HTML page from only the JSON: tables, plots, environment, method."""

from __future__ import annotations

import base64
from pathlib import Path

from ..measure.noise import MARK, MOST_SPREAD, doubts
from ..results import Results, has_numbers
from . import plots
from .format import number
from .peer_tables import ratios_to_best
from .rows import TEXT_COLUMNS
from .tables import gains, tables

PAGE = "report.html"
_ENVIRONMENT = {
    "device": "Measured on",
    "cpu": "CPU",
    "cpu_threads": "CPU threads",
    "load_at_start": "Load average at the start",
    "gpu_memory_gib": "GPU memory, GiB",
    "capability": "Compute capability",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "platform": "Platform",
    "python": "Python",
    "torch": "torch",
    "triton": "triton",
    "flash-attn-4": "flash-attn-4",
    "numpy": "numpy",
    "scipy": "scipy",
    "sparse_flash": "sparse_flash",
    "commit": "Commit",
    "source": "Digest of the sources",
    "date": "Started",
}
_CAPTIONS = {
    "speedup": "How many times as fast as the dense call in a mask's place (causal attention, where no query sees a later key), "
    "against the share of its pairs that the mask keeps, with the spread of the times. On the dashed line, time is proportional to "
    "what is kept.",
    "length": "Time and memory against length. A mask of fixed row length costs time in proportion to the tokens; dense attention, "
    "to their square.",
    "paper": "Time and memory of a batch of 16 (on a CPU, fewer) against length: the plain variant of arXiv:2205.14135, App. E.6.",
    "peers": "Beside the peers in the same run: TFLOP/s over the kept pairs only, or on a CPU milliseconds.",
}


def write(results: Results) -> Path:
    """Draws the plots and writes the page next to the JSON; returns the page's path."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    drawn = plots.draw(results.data, results.folder)
    embedded = {name: {theme: _data_uri(path) for theme, path in themes.items()} for name, themes in drawn.items()}
    templates = Environment(
        loader=PackageLoader(__package__, "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = templates.get_template("report.html.j2").render(
        headlines=headlines(results.data),
        environment=[
            (title, results.data["environment"][key]) for key, title in _ENVIRONMENT.items() if results.data["environment"].get(key)
        ],
        settings=results.data["settings"],
        plots=[(name, _CAPTIONS[name], themes) for name, themes in embedded.items()],
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
    if compared and not sure:
        found.append(("no figure", "of speed that can be relied on: other programs used this machine; see the marks in the tables"))
    if sure:
        best = max(sure, key=lambda gain: gain.total or 0.0)
        dense = "causal attention" if best.dense == "causal" else "attention of all pairs"
        said = f"as fast as dense {dense} ({best.rivals[1]}), forward and backward, with {best.row.label}"
        found.append((f"{best.total:.1f}x", said))
        shares = sorted(gain.total * gain.visited for gain in sure if gain.total and 0 < gain.visited < 0.5)
        if shares:
            said = (
                "of the ideal speed-up (blocks of the dense call / visited blocks), median of the masks that visit less than half"
            )
            found.append((f"{shares[len(shares) // 2]:.0%}", said))
    if checked := [e["result"]["correct"] for e in data["cases"].values() if "correct" in e["result"]]:
        said = "attention results agree with float64 attention of sampled queries, gradients included"
        found.append((f"{sum(checked)} of {len(checked)}", said))
    compiled = [e for e in data["cases"].values() if e["case"]["kind"] == "compile" and has_numbers(e["result"])]
    if compiled := [e for e in compiled if not doubts(e["result"])]:
        longest = max(compiled, key=lambda e: (e["case"]["tokens"], e["result"]["compile_s"]))
        said = f"to compile {longest['case']['label']} for {longest['case']['tokens']:,} tokens"
        found.append((f"{number(longest['result']['compile_s'])} s", said))
    ratios = ratios_to_best(data)
    if ratios:
        ends = dict.fromkeys(f"{ratio:.2f}x" for ratio in (min(ratios), max(ratios)))
        found.append((" to ".join(ends), "the speed of the fastest peer of each row, forward and backward each for itself"))
    return found


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
