"""Blocks chosen from content, in a pretrained model: loss and retrieval against density.

\b
python -m experiments.choosers measure MODEL --rows dense --rows "sampled(8) floor"
python -m experiments.choosers draw runs/choosers.json
"""

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from sparse_flash.core.arguments import check_precision

from .. import row_files
from ..row_files import device_of, say, user_errors
from . import picture, report, tables
from .measure import Measurer
from .model import load
from .rows import select_rows

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)

Rows = Annotated[list[str] | None, typer.Option(help="Names, or their first words; * stands for anything. [all]")]
Model = Annotated[Path, typer.Argument(help="A folder with a GGUF file, or one that convert wrote.")]


@app.command()
def convert(model: Model, folder: Annotated[Path, typer.Argument(help="Where the plain model goes.")]) -> None:
    """Write a GGUF model as safetensors in bfloat16, with its tokenizer. Other machines then need no package gguf."""
    with user_errors():
        plain, tokenizer = load(model, torch.device("cpu"), torch.bfloat16)
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@app.command("rows")
def list_rows(rows: Rows = None) -> None:
    """List the names of rows."""
    with user_errors():
        for name in select_rows(rows or []):
            say(name)


@app.command()
def measure(
    model: Model,
    out: Annotated[Path, typer.Option(help="Results; rows that are there are not measured again.")] = Path("runs/choosers.json"),
    rows: Rows = None,
    minutes: Annotated[
        float | None, typer.Option(help="Begin no row that would end later, if it takes as long as the last.")
    ] = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens of a window. [2048, 4096, 8192]")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Of each kind of text, of the greatest length.")] = 6,
    needles: Annotated[int, typer.Option(min=1, help="Numbers asked for, at each length.")] = 200,
    text: Annotated[
        list[Path] | None, typer.Option(help="A text to measure on; its last quarter is for tuning. [texts that are installed]")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp8 for attention in e4m3; on a CPU its definition, slowly.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")] = "auto",
) -> None:
    """Measure rows, one after the other, and write each down."""
    begin = time.monotonic()
    with user_errors():
        on = device_of(device)
        wanted = select_rows(rows or [])
        check_precision(precision)
        loaded = load(model, on, torch.bfloat16 if on.type == "cuda" or precision else torch.float32)
        measurer = Measurer(*loaded, length or [2048, 4096, 8192], windows, needles, text or [], precision)
        deadline = None if minutes is None else begin + 60 * minutes
        row_files.measure(out, measurer, list(wanted.values()), deadline, report.summary_line)


@app.command()
def draw(
    results: Annotated[list[Path], typer.Argument(help="Files that measure wrote, of one setup. The last that has a row counts.")],
    rows: Rows = None,
    target: Annotated[Path, typer.Option(help="The picture.")] = Path("choosers.png"),
    keep: Annotated[Path | None, typer.Option(help="A file for all results without lists by head, to commit.")] = None,
    guide: Annotated[Path | None, typer.Option(help="A page whose tables of these results are replaced.")] = None,
) -> None:
    """Print rows as a table in Markdown, and draw loss and retrieval against density."""
    with user_errors():
        found = row_files.read(results)
        page = row_files.replace_tables(guide.read_text(), tables.guide_tables(found)) if guide else ""
        say(tables.full_table(found, select_rows(rows or [])))
        say(picture.draw(found, target))
        if keep:
            row_files.write(keep, report.drop_details(found))
        if guide:
            guide.write_text(page)
