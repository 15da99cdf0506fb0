"""Tools around training: pictures and costs of masks. They know tables and back ends, but not users' calls."""

from ..masks.block_mask import BlockMask, as_block_mask
from ..masks.compiler import entry_patterns
from ..masks.fit import named_len
from ..masks.parsing import parse
from ..masks.pattern import Pattern


def resolve_mask(mask, q_len: int | None, kv_len: int | None, block_size: int | None, default_len: int) -> tuple[BlockMask, str]:
    """Returns (the mask, its spec text or "" if it has none). A pattern is compiled for these lengths; q_len is by default what the
    pattern names, else default_len. Raises ValueError for a mask that differs between heads or sequences, and for its lengths."""
    if isinstance(mask, (Pattern, str)):
        pattern, *others = dict.fromkeys(entry_patterns(parse(mask) if isinstance(mask, str) else mask))
        if others:
            got = f"{1 + len(others)} different ones; pass one, such as '{pattern}'"
            raise ValueError(f"the pattern must be that of one head or sequence; got {got}")
        q_len = named_len(pattern, default_len) if q_len is None else q_len
        return as_block_mask(pattern, q_len, kv_len, 128 if block_size is None else block_size), str(mask).strip()
    mask = as_block_mask(mask)
    if given := [name for name, n in (("q_len", q_len), ("kv_len", kv_len), ("block_size", block_size)) if n is not None]:
        sizes = f"{mask.q_len} x {mask.kv_len}"
        raise ValueError(f"{', '.join(given)} must come with a pattern to compile; got a mask of {sizes} tokens; leave them out")
    if mask.masks != 1:
        raise ValueError(f"the mask must be one; got {mask.masks}; take them one by one, as mask.select(head, batch)")
    return (mask.select() if mask.mask_index.numel() > 1 else mask), ""
