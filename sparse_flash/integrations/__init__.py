"""Models and calls of other libraries under this library's masks. A module imports at most the library it is named after."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..api.shared import SharedSequence
    from ..masks.block_mask import BlockMask
    from ..masks.pattern import Pattern


def masks_of(model: torch.nn.Module) -> dict[int, Pattern | str | BlockMask | SharedSequence]:
    """Returns the mask of each attention layer that ``use_sparse_flash`` switched, by the layer's number: the canonical spec text
    of a pattern, the pattern itself if it has none, a BlockMask, a plan, or "own" for the model's own mask.

    ``use_sparse_flash(other, masks_of(model))`` gives another model the same masks; ``dense_below`` and ``dense_last`` are passed
    again. ``print(model)`` shows all of it.

    model: as for ``use_sparse_flash``. Raises ValueError for a model that was not switched, or was switched back.
    """
    from .transformers import masks_of  # at the first call, as only models need Transformers

    return masks_of(model)
