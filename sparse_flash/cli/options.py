"""Options and output that commands share, and their errors: one message on stderr, no traceback, exit code 2."""

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

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
    except (ValueError, TypeError, NotImplementedError, ModuleNotFoundError) as error:
        said = str(error)
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {said}", markup=False)
    raise typer.Exit(2)


def _import_files(paths: list[Path] | None) -> list[Path] | None:
    """Imports Python files as modules of their names. Their own imports are found in their folders too."""
    import sparse_flash.choosers.built_in
    import sparse_flash.patterns  # noqa: F401  (what is built in, before the user's own)

    for path in paths or ():
        with user_errors():
            _import_file(path)
    return paths


def _import_file(path: Path) -> None:
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"--import must be a Python file, whose name ends in .py; got {path}")
    beside = str(path.parent.resolve())
    sys.path.append(beside)  # last: its files hide no installed package
    try:
        module = importlib.import_module(path.stem)
        if Path(getattr(module, "__file__", None) or "").resolve() != path.resolve():
            raise ImportError("a module of this name is installed or loaded already; rename the file")
    except Exception as error:
        sys.path.remove(beside)
        raise ValueError(f"{path} fails: {type(error).__name__}: {error}") from error


Spec = Annotated[str, typer.Argument(help="A pattern, such as 'causal & (local(1024) | butterfly(block=128))'.")]
_OF_PATTERN = "Queries, in tokens; by default as many as the pattern names, otherwise 4,096 (explain: 65,536)."
QLen = Annotated[int | None, typer.Option("--q-len", "-n", help=_OF_PATTERN)]
KvLen = Annotated[int | None, typer.Option("--kv-len", help="Keys, in tokens; as many as queries by default.")]
BlockSize = Annotated[int, typer.Option("--block-size", help="Tokens on a side of a block: 16, 32, 64, 128 or 256.")]
Imports = Annotated[
    list[Path] | None,
    typer.Option("--import", metavar="FILE", callback=_import_files, help="A Python file that registers patterns of yours."),
]
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def dtype_of(name: str) -> Any:
    """The torch.dtype that ``--dtype`` names; PyTorch's own names are taken as well."""
    import torch

    known = _DTYPES | {long: long for long in _DTYPES.values()}
    if name not in known:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}; got {name!r}")
    return getattr(torch, known[name])
