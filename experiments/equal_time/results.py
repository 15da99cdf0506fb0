"""Combines the results of runs: differences with their errors, times to a loss, a table and pictures."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np

from ..files import read_result
from . import evaluate

matplotlib.use("agg")
_RESAMPLED = 2000


@dataclass(frozen=True)
class Result:
    """The runs of one arm, by seed, each by its best way of reading long sequences. nats: (seeds, windows, positions) sums."""

    arm: str
    runs: list[dict]

    @property
    def reading_modes(self) -> list[str]:
        return [min(run["evaluations"], key=lambda way: evaluate.mean_loss(run["evaluations"][way])) for run in self.runs]

    @property
    def best(self) -> list[dict]:
        return [run["evaluations"][way] for run, way in zip(self.runs, self.reading_modes, strict=True)]

    @property
    def nats(self) -> np.ndarray:
        return np.array([found["nats"] for found in self.best])

    @property
    def far_nats(self) -> np.ndarray:
        return np.array([found["far_nats"] for found in self.best])

    @property
    def loss(self) -> float:
        """Mean over seeds, in nats a token."""
        return float(np.mean([evaluate.mean_loss(found) for found in self.best]))

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; NaN for one."""
        losses = [evaluate.mean_loss(found) for found in self.best]
        return float(np.std(losses, ddof=1)) if len(losses) > 1 else float("nan")

    @property
    def tokens_per_second(self) -> float:
        return float(np.mean([run["tokens"] / run["seconds"] for run in self.runs]))

    def find_crossing(self, loss: float, axis: Literal["tokens", "seconds"]) -> float:
        """The tokens or seconds at which the held-out curve falls to ``loss``, mean over seeds; infinite if one never does."""
        found = []
        for run in self.runs:
            nats, along = ([point[name] for point in run["curve"]] for name in ("nats", axis))
            below = next((i for i, value in enumerate(nats) if value <= loss), None)
            if below is None:
                return float("inf")
            around = slice(max(0, below - 1), below + 1)
            found.append(float(np.interp(-loss, [-value for value in nats[around]], along[around])))
        return float(np.mean(found))

    @property
    def curve_end(self) -> float:
        """The curve's last loss, mean over seeds: of fewer windows than ``loss``."""
        return float(np.mean([run["curve"][-1]["nats"] for run in self.runs]))

    @property
    def last_quarter(self) -> float:
        """By what share the last quarter of the tokens lowers the held-out loss."""
        shares = []
        for run in self.runs:
            tokens, nats = ([point[name] for point in run["curve"]] for name in ("tokens", "nats"))
            before = float(np.interp(0.75 * tokens[-1], tokens, nats))
            shares.append((before - nats[-1]) / before)
        return float(np.mean(shares))


def load(paths: list[Path]) -> dict[str, Result]:
    """Results by arm, from files that ``run`` wrote. Raises ValueError for files that cannot be compared."""
    runs: dict[str, list[dict]] = {}
    for path in paths:
        run = read_result(path, "run", "arm", "preset", "budget", "settings", "evaluations")
        some = runs.setdefault(run["arm"], [])
        if run["seed"] in [other["seed"] for other in some]:
            raise ValueError(f"{path} is a second run of {run['arm']} with seed {run['seed']}; pass one for each seed")
        some.append(run)
    if not runs:
        raise ValueError("no results; pass the files that run --out wrote")
    everything = [run for some in runs.values() for run in some]
    for name in ("preset", "budget", "device"):
        if len(found := {run[name] for run in everything}) > 1:
            raise ValueError(f"these runs differ in their {name}: {', '.join(map(str, sorted(found)))}; compare equal ones")
    packages = {tuple(next(iter(run["evaluations"].values()))["packages"]) for run in everything}
    if len(packages) > 1:
        raise ValueError("these runs were evaluated on different windows; evaluate all on the windows of one folder")
    return {arm: Result(arm, sorted(some, key=lambda run: run["seed"])) for arm, some in runs.items()}


@dataclass(frozen=True)
class Difference:
    """Nats a token, and its standard error by resampling packages."""

    nats: float
    error: float

    def __str__(self) -> str:
        return f"{self.nats:+.4f} ± {self.error:.4f}"


def gain(a: Result, b: Result, positions: slice = slice(None)) -> Difference:
    """How much lower a's loss is than b's at some positions."""
    return _estimate(a, [_gained_at(a, b, positions)], lambda gained: gained)


def gain_beyond_first(a: Result, b: Result) -> Difference:
    """The gain at later positions, less the gain at the first ones, which no mask of a window or more changes."""
    pieces = [_gained_at(a, b, positions) for positions in (slice(1, None), slice(0, 1))]
    return _estimate(a, pieces, lambda beyond, first: beyond - first)


def gain_far(a: Result, b: Result) -> Difference:
    """The gain at labels that repeat a far identifier."""
    gained = b.far_nats.mean(0) - a.far_nats.mean(0), np.array(a.best[0]["far_tokens"], float)
    return _estimate(a, [gained], lambda far: far)


