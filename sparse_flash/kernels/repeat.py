"""Launches made again on other tensors. A short call takes the host longer than the GPU, and most of that goes to working out
arguments that are those of the call before.

This enters Triton's launcher below its Python, which differs between releases: with another than 3.6's nothing is
remembered, and every launch goes the ordinary way.
"""

from functools import lru_cache

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel

_MOST = 512  # launches remembered for dense attention, some KB each
_dense: dict = {}


def signature(*tensors: torch.Tensor) -> tuple:
    """All that a launch's arguments depend on, but for addresses."""
    return (tensors[0].device, tensors[0].dtype, *(t.shape for t in tensors), *(t.stride() for t in tensors))


def repeated(mask, key: tuple, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Makes a launch again that was remembered for this mask under this key; whether there was one."""
    known = _memory(mask).get(key)
    if known is None or _hooked():
        return False
    pointers = [t.data_ptr() for t in tensors]
    if any(pointer % 16 for pointer in pointers):  # another kernel
        return False
    known.again(torch._C._cuda_getCurrentRawStream(tensors[0].device.index), pointers)
    return True


def remember(mask, key: tuple, tensors: tuple[torch.Tensor, ...], compiled, grid: tuple[int, int], arguments: list) -> None:
    """Remembers a launch that was made for the second time, where this Triton allows it: many masks are used once.

    arguments: all of them, compile-time ones too. tensors: those that differ from call to call, the bases of all
    descriptors among them.
    """
    memory = _memory(mask)
    if key not in memory:
        if mask is None and len(memory) >= _MOST:
            memory.clear()
        memory[key] = None
        return
    known = _launcher(compiled)
    if known is None or _hooked():
        return
    launcher, metas = known
    scratch = compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size
    if scratch or None in metas or any(t.data_ptr() % 16 for t in tensors):
        return
    memory[key] = _Launch(launcher, metas, compiled, grid, arguments, tensors)


def _launcher(compiled):
    """(what Triton's launcher calls at last, what it knows of each descriptor), or None where this is not 3.6's."""
    inner = getattr(getattr(compiled, "run", None), "launch", None)
    if getattr(inner, "__module__", None) == "__triton_launcher":  # of a kernel without descriptors
        return inner, ()
    names = inner.__code__.co_freevars if hasattr(inner, "__code__") else ()
    if set(names) != {"launcher", "tensordesc_indices", "tensordesc_meta"}:
        return None
    held = {name: cell.cell_contents for name, cell in zip(names, inner.__closure__, strict=True)}
    return held["launcher"], held["tensordesc_meta"]


def _memory(mask) -> dict:
    """For as long as the mask lives, whose tables the launches read."""
    return _dense if mask is None else mask.__dict__.setdefault("_launches", {})


def _hooked() -> bool:
    """Whether a profiler has to see launches."""
    runtime = knobs.runtime
    return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


class _Launch:
    def __init__(self, launcher, metas, compiled: CompiledKernel, grid, arguments, tensors):
        run = compiled.run
        self.launcher, self.grid = launcher, (*grid, 1)
        self.kernel = compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata
        self.flat = []
        places = [[] for _ in tensors]
        metas = iter(metas)
        for argument in arguments:
            described = hasattr(argument, "block_shape")
            tensor = argument.base if described else argument
            encode = _encoder(argument, next(metas)) if described else None
            for mine, one in zip(places, tensors, strict=True):
                if one is tensor:
                    mine.append((len(self.flat), encode))
            if described:
                self.flat += [None, *argument.shape, *argument.strides]
            else:
                self.flat.append(argument.data_ptr() if isinstance(argument, torch.Tensor) else argument)
        self.places = places

    def again(self, stream: int, pointers: list[int]) -> None:
        flat = self.flat.copy()
        for places, pointer in zip(self.places, pointers, strict=True):
            for place, encode in places:
                flat[place] = pointer if encode is None else encode(pointer)
        self.launcher(*self.grid, stream, *self.kernel, None, None, None, *flat)


def _encoder(descriptor, meta: dict):
    """address -> what the copy engine is told of a tensor there that is otherwise like the descriptor's."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    fill = triton.runtime.driver.active.utils.fill_tma_descriptor
    swizzle, size, block = meta["swizzle"], meta["elem_size"], meta["block_size"]
    element, shape, strides = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], descriptor.shape, descriptor.strides
    # The allocator hands out the same addresses again and again.
    return lru_cache(maxsize=64)(lambda address: fill(address, swizzle, size, element, block, shape, strides, 0))
