"""Models and calls of other libraries under this library's masks. A module imports at most the library it is named after."""

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch

from .models import MaskRecord, library_of


def masks_of(model: torch.nn.Module) -> dict[int, Any]:
    """Returns the mask of each attention layer that ``use_sparse_flash`` switched, by the layer's number: the canonical spec text
    of a pattern, the pattern itself if it has none, a BlockMask, a plan, or "own" for the model's own mask. Of a transformer of
    diffusers, the spec that it was given, and "layout" for layers that keep all pairs. ``print(model)`` shows all of it.

    model: as for ``use_sparse_flash``. Raises ValueError for a model that was not switched, or was switched back.
    """
    return _integration_of(model).masks_of(model)


def record_masks(model: torch.nn.Module) -> AbstractContextManager[MaskRecord]:
    """A context that records what the layers of a model do, of Transformers or diffusers.

        with sf.record_masks(model) as record:
            model.generate(tokens)
        print(record)  # a line for each layer
        record[3].kept, record[3].dense, record[3].calls

    kept: (heads,) float64, the share of the pairs (of a decoder, of the causal ones) that a layer kept in its calls under the mask,
    over all batch entries. dense: the number of its other calls, which kept all pairs, by the reason, such as prompts shorter than
    ``dense_below``. calls: all of them; gradient checkpointing calls twice. Padding counts, and packed rows count as one sequence.

    model: as for ``masks_of``, with the same errors; models under a plan are refused. Compiled models run uncompiled meanwhile, and
    each call waits for the GPU.
    """
    return _integration_of(model).record_masks(model)


def _integration_of(model: object) -> Any:
    return import_module(f".{library_of(model) or 'transformers'}", __name__)
