"""The libraries that may be missing, each with the extra of ``pyproject.toml`` that brings it, and the error of a missing one."""

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {"rich": "cli", "typer": "cli", "matplotlib": "plots", "jinja2": "plots"}
EXTRAS |= {"transformers": "transformers", "diffusers": "diffusers", "tokenizers": "train", "tensorboard": "train"}
NEEDED = {"numpy", "scipy"}  # which nothing brings for a folder of `make hub`


@contextmanager
def naming_extra() -> Iterator[None]:
    """Around imports, or as a decorator: the error of a missing library says what to type. Raises ModuleNotFoundError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (library := (error.name or "").partition(".")[0]) not in EXTRAS.keys() | NEEDED:
            raise
        wanted = library if library in NEEDED else f'"sparse-flash[{EXTRAS[library]}]"'
        raise ModuleNotFoundError(f"{library} is missing: pip install {wanted}", name=library) from None
