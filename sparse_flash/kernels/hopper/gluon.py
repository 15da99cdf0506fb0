"""What differs between the Triton releases that these kernels run on (3.6 to 3.9), behind one set of names."""

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import tma

try:
    from triton import aggregate
except ImportError:
    from triton.language.core import _aggregate as aggregate

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@_core.builtin
def async_add(tensor, coord, source, _semantic=None):
    """Starts adding a tile in shared memory to global memory, each element by an atomic addition of the copy engine."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor.handle, coord, source.handle)


@_core.builtin
def view(buffer, dtype, shape, layout, _semantic=None):
    """The bytes of a buffer in shared memory as another dtype, shape and layout."""
    method = getattr(buffer, "reinterpret", None) or buffer._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def fresh_zero(near):
    """0, but to the compiler a number of its own each time. An address with it is worked out where it is used: left to
    itself, the compiler works out all addresses of a loop before it, and spills them. near: any int32 scalar."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [near], dtype=gl.int32, is_pure=False, pack=1)


# Barriers of the hardware, by number. Triton's ``mbarrier.arrive`` holds all warps of a partition up, once before it and once
# before whatever touches shared memory next; here each warp reports for itself and goes on. Triton takes the lowest numbers.
FIRST_SIGNAL = gl.constexpr(8)


@gluon.jit
def signal(number, THREADS: gl.constexpr):
    """Reports to a barrier of the hardware without waiting. number: int32 scalar from FIRST_SIGNAL to 15. THREADS: of all
    warps that report to it or wait. The next report to a number must come after the wait for this one has ended."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    numbers = gl.full([32 * gl.num_warps()], number, gl.int32, layout=lanes)
    asm: gl.constexpr = f"bar.arrive $1, {THREADS}; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [numbers], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_signal(number, THREADS: gl.constexpr):
    """Waits until all others have reported to a barrier of the hardware."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    numbers = gl.full([32 * gl.num_warps()], number, gl.int32, layout=lanes)
    asm: gl.constexpr = f"bar.sync $1, {THREADS}; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [numbers], dtype=gl.int32, is_pure=False, pack=1)


def record(cls):
    """Class decorator: the annotated fields as one argument of a kernel function; its constructor takes them in order."""

    def __init__(self, *values):
        for name, value in zip(cls.__annotations__, values, strict=True):
            setattr(self, name, value if isinstance(value, triton.language.core.base_value) else gl.constexpr(value))

    __init__.__triton_builtin__ = True
    cls.__init__ = __init__
    return aggregate(cls)
