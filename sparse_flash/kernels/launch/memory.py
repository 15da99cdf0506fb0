"""What launchers store between calls. Each store states its bound and what makes an entry stale. ``clear`` empties everything
except memory that captured graphs write to."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakSet

import torch

RESULT = TypeVar("RESULT")
_MOST = 512  # entries of one mask, or of calls without one; launches take some KB each

# What calls without a mask have prepared; a key holds everything that its entry depends on. At _MOST entries, all are dropped.
_without_mask: dict[Any, Any] = {}
# The attribute of a mask that holds what its calls have prepared.
_PREPARED = "_prepared"
_masks: WeakSet = WeakSet()

# Compiled kernels, keyed by everything that Triton compiles them for: see ``launch``. One per variant in use; never stale.
compiled_kernels: dict[tuple, Any] = {}

# Configs that fit a GPU's memory when the first choice does not: see ``run_within_memory``. One per such variant.
fitting_configs: dict[tuple, Any] = {}

# Counters of arrivals or tiles, which launches reset to zero: one tensor for each use and stream, permanent.
_zeros: dict[tuple, torch.Tensor] = {}
# Each launch captured in a graph has a part of these: never dropped.
_zeros_of_graphs: dict[torch.device, torch.Tensor] = {}
_taken_by_graphs: dict[torch.device, int] = {}
_MOST_OF_GRAPHS = 1 << 16

# The functions that ``cached_until_cleared`` returned, 256 results each; never stale.
_caches: list = []


def cached_until_cleared(function: Callable[..., RESULT]) -> Callable[..., RESULT]:
    """Returns an lru_cache of 256 results, such as choices of configs, which ``clear`` empties."""
    _caches.append(lru_cache(maxsize=256)(function))
    return _caches[-1]


def prepared_under(mask) -> dict[Any, Any]:
    """Returns the dict of what calls under a mask have prepared; mask None: dense attention. ``keep`` adds to it. A mask of blocks
    chosen on the device, which is used once, shares the dict of the mask that the blocks were chosen from."""
    if mask is None:
        return _without_mask
    holder = mask.__dict__.get("selected_from", mask)
    prepared = holder.__dict__.get(_PREPARED)
    if prepared is None:
        prepared = holder.__dict__[_PREPARED] = {}
        _masks.add(holder)
    return prepared


def keep(prepared: dict[Any, Any], key: Any, value: Any) -> None:
    if len(prepared) >= _MOST:
        prepared.clear()
    prepared[key] = value


def zeros_of_stream(use: str, count: int, device: torch.device, stream: int) -> torch.Tensor:
    """(count or more,) int32 zeros for launches on this stream, which do not overlap. use: "arrivals", "queue"."""
    key = use, device, stream
    if key not in _zeros or _zeros[key].shape[0] < count:
        _zeros[key] = lasting_zeros(count, device)
    return _zeros[key]


def zeros_of_a_graph(count: int, device: torch.device) -> torch.Tensor:
    """(count,) int32 zeros for a launch being captured, whose replays may overlap; while the reserve lasts, zeroed before."""
    taken = _taken_by_graphs.get(device, 0)
    if device not in _zeros_of_graphs or taken + count > _MOST_OF_GRAPHS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    _taken_by_graphs[device] = taken + -(-count // 4) * 4  # keeps the next one 16-byte aligned
    return _zeros_of_graphs[device][taken : taken + count]


def reserve_graph_zeros(device: torch.device) -> None:
    """Allocates zeros before a capture, as it is impossible during one."""
    if device not in _zeros_of_graphs:
        _zeros_of_graphs[device] = lasting_zeros(_MOST_OF_GRAPHS, device)


def lasting_zeros(count: int, device: torch.device) -> torch.Tensor:
    """(count,) permanent int32 zeros, allocated in a separate thread, outside the pool of torch.compile's CUDA graphs."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device)

    def made() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return torch.zeros(count, dtype=torch.int32, device=device)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()


def forget_calls() -> None:
    """Drops what calls have prepared: choices of back ends, and launches."""
    for mask in list(_masks):
        mask.__dict__.pop(_PREPARED, None)
    _masks.clear()
    _without_mask.clear()


def clear() -> None:
    """Drops everything that the next calls recreate; kernels come from Triton's cache."""
    forget_calls()
    for memory in (compiled_kernels, fitting_configs, _zeros):
        memory.clear()
    for cached in _caches:
        cached.cache_clear()
