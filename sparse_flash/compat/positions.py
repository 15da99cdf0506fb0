"""Calls functions of users with positions: NumPy arrays, or tensors for a function that uses PyTorch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .captured import uses_torch
from .pytorch import tree_map


def call_with_positions(function: Callable[..., Any], *positions: np.ndarray) -> Any:
    """The function's value, not as a tensor."""
    if not uses_torch(function):
        return function(*map(np.asarray, positions))
    value = function(*(torch.as_tensor(one).as_subclass(Positions) for one in positions))
    return value.numpy(force=True) if isinstance(value, torch.Tensor) else value


class Positions(torch.Tensor):
    """Positions, and what a function computes of them with tensors on any device and with arrays, on the CPU.

    Arrays of positions would not do: Python holds ``tensor != array`` to be True, and cannot compute ``array & tensor``.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.detach().cpu() if type(x) is torch.Tensor else x, (args, kwargs or {}))
        return super().__torch_function__(func, (), args, kwargs)

    def __array_wrap__(self, array: np.ndarray, *_: object) -> torch.Tensor:
        """Returns what a function of NumPy computed. NumPy warns of PyTorch's own method, which takes fewer arguments."""
        return torch.as_tensor(array).as_subclass(Positions)


def _taking_arrays(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: method(self, torch.as_tensor(other) if isinstance(other, np.ndarray) else other)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Positions, f"__{_name}__", _taking_arrays(getattr(torch.Tensor, f"__{_name}__")))
for _name in ("and", "or", "xor", "add", "sub", "mul", "floordiv", "mod"):
    for _side in ("", "r"):
        setattr(Positions, f"__{_side}{_name}__", _taking_arrays(getattr(torch.Tensor, f"__{_side}{_name}__")))
