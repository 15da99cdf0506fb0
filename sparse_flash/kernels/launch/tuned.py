"""Configs that ``sparse-flash tune`` chose on this machine: one small JSON file, read once per process.

    {"format": 1, "choices": [{"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "backend": "triton",
      "kernel": "forward", "dtype": "bfloat16", "head_dim": 128, "block_size": 128, "v_head_dim": 128,
      "config": {"tile_m": 64, ...}, "instead_of": {"tile_m": 128, ...}, "measured": {"milliseconds": 1.9, ...}}]}

The first nine fields are the key; all must match, and v_head_dim defaults to head_dim. A choice holds as long as the built-in
config is the one it was measured against, and it is still among the candidates: newer kernels silently drop it. ``measured`` is for
readers.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from .folders import cache_folder

FORMAT = 1
ANY = TypeVar("ANY")


class Key(NamedTuple):
    """Says what a choice applies to. dtype: without "torch.". head_dim: of q and k, v_head_dim: of v, padded. block_size: the
    table's; None for dense."""

    gpu: str
    torch: str
    triton: str
    backend: str
    kernel: str
    dtype: str
    head_dim: int
    block_size: int | None
    v_head_dim: int


def cache_file() -> Path:
    """tuned.json in the ``cache_folder``."""
    return cache_folder() / "tuned.json"


def gpu_name(device: torch.device) -> str | None:
    """None if there is no GPU to tune for."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def key_of(
    kernel: str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int | None,
    device: torch.device,
    v_head_dim: int | None = None,
) -> Key | None:
    """Returns the key of a launch on this device, or None without a GPU. head_dim, v_head_dim: padded; v_head_dim defaults to
    head_dim."""
    gpu = gpu_name(device)
    if gpu is None:
        return None
    import triton

    name = str(dtype).removeprefix("torch.")
    versions = str(torch.__version__), triton.__version__
    return Key(gpu, *versions, "triton", kernel, name, head_dim, block_size, v_head_dim or head_dim)


def tuned_config(candidates: Sequence[ANY], key: Key | None) -> ANY:
    """The candidate chosen for this key, otherwise the first: the built-in config."""
    choice = None if key is None else _choices(cache_file()).get(key)
    if choice is None or choice["instead_of"] != asdict(candidates[0]):
        return candidates[0]
    return next((config for config in candidates if asdict(config) == choice["config"]), candidates[0])


_caches: list[Callable] = []


def cached_until_cleared(function: Callable[..., ANY]) -> Callable[..., ANY]:
    """Returns an lru_cache of 256 results, which is emptied when the file is written or read again, and by ``clear_caches``."""
    cached = lru_cache(maxsize=256)(function)
    _caches.append(cached)
    return cached


_generation = 0


def config_generation() -> int:
    """A number that changes when configs may have changed: memories of launches check it."""
    return _generation


def forget() -> None:
    """Makes the next lookup reread the file."""
    global _generation
    _generation += 1
    for cached in _caches:
        cached.cache_clear()


@cached_until_cleared
def _choices(path: Path) -> dict[Key, dict]:
    """A file that cannot be read costs at most speed, so it causes a warning, issued once, rather than an error."""
    try:
        return _read(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(
            f"cannot read the tuned configs in {path} ({type(error).__name__}: {error}); using the built-in ones; "
            "delete the file, or run 'sparse-flash tune' to write it anew",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}


def _read(path: Path) -> dict[Key, dict]:
    """Raises OSError, ValueError, KeyError or TypeError for a file not in the format described above."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["format"] != FORMAT:
        raise ValueError(f"its format is {data['format']!r}, not {FORMAT}")
    choices = {}
    for choice in data["choices"]:
        if not (isinstance(choice["config"], dict) and isinstance(choice["instead_of"], dict)):
            raise ValueError("a choice has no config")
        choice.setdefault("v_head_dim", choice["head_dim"])
        choices[Key(*(choice[name] for name in Key._fields))] = choice
    return choices


def count_choices(path: Path) -> int:
    """The number of choices in a file. Raises OSError, ValueError, KeyError or TypeError where ``tuned_config`` would warn."""
    return len(_read(path))


def check_writable() -> None:
    """Raises OSError if the file's folder cannot be created or written to."""
    folder = cache_file().parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def store_choice(key: Key, config, instead_of, measured: dict) -> None:
    """Stores a choice; choosing the built-in config, ``config == instead_of``, removes the stored choice for this key.

    Raises OSError if the file cannot be written. It is replaced atomically, so other processes never read half of it.
    """
    path = cache_file()
    forget()  # another process may have written in the meantime
    choices = dict(_choices(path))
    before = choices.pop(key, None)
    if config != instead_of:
        choices[key] = key._asdict() | {"config": asdict(config), "instead_of": asdict(instead_of), "measured": measured}
    elif before is None:
        return
    check_writable()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, "choices": list(choices.values())}, file, indent=1)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    forget()
