"""Shared by the launchers: tensor descriptors, table arguments, launches."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common.config import Config, shrink_config
from ..common.layout import layouts
from ..common.streams import current_device, raw_stream
from ..common.tiles import Rows, TableTensors
from ..common.variant import NO_VARIANT
from .first_calls import first_call
from .memory import compiled_kernels, fitting_configs, prepared_under, reserve_graph_zeros, zeros_of_a_graph, zeros_of_stream
from .replay import ensure_context, keep_for_replay

# Triton specializes integers that are 1 or multiples of 16. These integers do not benefit, and a new number of heads or keys should
# not compile. q_len does benefit: 16-byte aligned rows of lse and delta make dK and dV up to 16 % faster.
NOT_SPECIALIZED = ["heads", "group", "kv_len", "q_blocks", "kv_blocks", "mask_batch_stride", "mask_head_stride"]


@cache
def can_address_tiles(device: torch.device) -> bool:
    """Whether the chip can address tiles in hardware, and Triton uses it well: on 12.0, Triton 3.9 does not prefetch these, and
    the backward kernels at head_dim 128 spill 800 to 1,100 bytes, with pointers 0 to 100. Its interpreter can."""
    if device.type != "cuda":
        return True
    return (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)


def descriptor_or_rows(tensor: torch.Tensor, rows: int, dim: int) -> TensorDescriptor | Rows:
    """Returns Triton's descriptor of a (batch, heads, tokens, head_dim) tensor for tiles of (rows, dim), or ``Rows`` instead."""
    # Products of float32 read operands from registers. With descriptors they spill 400 to 8,100 bytes a thread at head_dim 64 and
    # 128, for compute capability 9.0, and with pointers 0 to 1,800.
    if tensor.dtype == torch.float32 or not can_address_tiles(tensor.device):
        return as_rows(tensor, dim)
    # Bypasses the constructor, whose checks the back end has made: a call creates up to sixteen descriptors.
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base = tensor
    descriptor.shape = list(tensor.shape)
    descriptor.strides = list(tensor.stride())
    descriptor.block_shape = [1, 1, rows, dim]
    return descriptor


