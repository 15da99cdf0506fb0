"""Replays launches on other tensors. A short call takes the host longer than the GPU, mostly to compute the same arguments as in
the call before.

A replay updates only the addresses in an earlier launch's parameters, and passes them to the CUDA driver, whose interface is public
and stable. A kernel's parameters are parsed from the PTX that Triton compiled, and must match its signature. Otherwise every launch
uses Triton's launcher, and ``refusal`` gives the reason.
"""

import ctypes
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel

from ..common.streams import current_gpu, raw_stream
from .memory import keep


def keep_for_replay(launches: dict, key: Any, inputs: tuple, recording, has_mask: bool) -> None:
    """Stores the launches of a ``Recording`` at the second call, as many masks are used once. has_mask: whether the next call has
    the same mask. Otherwise every tensor must be an input or the recording's, as a replay makes no others again."""
    if key not in launches:
        keep(launches, key, None)
        return
    compiled = [launch[0] for launch in recording.launches]
    if _hooked() or None in compiled or any(t.data_ptr() % 16 for t in (*inputs, *recording.tensors)):
        return
    for reason in map(refusal, compiled):
        if reason:
            _warn_once(reason)
            return
    call = ReplayedCall(recording.launches, inputs, recording.tensors, recording.makers)
    if has_mask or not call.has_fixed:
        keep(launches, key, call)


@cache
def _warn_once(reason: str) -> None:
    """Warns once per reason."""
    warnings.warn(f"sparse_flash launches kernels by Triton's own launcher, which takes the host longer: {reason}", stacklevel=2)


def refusal(compiled: CompiledKernel) -> str | None:
    """Why this kernel's launches cannot be replayed below Triton's launcher, or None."""
    meta = compiled.metadata
    scratch = meta.global_scratch_size or meta.profile_scratch_size
    if meta.num_ctas != 1 or meta.launch_cooperative_grid or meta.launch_pdl or scratch:
        return "the kernel asks for clusters, a cooperative grid, a programmatic launch or scratch memory"
    sizes = parameter_sizes(compiled.asm["ptx"])
    if parameter_types(compiled.src.signature, sizes) is None:
        return f"Triton {triton.__version__} compiles kernels with other parameters than the releases that this was tested with"
    return None if _driver() else "CUDA's driver library (libcuda.so.1) cannot be loaded"


_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\s+(?:\.ptr\s+[^,\s]*\s*(?:\.align\s+\d+\s+)?)?\w+(?:\[(\d+)\])?"
)
_FORMATS = {"i1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q"}
_FORMATS |= {"fp32": "f", "fp64": "d"}
_SCRATCH = ("*i8", "*i8")  # global and profiler scratch; null if a kernel requests none


