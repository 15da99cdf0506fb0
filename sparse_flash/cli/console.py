"""The command line's output, and how it reports errors: one message on stderr, no traceback, exit code 2."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import typer
from rich.console import Console

_PIPE_WIDTH = 160  # no terminal to fit, and tables must not be cut


def output_console() -> Console:
    """Standard output; colours and width as in the terminal, plain and wide in a pipe or a file."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


@contextmanager
def user_errors():
    """Reports a mistake in the arguments once; for code that raises these errors only for mistakes of its caller."""
    try:
        yield
        return
    except OSError as error:
        said = f"{error.filename}: {error.strerror}; pass another path" if error.filename and error.strerror else str(error)
    except (ValueError, TypeError, NotImplementedError) as error:
        said = str(error)
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {said}", markup=False)
    raise typer.Exit(2)
