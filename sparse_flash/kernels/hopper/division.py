"""How a call's work is divided: which tiles run, over which tables."""

from functools import partial

from ..common.config import padded_head_dim, used_columns
from ..launch.order import MOSTLY_KEPT
from .configs import (
    FORWARD,
    ForwardConfig,
    eight_bits_config,
    is_short,
    plain_forward_config,
    variant_forward_config,
    wide_forward_config,
)

_DOCUMENT_BLOCK = 128  # tiles by document are whole blocks
# Queries in a column's blocks, on average: from as many on, programs that compute one query head after the other read more than the
# L2 cache holds. Columns of different lengths, as under causal masks, reach that earlier.
_SHORT_COLUMN, _SHORT_COLUMN_KEPT = 3072, 1536


def column_constants(head_dim: int, v_head_dim: int) -> dict[str, int]:
    """Returns the kernel's constants for the columns of q and k, and of v: see ``ForwardArguments``."""
    used, used_v = used_columns(head_dim), used_columns(v_head_dim)
    # Keys of 192 columns, as in DeepSeek's models, are not padded, so that more of them fit shared memory.
    dim, dim_v, pieces = used if used == 192 else padded_head_dim(used), padded_head_dim(used_v), 3 if used == 192 else 1
    return {"DIM": dim, "USED": used, "DIM_V": dim_v, "USED_V": used_v, "PIECES": pieces, "WIDE": dim != dim_v or dim > 128}


def _takes_derived_tables(head_dim: int, v_head_dim: int, mask, plain: bool) -> bool:
    """Whether a call takes its mask's blocks by document and of 64: up to head_dim 128, where tiles are whole blocks, and without a
    variant, which would need the position of each block. plain: whether the call has no variant."""
    whole_tiles = {padded_head_dim(dim) for dim in (head_dim, v_head_dim)} in ({64}, {128})
    return mask is not None and plain and mask.block_size == _DOCUMENT_BLOCK and whole_tiles


def backward_tables(
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...], mask, plain: bool, deterministic: bool, multiprocessors: int
):
    """Returns the tables that the backward pass runs: the mask, its blocks by document, its blocks of 64, or None. Blocks of 64 pay
    where a tile computes all query heads that share a key head, at head_dim 64. kv_shape: of v."""
    if not _takes_derived_tables(q_shape[3], kv_shape[3], mask, plain):
        return mask
    if padded_head_dim(q_shape[3]) == 64 and not deterministic and mask.fine is not None:
        if heads_together(q_shape, kv_shape[1], mask.fine, plain, multiprocessors):
            return mask.fine
    return mask.by_document or mask


def plan_forward(
    q_shape: tuple[int, ...], v_head_dim: int, mask, plain: bool, multiprocessors: int
) -> tuple[ForwardConfig, object]:
    """Returns (config, the tables that the kernel runs: the mask, its tall rows, its blocks by document or of 64, or None).
    q_shape: (batch, heads, q_len, head_dim). plain: whether the call has no variant."""
    columns, block_size = column_constants(q_shape[3], v_head_dim), mask and mask.block_size
    dim, dim_v, wide = (columns[name] for name in ("DIM", "DIM_V", "WIDE"))
    by_document = fine = None
    if _takes_derived_tables(q_shape[3], v_head_dim, mask, plain):
        # Made even if this pass does not take them, because they cannot always be made where the backward pass is compiled.
        by_document, fine = mask.by_document, mask.fine
    tiles_of = partial(_count_tiles, q_shape, mask, by_document)
    if fine is not None:
        slower = by_document is not None and by_document.forward_us < fine.forward_us
        if slower or is_short(dim, items_and_tiles(q_shape, fine, fine.block_size)[1], multiprocessors):
            fine = None
    if wide:
        config = wide_forward_config(dim, dim_v, block_size, tiles_of(64), multiprocessors, plain)
    elif fine is not None:
        return variant_forward_config(dim, fine.block_size), fine
    elif plain:
        config = plain_forward_config(dim, block_size, tiles_of, multiprocessors)
    else:
        config = variant_forward_config(dim, block_size)
    if by_document is not None and not config.queries == config.keys == by_document.block_size:
        by_document = None
    tables = _tables_for(mask, by_document, config.queries)
    return (FORWARD[dim], mask) if mask and tables is None else (config, tables)


def plan_eight_bits(q_shape: tuple[int, ...], columns: int, mask, multiprocessors: int) -> tuple[ForwardConfig, object]:
    """Returns (config, the tables that the kernel runs: the mask, its tall rows, or None) for operands in e4m3. columns: of
    q, k and v."""
    config = eight_bits_config(columns, mask and mask.block_size, partial(_count_tiles, q_shape, mask, None), multiprocessors)
    return config, _tables_for(mask, None, config.queries)


def _count_tiles(q_shape: tuple[int, ...], mask, by_document, queries: int) -> int:
    """Returns a call's number of tiles of so many queries, 0 if its table has no such rows."""
    tables = _tables_for(mask, by_document, queries)
    return 0 if mask and tables is None else items_and_tiles(q_shape, tables, queries)[1]


def _tables_for(mask, by_document, queries: int):
    """Returns the tables for tiles of so many queries: the mask, its blocks by document, or its tall rows, which may be None."""
    if mask and mask.block_size % queries:
        return mask.tall
    return by_document or mask


def items_and_tiles(q_shape: tuple[int, ...], tables, queries: int) -> tuple[int, int]:
    """Returns (work items of a mask, tiles of all heads)."""
    items = tables.by_query.work.shape[1] if tables else -(-q_shape[2] // queries)
    return items, items * (tables.row_queries // queries if tables else 1) * q_shape[0] * q_shape[1]


def heads_together(q_shape: tuple[int, ...], kv_heads: int, tables, plain: bool, multiprocessors: int) -> bool:
    """Whether a backward tile computes all query heads that share a key head, instead of one of them. This saves the sums of dK and
    dV, and pays if columns are short. With long ones too few programs compute a head at a time (docs/performance/kernels.md has the
    figures)."""
    batch, heads, _, head_dim = q_shape
    if heads == kv_heads or padded_head_dim(head_dim) > 128 or not plain:
        return False
    if tables is None or tables.by_key.is_split:
        return False
    masks, columns = tables.by_key.row_order.shape
    if masks > 1 or tables.mask_index.shape[1] > 1:
        return False
    blocks = tables.by_key.col_idx.numel()
    if tables.starts is not None and tables.column_blocks > 0:
        blocks = columns * tables.column_blocks
    return has_short_columns(batch * kv_heads, columns, blocks, tables.block_size, multiprocessors)


def has_short_columns(kv_batch_heads: int, columns: int, blocks: float, block_size: int, programs: int) -> bool:
    """Whether columns are short, and there are enough for programs to finish together. A head group makes a heavy column heavier by
    its number of heads; an unsplit column has at most 64 blocks, four times the mean, or a thirty-second of all. kv_batch_heads:
    batch times key heads. blocks: of the table; if it was made on the device, expected, or as many as it has memory for."""
    balanced = (
        kv_batch_heads * columns >= 8 * programs and kv_batch_heads * blocks >= 64 * programs and 36 * kv_batch_heads >= programs
    )
    short = _SHORT_COLUMN_KEPT if blocks >= MOSTLY_KEPT * columns**2 else _SHORT_COLUMN
    return balanced and blocks * block_size <= short * columns
