"""The call on a BlockSelection: checks its arguments, computes attention over picked blocks."""

from __future__ import annotations

import torch

from .. import backends
from ..selection import operators
from ..selection.block_selection import BlockSelection
from ..variant.definition import with_sinks
from .arguments import (
    autocast,
    check_deterministic,
    check_selected_heads,
    check_sinks,
    check_tensors,
    check_types,
    checked_scale,
    of_some_batch,
)


def attention_over_picks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: BlockSelection,
    scale: float | None,
    sinks: torch.Tensor | None,
    return_lse: bool,
    return_block_lse: bool,
    deterministic: bool | None,
    backend: str,
    **others: object,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """``attention`` on a selection. others: the arguments that a selection does not take. Raises ValueError for them and for
    arguments that do not fit together, TypeError for wrong types."""
    nothing = int, float, tuple, list  # 0 and () change nothing
    given = [name for name, value in others.items() if value is not None and (not isinstance(value, nothing) or value)]
    if given:
        raise ValueError(f"a BlockSelection does not take {' and '.join(given)}; leave it out, or pass a BlockMask")
    check_types(q, k, v)
    check_deterministic(deterministic)
    backends.check_name(backend)
    q, k, v = autocast(q, k, v)
    check_tensors(*of_some_batch(q, k, v))
    check_selection(selection, q, k)
    if sinks is not None:
        check_sinks(sinks, q)
    scale = checked_scale(scale, q.shape[3])
    out, lse = operators.attention(q, k, v, selection, scale, backend)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks, None)
    results = [out]
    if return_lse:
        results.append(lse)
    if return_block_lse:
        results.append(operators.block_lse(q, k, selection, scale, backend))
    return tuple(results) if len(results) > 1 else out


def check_selection(selection: BlockSelection, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises ValueError where a selection was not made for these queries and keys."""
    if (selection.q_len, selection.kv_len) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"the selection is of q_len={selection.q_len}, kv_len={selection.kv_len}; q and k have {q.shape[2]} and {k.shape[2]} "
            "tokens; pass q_len= and kv_len= to BlockSelection.from_picks, or choose again for these"
        )
    check_selected_heads(selection, q, k)
