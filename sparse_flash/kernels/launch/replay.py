"""Replays launches on other tensors. A short call takes longer on the host than on the GPU, mostly to compute the same arguments as
in the call before.

A replay passes the previous launch's parameters to the CUDA driver with only addresses updated. The driver's interface is public
and stable. A kernel's parameters are parsed from the PTX that Triton compiled and must match its signature; otherwise every launch
uses Triton's own launcher, and ``refusal`` gives the reason in one sentence.
"""

import ctypes
import re
import struct
import threading
import warnings
from collections.abc import Iterator
from functools import cache, lru_cache

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel

from ..common.streams import current_gpu, raw_stream
from .first_calls import compiles_only
from .memory import keep_launch, launches_of


def known_call(mask, key: tuple) -> "ReplayedCall | None":
    """The launches remembered for this mask under this key."""
    return None if compiles_only() else launches_of(mask).get(key)


def remember(mask, key: tuple, tensors: tuple, rooms: tuple, launches: list, facts) -> None:
    """Remembers the launches of a call when it is made the second time, if possible: many masks are used only once.

    tensors: those that differ between calls, including the bases of all descriptors. rooms: those that descriptors and pointers
    reference in part. launches: (compiled, grid, all arguments including compile-time ones) of each kernel. facts: what the caller
    wants back next time.
    """
    if key not in launches_of(mask):
        keep_launch(mask, key, None)
        return
    if _hooked() or any(t.data_ptr() % 16 for t in tensors) or any(compiled is None for compiled, *_ in launches):
        return
    for compiled, *_ in launches:
        if reason := refusal(compiled):
            _say(reason)
            return
    launches_of(mask)[key] = ReplayedCall([Replay(*launch, tensors, rooms) for launch in launches], tensors, facts)


@cache
def _say(reason: str) -> None:
    """Warns once per reason."""
    warnings.warn(f"sparse_flash launches kernels by Triton's own launcher, which takes the host longer: {reason}", stacklevel=2)


def refusal(compiled: CompiledKernel) -> str | None:
    """Why this kernel's launches cannot be replayed below Triton's launcher, or None."""
    meta = compiled.metadata
    if "ptx" not in compiled.asm:
        return f"the kernel was compiled for {meta.target.backend}, and only launches through CUDA's driver are repeated"
    if meta.num_ctas != 1 or meta.launch_cooperative_grid or meta.launch_pdl:
        return "the kernel asks for clusters, a cooperative grid or a programmatic launch"
    if meta.global_scratch_size or meta.profile_scratch_size:
        return "the kernel asks for scratch memory"
    sizes = parameter_sizes(compiled.asm["ptx"])
    if parameter_types(compiled.src.signature, sizes) is None:
        return f"the parameters of kernels that Triton {triton.__version__} compiles are not those that it was tested with"
    return None if _driver() else "CUDA's driver library (libcuda.so.1) cannot be loaded"


_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\s+(?:\.ptr\s+[^,\s]*\s*(?:\.align\s+\d+\s+)?)?\w+(?:\[(\d+)\])?"
)
_SIZES = {"i1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp32": 4, "fp64": 8}
_FORMATS = {"i1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q"}
_FORMATS |= {"fp32": "f", "fp64": "d"}
_SCRATCH = ("*i8", "*i8")  # global and profiler scratch; null if a kernel requests none


