"""Rows of 192 queries, derived from a mask's own rows of 128."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import strategies
import torch
from hypothesis import example, given, settings
from makers import decoded
from oracle import tiles
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_flash as sf
from sparse_flash.masks import tall
from sparse_flash.masks.table import KernelTables


def pairs_of(rows: KernelTables, q_len: int, kv_len: int) -> np.ndarray:
    """(q_len, kv_len) bool."""
    shape = -(-q_len // 192), -(-kv_len // 128)
    kept = np.zeros((shape[0], 192, shape[1], 128), bool)
    for (row, col), block in decoded(rows, 0, rows.by_query, *shape).items():
        kept[row, :, col] = block
    return kept.reshape(-1, shape[1] * 128)[:q_len, :kv_len]


@settings(max_examples=40)
@given(pattern=strategies.expressions, lengths=strategies.lengths)
@example("causal", (1000, 1000))
@example("causal", (64, 900))
@example("causal", (900, 64))
@example("causal", (193, 193))
@example("causal & local(200)", (1500, 1500))
@example("causal & (local(70) | strided(7, block=1))", (700, 650))
@example("butterfly(block=128)", (2048, 2048))
@example("local(64) & documents((0, 192, 448, 1024))", (1024, 1024))
def test_tall_rows_keep_the_pairs_of_the_mask(pattern, lengths):
    mask = sf.compile_mask(pattern, *lengths)
    with tiles(tall=True):
        assert np.array_equal(pairs_of(mask.tall, *lengths), mask.to_dense().numpy())


def test_whole_blocks_stay_whole_where_the_queries_end_within_a_row():
    table = sf.compile_mask("causal", 16384).tall.by_query  # the last row has 64 queries
    assert table.row_split[0, -1, 0] - table.row_ptr[0, -2] == 127
    assert table.row_ptr[0, -1] - table.row_ptr[0, -2] == 128


TALL = ["causal", "causal & local(8000)", "prefix(4000) | causal"]


@pytest.mark.parametrize("spec", [*TALL, "causal & local(1024)", "butterfly", "bigbird"])
def test_long_rows_become_tall_unless_neighbours_share_too_few_blocks(spec):
    assert (sf.compile_mask(spec, 16384).tall is not None) == (spec in TALL)


def test_only_lasting_masks_of_one_head_and_blocks_of_128_have_tall_rows(monkeypatch):
    monkeypatch.setattr(tall, "_MOST_TIME", 1 << 30)
    mask = sf.compile_mask("causal", 1024)
    small, kept = sf.compile_mask("causal", 1024, block_size=32), mask.kept_blocks()
    lasting = mask, copy.deepcopy(mask), sf.BlockMask.from_dense(mask.to_dense()), small.coarse
    others = sf.BlockMask.from_blocks(kept, 128), sf.BlockMask.from_tensors(*mask.sizes, mask.tensors()), small
    others += (sf.BlockMask.per_head(["causal", "local(200)"], 1024),)
    assert all(made.tall is not None for made in lasting) and all(made.tall is None for made in others)


class Recorded(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(function)


def test_tall_rows_are_made_once_and_not_while_operations_are_recorded(monkeypatch):
    monkeypatch.setattr(tall, "_MOST_TIME", 1 << 30)
    mask = sf.compile_mask("causal", 512)
    with Recorded():
        assert mask.tall is None
    first = mask.tall
    with Recorded():
        assert mask.tall is first is not None


def test_threads_share_the_first_tall_rows_whatever_their_modes_and_pickles_hold_none(monkeypatch):
    monkeypatch.setattr(tall, "_MOST_TIME", 1 << 30)
    mask, together = sf.compile_mask("causal", 1024), Barrier(4)
    pickled = len(pickle.dumps(mask))

    def first(number: int) -> KernelTables:
        with torch.inference_mode(number % 2 == 0), torch.device("meta"):
            together.wait()
            return mask.tall

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(first, range(4)))
    assert all(rows is mask.tall for rows in found) and len(pickle.dumps(mask)) == pickled
    assert not any(t.is_inference() or t.is_meta for t in (*mask.tall.by_query, *mask.tall.tiles))
