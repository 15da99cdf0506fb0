"""Options that several commands take, spelt and read alike."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import user_errors

Spec = Annotated[str, typer.Argument(help="A pattern, such as 'causal & (local(1024) | butterfly(block=128))'.")]
KvLen = Annotated[int | None, typer.Option("--kv-len", help="Keys, in tokens; as many as queries by default.")]
BlockSize = Annotated[int, typer.Option("--block-size", help="Tokens on a side of a block: 16, 32, 64, 128 or 256.")]
_IMPORTS = typer.Option("--import", metavar="FILE", help="A Python file that registers patterns of yours; may be repeated.")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def dtype_of(name: str) -> Any:
    """The torch.dtype that ``--dtype`` names; PyTorch's own names are taken as well."""
    import torch

    known = _DTYPES | {long: long for long in _DTYPES.values()}
    if name not in known:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}; got {name!r}")
    return getattr(torch, known[name])


def with_imports(command: Callable[..., None]) -> Callable[..., None]:
    """The command with ``--import FILE``, which runs before it."""

    @functools.wraps(command)
    def run(*arguments, imports: list[Path] | None, **options):
        import sparse_flash.names  # noqa: F401  (the built-in patterns, before the user's own)

        with user_errors():
            for path in imports or ():
                _run_file(path)
        command(*arguments, **options)

    signature = inspect.signature(command, eval_str=True)
    more = inspect.Parameter(
        "imports", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[Path] | None, _IMPORTS]
    )
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])  # type: ignore[attr-defined]
    run.__annotations__ = {name: one.annotation for name, one in run.__signature__.parameters.items()}  # type: ignore[attr-defined]
    return run


def imported_files() -> tuple[Path, ...]:
    """The files that ``--import`` ran."""
    return tuple(_ran)


_ran: list[Path] = []


def _run_file(path: Path) -> None:
    """Runs the file as a module of its name, beside whose own imports are found."""
    if not path.is_file():
        raise ValueError(f"--import must be a Python file; got {path}, which is not a file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--import must be a Python file; got {path}, whose name does not end in .py")
    if loaded := sys.modules.get(path.stem):
        if getattr(loaded, "__file__", None) == str(path):
            return
        raise ValueError(f"--import must not name a module that is loaded already; got {path}: rename the file")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    beside = str(path.parent.resolve())
    sys.path.append(beside)  # last: files beside it hide no installed package from processes that this one starts
    try:
        spec.loader.exec_module(module)
        _ran.append(path)
    except Exception as error:
        del sys.modules[path.stem]
        sys.path.remove(beside)
        raise ValueError(f"{path} fails: {type(error).__name__}: {error}") from error
