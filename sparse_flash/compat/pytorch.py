"""PyTorch's dispatcher, autograd and operators, where public names do not reach."""

import importlib
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def import_private(name: str) -> Any:
    """The object with this dotted name in torch. Raises ImportError if this release lacks it."""
    module, _, path = name.rpartition(":")
    try:
        return operator.attrgetter(path)(importlib.import_module(f"torch.{module}" if module else "torch"))
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"PyTorch {torch.__version__} has no {name.replace(':', '.')}, which sparse_flash relies on; install a PyTorch that "
            "pyproject.toml allows"
        ) from error


# Keyed by identity, for keys without a hash: FlexAttention's masks.
WeakIdKeyDictionary = import_private("utils.weak:WeakIdKeyDictionary")

# (function, arguments): the function of each value in lists, tuples and dicts.
tree_map: Callable[..., Any] = import_private("utils._pytree:tree_map")

# () -> int: how many dispatch modes (of exporters, fake tensors, profilers of operators) are active in this thread.
active_modes: Callable[[], int] = import_private("_C._len_torch_dispatch_stack")

# (bool tensor of one element, message): raises RuntimeError once it is known to be False; does not synchronize, and compiled code
# keeps it.
assert_in_graph = import_private("_assert_async")

# (cycles): the current stream does nothing for so long.
sleep_cycles = import_private("cuda:_sleep")

# Flash attention on CPUs, as used by scaled_dot_product_attention; unlike that, these return and take lse.
# (q, k, v, dropout_p, is_causal, *, attn_mask, scale) -> (out, lse)
cpu_attention = import_private("ops.aten._scaled_dot_product_flash_attention_for_cpu")
# (dout, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask, scale) -> (dq, dk, dv)
cpu_attention_backward = import_private("ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")

_functorch = import_private("_C._functorch")
_forward_ad = import_private("autograd:forward_ad")
_without_modes = import_private("utils._python_dispatch:_disable_current_modes")
_FunctionBase = import_private("_C._FunctionBase")
_active_mode = import_private("_C._get_dispatch_mode")
_FAKE = import_private("_C._TorchDispatchModeKey.FAKE")
_tracing_state = import_private("_C._get_tracing_state")
_without_functions = import_private("_C.DisableTorchFunction")


def in_differentiating_transform() -> bool:
    """Whether vmap or a torch.func derivative is active, under which operators look different; functionalize is not one."""
    inner = _functorch.peek_interpreter_stack()
    return inner is not None and inner.key() != _functorch.TransformType.Functionalize


def is_batched_gradient(tensor: torch.Tensor) -> bool:
    """Whether a gradient is a batch of gradients: of ``is_grads_batched`` and of ``jacobian`` with vectorize, or under vmap."""
    return in_differentiating_transform() or _functorch.is_legacy_batchedtensor(tensor)


_PLAIN = {torch.Tensor, torch.nn.Parameter}


def is_plain_eager(*tensors: torch.Tensor) -> bool:
    """Whether no compiler, tracer, dispatch mode, transform, forward mode, subclass or meta tensor has to see the operator."""
    return (
        not torch.compiler.is_compiling()
        and _PLAIN.issuperset(map(type, tensors))
        and not tensors[0].is_meta
        and active_modes() == 0
        and _functorch.maybe_current_level() is None
        and _forward_ad._current_level < 0
        and _tracing_state() is None
    )


def is_recorded(device: torch.device) -> bool:
    """Whether a CUDA graph, torch.compile or a dispatch mode records operations, whose results must then not be kept."""
    if torch.compiler.is_compiling() or active_modes():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def has_forward_derivative(*tensors: torch.Tensor) -> bool:
    """Whether forward mode is active and one of these tensors carries a tangent."""
    return _forward_ad._current_level >= 0 and any(_forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def resolve_apply(function: type[torch.autograd.Function]) -> Callable:
    """Returns what ``function.apply`` resolves to without function transforms, which takes a fifth of a short call's host time."""
    return _FunctionBase.__dict__["apply"].__get__(None, function)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor. Does not import torch.distributed."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def fake_mode():
    """The FakeTensorMode that is active, or None."""
    return _active_mode(_FAKE) if active_modes() else None


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Inside, no dispatch mode or tensor subclass sees operations: results are plain tensors."""
    with _without_modes(), _without_functions():
        yield
