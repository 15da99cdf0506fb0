"""Results: files, a picture, tables."""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from rich.table import Table

from ..files import right_aligned
from .task import Task

_MAY_DIFFER = ("arm", "seed", "learning_rate", "compiled", "steps", "seconds")  # what may differ between results of one picture
_MARKERS = "osv^D<>P"
_SHARE = 200  # a distance is drawn if it has a 200th of the questions of the distance that has the most
_APART = 1.04  # arms are drawn side by side, as several answer the same: so far from each other, as a ratio of distances
Found = dict[str, dict[str, list[dict]]]  # results by budget, and by arm


def budget_text(result: dict) -> str:
    steps, seconds = result["trial"]["steps"], result["trial"]["seconds"]
    return f"{steps:,} steps" if steps else f"{seconds:g} s of training"


def read(paths: list[Path]) -> Found:
    """Raises ValueError for a file that is no result, and for results that cannot be compared. Equal steps may be taken on several
    devices, equal seconds may not."""
    found: Found = {}
    common: dict = {}  # by name, what is the same in all results, and where it was seen first
    for path in paths:
        try:
            result = json.loads(path.read_text())
            trial = result["trial"] | {"task": asdict(Task(**result["trial"]["task"]))}  # earlier results lack newer fields
            shared = {name: value for name, value in trial.items() if name not in _MAY_DIFFER}
            shared |= {"device": result["device"]} if trial["seconds"] else {}
            some = found.setdefault(budget_text(result), {}).setdefault(trial["arm"], [])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is no result of train: {type(error).__name__}: {error}") from error
        for name, value in shared.items():
            first, where = common.setdefault(name, (value, path))
            if value != first:
                raise ValueError(f"{path} has {name} {value}, and {where} has {first}; plot them apart")
        if trial["seed"] in [other["trial"]["seed"] for other in some]:
            raise ValueError(f"{path} is a second run of {trial['arm']} with seed {trial['seed']}; pass one for each seed")
        some.append(result)
    return found


def plot(found: Found, target: Path) -> Path:
    """Right answers against distance, a panel for each budget: for each arm the mean of its seeds, and a thin line for each, since
    a seed learns to match keys or does not. Dotted: the share of questions whose answer is within reach. Dashed: guessing.
    Distances that hardly any question has are left out."""
    figure, panels = plt.subplots(1, len(found), figsize=(2 + 7 * len(found), 5), layout="constrained", sharey=True, squeeze=False)
    arms = list(dict.fromkeys(arm for of_budget in found.values() for arm in of_budget))
    for axis, (title, of_budget) in zip(panels[0], found.items(), strict=True):
        for arm, results in of_budget.items():
            fewest = max(row["questions"] for row in results[0]["by_distance"]) / _SHARE
            octaves = [row["first"] for row in results[0]["by_distance"] if row["questions"] >= fewest]
            number, color = arms.index(arm), f"C{arms.index(arm)}"
            at = [1.5 * first * _APART ** (number - len(arms) / 2) for first in octaves]
            right = [[row["right"] for row in octave_rows(results, first)] for first in octaves]
            axis.plot(at, [mean(shares) for shares in right], f"{_MARKERS[number % 8]}-", color=color, markersize=4)
            if len(results) > 1:
                axis.plot(at, right, "-", color=color, linewidth=0.5)
            axis.plot(at, [octave_rows(results, first)[0]["within_reach"] for first in octaves], ":", color=color, linewidth=1)
        first = next(iter(of_budget.values()))[0]
        axis.axhline(first["chance"], color="gray", linestyle="--", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens_text(int(value))))
        axis.set_xlabel(f"tokens from a question back to its key, in sequences of {first['trial']['task']['length']:,}")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    panels[0, 0].set_ylim(-0.03, 1.03)
    panels[0, 0].set_ylabel("share of right answers")
    lines = [Line2D([], [], color=f"C{n}", marker=_MARKERS[n % 8], markersize=4, label=arm) for n, arm in enumerate(arms)]
    reached = Line2D([], [], color="black", linestyle=":", linewidth=1, label="within reach")
    guessed = Line2D([], [], color="gray", linestyle="--", linewidth=1, label="guessing")
    figure.legend(handles=[*lines, reached, guessed], loc="outside right center")
    figure.savefig(target, dpi=130)
    plt.close(figure)
    return target


