"""Runs the Hopper kernels on a CPU, for tests: their own functions, with Gluon's replaced by NumPy's. Triton's interpreter runs no
Gluon.

    with gluon_on_cpu(seed=0):
        out = sf.attention(q, k, v, mask, backend="hopper")    # float16 tensors on the CPU

Each partition of warps is a thread, and one runs at a time: at every operation on barriers, copies or products the next one is
drawn. So a seed is an order of events, and a kernel that waits forever raises ``Deadlock``. What a GPU leaves undefined is NaN:
memory before it is filled, and the results of products and copies whose operands change while they are under way. Barriers count
arrivals, bytes and phases as the hardware does. Not modelled: warps within a partition, layouts, registers, fences.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from functools import cache, reduce

import numpy as np
import pytest
import torch
import triton.language as tl
from accepted import DEVICE
from calls import Sizes, attention_with_terms
from calls import assert_right as assert_call_right
from numpy.lib.mixins import NDArrayOperatorsMixin
from oracle import heavy_rows_split, rising
from triton.experimental.gluon import language as gl
from triton.language.core import base_value
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITCallable

import sparse_flash as sf
from sparse_flash.core import hopper
from sparse_flash.core import triton as portable_backend
from sparse_flash.core.description import Call
from sparse_flash.kernels.common.compat import Constants
from sparse_flash.kernels.common.tiles import Rows
from sparse_flash.kernels.hopper import backward, forward
from sparse_flash.kernels.launch.launch import Recording
from sparse_flash.selection.kernels import hopper_backward as selection_backward
from sparse_flash.selection.kernels import hopper_forward as selection_forward

NUMPY = {"fp16": np.float16, "fp32": np.float32, "int1": np.bool_, "int16": np.int16, "int32": np.int32, "int64": np.int64}
NUMPY |= {"uint32": np.uint32, "uint64": np.uint64, "int8": np.int8}
NUMPY["fp8e4nv"] = np.uint8  # its bits: NumPy has no numbers of 8 bits
_NAMES = {"fp16": "float16", "fp32": "float32", "fp8e4nv": "float8e4nv"}
TRITON = {np.dtype(kind): getattr(tl, _NAMES.get(name, name)) for name, kind in NUMPY.items()}
EIGHT = np.dtype(np.uint8)


# Masks that have every kind of tile and row between them, for tests: pattern, queries, keys, block.
MASKS = {
    "dense, ragged": (None, 200, 190, 128),
    "causal": ("causal", 300, 300, 128),
    "one document": ("causal & documents((0, 33, 40, 200, 385))", 385, 385, 128),
    "bits": ("causal & (local(70) | strided(7, block=1))", 300, 300, 128),
    "whole blocks": ("butterfly(block=128)", 512, 512, 128),
    "empty rows and columns": ("prefix(70) & ~causal", 400, 300, 128),
    "blocks of 64": ("local(90)", 300, 300, 64),
    "blocks of 256": ("causal & local(200)", 400, 400, 256),
}


class Deadlock(AssertionError):
    """Every partition waits, and nothing is under way that could wake one."""


def undefined(kind: np.dtype):
    if kind == EIGHT:
        return 0x7F  # NaN
    return np.nan if kind.kind == "f" else np.iinfo(kind).min // 2 if kind.kind == "i" else 0


def as_numbers(array: np.ndarray) -> np.ndarray:
    """Bits of e4m3 as the numbers that they are; other arrays as they are."""
    if array.dtype != EIGHT:
        return array
    return torch.from_numpy(np.ascontiguousarray(array)).view(torch.float8_e4m3fn).float().numpy()


def in_eight_bits(array: np.ndarray) -> np.ndarray:
    """The bits of numbers rounded to e4m3, those beyond its largest to that."""
    numbers = torch.from_numpy(np.ascontiguousarray(array, np.float32)).clamp(-448, 448)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


class Tensor(NDArrayOperatorsMixin):
    """A tensor or a scalar in registers."""

    def __init__(self, array):
        self.array = np.asarray(array)

    def __array_ufunc__(self, function, method, *inputs, **options):
        assert method == "__call__"
        options.pop("out", None)  # x += y makes a new value
        with np.errstate(all="ignore"):
            return Tensor(function(*map(plain, inputs), **options))

    def __bool__(self):
        return bool(self.array)

    def __index__(self):
        return int(self.array)

    __int__ = __index__

    def __getitem__(self, index):
        return Tensor(self.array[index])

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        return TRITON[self.array.dtype]

    @property
    def type(self):
        return types.SimpleNamespace(layout=None)

    def to(self, kind, bitcast=False):
        kind = NUMPY[kind.name]
        if np.dtype(kind) == EIGHT and not bitcast:
            return Tensor(in_eight_bits(self.array))
        with np.errstate(all="ignore"):
            return Tensor(self.array.view(kind) if bitcast else as_numbers(self.array).astype(kind))

    def reshape(self, *shape):
        return Tensor(self.array.reshape(*shape))

    def permute(self, *order):
        return Tensor(self.array.transpose(*order))

    def split(self):
        return Tensor(self.array[..., 0]), Tensor(self.array[..., 1])


def plain(value):
    return value.array if isinstance(value, Tensor) else value


def in_numpy(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor).numpy()


class Pointer:
    """Elements of global memory."""

    def __init__(self, memory: np.ndarray, place):
        self.memory, self.place = memory, place

    def __add__(self, offset):
        return Pointer(self.memory, self.place + np.asarray(plain(offset), np.int64))

    __radd__ = __add__

    def __getitem__(self, index):
        return Pointer(self.memory, np.asarray(self.place)[index])

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=TRITON[self.memory.dtype])

    @classmethod
    def to(cls, tensor: torch.Tensor) -> Pointer:
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return cls(in_numpy(whole), np.int64(tensor.storage_offset()))


class Descriptor:
    """Tiles of a tensor in global memory."""

    def __init__(self, tensor: torch.Tensor, block: list[int]):
        self.array, self.block, self.layout, self.shape = in_numpy(tensor), block, None, tensor.shape
        self.dtype = TRITON[self.array.dtype]
        self.strides = [Tensor(np.int64(stride)) for stride in tensor.stride()]

    def _parts(self, corner) -> tuple[tuple, tuple]:
        """The slices of a tile that lie within the tensor: of the tensor, and of the tile."""
        corner = [int(plain(x)) for x in corner]
        assert min(corner) >= 0, corner
        assert corner[-1] * self.array.itemsize % 16 == 0, f"TMA would end the kernel: {corner} does not start at 16 bytes"
        stops = [min(first + size, end) for first, size, end in zip(corner, self.block, self.array.shape, strict=True)]
        inside = tuple(slice(first, max(first, stop)) for first, stop in zip(corner, stops, strict=True))
        return inside, tuple(slice(0, part.stop - part.start) for part in inside)

    def read(self, corner) -> np.ndarray:
        tile = np.zeros(self.block, self.array.dtype)
        inside, part = self._parts(corner)
        tile[part] = self.array[inside]
        return tile

    def load(self, corner):
        return Tensor(self.read(corner))

    def store(self, corner, tile):
        self.write(corner, tile.array, False)

    def write(self, corner, tile: np.ndarray, add: bool) -> None:
        inside, part = self._parts(corner)
        tile = tile.reshape(self.block)[part]
        self.array[inside] = self.array[inside] + tile if add else tile


class Shared:
    """A buffer in shared memory, or a view of one."""

    layout = None

    def __init__(self, array: np.ndarray):
        self.array, self.shape, self.dtype = array, array.shape, TRITON[array.dtype]

    def index(self, number):
        number = int(plain(number))
        assert 0 <= number < len(self.array)
        return Shared(self.array[number])

    def slice(self, start, length, dim=0):
        start = int(plain(start))
        return Shared(np.moveaxis(np.moveaxis(self.array, dim, 0)[start : start + length], 0, dim))

    def permute(self, order):
        return Shared(self.array.transpose(order))

    def load(self, layout=None):
        return Tensor(self.array.copy())

    def store(self, value):
        assert value.shape == self.shape, (value.shape, self.shape)
        self.array[...] = value.array


class Barrier:
    """One mbarrier."""

    count = pending = bytes = phase = 0

    def arrive(self, count):
        self.pending -= count
        assert self.pending >= 0, "more arrivals than a barrier counts"
        self.advance()

    def advance(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, barriers):
        self.barriers = barriers

    def index(self, number):
        return Barriers([self.barriers[int(plain(number))]])

    @property
    def one(self) -> Barrier:
        (barrier,) = self.barriers
        return barrier


class Partition(threading.Thread):
    """Warps that run one function."""

    def __init__(self, world: World, run: Callable, arguments: tuple, program: tuple[int, int], warps: int, name: str):
        super().__init__(daemon=True, name=name)
        self.world, self.work, self.program, self.warps = world, (run, arguments), program, warps
        self.condition: Callable[[], bool] = lambda: True
        self.turn, self.ended = threading.Event(), False
        self.products: list[Product] = []
        self.copies: list[Callable] = []
        self.elements: list[tuple[Shared, np.ndarray]] = []  # copied, and not yet bound to a barrier

    def run(self):
        try:
            self._wait_for_turn()
            run, arguments = self.work
            run(*arguments)
        except SystemExit:
            pass
        except BaseException as error:
            self.world.error = self.world.error or error
        self.ended = True
        self.world.turn.set()

    def pause(self, condition: Callable[[], bool] = lambda: True) -> None:
        """Lets others run; goes on, at some time, once the condition holds."""
        self.condition = condition
        self.world.turn.set()
        self._wait_for_turn()

    def _wait_for_turn(self):
        self.turn.wait()
        self.turn.clear()
        if self.world.over:
            raise SystemExit


class World:
    """One launch of a kernel: all its programs at once."""

    def __init__(self, seed: int, grid: tuple[int, int]):
        self.random, self.grid = random.Random(seed), grid
        self.partitions: list[Partition] = []
        self.arriving: list[Callable] = []  # copies into shared memory
        self.turn, self.over, self.error = threading.Event(), False, None

    def start(self, run: Callable, arguments: tuple, program: tuple[int, int], warps: int, name: str) -> Partition:
        partition = Partition(self, run, arguments, program, warps, name)
        self.partitions.append(partition)
        partition.start()
        return partition

    def run(self) -> None:
        try:
            while self.error is None and (alive := [p for p in self.partitions if not p.ended]):
                choices = [p for p in alive if p.condition()] + self.arriving
                if not choices:
                    raise Deadlock(", ".join(f"{p.name} of program {p.program[0]}" for p in alive))
                chosen = self.random.choice(choices)
                if isinstance(chosen, Partition):
                    chosen.turn.set()
                    self.turn.wait()
                    self.turn.clear()
                else:
                    self.arriving.remove(chosen)
                    chosen()
            if self.error is not None:
                raise self.error
        finally:
            self.over = True
            for partition in self.partitions:
                partition.turn.set()
                partition.join(10)


class Product:
    """A matrix product under way."""

    def __init__(self, left, right, accumulator):
        self.operands, self.accumulator, self.done = (left, right), accumulator, None
        self.before = self._read()

    def _read(self):
        return [as_numbers(operand.array).astype(np.float32) for operand in self.operands]

    def finish(self):
        if self.done is None:
            now = self._read()
            before = self.accumulator.finish() if isinstance(self.accumulator, Product) else self.accumulator
            with np.errstate(all="ignore"):
                result = now[0] @ now[1] + (0 if before is None else before.array)
            changed = any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(self.before, now, strict=True))
            self.done = Tensor(np.full_like(result, np.nan) if changed else result.astype(np.float32))
        return self.done


def here() -> Partition:
    return threading.current_thread()  # type: ignore[return-value]


def warpgroup_mma(left, right, accumulator, use_acc=True, is_async=False):
    assert is_async
    here().pause()
    product = Product(left, right, accumulator if use_acc else None)
    here().products.append(product)
    return product


def warpgroup_mma_wait(pending, deps):
    here().pause()
    products = here().products
    while len(products) > pending:
        products.pop(0).finish()
    # A product that is still under way can be what the next one adds to, and nothing else: it is no tensor.
    results = tuple(product if product.done is None else product.done for product in deps)
    return results[0] if len(deps) == 1 else results


def async_load(tensor, corner, barrier, target):
    assert target.shape[-2:] == tuple(tensor.block[-2:]) or target.shape == tuple(tensor.block), (target.shape, tensor.block)
    target.array[...] = undefined(target.array.dtype)
    tile = tensor.read(corner)

    def arrive():
        target.array[...] = tile.reshape(target.shape)
        barrier.one.bytes -= tile.nbytes
        barrier.one.advance()

    here().world.arriving.append(arrive)
    here().pause()


def copy_elements(target, pointer, mask=None):
    values = load(pointer, mask, 0).array
    assert target.shape == values.shape, (target.shape, values.shape)
    target.array[...] = undefined(values.dtype)
    here().elements.append((target, values))
    here().pause()


def copies_arrive(barrier, increment_count):
    assert not increment_count
    copied, here().elements = here().elements, []
    threads = 32 * here().warps

    def arrive():
        for target, values in copied:
            target.array[...] = values
        barrier.one.arrive(threads)

    here().world.arriving.append(arrive)
    here().pause()


def _leave(tensor, corner, source, add: bool):
    before = source.array.copy()

    def leave():
        same = np.array_equal(before, source.array, equal_nan=source.array.dtype.kind == "f")
        tensor.write(corner, source.array if same else np.full_like(before, undefined(before.dtype)), add)

    here().copies.append(leave)
    here().pause()


def store_wait(pending):
    here().pause()
    while len(here().copies) > pending:
        here().copies.pop(0)()


def view(buffer, dtype, shape, layout):
    assert buffer.array.flags.c_contiguous
    part = buffer.array.reshape(-1).view(NUMPY[dtype.name])
    return Shared(part[: math.prod(shape)].reshape(shape))


def allocate_shared_memory(dtype, shape, layout):
    if dtype == gl.int64:  # barriers
        return Barriers([Barrier() for _ in range(shape[0])])
    kind = np.dtype(NUMPY[dtype.name])
    return Shared(np.full(shape, undefined(kind), kind))


class mbarrier:
    MBarrierLayout = staticmethod(lambda: None)

    @staticmethod
    def init(barrier, count):
        barrier.one.count = barrier.one.pending = count

    @staticmethod
    def wait(barrier, parity, pred=True):
        if pred:
            parity = int(plain(parity))
            here().pause(lambda: barrier.one.phase % 2 != parity)

    @staticmethod
    def expect(barrier, size):
        barrier.one.bytes += size
        mbarrier.arrive(barrier, 1)

    @staticmethod
    def arrive(barrier, count, pred=True):
        if pred:
            barrier.one.arrive(count)
        here().pause()


def warp_specialize(partitions, warps, registers):
    me = here()
    (run, arguments), *others = partitions
    started = [
        me.world.start(function, given, me.program, count, function.__name__)
        for (function, given), count in zip(others, warps, strict=True)
    ]
    run(*arguments)
    me.pause(lambda: all(partition.ended for partition in started))


def load(pointer, mask=None, other=None):
    places = np.asarray(pointer.place)
    kept = np.broadcast_to(True if mask is None else plain(mask), places.shape)
    assert ((places >= 0) & (places < len(pointer.memory)) | ~kept).all(), "a read outside a tensor"
    read = pointer.memory[np.where(kept, places, 0)]
    return Tensor(np.where(kept, read, undefined(read.dtype) if other is None else plain(other)).astype(read.dtype))


def store(pointer, value, mask=None, cache_modifier=None):
    places, value = np.broadcast_arrays(pointer.place, plain(value))
    kept = np.broadcast_to(True if mask is None else plain(mask), places.shape)
    assert ((places >= 0) & (places < len(pointer.memory)) | ~kept).all(), "a write outside a tensor"
    pointer.memory[places[kept]] = value[kept]


def _atomic(change):
    def atomic(pointer, value, mask=None, sem=None):
        here().pause()
        places = np.asarray(pointer.place)
        kept = np.broadcast_to(True if mask is None else plain(mask), places.shape)
        before = pointer.memory[np.where(kept, places, 0)]
        pointer.memory[places[kept]] = change(before, plain(value))[kept]
        return Tensor(before)

    return atomic


def _bits_of_a_run(low, high):
    columns = np.arange(32)
    kept = (columns >= low[..., None]) & (columns < high[..., None])
    return (kept.astype(np.uint64) << columns.astype(np.uint64)).sum(-1).astype(np.uint32).view(np.int32)


def _unless_dropped(x, word, shift, threshold, otherwise):
    return np.where(word << shift < threshold, otherwise, x)


def _folded(scores, maximum, factor, is_too_large, rounded):
    """(weights, maxima) of scores (rows, pieces, columns of a piece). Where a weight of a warp is too large, its 16 rows get the
    maxima of their scores."""

    def weights(maximum):
        return np.exp2(scores * factor - maximum[..., None]).astype(np.float32)

    again = np.repeat(is_too_large(weights(maximum)).reshape(len(scores) // 16, -1).any(1), 16)
    highest = np.fmax(maximum[:, 0], rounded(np.fmax.reduce(scores.reshape(len(scores), -1), 1) * factor))
    maximum = np.where(again, highest, maximum[:, 0])[:, None] + np.zeros(scores.shape[:2], np.float32)
    return weights(maximum), maximum


def _folded_pairs(low, high, maximum, factor):
    """Returns weights, maxima, and the sums of each of the four threads that share a row."""

    def sums(weights):
        return weights.reshape(len(low), -1, 4, 2).sum((1, 3), dtype=np.float32)

    weights, maximum = _folded(np.stack([low, high], -1), maximum, factor, lambda weights: sums(weights) > 2**14, lambda x: x)
    return _halves(weights), maximum, np.tile(sums(weights), (1, low.shape[1] // 4))


def _folded_quads(first, second, third, fourth, maximum, factor):
    """Returns weights in e4m3, and maxima."""
    scores = np.stack([first, second, third, fourth], -1)
    weights, maximum = _folded(scores, maximum, factor, lambda weights: in_eight_bits(weights) >= 0x7E, lambda x: np.ceil(x) - 6)
    return _quads(*np.moveaxis(weights, -1, 0)), maximum


def _quads(*numbers):
    """Quads of numbers in e4m3."""
    return in_eight_bits(np.stack(numbers, -1)).view(np.int32)[..., 0]


def _halves(numbers):
    """Pairs of numbers in 16 bits."""
    return numbers.astype(np.float16).view(np.int32)[..., 0]


def _in_halves(pairs):
    return pairs[..., None].copy().view(np.float16).astype(np.float32)


# The result of each piece of the kernels' assembly, by a part of its text.
ASSEMBLY = {
    "mul.f32 b, b, $3": lambda pairs, low, high: _halves(_in_halves(pairs) * np.stack([low, high], -1)),
    "fma.rn.f32 $0, x": lambda pairs, low, high: (pairs.view(np.float32) * np.float32(0) - low, -high),
    "e4m3x2": lambda *given: (_folded_quads if len(given) == 6 else _quads)(*given),
    "mov.b32 {a, b}, $1;": lambda copies: np.stack([(copies[..., 0, 0] >> 8 * n).astype(np.int8) for n in range(4)], -1),
    "shfl.sync.bfly": _folded_pairs,
    "bra.uni KEPT": lambda x, factors: x * factors,
    "mov.b32 $0, 0;": lambda x: np.int32(0),
    "cvt.rni.s32.f32": lambda x: np.rint(x).astype(np.int64).clip(-(2**31), 2**31 - 1).astype(np.int32),
    "cvt.rn.f16x2": lambda low, high: _halves(np.stack([low, high], -1)),
    "mov.b32 {$0, $1}, $2;": lambda x: tuple(np.moveaxis(x[..., None].copy().view(np.int16), -1, 0)),
    "setp.lt.u32 p, $2, $3": lambda x, place, size, otherwise: np.where(
        place.astype(np.int32).view(np.uint32) < size.astype(np.int32).view(np.uint32), x, otherwise
    ),
    "and.b32 t, $2, $3": lambda x, words, bit, otherwise: np.where(words & bit, x, otherwise),
    "shl.b32 a, -1, $1": _bits_of_a_run,
    "neg.f32 n, $1": lambda x, word, shift, threshold, _: _unless_dropped(x, word, shift, threshold, -x),
    "shl.b32 t, $2, $3": _unless_dropped,
    "relu": lambda x: np.maximum(x, 0).astype(np.float16),
    "and.b32 $0, $1, $2": lambda x, words: (x.view(np.int32) & words.astype(np.int32)).view(np.float32),
    "rcp.approx": lambda x, steepness: np.float32(1) - np.float32(2) / (np.exp2(x * steepness) + np.float32(1)),
    "abs.f32 a, $1": lambda p, dp, delta: np.where(p > 0, p, 0) * dp - np.abs(p) * delta,
}


def inline_asm_elementwise(assembly, constraints, args, dtype, is_pure, pack):
    part = next(text for text in ASSEMBLY if text in assembly)
    arrays = list(map(plain, args))
    if "selp.f32" in assembly:
        otherwise = {"0fFF800000": np.float32(-np.inf), "0f00000000": np.float32(0)}
        arrays.append(next((value for text, value in otherwise.items() if text in assembly), None))
    with np.errstate(all="ignore"):
        result = ASSEMBLY[part](*arrays)
    return tuple(map(Tensor, result)) if isinstance(result, tuple) else Tensor(result)


def _of(function):
    """A function of arrays as one of tensors."""

    def call(*values, **options):
        with np.errstate(all="ignore"):
            return Tensor(function(*map(plain, values), **{name: plain(value) for name, value in options.items()}))

    return call


class Language(types.SimpleNamespace):
    """The functions of ``gl`` and ``tl`` that kernels call. Types and layouts are the real ones."""

    def __getattr__(self, name):
        return (lambda *_, **__: None) if name.endswith("Layout") else getattr(tl, name)


OF_NUMPY = ("abs", "ceil", "exp", "exp2", "log2", "max", "min", "sum", "where", "zeros_like")
LANGUAGE = Language(
    **{name: _of(getattr(np, name)) for name in OF_NUMPY},
    sqrt_rn=_of(np.sqrt),
    maximum=_of(lambda x, y, propagate_nan=None: (np.fmax if propagate_nan is None else np.maximum)(x, y)),
    minimum=_of(lambda x, y, propagate_nan=None: (np.fmin if propagate_nan is None else np.minimum)(x, y)),
    dot=_of(lambda left, right: np.matmul(left, right, dtype=np.float32)),
    join=_of(lambda low, high: np.stack([low, high], -1)),
    arange=lambda start, stop, layout=None: Tensor(np.arange(start, stop, dtype=np.int32)),
    zeros=lambda shape, dtype, layout=None: Tensor(np.zeros(shape, NUMPY[dtype.name])),
    full=lambda shape, value, dtype, layout=None: Tensor(np.full(shape, plain(value), NUMPY[dtype.name])),
    cast=lambda x, dtype: Tensor(plain(x)).to(dtype),
    convert_layout=lambda x, layout: x,
    permute=lambda x, order: x.permute(*order),
    reduce=lambda x, axis, combine: reduce(combine, map(Tensor, np.moveaxis(plain(x), axis, 0))),
    cdiv=lambda number, size: (number + size - 1) // size,
    load=load,
    store=store,
    atomic_add=_atomic(np.add),
    atomic_max=_atomic(np.maximum),
    program_id=lambda axis: Tensor(np.int32(here().program[axis])),
    num_programs=lambda axis=0: Tensor(np.int32(here().world.grid[axis])),
    num_warps=lambda: here().warps,
    static_range=range,
    static_assert=lambda condition: None,
    inline_asm_elementwise=inline_asm_elementwise,
    allocate_shared_memory=allocate_shared_memory,
    warp_specialize=warp_specialize,
)
LANGUAGE.math = LANGUAGE
REPLACED = {
    "gl": LANGUAGE,
    "tl": LANGUAGE,
    "mbarrier": mbarrier,
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma_wait,
    "fence_async_shared": lambda: None,
    "barrier": lambda: None,
    "async_load": async_load,
    "copy_elements": copy_elements,
    "copies_arrive": copies_arrive,
    "async_store": lambda tensor, corner, source: _leave(tensor, corner, source, False),
    "async_add": lambda tensor, corner, source: _leave(tensor, corner, source, True),
    "store_wait": store_wait,
    "view": view,
    "is_rows": lambda tensor: isinstance(tensor, Rows),
}
JITTED = (JITCallable, InterpretedFunction)
_globals: dict[int, dict] = {}


def ordinary(value):
    """A kernel function, record or constant as Python runs it."""
    if isinstance(value, JITTED):
        function = value.fn
        return types.FunctionType(function.__code__, _globals_of(function), function.__name__, function.__defaults__)
    if isinstance(value, type) and issubclass(value, base_value) and value.__module__.startswith("sparse_flash"):
        return _record(value)
    if isinstance(value, types.ModuleType) and value.__name__.startswith("sparse_flash"):
        return _Module(value)
    if isinstance(value, Constants):
        return value.of
    return value.value if isinstance(value, tl.constexpr) else value


class _Module:
    """A module of the package whose members are as Python runs them, made when asked for: modules may name each other."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        return REPLACED.get(name) or ordinary(getattr(self._module, name))


