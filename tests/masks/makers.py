"""Masks by each of their makers, with the pairs that these are told to keep; and what holds of every mask and its tables."""

from itertools import pairwise, product

import numpy as np
import pytest
import strategies
import torch
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash.masks import compiler, rules, tiles
from sparse_flash.masks.grid import BlockGrid
from sparse_flash.masks.table import groups_of

# Makers: from draw, (q_len, kv_len) and the size of blocks to (mask, pairs), (batch | 1, heads | 1, q_len, kv_len) bool.


def dense(pattern, lengths):
    return torch.from_numpy(strategies.dense(pattern, *lengths).copy())


def of_pattern(draw, lengths, size):
    pattern = draw(strategies.expressions)
    with pytest.MonkeyPatch.context() as patch:
        if draw(st.booleans()):  # the batches that bound memory are small
            patch.setattr(compiler, "_CHUNK", 5)
            patch.setattr(compiler, "_BATCH_NUMBERS", 3 * size)
            patch.setattr(rules, "_CHUNK", 2 * size)
            patch.setattr(tiles, "_BATCH_PAIRS", 2 * size**2)
        return sf.compile_mask(pattern, *lengths, size), dense(pattern, lengths)[None, None]


def of_heads(draw, lengths, size):
    """A mask for each head, or each sequence."""
    name, form = draw(st.sampled_from(["per_head", "per_batch"])), draw(st.sampled_from(["patterns", "tables", "pattern"]))
    patterns = draw(st.lists(strategies.expressions, min_size=1, max_size=4))
    kept = torch.stack([dense(one, lengths) for one in patterns])
    if form == "pattern":
        mask = sf.compile_mask(getattr(sf, name)(patterns), *lengths, size)
    else:
        name, masks = "per_head", patterns if form == "patterns" else [sf.compile_mask(one, *lengths, size) for one in patterns]
        mask = sf.BlockMask.per_head(masks, *lengths, size)
    return mask, kept[None] if name == "per_head" else kept[:, None]


def of_pairs(draw, lengths, size):
    heads, density = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)])), draw(st.sampled_from([0.0, 0.01, 0.5, 1.0]))
    kept = torch.from_numpy(np.random.default_rng(0).random((*heads, *lengths)) < density)
    kept[-1, -1] = dense(draw(strategies.leaves), lengths)
    return sf.BlockMask.from_dense(kept, size), kept


def one_head(draw, lengths, size):
    mask, kept = draw(st.sampled_from([of_heads, of_pairs]))(draw, lengths, size)
    batch, head = (draw(st.integers(0, n - 1)) for n in kept.shape[:2])
    return mask.select(head, batch), kept[batch, head][None, None]


def drawn_map(draw, lengths, size):
    """Blocks, (batch, heads, q_blocks, kv_blocks) bool, and the pairs in them."""
    heads, density = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)])), draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    blocks = np.random.default_rng(draw(st.integers(0, 99))).random((*heads, *BlockGrid(*lengths, size).shape)) < density
    kept = blocks.repeat(size, 2).repeat(size, 3)[:, :, : lengths[0], : lengths[1]]
    return torch.from_numpy(blocks), torch.from_numpy(kept)


def drawn_limit(draw, lengths, size):
    """(what stands as within=, its pairs): nothing, a pattern, a table or a map of blocks."""
    pattern, form = draw(strategies.expressions), draw(st.sampled_from(["nothing", "pattern", "table", "map"]))
    if form == "nothing":
        return None, torch.ones(lengths, dtype=torch.bool, device="cpu")
    table, kept = sf.compile_mask(pattern, *lengths, size), dense(pattern, lengths)
    blocks, pairs = (t[0, 0] for t in drawn_map(draw, lengths, size))
    if form == "map":
        return sf.BlockMask.from_blocks(blocks, size, *lengths, within=table), kept & pairs
    return pattern if form == "pattern" else table, kept


