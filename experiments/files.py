"""Files that are whole at any time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
