"""One name for each function that differs between Triton 3.6 to 3.9."""

from math import prod

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource as GluonASTSource
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

try:
    from triton import aggregate
except ImportError:
    from triton.language.core import _aggregate as aggregate

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
# Asynchronous copies of 4 to 16 bytes a thread from any addresses, zeros outside a mask; and their arrival at a barrier.
copy_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
copies_arrive = async_copy.mbarrier_arrive
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@_core.builtin
def async_add(tensor, coord, source, _semantic=None):
    """Starts a TMA reduction that adds a tile in shared memory to global memory, atomically per element."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor.handle, coord, source.handle)


@_core.builtin
def view(buffer, dtype, shape, layout, _semantic=None):
    """The first bytes of a shared-memory buffer as another dtype, shape and layout."""
    method = getattr(buffer, "reinterpret", None) or buffer._reinterpret
    dtype, *shape = (_core._unwrap_if_constexpr(value) for value in (dtype, *_core._unwrap_if_constexpr(shape)))
    bits, wanted = (of.primitive_bitwidth * prod(sizes) for of, sizes in ((buffer.dtype, buffer.shape), (dtype, shape)))
    if bits == wanted:
        return method(dtype, shape, layout, _semantic=_semantic)
    # Triton 3.8 only reinterprets a whole buffer as the same number of bytes.
    return method(dtype, [bits // wanted, *shape], layout, _semantic=_semantic).index(0, _semantic=_semantic)


@gluon.jit
def view_for_tma(tile, tensor):
    """A tile in shared memory with the four dimensions of the tensor that TMA loads it from."""
    return view(tile, tensor.dtype, [1, 1, tile.shape[0], tile.shape[1]], tensor.layout)


@gluon.jit
def opaque_zero(near):
    """0 that the compiler takes for a new value each time. Added to an address, it makes the compiler compute the address where it
    is used, instead of computing all addresses before a loop and spilling them. near: any int32 scalar."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [near], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet(near):
    """Waits until two roles of four warps have called this equally often. A test of an mbarrier would queue behind the reads of
    products under way. Triton's own barriers are numbered from 0, one for each role. near: any int32 scalar."""
    gl.inline_asm_elementwise("bar.sync 15, 256; mov.b32 $0, $1;", "=r,r", [near], dtype=gl.int32, is_pure=False, pack=1)


def record(cls):
    """Class decorator: makes the annotated fields, each a value or a record, one argument of a kernel function. Its constructor
    takes them in order or by name."""

    def __init__(self, *values, **named):
        fields = cls.__annotations__
        values = dict(zip(fields, values, strict=False)) | named
        for name in fields:
            value = values.pop(name)
            setattr(self, name, value if isinstance(value, triton.language.core.base_value) else gl.constexpr(value))
        assert not values, f"{cls.__name__} has no fields {list(values)}"

    __init__.__triton_builtin__ = True
    cls.__init__ = __init__
    return aggregate(cls)
