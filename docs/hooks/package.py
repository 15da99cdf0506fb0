"""Gives mkdocstrings the package as one folder of links: its reader does not know pyproject.toml's package-dir."""

import atexit
import shutil
import tempfile
from pathlib import Path

from mkdocs.plugins import event_priority


@event_priority(100)  # before mkdocstrings reads its paths
def on_config(config):
    root = Path(config.config_file_path).parent
    folder = Path(tempfile.mkdtemp(prefix="sparse-flash-docs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    package = folder / "sparse_flash"
    package.mkdir()
    for path in [*(root / "sparse_flash").iterdir(), root / "patterns", root / "benchmarks"]:
        (package / path.name).symlink_to(path)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"].insert(0, str(folder))
