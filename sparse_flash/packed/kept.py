"""What is made of packed documents, kept while their cu_seqlens live unchanged: for all layers and both passes of a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from ..compat.pytorch import WeakIdKeyDictionary, is_plain_eager, is_recorded
from ..kernels.common.streams import raw_stream
from ..masks.cache import run_in_thread
from ..masks.memory import register_clear

MADE = TypeVar("MADE")
_MOST, _MOST_OF_ONE = 4, 16  # tensors, whose tables take up to some MB each; patterns and sizes

# cu_seqlens of queries -> (its version, {key: (cu_seqlens of keys if others, what was made)})
_kept = WeakIdKeyDictionary()
register_clear(_kept.clear)


def kept_of_documents(starts: tuple[torch.Tensor, torch.Tensor], key: tuple, make: Callable[[Callable], MADE]) -> MADE:
    """``make(run)``, or what it returned before for the same tensors with the same values and the same key.

    starts: cu_seqlens of queries and of keys. On a GPU their versions say whether values changed, so tensors without one, of
    inference mode, are made of anew, as they are for each stream; and where a graph records operations. make: makes tensors that
    are kept within ``run``; what it returns refers to neither of starts.
    """
    queries, keys = starts
    if not is_plain_eager(*starts) or is_recorded(queries.device) or any(t.is_inference() for t in starts):
        return make(lambda function: function())
    if queries.is_cuda:
        key = *key, raw_stream(queries.device.index), id(keys), keys._version  # type: ignore[misc]  # None only without GPUs
    else:  # whose values NumPy may change, too
        key = *key, *(tuple(t.tolist()) for t in starts)
    version, made = _kept.get(queries, (None, None))
    if version != queries._version:
        while len(_kept) >= _MOST:
            del _kept[next(iter(_kept))]
        made = {}
        _kept[queries] = queries._version, made
    if key not in made:
        if len(made) >= _MOST_OF_ONE:
            made.clear()

        def run(function: Callable[[], Any]) -> Any:
            stream = torch.cuda.current_stream(queries.device) if queries.is_cuda else None

            def on_stream() -> Any:
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    return function()

            return run_in_thread(on_stream)

        others = None if keys is queries else keys  # their ids are part of the key; the queries' own would never be freed
        made[key] = others, make(run)
    return made[key][1]
