"""Results: files, a picture, tables."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter
from rich.table import Table

_OWN = ("arm", "seed", "learning_rate", "compiled")  # what may differ between results of one picture


def read(paths: list[Path]) -> dict[str, list[dict]]:
    """Results by arm. Raises ValueError for a file that is none, and for results that cannot be compared."""
    found: dict[str, list[dict]] = {}
    common = None
    for path in paths:
        try:
            result = json.loads(path.read_text())
            shared = {name: value for name, value in result["trial"].items() if name not in _OWN} | {"device": result["device"]}
            found.setdefault(result["trial"]["arm"], []).append(result)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is no result of train: {type(error).__name__}: {error}") from error
        common = common or shared
        if other := [name for name in shared if shared[name] != common[name]]:
            name = other[0]
            raise ValueError(f"{path} has {name} {shared[name]}, and {paths[0]} has {common[name]}; plot them apart")
    return found


def plot(found: dict[str, list[dict]], target: Path) -> Path:
    """Right answers against distance: for each arm the mean of its seeds, and a thin line for each, since a seed learns to match
    keys or does not. Dotted: the share of questions whose answer is within reach. Dashed: guessing."""
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    for number, (arm, results) in enumerate(found.items()):
        octaves = [row["first"] for row in results[0]["by_distance"]]
        at = [1.5 * first for first in octaves]
        right = [[row["right"] for row in by_octave(results, first)] for first in octaves]
        axis.plot(at, [mean(shares) for shares in right], "o-", color=f"C{number}", markersize=4, label=arm)
        if len(results) > 1:
            axis.plot(at, right, "-", color=f"C{number}", linewidth=0.5)
        axis.plot(at, [by_octave(results, first)[0]["within_reach"] for first in octaves], ":", color=f"C{number}", linewidth=1)
    first = next(iter(found.values()))[0]
    axis.axhline(first["chance"], color="gray", linestyle="--", linewidth=1, label="guessing")
    axis.plot([], [], ":", color="black", linewidth=1, label="within reach")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens_text(int(value))))
    axis.set_ylim(-0.03, 1.03)
    axis.set_xlabel(f"tokens from a question back to its key, in sequences of {first['trial']['task']['length']:,}")
    axis.set_ylabel("share of right answers")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    figure.savefig(target, dpi=130)
    plt.close(figure)
    return target


def tables(found: dict[str, list[dict]]) -> list[Table]:
    """Right answers by distance and by hops, means over seeds."""
    results = [result for of_arm in found.values() for result in of_arm]
    octaves = sorted({row["first"] for result in results for row in result["by_distance"]})
    by_distance = Table(title="right answers in %, by distance from")
    for heading in ("arm", "seeds", "steps", "s", "tokens/s", "pairs kept", *map(tokens_text, octaves)):
        by_distance.add_column(heading, justify="left" if heading == "arm" else "right")
    layers = results[0]["trial"]["shape"]["layers"]
    counts = sorted({row["hops"] for result in results for row in result["by_hops"]})
    by_hops = Table(title="right answers in %, by hops that the masks need (questions in %)")
    for heading in ("arm", *(f"{count}" if count <= layers else "out of reach" for count in counts)):
        by_hops.add_column(heading, justify="left" if heading == "arm" else "right")
    for arm, of_arm in found.items():
        steps, seconds, speed = (mean(result[name] for result in of_arm) for name in ("steps", "seconds", "tokens_per_second"))
        about = f"{len(of_arm)}", f"{steps:,.0f}", f"{seconds:,.0f}", f"{speed:,.0f}", f"{of_arm[0]['reach']['density']:.1%}"
        by_distance.add_row(arm, *about, *(_percent(by_octave(of_arm, first)) for first in octaves))
        of_hops = [[row for result in of_arm for row in result["by_hops"] if row["hops"] == count] for count in counts]
        asked = sum(row["questions"] for rows in of_hops for row in rows)
        shares = [f" ({sum(row['questions'] for row in rows) / asked:.0%})" if rows else "" for rows in of_hops]
        by_hops.add_row(arm, *(_percent(rows) + share for rows, share in zip(of_hops, shares, strict=True)))
    return [by_distance, by_hops]


def by_octave(results: list[dict], first: int) -> list[dict]:
    """Each result's row of the distances from ``first`` on."""
    return [row for result in results for row in result["by_distance"] if row["first"] == first]


def _percent(rows: list[dict]) -> str:
    return f"{mean(row['right'] for row in rows):.1%}".removesuffix("%") if rows else ""


def tokens_text(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else f"{tokens}"
