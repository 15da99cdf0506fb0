"""Reads what a model's own mask keeps, from Transformers' arguments for it: two readers that return one record.

``read_function`` looks into the mask function. Compiled code cannot inspect functions, so ``read_arguments`` takes what
Transformers passes beside it. Both must say the same of a mask, except that the second does not see packed sequences:
``sequences`` finds those.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...masks.pattern import Pattern
from ...masks.rules import move_pattern
from ...patterns import block_diagonal
from .limits import depends_on_position, keeps_all


class MaskParts(NamedTuple):
    """The parts of a mask: see ``ModelMask`` for base, limits and sequence_starts. is_known: whether they are all of the mask."""

    base: str = "full"
    limits: tuple[tuple[Pattern | str, ...], ...] = ()
    sequence_starts: torch.Tensor | None = None
    is_known: bool = True


def read_arguments(arguments: dict[str, Any]) -> MaskParts:
    """Reads a mask within torch.compile. Raises ValueError for masks that are not clear from the arguments."""
    bidirectional = "allow_is_bidirectional_skip" in arguments
    size, config = arguments.get("local_size"), arguments.get("config")
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    unclear = size is not None and (size == window) == (size == chunk)
    if arguments.get("use_vmap") or unclear or arguments["mask_function"].__name__ == "or_mask":
        raise ValueError(
            "the model masks by functions of its own, which torch.compile cannot read; compile it with another attention "
            "implementation, or call it uncompiled"
        )
    base = "full" if bidirectional else "causal"
    if size is None:
        return MaskParts(base)
    if size == chunk:
        if arguments.get("attention_mask") is not None:
            raise ValueError(
                "the model's chunks start with its sequences, and where those start torch.compile cannot read from attention_mask; "
                "leave attention_mask out, or call the model uncompiled"
            )
        return MaskParts(base, ((f"block_diagonal(block={size})",),))
    return MaskParts(base, ((f"local({size + 1 if bidirectional else size})",),))


def read_function(function: Any) -> MaskParts:
    """Reads a mask function by its name, and by what its closure holds."""
    code = getattr(function, "__code__", None)
    if code is None:  # such as a partial
        return MaskParts(is_known=False)
    name = function.__qualname__.removesuffix(".<locals>.inner_mask")
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    held = {variable: cell.cell_contents for variable, cell in cells}
    match name:
        case "causal_mask_function":
            return MaskParts("causal")
        case "bidirectional_mask_function":
            return MaskParts()
        case "and_masks.<locals>.and_mask":
            return _join_parts([read_function(part) for part in held["mask_functions"]])
        case "sliding_window_overlay":
            return MaskParts(limits=((f"local({held['sliding_window']})",),))
        case "sliding_window_bidirectional_overlay":
            return MaskParts(limits=((f"local({held['sliding_window'] + 1})",),))
        case "chunked_overlay":
            return MaskParts(limits=(_chunks(held["chunk_size"], held["left_padding"].tolist()),))
        case "packed_sequence_mask_function":
            starts = torch.nn.functional.pad(held["packed_sequence_mask"].diff() != 0, (1, 0), value=True)
            return MaskParts(sequence_starts=starts if starts[:, 1:].any() else None)
        case "remap_positions_for_packed_sequence":
            # The distance of two tokens of one sequence does not change; another restriction separates sequences. What depends on
            # positions counts from the start of each, as long as these positions do.
            parts = read_function(held["mask_function"])
            positions = held["position_ids"]
            limits = [limit for limit in parts.limits if len(limit) > 1 or depends_on_position(limit[0])]
            if limits and any(len(limit) > 1 or not keeps_all(limit[0], int(positions.max()) + 1) for limit in limits):
                return parts._replace(is_known=parts.is_known and _restart_at_zero(positions))
            return parts
    return MaskParts(is_known=False)


def _join_parts(parts: list[MaskParts]) -> MaskParts:
    """Returns the intersection of masks."""
    return MaskParts(
        "causal" if any(part.base == "causal" for part in parts) else "full",
        tuple(limit for part in parts for limit in part.limits),
        next((part.sequence_starts for part in parts if part.sequence_starts is not None), None),
        all(part.is_known for part in parts),
    )


def _chunks(size: int, left_padding: list[int]) -> tuple[Pattern | str, ...]:
    """Returns the limit of chunks, which are counted from the first token of each sequence."""
    limits = tuple(
        str(block_diagonal(size)) if left % size == 0 else move_pattern(block_diagonal(size), left) for left in left_padding
    )
    return limits[:1] if len(set(limits)) == 1 else limits


def _restart_at_zero(positions: torch.Tensor) -> bool:
    """Whether positions, (batch, tokens), begin at 0, and again with each packed sequence: wherever they do not go on by one."""
    first = torch.nn.functional.pad(positions.diff() != 1, (1, 0), value=True)
    return bool((positions[first] == 0).all())
