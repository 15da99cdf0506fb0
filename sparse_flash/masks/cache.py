"""Patterns and tables under torch.compile, FakeTensorMode and CUDA graphs."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from ..compat.pytorch import fake_mode
from .pattern import Pattern, is_made_in_graph

MADE = TypeVar("MADE")

# Masks and tables that captured CUDA graphs use, by id. Replays read them, so all are kept.
_captured: dict[int, object] = {}

ACCEPTS_ONLY_TEXT = torch.__version__ < "2.13"  # a TorchVersion, which compares versions as numbers
ONLY_TEXT = f"torch.compile of PyTorch {torch.__version__} does not trace Pattern objects; pass pattern.to_spec()"


def keep_if_captured(tables: object, device: torch.device) -> None:
    """Keeps forever what a CUDA graph captures, as replays read it: a mask, or tables that others remember."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured[id(tables)] = tables


def to_traceable(pattern: Pattern | str) -> Pattern | str:
    """The pattern as torch.compile hands it over: the text of one that is made in the graph."""
    if ACCEPTS_ONLY_TEXT and isinstance(pattern, Pattern):
        raise TypeError(ONLY_TEXT)
    return pattern.to_spec() if isinstance(pattern, Pattern) and is_made_in_graph(pattern) else pattern


def fake_tensors_if_needed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Remembered tensors; under a FakeTensorMode, whose operations refuse real ones, fake tensors of the same shapes."""
    if torch.compiler.is_compiling() or (fake := fake_mode()) is None:  # in graphs they are constants
        return tensors
    return [fake.from_tensor(t) for t in tensors]


def run_in_thread(make: Callable[..., MADE], *args: Any, **options: Any) -> MADE:
    """make(*args, **options) in another thread, whose lasting tables belong to no dispatch mode, inference mode, default device or
    memory pool of torch.compile's CUDA graphs: these are per thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make, *args, **options).result()
