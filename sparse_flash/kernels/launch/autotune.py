"""Tile sizes measured by Triton's autotuner if SPARSE_FLASH_AUTOTUNE=1, for GPUs on which the built-in ones were not measured. Off
by default because other tiles round in another order, and two processes may choose differently."""

import os
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import torch
import triton
from triton.runtime.errors import OutOfResources

from ..common.config import Config

# The fastest configs, by what a kernel is compiled for and the class of the call's sizes; never stale.
_fastest: dict[str, Config] = {}


def tuned_config(kernel, launch, config: Config, block_size: int | None, key, sizes: tuple[int, ...], recording) -> Config:
    """Returns the fastest of a config and its neighbours, which the first call of a class measures.

    launch, key: of ``run_within_memory``; launches may be repeated. sizes: of the call; sizes between the same powers of two form a
    class. recording: measured launches are removed from it.
    """
    if os.environ.get("SPARSE_FLASH_AUTOTUNE") != "1" or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return config

    def run(key, *, num_ctas, **chosen):
        launch(Config(**chosen))
        del recording.launches[-1:]

    name = str((*key(), *(size.bit_length() for size in sizes)))
    if name not in _fastest:
        options = [triton.Config({"tile_m": c.tile_m, "tile_n": c.tile_n}, **c.options) for c in _neighbours(config, block_size)]
        tuner = triton.autotune(options, ["key"])(SimpleNamespace(fn=kernel, arg_names=["key"], run=run))
        with suppress(OutOfResources):  # if none fits, ``run_within_memory`` shrinks the config
            tuner.run(name)
        best = tuner.best_config
        _fastest[name] = Config(**best.kwargs, num_warps=best.num_warps, num_stages=best.num_stages)
    return _fastest[name]


def _neighbours(config: Config, block_size: int | None) -> list[Config]:
    """The config, and those with one side of the tile or the warps halved or doubled, or with a stage more or less."""
    found, most = [config], min(128, block_size or 128)
    for field, least, greatest in (("tile_m", 16, most), ("tile_n", 16, most), ("num_warps", 1, 8)):
        for value in (getattr(config, field) // 2, getattr(config, field) * 2):
            found += [replace(config, **{field: value})] if least <= value <= greatest else []
    return found + [replace(config, num_stages=config.num_stages + n) for n in (-1, 1) if 2 <= config.num_stages + n <= 4]
