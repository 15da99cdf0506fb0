"""Names of the files that pictures are written to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

FORMATS, PAGE = (".png", ".svg"), ".html"


def check_path(path: str | Path, formats: Sequence[str] = FORMATS) -> Path:
    """The path, if its extension is one of ``formats``. Raises TypeError or ValueError otherwise."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be the name of a picture to write; got {path!r}; lengths are q_len= and kv_len=")
    path = Path(path)
    if path.suffix.lower() not in formats:
        *others, last = formats
        named = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"a picture must be a {named} file; got {str(path)!r}; try {str(path.with_suffix(formats[0]))!r}")
    return path
