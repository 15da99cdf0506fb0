"""A recall task: who answers what stood far back, by mask.

\b
python -m experiments.recall train window --preset 64K --seconds 60 --seed 0 --seed 1 --out runs/recall
python -m experiments.recall plot runs/recall/*.json
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table

from examples.train_lm import parallel
from examples.train_lm.cli import Device, user_errors
from examples.train_lm.report import console

from ..files import check_one_of, whole_file
from . import report
from .arms import build_arms as arms_of
from .arms import measure_reach
from .settings import PRESETS, Trial, check_trial
from .train import run

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)

Preset = Annotated[str, typer.Option(help=f"Sizes of model and task: {', '.join(PRESETS)}.")]
Length = Annotated[int | None, typer.Option(help="Tokens of a sequence. [the preset's, as all sizes]")]
Layers = Annotated[int | None, typer.Option(min=1, help="Layers of the model.")]
Window = Annotated[int | None, typer.Option(help="Tokens that each query sees next to it.")]


def trial_of(preset: str, sizes: dict[str, int | None], **rest) -> Trial:
    """A preset's trial, with the given sizes instead of its own. sizes: by name, as in Trial, its task and its shape."""
    check_one_of(PRESETS, preset=preset)
    base = PRESETS[preset]
    given = {name: size for name, size in sizes.items() if size is not None}

    def with_given(part):
        return replace(part, **{name: size for name, size in given.items() if name in vars(part)})

    return replace(with_given(base), task=with_given(base.task), shape=with_given(base.shape), **rest)


@app.command()
def arms(
    preset: Preset = "64K",
    length: Length = None,
    layers: Layers = None,
    window: Window = None,
) -> None:
    """Prints the compared masks, what they keep, and how far they reach according to explain."""
    with user_errors():
        base = trial_of(preset, {"length": length, "layers": layers, "window": window})
        depth = base.shape.layers
        table = Table(title=f"{depth} layers, {base.task.length:,} tokens; causal pairs in %")
        for heading in ("arm", "layers: mask", "kept", "explain: within reach after layers", "after all", "most hops"):
            table.add_column(heading, justify="right" if heading in ("kept", "after all", "most hops") else "left")
        for name, arm in track(arms_of(base.window, base.block, base.task.length).items(), transient=True):
            found = measure_reach(arm, depth, base.task.length, base.block)
            masks = [f"{one['layers']}: {one['mask']}" for one in found["masks"]]
            if arm.keep:
                by = "each query" if arm.by_query else "each block of queries"
                masks = [f"{depth}: {arm.masks[0]} and more, {arm.keep} blocks for {by} by topk_blocks"]
            shares = [", ".join(f"{n}: {_percent(s)}" for n, s in one["explained"].items() if n <= depth) for one in found["masks"]]
            sums = _percent(found["density"]), "\n".join(shares), _percent(found["within_reach"]), f"{found['most_hops']}"
            table.add_row(name, "\n".join(masks), *sums)
        console.print(table)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


@app.command()
def train(
    arm: Annotated[
        str,
        typer.Argument(
            help="dense, window, powers, butterfly, fixed, chosen, chosen-max, mixed, mixed-second, mixed-last: see arms."
        ),
    ],
    preset: Preset = "64K",
    length: Length = None,
    pairs: Annotated[int | None, typer.Option(help="Keys and values of a sequence, each asked once.")] = None,
    askings: Annotated[int | None, typer.Option(help="How often each key is asked, where its questions fit in.")] = None,
    apart: Annotated[
        int | None, typer.Option(help="The most tokens from a key to its first question, and to each next one. [any]")
    ] = None,
    layers: Layers = None,
    window: Window = None,
    step_tokens: Annotated[int | None, typer.Option(help="Tokens of an optimizer step.")] = None,
    steps: Annotated[int, typer.Option(help="The budget in optimizer steps.")] = 0,
    seconds: Annotated[float, typer.Option(help="Instead of steps: seconds of training steps; compiling does not count.")] = 0.0,
    learning_rate: Annotated[float, typer.Option(help="Its peak.")] = 3e-3,
    seed: Annotated[list[int] | None, typer.Option(help="Of the weights and the sequences; several are run in turn. [0]")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Held-out questions for evaluation, at least.")] = 65_536,
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="A folder for results: ARM-BUDGET-SEED.json.")] = Path("runs/recall"),
) -> None:
    """Train one arm and evaluate it, on one device."""
    seeds = seed or [0]
    with user_errors(), parallel.join_world(device) as world:
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"--seed must name each value once; got {', '.join(map(str, seeds))}")
        sizes = {"length": length, "pairs": pairs, "askings": askings, "apart": apart, "step_tokens": step_tokens}
        sizes |= {"layers": layers, "window": window}
        budget = {"steps": steps, "seconds": seconds, "learning_rate": learning_rate}
        base = check_trial(trial_of(preset, sizes, arm=arm, compiled=world.device.type == "cuda", **budget))
        results = []
        for number in seeds:
            results.append(run(replace(base, seed=number), world, questions))
            path = out / f"{arm}-{f'{steps}-steps' if steps else f'{seconds:g}-s'}-seed{number}.json"
            with whole_file(path) as partial:
                partial.write_text(json.dumps(results[-1], indent=1))
            console.print(f"{path}: final loss {results[-1]['final_loss']:.3f}", soft_wrap=True, markup=False)
        _show({report.budget_text(results[0]): {arm: results}})


@app.command()
def plot(
    results: Annotated[list[Path], typer.Argument(help="Files that train wrote, of one task.")],
    target: Annotated[Path, typer.Option(help="The picture.")] = Path("recall.png"),
) -> None:
    """Right answers against distance, of several arms and seeds, a panel for each budget: a picture, and tables."""
    with user_errors():
        found = report.read(results)
        _show(found)
        console.print(f"{report.plot(found, target)}", soft_wrap=True, markup=False)


def _show(found: report.Found) -> None:
    for table in report.tables(found):
        console.print(table)
