"""Gives ``torch.utils.flop_counter`` the formulas of the package's operators, once a program imports that module. It imports
triton, which ``import sparse_flash`` does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from .names import NAMESPACE
from .pytorch import plain_tensors

_MODULE = "torch.utils.flop_counter"
_waiting: dict[str, Callable[..., int]] = {}


def flop_formula(name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorator: ``FlopCounterMode`` counts a call of the operator of this name by the function, which takes the operator's
    arguments and ``out_val``, its results. It runs outside of dispatch modes."""

    def decorate(formula: Callable[..., int]) -> Callable[..., int]:
        _waiting[name] = formula
        if _MODULE in sys.modules:
            _register(sys.modules[_MODULE])
        return formula

    return decorate


def _register(module: Any) -> None:
    for name, formula in _waiting.items():
        operator = getattr(getattr(torch.ops, NAMESPACE), name)
        module.flop_registry.pop(operator, None)  # of an earlier import of the package
        module.register_flop_formula(operator, get_raw=True)(plain_tensors()(formula))
    _waiting.clear()


class _AtImport(MetaPathFinder):
    """Registers the formulas as soon as the module has run, as each ``FlopCounterMode`` copies the registry when it is made."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)  # to ask the others
        try:
            spec = find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)  # who asks need not import
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register(module)
                sys.meta_path.remove(self)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


if _MODULE not in sys.modules:
    sys.meta_path.insert(0, _AtImport())
