"""What is made of packed documents, kept while their cu_seqlens live unchanged: for all layers and both passes of a step."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar
from weakref import ref

import torch

from ..compat.pytorch import is_plain_eager, is_recorded
from ..kernels.common.streams import raw_stream
from ..masks.cache import run_in_thread
from ..masks.memory import register_clear

MADE = TypeVar("MADE")
_MOST, _MOST_OF_ONE = 4, 16  # tensors, whose tables take up to some MB each; patterns and sizes

# id of cu_seqlens of queries -> (a weak reference to it, its version, {key: (cu_seqlens of keys if others, what was made)})
_kept: dict[int, tuple[ref, int, dict]] = {}
register_clear(_kept.clear)


def kept_of_documents(starts: tuple[torch.Tensor, torch.Tensor], key: tuple, make: Callable[[Callable], MADE]) -> MADE:
    """``make(run)``, or what it returned before for the same tensors with the same values and the same key. starts: cu_seqlens of
    queries and of keys; on a GPU their versions say whether values changed. make: makes tensors that are kept within ``run``; what
    it returns refers to neither of starts."""
    queries, keys = starts
    if not is_plain_eager(*starts) or is_recorded(queries.device) or queries.is_inference() or keys.is_inference():
        return make(lambda function: function())
    if queries.is_cuda:
        key = *key, raw_stream(queries.device.index), id(keys), keys._version  # type: ignore[misc]  # None only without GPUs
    else:  # whose values NumPy may change, too
        key = *key, *(tuple(t.tolist()) for t in starts)
    number = id(queries)
    known, version, made = _kept.get(number, (None, None, {}))
    if known is None or known() is not queries or version != queries._version:
        _kept.pop(number, None)
        while len(_kept) >= _MOST:
            del _kept[next(iter(_kept))]
        made = {}
        _kept[number] = ref(queries, lambda dead: _forget(number, dead)), queries._version, made
    if key not in made:
        if len(made) >= _MOST_OF_ONE:
            made.clear()

        def run(function: Callable[[], Any]) -> Any:
            stream = torch.cuda.current_stream(queries.device) if queries.is_cuda else None

            def on_stream() -> Any:
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    return function()

            return run_in_thread(on_stream)

        others = None if keys is queries else keys  # their ids are part of the key; the queries would never be freed
        made[key] = others, make(run)
    return made[key][1]


def _forget(number: int, dead: ref) -> None:
    if number in _kept and _kept[number][0] is dead:
        del _kept[number]
