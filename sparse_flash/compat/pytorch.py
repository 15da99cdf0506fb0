"""PyTorch's dispatcher, autograd and operators, as far as no public name reaches."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def private(name: str) -> Any:
    """The object of this dotted name in torch. Raises ImportError where this release has none."""
    module, _, path = name.rpartition(":")
    try:
        return operator.attrgetter(path)(importlib.import_module(f"torch.{module}" if module else "torch"))
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"PyTorch {torch.__version__} has no {name.replace(':', '.')}, which sparse_flash relies on; install a PyTorch that "
            "pyproject.toml allows"
        ) from error


# By identity, for keys that have no hash: FlexAttention's masks.
WeakIdKeyDictionary = private("utils.weak:WeakIdKeyDictionary")

# () -> int: how many dispatch modes (of exporters, fake tensors, profilers of operators) are active in this thread.
active_modes: Callable[[], int] = private("_C._len_torch_dispatch_stack")

# A context in which ``__torch_function__`` of tensor subclasses is not called.
without_subclasses = private("_C.DisableTorchFunctionSubclass")

# (nested tuples, lists and dicts) -> list of their leaves
leaves_of = private("utils._pytree:tree_leaves")

# (bool tensor of one element, message): RuntimeError where it is False, when that is known; nothing waits for the device, and
# compiled code keeps it.
assert_in_graph = private("_assert_async")

# Flash attention on CPUs, which scaled_dot_product_attention takes there; these return and take lse, which that does not.
# (q, k, v, dropout_p, is_causal, *, attn_mask, scale) -> (out, lse)
cpu_attention = private("ops.aten._scaled_dot_product_flash_attention_for_cpu")
# (dout, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask, scale) -> (dq, dk, dv)
cpu_attention_backward = private("ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")

_functorch = private("_C._functorch")
_forward_ad = private("autograd:forward_ad")
_without_modes = private("utils._python_dispatch:_disable_current_modes")
_FunctionBase = private("_C._FunctionBase")
_active_mode = private("_C._get_dispatch_mode")
_FAKE = private("_C._TorchDispatchModeKey.FAKE")
_without_functions = private("_C.DisableTorchFunction")


def in_function_transform() -> bool:
    """Whether vmap or a transform of torch.func is active, torch.func.functionalize too."""
    return _functorch.maybe_current_level() is not None


def in_differentiating_transform() -> bool:
    """Whether vmap or a derivative of torch.func is active, which see operators in another form; functionalize does not."""
    inner = _functorch.peek_interpreter_stack()
    return inner is not None and inner.key() != _functorch.TransformType.Functionalize


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active."""
    return _forward_ad._current_level >= 0


def has_forward_derivative(*tensors: torch.Tensor) -> bool:
    """Whether forward mode is active and one of these tensors carries a tangent."""
    return in_forward_mode() and any(_forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def apply_directly(function: type[torch.autograd.Function]) -> Callable:
    """What ``function.apply`` comes to where no function transform is active, which takes a fifth of a short call's host time to
    find out."""
    return _FunctionBase.__dict__["apply"].__get__(None, function)


def fake_mode():
    """The FakeTensorMode that is active, or None."""
    return _active_mode(_FAKE) if active_modes() else None


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Within, no dispatch mode and no tensor subclass sees operations: results are plain tensors."""
    with _without_modes(), _without_functions():
        yield
