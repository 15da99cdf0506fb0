"""Options and files of rows, for the programs that measure."""

import argparse
import sys
from pathlib import Path

import torch

from sparse_flash.compat.extras import naming_extra

from .results import write_json
from .run import device_of

with naming_extra():
    from rich.console import Console
    from rich.table import Table


def create_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of ``python -m sparse_flash.benchmarks.NAME``. description: the program's docstring, whose first line
    counts. ``--out`` is the folder of results, by default runs/NAME."""
    prog = f"python -m sparse_flash.benchmarks.{name}"
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0], prog=prog)
    parser.add_argument("--out", type=Path, default=Path("runs", name), help="folder (default %(default)s)")
    return parser


def add_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no more is begun (default: none)")


def add_device(parser: argparse.ArgumentParser) -> None:
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=_parse_device, default=usual, help="(default %(default)s)")


def _parse_device(text: str) -> torch.device:
    try:
        return device_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class RowFile:
    """A JSON file of rows, in one or more parts. It is written after every row, so a run that is stopped keeps what it has."""

    def __init__(self, path: Path, facts: dict, *parts: str):
        """facts: what all rows share."""
        self.path, self.data = path, {"format": 1, **facts, **{part: [] for part in parts}}

    def add(self, part: str, row: dict, *texts: str) -> None:
        """Writes a row, and prints the texts, if any."""
        self.data[part].append(row)
        self.write()
        if texts:
            print(*filter(None, texts), sep="; ", flush=True)

    def write(self) -> None:
        write_json(self.path, self.data)


def print_tables(*tables: Table, folder: Path | None = None) -> None:
    """Prints tables at the terminal's width, at 200 columns into a file; then the folder of results."""
    Console(width=200 if not sys.stdout.isatty() else None).print(*tables)
    if folder:
        print(folder, flush=True)