def parameter_sizes(ptx: str) -> list[int]:
    """The size in bytes of each kernel parameter, in order."""
    start = ptx.index("(", ptx.index(".entry"))
    return [int(bits) // 8 * int(count or 1) for bits, count in _PARAMETER.findall(ptx[start : ptx.index(")", start)])]


def parameter_types(of_arguments: dict, sizes: list[int]) -> list[str] | None:
    """The type of each parameter: Triton's names, and "map" for a tensor map; None if the sizes do not match.

    of_arguments: the signature that the kernel was compiled for.
    """
    plain = [kind for kind in _flat_types(tuple(of_arguments.values())) if kind != "constexpr"]
    types = [part for kind in plain for part in _parts(kind)]
    types += _SCRATCH
    return types if [_size(kind) for kind in types] == sizes else None


def _flat_types(of_arguments) -> Iterator[str]:
    for kind in of_arguments:
        yield from _flat_types(kind) if isinstance(kind, tuple) else (kind,)


def _parts(kind: str) -> list[str]:
    """The parameters that one argument becomes: a descriptor, on chips that address tiles in hardware, becomes a map, shape and
    strides."""
    if not kind.startswith("tensordesc"):
        return [kind]
    rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
    return ["map", *["i32"] * rank, *["i64"] * rank]


def _size(kind: str) -> int:
    return 8 if kind.startswith("*") else 128 if kind == "map" else _SIZES.get(kind, 0)


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


class ReplayedCall:
    """The launches of one call, replayed on other tensors by ``again``. Threads may share it."""

    def __init__(self, replays: list["Replay"], tensors: tuple[torch.Tensor, ...], facts):
        self.facts = facts
        self.replays = replays
        self.device = tensors[0].device.index
        self.pointers = [t.data_ptr() for t in tensors]
        # Parameters are found by tensor, so those of one that came twice, such as q as keys too, cannot be told apart.
        first = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
        self.same = [(first[id(t)], i) for i, t in enumerate(tensors) if first[id(t)] != i]
        self.stream: int | None = None
        self.lock = threading.Lock()

    def again(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Returns False, without launching, if these tensors need another kernel, some of them were one tensor in the call before,
        another GPU is current, or a profiler needs to see the launches."""
        if _hooked() or current_gpu() != self.device:
            return False
        if not hasattr(_this_thread, "entered"):
            enter_context(self.device)
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
                for replay in self.replays:
                    replay.move(changed)
                self.pointers = pointers
            if stream != self.stream:
                for replay in self.replays:
                    replay.config.stream = stream
                self.stream = stream
            for replay in self.replays:
                replay.launch()
        return True


class Replay:
    """One launch with all its parameters."""

    def __init__(self, compiled: CompiledKernel, grid: tuple[int, int], arguments: list, tensors: tuple, rooms: tuple = ()):
        meta = compiled.metadata
        self.compiled = compiled  # unloads its code when unreferenced
        self.function = ctypes.c_void_p(compiled.function)
        self.config = _LaunchConfig(*grid, 1, 32 * meta.num_warps, 1, 1, meta.shared, None, None, 0)
        self.config_reference = ctypes.byref(self.config)
        self.enter = _driver().cuLaunchKernelEx
        values = list(_values(compiled.src.signature.values(), arguments, iter(meta.tensordesc_meta or ())))
        types = parameter_types(compiled.src.signature, parameter_sizes(compiled.asm["ptx"]))
        values += [None] * len(_SCRATCH)
        # 8 bytes per parameter; for a tensor map, the driver gets a pointer to the map itself.
        self.storage = (ctypes.c_uint64 * len(values))()
        start = ctypes.addressof(self.storage)
        self.parameters = (ctypes.c_void_p * len(values))(*(start + 8 * i for i in range(len(values))))
        # Per tensor: (parameter, its tensor map or None, byte offset from the tensor's address). A mask's tables never move.
        self.places: list[list] = [[] for _ in tensors]
        for index, (kind, value) in enumerate(zip(types, values, strict=True)):
            if isinstance(value, torch.Tensor) or kind == "map":
                # Stores addresses, never tensors: a remembered launch outlives the call that it was made for.
                base, tensor_map = value if kind == "map" else (value, None)
                for number, offset in _found(base, tensors, rooms):
                    self.places[number].append((index, tensor_map, offset))
                self._point(index, tensor_map, base.data_ptr())
            elif value is not None:
                struct.pack_into(_FORMATS[kind], self.storage, 8 * index, value)

    def _point(self, index: int, tensor_map: "_Map | None", address: int) -> None:
        if tensor_map is None:
            self.storage[index] = address
        else:
            self.parameters[index] = tensor_map.at(address)

    def move(self, changed: list[tuple[int, int]]) -> None:
        """changed: the numbers of tensors, and their new addresses."""
        for number, pointer in changed:
            for index, tensor_map, offset in self.places[number]:
                self._point(index, tensor_map, pointer + offset)

    def launch(self) -> None:
        status = self.enter(self.config_reference, self.function, self.parameters, None)
        if status:
            _check(status)


def _found(base: torch.Tensor, tensors: tuple, rooms: tuple) -> Iterator[tuple[int, int]]:
    """Which tensors this is, or is a part of if they are rooms, and the byte offset from their start."""
    for number, tensor in enumerate(tensors):
        if tensor is base:
            yield number, 0
        elif any(tensor is room for room in rooms):
            offset = base.data_ptr() - tensor.data_ptr()
            if 0 <= offset < tensor.nbytes:
                yield number, offset


def _values(kinds, arguments, metas) -> Iterator:
    """The value of each parameter, except scratch memory; for a tensor map the tensor and the map."""
    for kind, argument in zip(kinds, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from _values(kind, argument, metas)
        elif kind.startswith("tensordesc"):
            yield argument.base, _Map(argument, next(metas))
            yield from (*argument.shape, *argument.strides)
        elif kind != "constexpr":
            yield argument


# For these three element types, Triton's numbers on the device differ from the driver's.
_HOST_TYPES = {8: 10, 9: 8, 10: 9}


class _Map:
    """Tensor maps of a tensor at any address. (The driver's cuTensorMapEncodeTiled.)"""

    def __init__(self, descriptor, meta: dict):
        rank, size = len(descriptor.shape), meta["elem_size"]
        shape, strides = descriptor.shape[::-1], [size * stride for stride in descriptor.strides[-2::-1]]
        self.given = (
            (ctypes.c_uint64 * rank)(*shape),
            (ctypes.c_uint64 * rank)(*strides, shape[-1] * (strides[-1] if strides else size)),
            (ctypes.c_uint32 * rank)(*meta["block_size"][::-1]),
            (ctypes.c_uint32 * rank)(*[1] * rank),
        )
        element = meta["elem_type"]
        self.kind = _HOST_TYPES.get(element, element), rank
        self.swizzle = meta["swizzle"]
        steps = [size, *strides]
        self.is_short = sum((length - 1) * step for length, step in zip(shape, steps, strict=True)) + 1 < 128 * 1024
        # The allocator reuses the same addresses.
        self.encoded = lru_cache(maxsize=64)(self._encoded)

    def at(self, address: int) -> int:
        """The address of the map for a tensor at this address."""
        return self.encoded(address)[1]

    def _encoded(self, address: int) -> tuple:
        memory = (ctypes.c_uint64 * 32)()  # 128 bytes, from the first multiple of 128 on
        place = -(-ctypes.addressof(memory) // 128) * 128
        shape, strides, box, ones = self.given
        element, rank = self.kind
        no_interleave, promotion_to_128, fill_with_zeros = 0, 2, 0
        _check(
            _driver().cuTensorMapEncodeTiled(
                ctypes.c_void_p(place),
                element,
                rank,
                ctypes.c_void_p(address),
                shape,
                strides,
                box,
                ones,
                no_interleave,
                self.swizzle,
                promotion_to_128,
                fill_with_zeros,
            )
        )
        if self.is_short and _driver_version() <= 13010:  # a driver bug; same workaround as in CUTLASS and Triton 3.9
            second = ctypes.c_uint64.from_address(place + 8)
            second.value &= ~(1 << 21)
        return memory, place


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


def enter_context(device: int | None) -> None:
    """Gives a thread that has not used the GPU yet, such as autograd's, PyTorch's context: Triton encodes tensor maps before it
    sets one. device: its index; None for a CPU, which has no context."""
    if device is None or torch.version.hip or hasattr(_this_thread, "entered") or not _driver():
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