def of_map(draw, lengths, size):
    blocks, kept = drawn_map(draw, lengths, size)
    within, pairs = drawn_limit(draw, lengths, size)
    blocks = blocks if draw(st.booleans()) or blocks.shape[:2] != (1, 1) else blocks[0, 0]
    return sf.BlockMask.from_blocks(blocks, size, *lengths, within), kept & pairs


MAKERS = {"pattern": of_pattern, "heads": of_heads, "pairs": of_pairs, "one head": one_head, "map": of_map}


def states_of(kept, size):
    """The state of each block by definition: 0 for empty, 1 for partial, 2 for full."""
    first = [np.arange(0, n, size) for n in kept.shape]
    some, every = (of.reduceat(of.reduceat(kept, first[0], 0), first[1], 1) for of in (np.logical_or, np.logical_and))
    return some.astype(np.int8) + every


def decoded(mask, number, table, rows, cols):
    """One stored mask, by the five lines of BlockMask's docstring: of each listed block, (row_queries, block_size) bool."""
    size, column, found = mask.block_size, np.arange(mask.block_size), {}
    tile_runs, tile_bits, col_idx, tile_idx = (t.numpy() for t in (*mask.tiles, table.col_idx, table.tile_idx))
    row_ptr, row_split = table.row_ptr[number].tolist(), table.row_split[number].tolist()
    for r in range(rows):
        begin, end = row_ptr[r], row_ptr[r + 1]
        runs, bits = row_split[r]
        assert begin <= runs <= bits <= end
        for e in range(begin, end):
            tile = None if e < runs else (tile_runs if e < bits else tile_bits)[tile_idx[e]]
            block = np.ones((mask.row_queries, size), bool)
            if tile is not None and e < bits:
                block = (column >= (tile & 0xFFFF)[:, None]) & (column < (tile >> 16)[:, None])
            elif tile is not None:
                block = (tile[:, column // 32] >> (column % 32) & 1).astype(bool)
            key = (r, int(col_idx[e]))
            assert key not in found and key[1] < cols and block.any() and (tile is None or not block.all())
            found[key] = block
    return found


def assert_stored(mask, number, kept):
    """Both tables of a stored mask decode to these pairs. Columns ascend within each kind of blocks."""
    size, (q_len, kv_len) = mask.block_size, kept.shape
    for table, shape, by_key in ((mask.by_query, mask.grid.shape, False), (mask.by_key, mask.grid.shape[::-1], True)):
        dense = np.zeros(np.multiply(mask.grid.shape, size), bool)
        for (r, c), block in decoded(mask, number, table, *shape).items():
            r, c = (c, r) if by_key else (r, c)
            dense[r * size : (r + 1) * size, c * size : (c + 1) * size] = block
        np.testing.assert_array_equal(dense[:q_len, :kv_len], kept)
        # Blocks cut short by the lengths have tiles for that: nothing outside is kept.
        assert not dense[q_len:].any() and not dense[:, kv_len:].any()
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in table)
        ptr, split = table.row_ptr[number], table.row_split[number]
        for segment in torch.stack([ptr[:-1], split[:, 0], split[:, 1], ptr[1:]], 1).unfold(1, 2, 1).reshape(-1, 2).tolist():
            assert (table.col_idx[slice(*segment)].diff() > 0).all()


def assert_work_is_whole(table, number):
    """The work items of each row cover its entries once: unmasked blocks, run tiles and bit tiles, as far as the item goes. Items
    that other masks have more of are past the last row."""
    ptr, split, work = (t[number].tolist() for t in (table.row_ptr, table.row_split, table.work))
    items = {row: sorted(item[1:5] for item in work if item[0] == row) for row in range(len(split))}
    used = sum(map(len, items.values()))
    assert work[used:] == [[len(split)] + [0] * 7] * (len(work) - used)
    for row, (runs, bits) in enumerate(split):
        mine = items[row]
        assert mine[0][0] == ptr[row] and mine[-1][3] == ptr[row + 1]
        assert all(one[3] == other[0] for one, other in pairwise(mine))
        for low, until_runs, until_bits, high in mine:
            assert [until_runs, until_bits] == [min(max(bound, low), high) for bound in (runs, bits)]


def heaviest_first(weights: torch.Tensor) -> bool:
    """Whether weights descend; those within a quarter of the heaviest count as equal if three quarters of them are."""
    near = weights >= 0.75 * weights.amax() if len(weights) else weights
    if 4 * near.sum() >= 3 * len(weights):
        weights = torch.where(near, weights.amax(), weights)
    return bool((weights.diff() <= 0).all())


def assert_order(mask, table, number):
    """Heavy rows and items are visited first; under long documents, one document after the other."""
    weight, order = table.row_ptr[number].diff(), table.row_order[number].long()
    assert sorted(order.tolist()) == list(range(len(weight)))
    if not mask.from_host:
        assert (weight[order].diff() <= 0).all()
        return
    document = groups_of(table.row_ptr[number].numpy(), table.row_split[number].numpy(), table.col_idx.numpy())
    assert (np.diff(document[order.numpy()]) >= 0).all()
    if not document.any():
        assert heaviest_first(weight[order]) and heaviest_first(table.work[number, :, 4] - table.work[number, :, 1])


def assert_keeps(mask, kept):
    """Every view of a mask is of these pairs, (batch | 1, heads | 1, q_len, kv_len) bool, and its tables are as they should be."""
    assert mask.mask_index.shape == kept.shape[:2] and mask.mask_index.dtype == torch.int32
    assert torch.equal(mask.to_dense().view(kept.shape), kept)
    heads = list(product(*map(range, kept.shape[:2])))
    of_heads = [states_of(kept[head].numpy(), mask.block_size) for head in heads]
    states = torch.from_numpy(np.stack(of_heads)).unflatten(0, kept.shape[:2])
    assert torch.equal(mask.block_states().view(states.shape), states)
    assert torch.equal(mask.kept_blocks().view(states.shape), states > 0)
    assert mask.kept_pairs()[mask.mask_index.numpy()].tolist() == kept.sum((2, 3)).tolist()
    assert (mask.density, mask.block_density) == pytest.approx((kept.double().mean().item(), (states > 0).double().mean().item()))
    q_len, kv_len = kept.shape[2:]
    assert mask.is_causal == (not kept.triu(kv_len - q_len + 1).any())
    for head in heads:
        assert torch.equal(mask.kept_keys(sum(head) % q_len, *head), kept[head][sum(head) % q_len])
    for number, head in {int(mask.mask_index[head]): head for head in heads}.items():
        assert_stored(mask, number, kept[head].numpy())
        for table in (mask.by_query, mask.by_key):
            assert_work_is_whole(table, number)
            assert_order(mask, table, number)
        columns, table = mask.whole_columns[number], mask.by_key
        assert columns[:, 0].tolist() == table.row_order[number].tolist() and not columns[:, 5:].any()
        bounds = torch.stack([table.row_ptr[number, :-1], *table.row_split[number].T, table.row_ptr[number, 1:]], 1)
        assert torch.equal(columns[:, 1:5], bounds[columns[:, 0].long()])
    if mask.from_host:  # tables are canonical: one meaning, one table
        assert mask.keeps_all == kept.all() and mask.masks == len({kept[head].numpy().tobytes() for head in heads})
        other = sf.BlockMask.from_dense(kept, mask.block_size)
        assert mask.equal(other) and mask.digest == other.digest
        if mask.masks == 1:
            assert_tiles_are_few(mask)


def assert_tiles_are_few(mask):
    """Tiles are distinct and all used, and of bits only where a row keeps several runs."""
    _, _, kind, tile = mask.by_query.entries()
    for number, stored in enumerate(mask.tiles, start=1):
        used = np.unique(tile[kind == number])
        assert used.tolist() == list(range(len(used))) and len(stored) == max(2, len(used))
        assert len(torch.unique(stored[: len(used)].flatten(1), dim=0)) == len(used)
    bits = mask.tile_pairs(*(a[kind == 2] for a in (kind, tile)))
    assert ((bits[:, :, 1:] & ~bits[:, :, :-1]).sum(2) + bits[:, :, 0]).max(1, initial=0).min(initial=2) >= 2
