"""The tables of masks in blocks of 64, made from tables in blocks of 128."""

import numpy as np
import pytest
import strategies
from hypothesis import example, given, settings
from makers import decoded
from oracle import tiles

import sparse_flash as sf
from sparse_flash.benchmarks.workload.masks import ragged_documents


@settings(max_examples=40)
@given(pattern=strategies.expressions, lengths=strategies.lengths)
@example("causal", (1000, 1000))
@example("causal", (64, 900))
@example("causal", (900, 64))
@example("causal & local(128)", (193, 193))  # the last block of 64 has one query
@example("causal & (local(70) | strided(7, block=1))", (700, 650))
@example("butterfly(block=128)", (2048, 2048))
def test_they_are_the_tables_that_the_pattern_compiles_to(pattern, lengths):
    with tiles(fine=True):
        fine = sf.compile_mask(pattern, *lengths).fine
    compiled = sf.compile_mask(pattern, *lengths, block_size=64)
    for name in ("by_query", "by_key"):
        shape = compiled.grid.shape[:: 1 if name == "by_query" else -1]
        mine, theirs = (decoded(table, 0, getattr(table, name), *shape) for table in (fine, compiled))
        assert mine.keys() == theirs.keys()
        assert [np.array_equal(mine[block], theirs[block]) for block in mine].count(False) == 0
    assert int(fine.by_query.row_split[0, :, 0].sum()) == int(compiled.by_query.row_split[0, :, 0].sum())


SHORT_ROWS = [
    "causal & local(128)",
    "causal & local(256)",
    "causal & documents((0, 270, 500, 800, 1100, 2048))",
    "local(64) | sinks(4)",
]


@pytest.mark.parametrize(
    "spec", [*SHORT_ROWS, "causal & local(512)", "causal", "butterfly(block=128)", "random(0.3, block=128)", "full"]
)
def test_masks_whose_rows_keep_few_blocks_have_them(spec):
    assert (sf.compile_mask(spec, 2048).fine is not None) == (spec in SHORT_ROWS)


@pytest.mark.parametrize("median, chosen", [(270, "fine"), (700, "fine"), (900, "by_document"), (2000, "by_document")])
def test_forward_passes_take_the_blocks_that_are_predicted_to_be_fastest(median, chosen):
    division = pytest.importorskip("sparse_flash.kernels.hopper.division")
    mask = sf.compile_mask(ragged_documents(32768, median, 0.3).spec, 32768)
    _, tables = division.plan_forward((1, 16, 32768, 128), 128, mask, plain=True, multiprocessors=132)
    assert tables is getattr(mask, chosen)