def _steps(*bounds):
    """``range``, of numbers as a kernel has them."""
    return (Tensor(np.int32(number)) for number in range(*map(int, bounds)))


def _globals_of(function) -> dict:
    known = _globals.get(id(function.__globals__))
    if known is None:
        known = _globals[id(function.__globals__)] = {"range": _steps}
        known |= {name: REPLACED.get(name) or ordinary(value) for name, value in function.__globals__.items()}
    return known


@cache
def _record(kind: type) -> type:
    # Triton 3.6 leaves the fields with the class that was decorated.
    declared = [cell.cell_contents for cell in kind.__setattr__.__closure__ or () if cell.cell_contents is not kind]
    fields = list(kind.__annotations__ or declared[0].__annotations__)
    methods = {name: ordinary(value) for name, value in vars(kind).items() if isinstance(value, JITTED)}

    def __init__(self, *values, **named):
        vars(self).update(dict(zip(fields, values, strict=False)) | named)
        assert sorted(vars(self)) == sorted(fields), (kind.__name__, sorted(vars(self)))

    return type(kind.__name__, (), {"__init__": __init__, **methods})


def run(kernel, grid, arguments, constants, options) -> None:
    """In place of ``launch``."""
    world = World(_seed, grid)
    given = (*map(_argument, arguments), *map(ordinary, constants.values()))
    for program in np.ndindex(*grid):
        world.start(ordinary(kernel), given, program, options["num_warps"], "the first partition")
    world.run()


