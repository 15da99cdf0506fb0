"""Launches of the forward and both backward kernels, which iterate over a table's entries, or over all tiles."""

from typing import Any, NamedTuple

import torch

from ..common.compat import Constants
from ..common.config import Config
from ..common.tiles import LOG2_E
from ..common.variant import launch_options
from ..launch.autotune import tuned_config
from ..launch.launch import Recording, descriptor_or_rows, loop_arguments, program_count, run_within_memory
from ..launch.order import concurrent_grid_heads
from .configs import adapt_to_variant, builtin_config, detect_gpu
from .row_loop import LoopShape

# By kernel: tensors that it reads or writes in tiles, and tensors with a number for each query.
_ARGUMENTS = {
    "forward": ("q k v out", "lse"),
    "grad_q": ("q k v out dout dq", "lse dlse delta"),
    "grad_kv": ("q k v dout dk dv", "lse delta"),
    "grad_qkv": ("q k v out dout dq dk dv", "lse dlse"),
}


class Passes(NamedTuple):
    """The launches of a call. tensors: by name; dlse is lse if unused. dim, dim_v: the padded head_dims of q and k, and of v."""

    recording: Recording
    tensors: dict[str, torch.Tensor]
    mask: Any
    scale: float
    dim: int
    dim_v: int
    has_dlse: bool = False

    def run(self, name: str, kernel, of_variant: tuple) -> None:
        """Launches a kernel of ``_ARGUMENTS`` with the GPU's config, or a smaller one that fits. of_variant: see
        ``kernel_variant``."""
        q, k, v = (self.tensors[name] for name in "qkv")
        given, switches, kinds = of_variant
        block_size, chip = self.mask and self.mask.block_size, detect_gpu(q.device)
        # Both backward passes in one launch take the tiles of dK and dV.
        tiles, changes = ("grad_kv", "grad_q") if name == "grad_qkv" else (name, name)
        config = builtin_config(chip, tiles, q.dtype, q.shape[3], block_size, v.shape[3])
        config = adapt_to_variant(config, changes, chip, given, switches, max(self.dim, self.dim_v))

        def launch(config: Config) -> None:
            grid, arguments, rows, step = self._arguments(name, config)
            if name != "forward":
                arguments.append(self.scale)
            arguments += [self.scale * LOG2_E.value, given]
            of_tiles = self.dim, self.dim_v, config.tile_m, config.tile_n, block_size or step
            shape = LoopShape(*of_tiles, self.mask is not None, switches["SCORED"], switches["REACH"], self.has_dlse)
            constants = {"SHAPE": Constants(shape), "SCORE": switches["SCORE"], "DERIVATIVE": switches["DERIVATIVE"]}
            prepared = grid, arguments, constants, launch_options(config, given, switches, rows)
            self.recording.launch(kernel, prepared, (q.shape[2] % 16 == 0, q.shape[2] == 1, *kinds))

        def key() -> tuple:
            facts = q.device, q.dtype, self.dim, self.dim_v, block_size, kinds, *switches.values()
            return name, *facts, self.has_dlse, given.rel_bias_gradient is not None

        if given.rel_bias_gradient is None:  # which every launch adds to
            sizes = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
            config = tuned_config(kernel, launch, config, block_size, key, sizes, self.recording)
        run_within_memory(launch, config, key)

    def _arguments(self, name: str, config: Config) -> tuple[tuple[int, int], list, int, int]:
        """(grid, arguments up to the scales, rows of the largest tile of results, tokens of a step)."""
        q, k, lse, mask = self.tensors["q"], self.tensors["k"], self.tensors["lse"], self.mask
        m, n, group = config.tile_m, config.tile_n, q.shape[1] // k.shape[1]
        shapes = {"q": (m, self.dim), "k": (n, self.dim), "v": (n, self.dim_v), "out": (m, self.dim_v)}
        of_tiles, of_queries = (names.split() for names in _ARGUMENTS[name])
        arguments = [descriptor_or_rows(self.tensors[of], *shapes[of.removeprefix("d")]) for of in of_tiles]
        arguments += [self.tensors[of] for of in of_queries]
        by_query, by_key, block_size = mask and mask.by_query, mask and mask.by_key, mask and mask.block_size
        rows = loop_arguments(mask, by_key if name == "grad_kv" else by_query, q, k, lse)
        if name in ("forward", "grad_q"):
            grid = self._grid(program_count(by_query, q.shape[2], m, block_size), q, k)
            return grid, [*arguments, *rows], m, n
        tiles = program_count(by_key, k.shape[2], n, block_size)
        if name == "grad_kv":
            return self._grid(tiles, k, q), [*arguments, *rows], n, m
        columns, *_, kv_blocks = loop_arguments(mask, by_key, q, k, lse)
        grid = self._grid(tiles + group * program_count(by_query, q.shape[2], m, block_size), k, q)
        return grid, [*arguments, columns, kv_blocks, *rows], max(m, n), n

    def _grid(self, tiles: int, own: torch.Tensor, others: torch.Tensor) -> tuple[int, int]:
        """The grid for ``tiles`` of each head of ``own``, which iterate over ``others``."""
        batch_heads, rows = own.shape[0] * own.shape[1], others.shape[2]
        bytes_of_head = 2 * rows * (self.dim + self.dim_v) * max(1, others.shape[1] // own.shape[1])
        together = concurrent_grid_heads(bytes_of_head, rows, self.mask, batch_heads, by_key=own is self.tensors["k"])
        return tiles * together, batch_heads // together
