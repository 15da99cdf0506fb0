"""Patterns and tables under torch.compile, FakeTensorMode and CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..compat.constants import constant_in_graphs
from ..compat.dynamo import position_in_graph
from ..compat.pytorch import fake_mode
from .memory import register_clear
from .pattern import Pattern, is_made_in_graph, short_text

MADE = TypeVar("MADE")

# Masks and tables that captured CUDA graphs use, by id. Replays read them, so none is ever dropped.
_captured: dict[int, object] = {}

_ACCEPTS_ONLY_TEXT = torch.__version__ < "2.13"  # a TorchVersion, which compares versions as numbers


def keep_if_captured(tables: object, device: torch.device) -> None:
    """Keeps forever what a CUDA graph captures, as replays read it: a mask, or tables that others remember."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured[id(tables)] = tables


def to_traceable(pattern: Pattern | str) -> Pattern | str:
    """The pattern as torch.compile hands it over: the text of one that is made in the graph. Raises a TypeError, which ends a
    graph, for what PyTorch before 2.13 cannot hand over as a constant."""
    if _ACCEPTS_ONLY_TEXT and isinstance(pattern, Pattern):
        raise TypeError(f"torch.compile of PyTorch {torch.__version__} does not trace Pattern objects; pass pattern.to_spec()")
    pattern = pattern.to_spec() if isinstance(pattern, Pattern) and is_made_in_graph(pattern) else pattern
    _warn_of_another_graph(pattern)
    return pattern


# Of each call in compiled code: the compiled function, how often it was compiled before, the patterns then; none after a warning.
_graphs: dict[object, tuple[int, int, set[str]]] = {}
register_clear(_graphs.clear)


@constant_in_graphs
def _warn_of_another_graph(pattern: Pattern | str) -> None:
    """Warns where a call is compiled again for another pattern; once for each call."""
    if (position := position_in_graph()) is None:
        return
    calls, function, times = position
    known = _graphs.get(calls)
    if known is None or known[0] != function or known[1] > times:  # the last after torch.compiler.reset
        _graphs[calls] = function, times, {str(pattern)}
    elif known[1] == times:
        known[2].add(str(pattern))
    elif known[2] and str(pattern) not in known[2]:
        skipped = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
        file, line = next((call for call in reversed(calls) if not call[0].startswith(skipped)), calls[0])
        message = (
            f"compiled again for the mask {short_text(pattern)}, after {short_text(min(known[2]))}: each pattern or text is a "
            "graph of its own, of which torch.compile keeps few; if masks change, pass compile_mask(...), whose tables are data"
        )
        warnings.warn_explicit(message, UserWarning, file, line or 0)
        known[2].clear()


def fake_tensors_if_needed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Remembered tensors; under a FakeTensorMode, whose operations refuse real ones, fake tensors of the same shapes."""
    if torch.compiler.is_compiling() or (fake := fake_mode()) is None:  # in graphs they are constants
        return tensors
    return [fake.from_tensor(t) for t in tensors]


def run_in_thread(make: Callable[..., MADE], *args: Any, **options: Any) -> MADE:
    """make(*args, **options), in a separate thread: dispatch modes, inference mode, default devices and the memory pool of
    torch.compile's CUDA graphs are per thread, and a lasting table must not belong to any of them."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make, *args, **options).result()