_seed = 0
_by_triton = Recording.launch


def _launch(recording, kernel, prepared, specialized=()):
    """In place of ``Recording.launch``. Triton interprets kernels of other back ends."""
    if "hopper" not in kernel.fn.__module__:
        return _by_triton(recording, kernel, prepared, specialized)
    run(kernel, *prepared)


def _argument(value):
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return Pointer.to(value)
    if isinstance(value, Rows):
        return value._replace(base=Pointer.to(value.base))
    if isinstance(value, tuple):
        fields = [_argument(field) for field in value]
        return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
    if hasattr(value, "block_shape"):
        return Descriptor(value.base, value.block_shape)
    return Tensor(np.float32(value) if isinstance(value, float) else np.int32(value))


def _supports(call: Call) -> str | None:
    """Supports the calls of a Hopper GPU, except in bfloat16, which NumPy lacks."""
    if call.dtype not in (torch.float16, torch.float8_e4m3fn):
        return f"on a CPU it runs float16; got {call.dtype}"
    return SUPPORTS(replace(call, device=torch.device("cuda")))


SUPPORTS = hopper.supports


def assert_right(
    spec, q_len, kv_len=None, block_size=128, *, terms=(), seed=0, split=False, mask=None, rise=0.0, portable=False, **sizes
):  # fmt: skip
    """Compares out, lse and gradients of the Hopper kernels, on a GPU of the compiled ones, with the oracle. seed: of the order of
    events. split: rows and columns are split. rise: see ``oracle.rising``. portable: another back end may run the backward
    pass. sizes: of ``calls.Sizes``."""
    given = {"batch": 1, "heads": 2, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "backend": "hopper"} | sizes
    given = {"v_head_dim": given["head_dim"], "q_len": q_len, "kv_len": kv_len or q_len, "spec": spec, "terms": terms} | given
    sizes = Sizes(**given)
    if spec is not None and mask is None:
        with heavy_rows_split() if split else contextlib.nullcontext():
            mask = sf.compile_mask(spec, sizes.q_len, sizes.kv_len, block_size, device=DEVICE)
        assert mask.by_query.is_split == mask.by_key.is_split == split
        mask = replace(mask, coarse=None)
    call = attention_with_terms(sizes, mask)
    if rise:
        rising(*call.inputs[:2], None, rise)
    with pytest.MonkeyPatch.context() as patch, gluon_on_cpu(seed) if DEVICE == "cpu" else contextlib.nullcontext():
        if not portable:
            patch.setattr(portable_backend, "backward", None)
        assert_call_right(call, "hopper", keeps_order=True)


@contextlib.contextmanager
def gluon_on_cpu(seed: int = 0):
    """Within it, backend="hopper" runs float16 on the CPU. seed: of the order of events."""
    global _seed
    _seed = seed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recording, "launch", _launch)
        for module in (forward, backward):
            patch.setattr(module, "tile_queue", lambda device: torch.zeros(2, dtype=torch.int32))
        for module in (selection_forward, selection_backward):
            patch.setattr(module, "launch", run)
        patch.setattr(hopper, "why_unavailable", lambda: None)
        patch.setattr(hopper, "_is_hopper", lambda device: True)
        # Kernels cannot be compiled next to the interpreter.
        patch.setattr(hopper, "_score_mod_refusal", lambda score_mod, dtypes: None)
        patch.setattr(hopper, "supports", _supports)
        yield