def parameter_sizes(ptx: str) -> list[int]:
    """The size in bytes of each kernel parameter, in order."""
    start = ptx.index("(", ptx.index(".entry"))
    return [int(bits) // 8 * int(count or 1) for bits, count in _PARAMETER.findall(ptx[start : ptx.index(")", start)])]


def parameter_types(of_arguments: dict, sizes: list[int]) -> list[str] | None:
    """The type of each parameter: Triton's names, and "map" for a tensor map; None if the sizes do not match the signature."""
    types = [*_types(of_arguments.values()), *_SCRATCH]
    return types if [_size(kind) for kind in types] == sizes else None


def _types(of_arguments) -> Iterator[str]:
    """Yields the types of parameters. On chips that address tiles in hardware, a descriptor becomes a map, shape and strides."""
    for kind in of_arguments:
        if isinstance(kind, tuple):
            yield from _types(kind)
        elif kind.startswith("tensordesc"):
            rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
            yield from ("map", *["i32"] * rank, *["i64"] * rank)
        elif kind != "constexpr":
            yield kind


def _size(kind: str) -> int:
    return 8 if kind.startswith("*") else 128 if kind == "map" else struct.calcsize(_FORMATS.get(kind, ""))


def _hooked() -> bool:
    """Whether a profiler needs to see launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class _LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [
        *((f"{name}{axis}", ctypes.c_uint) for name in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


class _Launch(NamedTuple):
    """One launch with its parameters, 8 bytes each in ``storage``; for a tensor map, the driver gets a pointer to the map.
    compiled: the reference keeps its code loaded."""

    compiled: CompiledKernel
    config: _LaunchConfig
    config_reference: Any
    function: ctypes.c_void_p
    storage: ctypes.Array
    parameters: ctypes.Array

    def point(self, index: int, tensor_map: Callable[[int], int] | None, address: int) -> None:
        """Sets the address of a parameter."""
        if tensor_map is None:
            self.storage[index] = address
        else:
            self.parameters[index] = tensor_map(address)


class ReplayedCall:
    """The launches of one call, which ``again`` replays on other tensors. Threads may share it. It stores addresses, as it outlives
    the recorded call. launches, made, makers: see ``Recording``."""

    def __init__(self, launches: list, inputs: tuple, made: list, makers: list):
        self.makers = makers
        tensors = *inputs, *made
        self.device = tensors[0].device.index
        self.pointers = [t.data_ptr() for t in tensors]
        # Parameters are found by tensor. If one tensor came twice, such as q also as k, its parameters cannot be told apart.
        first = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
        self.same = [(first[id(t)], i) for i, t in enumerate(tensors) if first[id(t)] != i]
        # For each tensor: (launch, parameter, its tensor map or None, byte offset from the tensor). Other tensors, such as a mask's
        # tables, have fixed addresses.
        self.positions: list[list] = [[] for _ in tensors]
        self.has_fixed = False
        self.launches = [self._prepared(*launch, tensors, len(inputs)) for launch in launches]
        self.enter = _driver().cuLaunchKernelEx
        self.stream: int | None = None
        self.lock = threading.Lock()

    def _prepared(self, compiled: CompiledKernel, grid, arguments: list, tensors: tuple, inputs: int) -> _Launch:
        meta = compiled.metadata
        values = list(_values(compiled.src.signature.values(), arguments, iter(meta.tensordesc_meta or ())))
        values += [None] * len(_SCRATCH)
        config = _LaunchConfig(*grid, 1, 32 * meta.num_warps, 1, 1, meta.shared, None, None, 0)
        storage = (ctypes.c_uint64 * len(values))()
        start = ctypes.addressof(storage)
        parameters = (ctypes.c_void_p * len(values))(*(start + 8 * i for i in range(len(values))))
        launch = _Launch(compiled, config, ctypes.byref(config), ctypes.c_void_p(compiled.function), storage, parameters)
        types = parameter_types(compiled.src.signature, parameter_sizes(compiled.asm["ptx"]))
        for index, (kind, value) in enumerate(zip(types, values, strict=True)):
            if isinstance(value, torch.Tensor) or kind == "map":
                base, tensor_map = value if kind == "map" else (value, None)
                found = list(_find_tensors(base, tensors, inputs))
                self.has_fixed |= not found
                for number, offset in found:
                    self.positions[number].append((launch, index, tensor_map, offset))
                launch.point(index, tensor_map, base.data_ptr())
            elif value is not None:
                struct.pack_into(_FORMATS[kind], storage, 8 * index, value)
        return launch

    def again(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Launches and returns True. Returns False, without launching, if these tensors need another kernel, if two of them were
        one tensor only in the recorded call, if another GPU is current, or if a profiler needs to see the launches."""
        if _hooked() or current_gpu() != self.device:
            return False
        if not hasattr(_this_thread, "entered"):
            ensure_context(self.device)
        pointers = [t.data_ptr() for t in tensors]
        stream = raw_stream(self.device)
        with self.lock:
            before = self.pointers
            if pointers != before:
                for i, j in self.same:
                    if pointers[i] != pointers[j]:
                        return False
                changed = [(i, p) for i, p in enumerate(pointers) if p != before[i]]
                for _, pointer in changed:
                    if pointer % 16:
                        return False
                for number, pointer in changed:
                    for launch, index, tensor_map, offset in self.positions[number]:
                        launch.point(index, tensor_map, pointer + offset)
                self.pointers = pointers
            if stream != self.stream:
                for launch in self.launches:
                    launch.config.stream = stream
                self.stream = stream
            for launch in self.launches:
                _check(self.enter(launch.config_reference, launch.function, launch.parameters, None))
        return True


def _find_tensors(base: torch.Tensor, tensors: tuple, inputs: int) -> Iterator[tuple[int, int]]:
    """Yields the tensors that are ``base``, or after the inputs that contain it, with the byte offset from their start."""
    for number, tensor in enumerate(tensors):
        if tensor is base:
            yield number, 0
        elif number >= inputs:
            offset = base.data_ptr() - tensor.data_ptr()
            if 0 <= offset < tensor.nbytes:
                yield number, offset


def _values(kinds, arguments, metas) -> Iterator:
    """Yields the value of each parameter except scratch memory; for a tensor map the tensor and the map."""
    for kind, argument in zip(kinds, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from _values(kind, argument, metas)
        elif kind.startswith("tensordesc"):
            yield argument.base, _tensor_map(argument, next(metas))
            yield from (*argument.shape, *argument.strides)
        elif kind != "constexpr":
            yield argument


# For these three element types, Triton's numbers on the device differ from the driver's.
_HOST_TYPES = {8: 10, 9: 8, 10: 9}


def _tensor_map(descriptor, meta: dict) -> Callable[[int], int]:
    """Returns a function from a tensor's address to the address of its tensor map. (The driver's cuTensorMapEncodeTiled.)"""
    rank, size = len(descriptor.shape), meta["elem_size"]
    lengths, steps = descriptor.shape[::-1], [size * stride for stride in descriptor.strides[-2::-1]]
    shape = (ctypes.c_uint64 * rank)(*lengths)
    strides = (ctypes.c_uint64 * rank)(*steps, lengths[-1] * (steps[-1] if steps else size))
    box, ones = (ctypes.c_uint32 * rank)(*meta["block_size"][::-1]), (ctypes.c_uint32 * rank)(*[1] * rank)
    element, swizzle = _HOST_TYPES.get(meta["elem_type"], meta["elem_type"]), meta["swizzle"]
    no_interleave, promotion_to_128, fill_with_zeros = 0, 2, 0
    is_short = sum((length - 1) * step for length, step in zip(lengths, [size, *steps], strict=True)) + 1 < 128 * 1024

    @lru_cache(maxsize=64)  # the allocator reuses the same addresses
    def encoded(address: int) -> tuple:
        memory = (ctypes.c_uint64 * 32)()  # 128 bytes, from the first multiple of 128 on
        place = -(-ctypes.addressof(memory) // 128) * 128
        of_tensor = ctypes.c_void_p(place), element, rank, ctypes.c_void_p(address), shape, strides, box, ones
        _check(_driver().cuTensorMapEncodeTiled(*of_tensor, no_interleave, swizzle, promotion_to_128, fill_with_zeros))
        if is_short and _driver_version() <= 13010:  # a driver bug; same workaround as in CUTLASS and Triton 3.9
            second = ctypes.c_uint64.from_address(place + 8)
            second.value &= ~(1 << 21)
        return memory, place

    return lambda address: encoded(address)[1]


_this_thread = threading.local()


@cache
def _driver():
    """CUDA's driver library, or None."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@cache
def _driver_version() -> int:
    version = ctypes.c_int()
    _check(_driver().cuDriverGetVersion(ctypes.byref(version)))
    return version.value


def ensure_context(device: int | None) -> None:
    """Sets PyTorch's context in a thread that has not used this GPU yet, such as autograd's: Triton encodes tensor maps before."""
    if device is None or hasattr(_this_thread, "entered") or not _driver():
        return
    context = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(context)))
    if not context:
        _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _check(_driver().cuCtxSetCurrent(context))
    _this_thread.entered = True


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA's driver refused a launch: {(text.value or b'unknown error').decode()} ({status})")
