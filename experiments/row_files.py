"""Files of rows that were measured on one setup: {"setup": what all have in common, "rows": dicts, each with its name, "row"};
and what the commands that measure rows share."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

console = Console(highlight=False)


def read(paths: Sequence[Path]) -> dict:
    """The rows of some files of one setup. The last file that has a row counts. Raises ValueError for a file that is no result of
    measure, and for files of different setups."""
    found = [_read(path) for path in paths]
    for path, one in zip(paths, found, strict=True):
        if one["setup"] != found[0]["setup"]:
            setups = f"{paths[0]} has {found[0]['setup']}, and {path} has {one['setup']}"
            raise ValueError(f"the files must have one setup; {setups}; pass one of the two")
    by_name = {row["row"]: row for one in found for row in one["rows"]}
    return {"setup": found[0]["setup"], "rows": list(by_name.values())}


def _read(path: Path) -> dict:
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


def say(text: object) -> None:
    console.print(f"{text}", markup=False, soft_wrap=True)


@contextmanager
def user_errors() -> Iterator[None]:
    """Ends the program with the sentence of an error of input."""
    try:
        yield
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error


def device_of(name: str) -> torch.device:
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def progress() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console)


def measure(out: Path, measuring: Any, rows: Sequence[Any], until: float | None, line: Callable[[dict], str]) -> None:
    """Measures the rows that a file lacks, and writes each down. measuring: has ``setup()``, ``row(row)`` and ``missing(row)``, why
    a row cannot be measured, or None. until: by time.monotonic; no row begins that would end later if it took as long as the one
    before. line: a result in words."""
    setup = measuring.setup()
    done = read([out]) if out.exists() else {"setup": setup, "rows": []}
    if done["setup"] != setup:
        raise ValueError(f"{out} was measured on {done['setup']}, and this would be {setup}; pass another --out")
    there, seconds = {one["row"] for one in done["rows"]}, 0.0
    missing = [row for row in rows if row.name not in there]
    with progress() as bar:
        task = bar.add_task("", total=len(missing))
        for row in missing:
            if until is not None and time.monotonic() + seconds > until:
                break
            if reason := measuring.missing(row):
                say(f"{row.name}: {reason}")
                continue
            bar.update(task, description=row.name)
            result = measuring.row(row)
            seconds = result["seconds"]
            done["rows"].append(result)
            write(out, done)
            say(line(result))
            bar.advance(task)
    left = len(missing) - int(bar.tasks[0].completed)
    say(f"{out}: {len(done['rows'])} rows, {left} of those asked for are missing")
