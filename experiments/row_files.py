"""Files of rows that were measured on one setup, and what the programs that measure rows share.

A file is JSON: {"setup": what all rows have in common, "rows": a dict for each row, with its name as "row"}.
"""

import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import mean, stdev
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .files import read_result, whole_file

console = Console(highlight=False)
Row = TypeVar("Row")


class Measurer(Protocol):
    """Measures the rows of a program. packages: whose versions are written down."""

    device: torch.device
    packages: tuple[ModuleType, ...]

    def setup(self) -> dict:
        """Returns what all rows of a file must have in common."""

    def why_missing(self, row: Any) -> str | None:
        """Returns why a row cannot be measured, or None."""

    def measure_row(self, row: Any) -> dict:
        """Returns a row's result as plain data."""


def read(paths: Sequence[Path]) -> dict:
    """Returns the rows of files of one setup. If several files have a row, the last one counts. Raises ValueError for a file that
    measure did not write, and for files of different setups."""
    found = [read_result(path, "measure", "setup", "rows") for path in paths]
    for path, one in zip(paths, found, strict=True):
        if one["setup"] != found[0]["setup"]:
            setups = f"{paths[0]} has {found[0]['setup']}, and {path} has {one['setup']}"
            raise ValueError(f"the files must have one setup; {setups}; pass one of the two")
    by_name = {row["row"]: row for one in found for row in one["rows"]}
    return {"setup": found[0]["setup"], "rows": list(by_name.values())}


def write(path: Path, results: dict) -> None:
    """Writes a line for each row."""
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in results["rows"])
    with whole_file(path) as partial:
        partial.write_text(f'{{"setup": {json.dumps(results["setup"])},\n"rows": [\n{lines}\n]}}\n')


def order_rows(results: dict, names: Iterable[str]) -> dict:
    """The results with the rows of these names alone, in this order."""
    by_name = rows_by_name(results)
    return results | {"rows": [by_name[name] for name in names if name in by_name]}


def drop_fields(results: dict, *fields: str) -> dict:
    """The results, their rows without some fields."""
    return results | {"rows": [{key: value for key, value in row.items() if key not in fields} for row in results["rows"]]}


def rows_by_name(results: dict) -> dict[str, dict]:
    return {row["row"]: row for row in results["rows"]}


def dense_row(results: dict) -> dict:
    """The row of dense attention. Raises ValueError if there is none."""
    if "dense" not in (by_name := rows_by_name(results)):
        raise ValueError("the results must have the row dense; they have none; run measure with --rows dense")
    return by_name["dense"]


def select_rows(rows: dict[str, Row], patterns: Sequence[str], endings: Sequence[str] = ("",)) -> dict[str, Row]:
    """The rows whose names fit a pattern, in which * stands for anything; all rows if there is no pattern. endings: patterns for
    what may follow a given pattern. Raises ValueError for a pattern that fits no name."""

    def fits(name: str, pattern: str) -> bool:
        return any(fnmatchcase(name, pattern + ending) for ending in endings)

    for pattern in patterns:
        if not any(fits(name, pattern) for name in rows):
            raise ValueError(f"--rows must be names that the command rows prints, or have * for a part; got {pattern!r}")
    return {name: row for name, row in rows.items() if not patterns or any(fits(name, pattern) for pattern in patterns)}


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    return mean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown. rows: cells; the first row has the headings."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], ["---"] * len(rows[0]), *rows[1:]))


def replace_tables(page: str, tables: Iterable[str]) -> str:
    """The page with each table instead of the one that has the same headings. Raises ValueError if the page has none."""
    lines = page.split("\n")
    for table in tables:
        new = table.split("\n")
        if new[0] not in lines:
            raise ValueError(f"the page must have a table with the headings {new[0]!r}; it has none")
        first = last = lines.index(new[0])
        while last < len(lines) and lines[last].startswith("|"):
            last += 1
        lines[first:last] = new
    return "\n".join(lines)


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


def measure(
    out: Path, measurer: Measurer, rows: Sequence[Any], deadline: float | None, summary_line: Callable[[dict], str]
) -> None:
    """Measures the rows that a file lacks, and writes each down with its seconds, device and versions. deadline: by time.monotonic;
    no row begins that would end later if it took as long as the last one."""
    setup = measurer.setup()
    results = read([out]) if out.exists() else {"setup": setup, "rows": []}
    if results["setup"] != setup:
        raise ValueError(f"{out} was measured on {results['setup']}, and this would be {setup}; pass another --out")
    device = torch.cuda.get_device_name(measurer.device) if measurer.device.type == "cuda" else "cpu"
    versions = {one.__name__: one.__version__ for one in measurer.packages} | {"python": platform.python_version()}
    done, seconds = rows_by_name(results), 0.0
    missing = [row for row in rows if row.name not in done]
    with progress() as bar:
        task = bar.add_task("", total=len(missing))
        for row in missing:
            if deadline is not None and time.monotonic() + seconds > deadline:
                break
            if reason := measurer.why_missing(row):
                say(f"{row.name}: {reason}")
                continue
            bar.update(task, description=row.name)
            begin = time.perf_counter()
            found = {"row": row.name, **measurer.measure_row(row)}
            seconds = round(time.perf_counter() - begin, 1)
            results["rows"].append(found | {"seconds": seconds, "device": device, "versions": versions})
            write(out, results)
            say(summary_line(results["rows"][-1]))
            bar.advance(task)
    left = len(missing) - int(bar.tasks[0].completed)
    say(f"{out}: {len(results['rows'])} rows, {left} of those asked for are missing")
