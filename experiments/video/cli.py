"""Does a video model still make video if its attention is sparse? Trained on generated scenes, in minutes of one GPU.

\b
python -m experiments.video train dense
python -m experiments.video train window --start runs/video/dense-0.pt
python -m experiments.video measure --rows dense --rows "window*"
python -m experiments.video draw runs/video/results.json
"""

import re
import time
from pathlib import Path
from typing import Annotated

import typer

from .. import row_files
from ..files import check_one_of
from ..row_files import device_of, progress, say, select_rows, user_errors
from . import picture, report
from .flow import LONGEST
from .masks import BY_SHARE, SHARES, VSA
from .measure import Measurer
from .model import PRESETS
from .rows import TRAINED, Arm
from .rows import rows as all_rows
from .train import Training
from .train import train as train_arm

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)

FOLDER = Path("runs/video")
TRAINABLE = ("dense", "window", "sampled", "random", VSA)
Rows = Annotated[list[str] | None, typer.Option(help="Names; * stands for anything. [all]")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")]


def part_of(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    number, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= parts:
        raise ValueError(f"part must be such as 2/4, the second of four; got {text!r}")
    return number, parts


@app.command("rows")
def list_rows(rows: Rows = None) -> None:
    """List the names of rows, and the models that they need."""
    with user_errors():
        for name, row in select_rows(all_rows(), rows or []).items():
            say(f"{name}  ({row.arm.name}.pt)" if row.arm else name)


@app.command()
def train(
    mask: Annotated[str, typer.Argument(help=", ".join(TRAINABLE))],
    share: Annotated[float, typer.Option(help=f"Of the tiles that sparse masks keep: {', '.join(map(str, SHARES))}.")] = TRAINED,
    seed: Annotated[int, typer.Option(min=0, help="Of first weights, scenes and noise.")] = 0,
    start: Annotated[Path | None, typer.Option(help="A dense model of which training goes on.")] = None,
    models: Annotated[Path, typer.Option(help="The folder for models. One that is there is not trained again.")] = FOLDER,
    steps: Annotated[int | None, typer.Option(min=1, help="[2000, with --start 500]")] = None,
    seconds: Annotated[float, typer.Option(help="End the schedule by then; compiling is not counted.")] = 600,
    batch: Annotated[int, typer.Option(min=1, help="Videos in a step.")] = 16,
    learning_rate: Annotated[float | None, typer.Option(help="[0.0006, with --start 0.0003]")] = None,
    preset: Annotated[str, typer.Option(help=", ".join(PRESETS))] = "full",
    compiled: Annotated[bool | None, typer.Option("--compile/--no-compile", help="[on a GPU]")] = None,
    device: Device = "auto",
) -> None:
    """Train one model."""
    with user_errors():
        check_one_of(TRAINABLE, mask=mask)
        check_one_of(PRESETS, preset=preset)
        check_one_of(SHARES, share=share)
        arm = Arm(mask, share if mask in BY_SHARE else TRAINED, seed, start is not None)
        out, on = models / f"{arm.name}.pt", device_of(device)
        if out.exists():
            say(f"{out} is there; remove it to train it again")
            return
        rate = learning_rate or (0.0003 if start else 0.0006)
        training = Training(arm, PRESETS[preset], steps or (500 if start else 2000), seconds, batch, rate)
        with progress() as bar:
            task = bar.add_task(arm.name, total=training.steps)

            def step_done(loss: float | None) -> None:
                said = arm.name if loss is None else f"{arm.name} {loss:.4f}"
                bar.update(task, advance=1, description=said)

            log = train_arm(training, on, out, start, on.type == "cuda" if compiled is None else compiled, step_done)
        losses = ", ".join(f"{loss:.4f}" for loss in log["losses"][-3:])
        say(f"{out}: {log['steps']} steps, {log['seconds']} s, losses {losses}")


@app.command()
def measure(
    models: Annotated[Path, typer.Option(help="The folder of models that train wrote.")] = FOLDER,
    out: Annotated[
        Path | None, typer.Option(help="Results; rows that are there are not measured again. [results.json in models]")
    ] = None,
    rows: Rows = None,
    part: Annotated[str, typer.Option(help="2/4 is the second fourth of the rows, for one of four GPUs.")] = "1/1",
    minutes: Annotated[float | None, typer.Option(help="Begin no row that would end later.")] = None,
    scenes: Annotated[int, typer.Option(min=1, help="Held-out scenes.")] = 128,
    steps: Annotated[int, typer.Option(min=1, max=LONGEST, help="Of sampling.")] = 25,
    device: Device = "auto",
) -> None:
    """Measure rows, one after the other, and write each down. Rows whose model is not there are left out."""
    begin = time.monotonic()
    with user_errors():
        wanted = list(select_rows(all_rows(), rows or []).values())
        number, parts = part_of(part)
        out = out or models / "results.json"
        measurer = Measurer(models, scenes, steps, device_of(device))
        deadline = None if minutes is None else begin + 60 * minutes
        row_files.measure(out, measurer, wanted[number - 1 :: parts], deadline, report.summary_line)


@app.command()
def draw(
    results: Annotated[list[Path], typer.Argument(help="Files that measure wrote, of one setup. The last that has a row counts.")],
    rows: Rows = None,
    target: Annotated[Path, typer.Option(help="The picture.")] = Path("video-frames.png"),
    scene: Annotated[int, typer.Option(min=0, help="Whose frames are drawn.")] = 0,
    keep: Annotated[Path | None, typer.Option(help="A file for all results without frames, to commit.")] = None,
    page: Annotated[Path | None, typer.Option(help="A page whose table is replaced.")] = None,
) -> None:
    """Print rows as a table in Markdown, and draw frames of one scene."""
    with user_errors():
        found = report.read(results)
        table = report.table(found, select_rows(all_rows(), rows or []))
        text = row_files.replace_tables(page.read_text(), [table]) if page else ""
        say(table)
        say(picture.draw(found, target, scene))
        if keep:
            row_files.write(keep, row_files.drop_fields(found, "strips"))
        if page:
            page.write_text(text)