def as_rows(tensor: torch.Tensor, dim: int) -> Rows:
    """``Rows`` of a tensor. dim: of a tile."""
    piece = 16 // tensor.element_size()
    *strides, _ = tensor.stride()
    tokens, head_dim = tensor.shape[2:]
    return Rows(tensor, *(stride // piece for stride in strides), tokens, None if head_dim == dim else head_dim // piece)


def integers_key(numbers: Iterable[int | None]) -> tuple:
    """The key by which Triton specializes integers."""
    return tuple(number and (number == 1, number % 16 == 0, number >= 2**31) for number in numbers)


def table_arguments(mask, table, placeholder: torch.Tensor) -> tuple:
    """The arguments of a kernel that iterates over ``table``. A dense kernel gets placeholders, which are unused."""
    if mask is None:
        return (placeholder,) * 8 + (0, 0)
    index = mask.mask_index
    several = table.row_ptr.shape[0] > 1
    strides = (stride if size > 1 and several else 0 for size, stride in zip(index.shape, index.stride(), strict=True))
    return (index, *table[:5], *mask.tiles, *strides)


def loop_arguments(mask, table, q: torch.Tensor, k: torch.Tensor, placeholder: torch.Tensor) -> tuple:
    """The table and shape arguments of every portable kernel. table: the mask's, or None without a mask."""
    (heads, q_len), (kv_heads, kv_len) = q.shape[1:3], k.shape[1:3]
    rows = 0 if table is None else table.row_order.shape[1]
    *tensors, batch_stride, head_stride = table_arguments(mask, table, placeholder)
    return (TableTensors(*tensors), batch_stride, head_stride, heads, heads // kv_heads, q_len, kv_len, rows)


def program_count(table, length: int, tile: int, block_size: int | None) -> int:
    """The number of programs along a table's rows, or along ``length`` tokens if table is None."""
    return triton.cdiv(length, tile) if table is None else table.row_order.shape[1] * (block_size // tile)


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; 4 for the interpreter, on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def arrival_counters(count: int, device: torch.device) -> torch.Tensor:
    """(count or more,) int32 zeros, which the launch must reset to zeros."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return zeros_of_a_graph(count, device)
    reserve_graph_zeros(device)
    return zeros_of_stream("arrivals", max(count, 1024), device, raw_stream(device.index))


# Fuses multiply-adds, with one rounding instead of two, as in all measurements and tests. Triton 3.10 has another default.
FUSED = {"enable_fp_fusion": True}


def launch(kernel, grid: tuple[int, int], arguments: list, constants: dict, options: dict, specialized: tuple = ()):
    """Does ``kernel[grid](*arguments, **constants, **options)``, repeatedly without Triton's lookup of the compiled code, which
    takes half of the host's time. Returns the compiled kernel, or None under the interpreter.

    constants: the last parameters, known at compile time. specialized: what else Triton specializes on.
    """
    # A tensor, its descriptor or a record that begins with it; its dtype determines the other dtypes.
    first = arguments[0][0] if isinstance(arguments[0], tuple) else arguments[0]
    first = first if isinstance(first, torch.Tensor) else first.base
    pointers = [tensor.data_ptr() for tensor in _tensors_in(arguments)]
    if isinstance(arguments[0], Rows):
        # Triton specializes a tuple's integers in any case.
        specialized = (*specialized, *(integers_key(a[1:]) for a in arguments if isinstance(a, Rows)))
    key = (kernel.fn, first.device, first.dtype, specialized, *options.values(), *constants.values())
    aligned = not any(pointer % 16 for pointer in pointers)
    ensure_context(first.device.index)
    if aligned and key in compiled_kernels:
        compiled_kernels[key][(*grid, 1)](*arguments, *constants.values())
        return compiled_kernels[key]
    known = getattr(kernel, "params", ())  # the interpreter's kernels have none
    several = [p.name for p, a in zip(known, arguments, strict=False) if type(a) is int and not p.do_not_specialize]
    assert not several or specialized, f"{kernel.fn.__name__} is compiled for values of {several}, which nothing tells apart"
    options = options | FUSED
    if not known:
        kernel[grid](*arguments, **constants, **options)
        return None
    with first_call(_description(kernel, constants), (kernel.fn.__qualname__, kernel.fn.__module__, *map(str, key[2:]))):
        kernel.warmup(*arguments, grid=grid, **constants, **options)
    compiled = kernel[grid](*arguments, **constants, **options)
    if aligned:
        compiled_kernels[key] = compiled
    return compiled


def _tensors_in(arguments: Iterable) -> Iterator[torch.Tensor]:
    """Yields the tensors among these arguments and in their tuples."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple) and argument is not NO_VARIANT:
            yield from _tensors_in(argument)


def run_within_memory(run: Callable[[Config], None], config: Config, key: Callable[[], tuple]) -> None:
    """Calls run(config); if the config does not fit this GPU's shared memory, with the next one by ``shrink_config`` that does.

    A user's score_mod may load anything, which Triton prefetches through shared memory; how much that takes is known after
    compilation. key: everything that the kernel is compiled for, except the config; the config that fits is stored.
    """
    wanted = config
    if fitting_configs:
        config = fitting_configs.get((*key(), wanted), wanted)
    while True:
        try:
            run(config)
        except OutOfResources as error:
            config = shrink_config(config)
            if config is None:
                raise ValueError(
                    f"this call takes {error.required} bytes of {error.name} in the smallest tiles, and this GPU has "
                    f"{error.limit}; pass backend='torch'"
                ) from error
            fitting_configs[*key(), wanted] = config
        else:
            return


def _description(kernel, constants: dict) -> str:
    """A description such as "attention forward for Hopper, head_dim 128"."""
    name = kernel.fn.__name__.removesuffix("_kernel").replace("_", " ")
    family = " for Hopper" if ".hopper" in kernel.fn.__module__ else ""
    shape = constants.get("SHAPE") or constants.get("C")
    dim = constants.get("DIM", getattr(shape, "DIM", None))
    return f"{name}{family}{f', head_dim {int(dim)}' if dim else ''}"


class Recording:
    """Makes the launches of one call, and records them: (compiled, grid, all arguments including compile-time ones). tensors: all
    except the call's inputs. makers: the functions that make them."""

    def __init__(self):
        self.launches: list[tuple] = []
        self.tensors: list[torch.Tensor] = []
        self.makers: list[Callable[[], torch.Tensor]] = []

    def launch(self, kernel, prepared, specialized: tuple = ()) -> None:
        """prepared: (grid, arguments, constants, options). specialized: see ``launch``."""
        grid, arguments, constants, options = prepared
        compiled = launch(kernel, grid, arguments, constants, options, specialized)
        self.launches.append((compiled, grid, [*arguments, *constants.values()]))

    def fresh(self, tensor: torch.Tensor) -> torch.Tensor:
        """Records an uninitialized tensor that this call allocated. A replay allocates another with its layout."""
        self.tensors.append(tensor)
        kind = {"dtype": tensor.dtype, "device": tensor.device}
        self.makers.append(partial(torch.empty_strided, tensor.shape, tensor.stride(), **kind))
        return tensor

    def each_time(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns and records ``make()``, which a replay calls too. make: refers to no tensor, which it would keep alive."""
        self.tensors.append(make())
        self.makers.append(make)
        return self.tensors[-1]


def launch_or_repeat(
    launches: dict[Any, Any] | None, key: Any, mask, inputs: tuple[torch.Tensor, ...], run: Callable[[Recording], Any]
):
    """Makes the launches of a call, or replays those of an earlier equal call. Returns the result of ``run``, or the tensors of the
    replay in the order in which ``run`` got them from its ``Recording``.

    launches: of earlier calls; None: never replayed. key: with ``launches``, everything that they depend on except addresses.
    inputs: all tensors except the mask's and the recording's. run: may instead call its launcher again on copies of the inputs.
    """
    has_mask = mask is not None
    if has_mask and mask.selected_from is not None:  # the next such mask has other tables
        inputs, has_mask = (*inputs, *mask.tensors()), False
    if launches is not None:
        known = launches.get(key)
        if known is not None:
            made = [make() for make in known.makers]
            if known.again((*inputs, *made)):
                return made
    with current_device(inputs[0].device):
        recording = Recording()
        result = run(recording)
    if launches is not None and recording.launches:
        keep_for_replay(launches, key, inputs, recording, has_mask)
    return result


def launch_or_repeat_alike(kernel, mask, key: tuple, inputs: tuple[torch.Tensor, ...], run: Callable[[Recording], Any]):
    """``launch_or_repeat`` for calls without a record. kernel: any kernel of the call."""
    chosen = mask is not None and mask.selected_from is not None
    shapes = [t.shape for t in mask.tensors()] if chosen else ()
    key = kernel.fn, *key, *layouts(inputs), *shapes
    return launch_or_repeat(prepared_under(mask), key, mask, inputs, run)
