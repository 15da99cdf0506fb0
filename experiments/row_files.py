"""Files of rows that were measured on one setup: {"setup": what all have in common, "rows": dicts, each with its name, "row"}."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path


def read(paths: Sequence[Path]) -> dict:
    """The rows of some files of one setup. The last file that has a row counts. Raises ValueError for a file that is no result of
    measure, and for files of different setups."""
    found = [_read(path) for path in paths]
    for path, one in zip(paths, found, strict=True):
        if one["setup"] != found[0]["setup"]:
            setups = f"{paths[0]} has {found[0]['setup']}, and {path} has {one['setup']}"
            raise ValueError(f"the files must have one setup; {setups}; pass one of the two")
    by_name = {row["row"]: row for one in found for row in one["rows"]}
    return {"setup": found[0]["setup"], "rows": list(by_name.values())}


def _read(path: Path) -> dict:
    try:
        found = json.loads(path.read_text())
        return {"setup": found["setup"], "rows": found["rows"]}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no result of measure: {type(error).__name__}: {error}") from error


def write(path: Path, results: dict) -> None:
    """Writes a line for each row. The file is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in results["rows"])
    (new := path.with_suffix(".new")).write_text(f'{{"setup": {json.dumps(results["setup"])},\n"rows": [\n{lines}\n]}}\n')
    os.replace(new, path)