def tables(found: Found) -> list[Table]:
    """For each budget right answers, means over seeds: by distance, hops, stops where there are any, and without each layer."""
    return [table for title, of_budget in found.items() for table in _budget_tables(title, of_budget)]


def _budget_tables(title: str, found: dict[str, list[dict]]) -> list[Table]:
    results = [result for of_arm in found.values() for result in of_arm]
    octaves = sorted({row["first"] for result in results for row in result["by_distance"]})
    numbers = "seeds", "steps", "s", "tokens/s", "pairs kept", *map(tokens_text, octaves)
    by_distance = right_aligned(f"right answers in % after {title}, by distance from", "arm", numbers)
    for arm, of_arm in found.items():
        steps, seconds, speed = (mean(result[name] for result in of_arm) for name in ("steps", "seconds", "tokens_per_second"))
        one_device = len({result["device"] for result in of_arm}) == 1  # a mean over several says nothing
        times = (f"{seconds:,.0f}", f"{speed:,.0f}") if one_device else ("", "")
        about = f"{len(of_arm)}", f"{steps:,.0f}", *times, f"{of_arm[0]['reach']['density']:.1%}"
        by_distance.add_row(arm, *about, *(_percent(octave_rows(of_arm, first)) for first in octaves))
    made = [by_distance, _by_count(found, "hops", "hops that the masks need")]
    if all("without_layer" in result for result in results):
        made.append(_without_layers(found))
    if results[0]["trial"]["task"].get("askings", 1) > 1:
        made.append(_by_count(found, "stops", "hops from question to question of the same key"))
    return made


def _without_layers(found: dict[str, list[dict]]) -> Table:
    layers = next(iter(found.values()))[0]["trial"]["shape"]["layers"]
    table = right_aligned("right answers in % where the attention of a layer is left out", "arm", map(str, range(layers)))
    for arm, of_arm in found.items():
        table.add_row(arm, *(f"{100 * mean(result['without_layer'][layer] for result in of_arm):.1f}" for layer in range(layers)))
    return table


def _by_count(found: dict[str, list[dict]], name: str, of: str) -> Table:
    """name: of the rows' count, "hops" or "stops"."""
    rows = {arm: [row for result in of_arm for row in result[f"by_{name}"]] for arm, of_arm in found.items()}
    layers = next(iter(found.values()))[0]["trial"]["shape"]["layers"]
    counts = sorted({row[name] for of_arm in rows.values() for row in of_arm})
    headings = (f"{count}" if count <= layers else "out of reach" for count in counts)
    table = right_aligned(f"right answers in %, by {of} (questions in %)", "arm", headings)
    for arm, of_arm in rows.items():
        of_count = [[row for row in of_arm if row[name] == count] for count in counts]
        asked = sum(row["questions"] for row in of_arm)
        shares = [f" ({sum(row['questions'] for row in some) / asked:.0%})" if some else "" for some in of_count]
        table.add_row(arm, *(_percent(some) + share for some, share in zip(of_count, shares, strict=True)))
    return table


def octave_rows(results: list[dict], first: int) -> list[dict]:
    """Each result's row of the distances from ``first`` on."""
    return [row for result in results for row in result["by_distance"] if row["first"] == first]


def _percent(rows: list[dict]) -> str:
    return f"{mean(row['right'] for row in rows):.1%}".removesuffix("%") if rows else ""


def tokens_text(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else f"{tokens}"
