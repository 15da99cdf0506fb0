"""Where the command line prints, and how it fails: one message on stderr, no traceback, exit code 2."""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager

import typer
from rich.console import Console

_PIPE_WIDTH = 160  # no terminal to fit, so that tables are not cut


def output() -> Console:
    """Standard output; colours and width as the terminal has them, plain and wide in a pipe or a file."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def errors() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def can_draw(text: str) -> bool:
    """Whether standard output's encoding has these characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def picture_size() -> tuple[int, int]:
    """Characters and lines that a picture may take."""
    size = shutil.get_terminal_size((130, 64))
    return max(16, size.columns - 2), max(8, size.lines - 8)


@contextmanager
def user_errors():
    """What is wrong with the arguments, said once: for code that only raises these for its caller's mistakes."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        errors().print(f"error: {error}", markup=False)
        raise typer.Exit(2) from None


def size_text(count: float) -> str:
    """Bytes in the unit that reads best."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
