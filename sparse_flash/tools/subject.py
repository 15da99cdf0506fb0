"""The subject of pictures and figures: a mask, or a pattern at some length."""

from __future__ import annotations

from ..masks.block_mask import BlockMask
from ..masks.build import with_coarse
from ..masks.cache import as_block_mask
from ..masks.compiler import head_patterns
from ..masks.fit import named_len
from ..masks.parsing import parse
from ..masks.pattern import Pattern
from ..selection.block_selection import BlockSelection


def resolve_mask(
    mask, q_len: int | None, kv_len: int | None, block_size: int | None, default_len: int, one_head: bool = True
) -> tuple[BlockMask | BlockSelection, str]:
    """(the mask or selection, its spec text or "" if it has none). A pattern is compiled for these lengths; without
    any, for as many tokens as it names, or default_len. Raises ValueError if they are given with a mask, which has its own, and for
    a mask without contents, or for a pattern that differs between heads. one_head: False allows such a pattern, and keeps all heads
    of a mask."""
    lengths = {"q_len": q_len, "kv_len": kv_len, "block_size": block_size}
    given = {name: value for name, value in lengths.items() if value is not None}
    if isinstance(mask, (Pattern, str)):
        pattern = parse(mask) if isinstance(mask, str) else mask
        pattern = require_one_head(pattern) if one_head else pattern
        q_len = named_len(pattern, default_len) if q_len is None else q_len
        compiled = as_block_mask(pattern, q_len, kv_len, 128 if block_size is None else block_size)
        return compiled, str(mask).strip()
    mask = mask if isinstance(mask, BlockSelection) else as_block_mask(mask)
    if mask.device.type == "meta":
        raise ValueError("a mask on the device meta has no contents to look at; make it on another, such as cpu")
    if one_head and isinstance(mask, BlockMask) and mask.masks == 1 < mask.mask_index.numel():  # one mask, of several heads
        mask = with_coarse(mask.select())
    if given:
        sizes = f"{mask.q_len} x {mask.kv_len}"
        raise ValueError(f"{', '.join(given)} must come with a pattern to compile; got a mask of {sizes} tokens; leave them out")
    return mask, ""


def require_one_head(pattern: Pattern) -> Pattern:
    """The pattern of every head. Raises ValueError if heads differ."""
    first, *others = dict.fromkeys(head_patterns(pattern))
    if others:
        raise ValueError(f"the pattern must be that of one head; got {1 + len(others)} different ones; pass one, such as '{first}'")
    return first
