"""Names the folders of files that hold what was measured on a machine."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns the folder named by SPARSE_FLASH_CACHE, otherwise sparse_flash in the user's cache folder."""
    folder = os.environ.get("SPARSE_FLASH_CACHE")
    if not folder:
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "sparse_flash")
    return Path(os.path.expanduser(folder))
