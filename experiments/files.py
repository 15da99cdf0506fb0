"""What the experiments share: files that are whole at any time, results, names that must be known, tables on a terminal."""

import json
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.table import Table


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields another path to write to. It becomes ``path`` once the block ends and all bytes are on the disk, so a program that is
    killed leaves no half of a file. Makes the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    yield partial
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_result(path: Path, program: str, *names: str) -> dict:
    """What a program wrote. names: that it has. Raises ValueError for other files."""
    try:
        found = json.loads(path.read_text())
        return found | {name: found[name] for name in names}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no result of {program}: {type(error).__name__}: {error}") from error


def check_one_of(known: Collection, **given: object) -> None:
    """Raises ValueError for what is given under a name and is not known."""
    for name, value in given.items():
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(str, known))}; got {value!r}")


def right_aligned(title: str, names: str, numbers: Iterable[str]) -> Table:
    """A table without rows. names: the headings of its first columns, after commas; numbers: of the others."""
    table = Table(*names.split(","), title=title)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table
