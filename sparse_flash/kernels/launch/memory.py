"""What launchers remember between calls, choices of tuned configs apart (``tuned.remembered``, which ``clear`` empties too). Each
memory says its bound, and what makes an entry out of date. ``clear`` empties all but what captured graphs write to."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakSet

import torch

from . import tuned

_MOST = 512  # launches under one mask, or dense; some KB each

# Launches of dense calls that can be made again, by all that their arguments depend on: see ``replay.remember``. At most _MOST;
# then all are dropped. Keys hold how many times tuned configs were read, so that a new choice is found.
_dense: dict[tuple, Any] = {}
# The same of masks is kept by each mask, as long as it lives, under this name.
_LAUNCHES = "_launches"
_masks: WeakSet = WeakSet()

# Compiled kernels by all that Triton compiles them for: see ``launch``. As many as there are variants in use; never out of date.
launched: dict[tuple, Any] = {}

# Configs that fit a GPU's memory where the first choice does not: see ``run_within_memory``. As many as there are such variants.
within_memory: dict[tuple, Any] = {}

# Zeros that launches count arrivals in or take tiles from, and leave as zeros: one for each use and stream, for good.
_zeros: dict[tuple, torch.Tensor] = {}
# A launch that is captured in a graph has its own part of these for good: never dropped.
_zeros_of_graphs: dict[torch.device, torch.Tensor] = {}
_taken_by_graphs: dict[torch.device, int] = {}
_MOST_OF_GRAPHS = 1 << 16


def launches_of(mask) -> dict[tuple, Any]:
    """The launches under a mask, None for dense, by key."""
    if mask is None:
        return _dense
    launches = mask.__dict__.get(_LAUNCHES)
    if launches is None:
        launches = mask.__dict__[_LAUNCHES] = {}
        _masks.add(mask)
    return launches


def keep_launch(mask, key: tuple, launch) -> None:
    launches = launches_of(mask)
    if len(launches) >= _MOST:
        launches.clear()
    launches[key] = launch


def zeros_of_stream(use: str, count: int, device: torch.device, stream: int) -> torch.Tensor:
    """(count or more,) int32 zeros for launches on this stream, where they do not overlap. use: "arrivals", "queue"."""
    key = use, device, stream
    if key not in _zeros or _zeros[key].shape[0] < count:
        _zeros[key] = lasting_zeros(count, device)
    return _zeros[key]


def zeros_of_a_graph(count: int, device: torch.device) -> torch.Tensor:
    """(count,) int32 zeros for a launch that is captured now, which may be replayed beside anything: zeroed before the capture
    where there is room, so that no replay has to."""
    taken = _taken_by_graphs.get(device, 0)
    if device not in _zeros_of_graphs or taken + count > _MOST_OF_GRAPHS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    _taken_by_graphs[device] = taken + -(-count // 4) * 4  # the next begins on 16 bytes
    return _zeros_of_graphs[device][taken : taken + count]


def make_room_for_graphs(device: torch.device) -> None:
    """Before a capture, during which it could not be made."""
    if device not in _zeros_of_graphs:
        _zeros_of_graphs[device] = lasting_zeros(_MOST_OF_GRAPHS, device)


def lasting_zeros(count: int, device: torch.device) -> torch.Tensor:
    """(count,) int32 zeros that stay: made in a thread of its own, which torch.compile's pool of CUDA graphs does not reach."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device)

    def made() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return torch.zeros(count, dtype=torch.int32, device=device)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()


def clear() -> None:
    """Forgets launches, compiled kernels, choices of configs, and the zeros of streams. The next call makes them anew; kernels come
    from Triton's own cache."""
    for mask in list(_masks):
        mask.__dict__.pop(_LAUNCHES, None)
    _masks.clear()
    for memory in (_dense, launched, within_memory, _zeros):
        memory.clear()
    tuned.forget()
