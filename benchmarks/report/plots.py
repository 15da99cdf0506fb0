"""PNG plots from only the JSON, each in a light and a dark version."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from sparse_flash.compat.extras import naming_extra

from ..workload.cases import OURS
from .format import mark_doubtful
from .rows import rows
from .tables import gains

with naming_extra():
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter


@dataclass(frozen=True)
class Theme:
    name: str
    paper: str
    ink: str
    faint: str
    grid: str


THEMES = (
    Theme("light", "#ffffff", "#1d2530", "#69707c", "#e3e6eb"),
    Theme("dark", "#171b22", "#e6e9ee", "#9aa3b0", "#2d343f"),
)
_COLOURS = ("#2f7de1", "#e0752d", "#22a06b", "#a455d6", "#d64550", "#1aa3b8", "#b8921a", "#d65aa8", "#7f8c9b", "#6b8e23")
_MARKERS = "osD^vPX*<>"


def draw(data: dict, folder: str | Path) -> dict[str, dict[str, Path]]:
    """Writes the plots of the suites that were measured; returns {plot: {theme: path}}."""
    folder = Path(folder)
    paths: dict[str, dict[str, Path]] = {}
    for name, plot in (("speedup", _speedup), ("length", _length)):
        if found := _draw(plot, data, folder / name):
            paths[name] = found
    return paths


def _draw(plot: Callable, data: Any, target: Path) -> dict[str, Path]:
    """Writes a plot in each theme; returns {theme: path}, or {} if the data has nothing to plot. target: without a suffix."""
    target.parent.mkdir(parents=True, exist_ok=True)
    figures = {theme: plot(data, theme) for theme in THEMES}
    return {theme.name: _save(figure, target, theme) for theme, figure in figures.items() if figure is not None}


def draw_traffic(data: dict, folder: str | Path) -> dict[str, Path]:
    """Writes the plot of the measurements of ``traffic``; returns {theme: path}."""
    return _draw(_traffic, data, Path(folder, "traffic"))


def draw_training(data: dict, target: str | Path) -> dict[str, Path]:
    """Writes the plot of the costs of training steps; returns {theme: path}. data: {"step_tokens", "costs": [{"mask", "length",
    "seconds"}]}, where costs may also name a "model" and data a "gpu" or "device"."""
    return _draw(_training, data, Path(target).with_suffix(""))


def _training(data: dict, theme: Theme):
    """Seconds of a step against length: a panel for each model, a line for each mask. Numbers at the bottom of a panel say how many
    times as fast as the dense step the first mask with an alternative in it is, or else the last mask."""
    costs = data["costs"]
    models, masks = (list(dict.fromkeys(cost.get(name, "") for cost in costs)) for name in ("model", "mask"))
    figure, axes = _figure(5 * len(models), 4.2, len(models), theme)
    for ax, model in zip(axes, models, strict=True):
        handles, fastest = [], {}
        for number, mask in enumerate(masks):
            mine = [cost for cost in costs if (cost.get("model", ""), cost["mask"]) == (model, mask)]
            times = sorted((cost["length"], cost["seconds"]) for cost in mine)
            fastest[mask] = dict(reversed(times))  # of several ways to recompute activations, the fastest
            points = sorted(fastest[mask].items())
            style = {"color": _COLOURS[number], "marker": _MARKERS[number], "markersize": 5, "label": _layers(mask)}
            handles += ax.plot(*zip(*points) if points else ([], []), linestyle="--" if mask == "sdpa" else "-", **style)
        lengths = sorted({length for line in fastest.values() for length in line})
        sparse = next((mask for mask in masks if "|" in mask), masks[-1])
        colour = _COLOURS[masks.index(sparse)]
        for length, seconds in fastest[sparse].items():
            if (dense := fastest.get("sdpa", {}).get(length)) and sparse != "sdpa":
                ratio = dense / seconds
                said = f"{ratio:.0f}x" if ratio >= 9.95 else f"{ratio:.1f}x"
                ax.annotate(said, (length, 0.03), xycoords=ax.get_xaxis_transform(), ha="center", color=colour, fontsize=9)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.margins(y=0.18)  # room for the ratios at the bottom
        ax.set_xticks(lengths, [f"{length}" if length % 1024 else f"{length // 1024}K" for length in lengths])
        _plain_ticks(ax.yaxis)
        title = f"{model} parameters, {data.get('gpu', data.get('device', ''))}" if model else ""
        _label(ax, theme, title, "tokens in a sequence", f"seconds a training step of {data['step_tokens']:,} tokens")
    _legend(figure, theme, handles, 2)
    return figure


def _layers(masks: str) -> str:
    """The masks of layers in order, in words: "3 x causal & local(1024), causal"."""
    if masks == "sdpa":
        return "dense: PyTorch's own causal attention"
    runs = [(mask, len(list(run))) for mask, run in groupby(masks.split(", "))]
    return ", ".join(f"{count} x {mask}" if count > 1 else mask for mask, count in runs)


def draw_context(cases: list[dict], folder: str | Path) -> dict[str, Path]:
    """Writes the plot of the cases of ``context``, of any numbers of ranks; returns {theme: path}."""
    return _draw(_context, cases, Path(folder, "context"))


def _context(cases: list[dict], theme: Theme):
    """The share of linear scaling against the number of ranks, for each kind of heads: of the length that most cases have, and of
    the way that a plan chose."""
    cases = [case for case in cases if "both_ms" in case["ways"].get("auto", {})]
    lengths = [case["case"]["tokens"] for case in cases]
    tokens = max(set(lengths), key=lambda length: (lengths.count(length), length))
    shown = [case for case in cases if case["case"]["tokens"] == tokens]
    kinds = sorted({(case["case"]["heads"], case["case"]["kv_heads"]) for case in shown}, reverse=True)
    labels = list(dict.fromkeys(case["case"]["label"] for case in shown))
    counts = [1, *sorted({case["ranks"] for case in shown})]
    figure, axes = _figure(10, 4.4, len(kinds), theme, sharey=True)
    handles = []
    for (heads, kv_heads), ax in zip(kinds, axes, strict=True):
        ax.axhline(1.0, color=theme.faint, linewidth=0.8, linestyle=":")
        for number, label in enumerate(labels):
            of_ranks = {
                case["ranks"]: case
                for case in shown
                if (case["case"]["label"], case["case"]["heads"], case["case"]["kv_heads"]) == (label, heads, kv_heads)
            }
            style = {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)], "markersize": 4}
            for name, line in (("both_ms", "-"), ("forward_ms", "--")):
                points = [case["one"][name] / (ranks * case["ways"]["auto"][name]) for ranks, case in sorted(of_ranks.items())]
                drawn = ax.plot([1, *sorted(of_ranks)], [1.0, *points], linestyle=line, label=label, **style)
                if ax is axes[0] and line == "-":
                    handles += drawn
        ax.set_xscale("log", base=2)
        ax.set_xticks(counts, [str(count) for count in counts])
        ax.minorticks_off()
        ax.set_ylim(0, 1.1)
        title = f"{heads} query and {kv_heads} key heads, {tokens:,} tokens"
        _label(ax, theme, title, "GPUs; solid: forward and backward, dashed: forward", "of linear scaling")
    _legend(figure, theme, handles, 3)
    return figure


def _save(figure, target: Path, theme: Theme) -> Path:
    path = target.with_name(f"{target.name}.png" if theme.name == "light" else f"{target.name}-{theme.name}.png")
    figure.savefig(path, facecolor=theme.paper)
    return path


def _figure(width: float, height: float, columns: int, theme: Theme, lines: int = 1, **shared):
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor=theme.paper)
    axes = figure.subplots(lines, columns, squeeze=False, **shared).ravel()
    for ax in axes:
        ax.set_facecolor(theme.paper)
        ax.tick_params(colors=theme.faint, which="both", labelsize=9)
        ax.grid(True, color=theme.grid, linewidth=0.8)
        ax.set_axisbelow(True)
        for side, spine in ax.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(theme.grid)
    return figure, axes


def _label(ax, theme: Theme, title: str, x: str, y: str) -> None:
    ax.set_title(title, color=theme.ink, fontsize=11, loc="left")
    ax.set_xlabel(x, color=theme.faint, fontsize=9)
    ax.set_ylabel(y, color=theme.faint, fontsize=9)


def _legend(figure, theme: Theme, handles, columns: int) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5, labelcolor=theme.ink)


def _plain_ticks(axis) -> None:
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _speedup(data: dict, theme: Theme):
    found = [gain for gain in gains(data) if gain.forward]
    if not found:
        return None
    figure, axes = _figure(9.5, 11, 1, theme, lines=2)
    most, least = 115.0, 100 * min(gain.kept for gain in found) * 0.8
    for ax, title, value in ((axes[0], "Forward", "forward"), (axes[1], "Forward and backward", "total")):
        handles = []
        for n, gain in enumerate(found):
            label = mark_doubtful(_shorten_label(gain.row.label), gain.doubtful)
            style = {"color": _COLOURS[n % 10], "marker": _MARKERS[(n + n // 10) % 10], "markersize": 7, "linestyle": ""}
            handles += ax.plot(100 * gain.kept, getattr(gain, value) or np.nan, label=label, zorder=3, **style)
        ideal = {"color": theme.faint, "linewidth": 1, "linestyle": "--", "label": "1 / pairs kept"}
        handles += ax.plot((most, least), (100 / most, 100 / least), **ideal)
        ax.axhline(1, color=theme.faint, linewidth=1)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlim(most, least)  # sparser to the right
        _plain_ticks(ax.xaxis)
        _plain_ticks(ax.yaxis)
        _label(ax, theme, title, "pairs kept, % of the dense call's  (sparser to the right)", "times as fast as the dense call")
    _legend(figure, theme, handles, 3)
    return figure


def _length(data: dict, theme: Theme):
    found = rows(data, "length")
    if not found:
        return None
    figure, axes = _figure(11, 5, 2, theme)
    panels = (
        (axes[0], "Time", "ms, forward and backward", lambda row: row.total_ms),
        (axes[1], "Memory beyond the inputs", "MiB", lambda row: row.result.get("extra_bytes", 0) / 2**20),
    )
    lengths = sorted({row.tokens for row in found})
    for ax, title, unit, value in panels:
        handles = []
        for number, name in enumerate(dict.fromkeys(row.name for row in found)):
            line = [row for row in found if row.name == name and value(row)]
            style = {"marker": _MARKERS[number % 10], "markersize": 5, "color": _COLOURS[number % 10], "linewidth": 1.7}
            points = [row.tokens for row in line], [value(row) for row in line]
            label = mark_doubtful(name, any(row.doubtful for row in line))
            handles += ax.plot(*points, linestyle="-" if name.endswith(OURS) else "--", label=label, **style)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
        _label(ax, theme, title, "tokens", unit)
    _legend(figure, theme, handles, 3)
    return figure


def _traffic(data: dict, theme: Theme):
    figure, axes = _figure(10, 4.6, 2, theme)
    levels = {"multiprocessor_bytes": "into the multiprocessors", "dram_bytes": "from DRAM"}
    measured = sorted(point["density"] for point in data["points"])
    densities = np.geomspace(measured[0], 1.0)

    def draw_line(ax, line: dict, **style) -> str:
        ax.plot(densities, (line["a"] + line["b"] * densities) / 1e9, **style)
        return f"{line['a'] / 1e9:.2g} + {line['b'] / 1e9:.3g} x density"

    for ax, (name, fits) in zip(axes, data["fits"].items(), strict=True):
        handles, counted = [], {"color": theme.faint, "linewidth": 1, "linestyle": "--"}
        counted["label"] = f"counted: {draw_line(ax, data['counted'][name], **counted)}"
        for colour, marker, level in zip(_COLOURS, _MARKERS, levels, strict=False):
            said = draw_line(ax, fits[level], color=colour, linewidth=1.4)
            dots = [point["density"] for point in data["points"]], [point[name][level] / 1e9 for point in data["points"]]
            label = f"{levels[level]}: {said}, R² {fits[level]['r2']:.3f}"
            handles += ax.plot(*dots, marker, color=colour, zorder=3, label=label)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(measured, [f"1/{round(1 / tick)}" if tick < 1 else "1" for tick in measured])
        _label(ax, theme, f"{name.capitalize()}, {data['shape']['name']}", "blocks kept / all blocks", "GB read")
        handles += ax.plot([], [], **counted)
        ax.legend(handles=handles, fontsize=8, frameon=False, labelcolor=theme.ink, loc="upper left").set_zorder(4)
        ax.set_ylim(top=ax.get_ylim()[1] * 8)
    return figure


def _shorten_label(label: str) -> str:
    return label if len(label) <= 44 else label[:41] + "..."