Gained = tuple[np.ndarray, np.ndarray]  # (windows,) each: nats by which a's sum is lower than b's, and the tokens of the sum


def _gained_at(a: Result, b: Result, positions: slice) -> Gained:
    nats = (b.nats.mean(0) - a.nats.mean(0))[:, positions].sum(1)
    return nats, np.full(len(nats), float(sum(a.best[0]["tokens"][positions])))


def _estimate(result: Result, pieces: list[Gained], combine: Callable[..., float]) -> Difference:
    """A number that ``combine`` makes of the means of the pieces, in nats a token. Its error is by a bootstrap over packages. NaN
    if a piece has no tokens."""
    if not all(tokens.any() for _, tokens in pieces):
        return Difference(float("nan"), float("nan"))
    packages = np.array(result.best[0]["packages"])
    windows_of = [packages == name for name in sorted(set(packages))]
    # For each piece (packages, 2): sums of nats and of tokens.
    sums = [np.array([[nats[those].sum(), tokens[those].sum()] for those in windows_of]) for nats, tokens in pieces]

    def value(counts: np.ndarray) -> float:
        """counts: (packages,), how often each is drawn."""
        return combine(*(float(counts @ piece[:, 0] / (counts @ piece[:, 1])) for piece in sums))

    generator, count = np.random.default_rng(0), len(windows_of)
    samples = [generator.multinomial(count, np.full(count, 1 / count)).astype(float) for _ in range(_RESAMPLED)]
    with np.errstate(invalid="ignore"):  # none of the packages drawn may have a far identifier
        values = [value(counts) for counts in samples]
    return Difference(value(np.ones(count)), float(np.nanstd(values)))


def compare_arms(results: dict[str, Result], base: str = "dense") -> list[dict]:
    """A row for each arm, compared with ``base``. Raises ValueError if ``base`` was not run."""
    if base not in results:
        raise ValueError(f"no run of {base} to compare with; got {', '.join(results)}")
    dense, found = results[base], []
    for name, result in results.items():
        end = dense.runs[0]["curve"][-1]
        to_loss = {axis: result.find_crossing(dense.curve_end, axis) / end[axis] for axis in ("tokens", "seconds")}
        found.append(
            {
                "arm": name,
                "seeds": len(result.runs),
                "loss": result.loss,
                "spread": result.spread,
                "tokens_per_second": result.tokens_per_second,
                "throughput_ratio": result.tokens_per_second / dense.tokens_per_second,
                "epochs": max(run["epochs"] for run in result.runs),
                "tokens_to_loss_ratio": to_loss["tokens"],
                "time_to_loss_ratio": to_loss["seconds"],
                "last_quarter": result.last_quarter,
                "gain": gain(result, dense),
                "gain_first": gain(result, dense, slice(0, 1)),
                "gain_beyond": gain_beyond_first(result, dense),
                "gain_far": gain_far(result, dense),
            }
        )
    return sorted(found, key=lambda row: row["loss"])


def plot(results: dict[str, Result], target: Path) -> Path:
    """Held-out loss against seconds of training steps, and against the position in the sequence. Of runs that all continue from a
    checkpoint: against the tokens after the switch."""
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    losses = [result.loss for result in results.values()]
    continued = all(run["start"] for result in results.values() for run in result.runs)
    what, scale = ("tokens", 1e-6) if continued else ("seconds", 1.0)
    # Arms that are far behind most would squeeze the others into a line: their loss is in the legend.
    lowest, top = math.inf, min(losses) + 3 * (float(np.median(losses)) - min(losses)) + 0.4
    for number, (name, result) in enumerate(sorted(results.items(), key=lambda item: item[1].loss)):
        color, said = f"C{number}", f"{name}: {result.loss:.3f}"
        for index, run in enumerate(result.runs):
            along, nats = [scale * point[what] for point in run["curve"]], [point["nats"] for point in run["curve"]]
            left.plot(along, nats, "-", color=color, linewidth=1.2, label=said if index == 0 else None)
        borders = result.best[0]["borders"]
        by_position = result.nats.mean(1) / np.array(result.best[0]["tokens"])
        lowest = min(lowest, by_position.min(), *(run["curve"][-1]["nats"] for run in result.runs))
        for of_run in by_position:  # thin beside their mean
            right.plot(range(len(of_run)), of_run, "-", color=color, linewidth=0.5)
        right.plot(range(len(borders) - 1), by_position.mean(0), "o-", color=color, markersize=4, linewidth=1.6, label=name)
    left.set_ylim(lowest - 0.05, top + 0.6 * (not continued))
    right.set_ylim(lowest - 0.05, top + 0.1)
    left.set_xlabel("million tokens after the switch" if continued else "seconds of training steps")
    left.set_ylabel("held-out loss, nats a token")
    right.set_xlabel("position in the sequence, tokens")
    right.set_xticks(range(len(borders) - 1), [f"{_thousands(a)}-{_thousands(b)}" for a, b in pairwise(borders)])
    for axis in (left, right):
        axis.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.savefig(target, dpi=130)
    plt.close(figure)
    return target


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens else "0"
