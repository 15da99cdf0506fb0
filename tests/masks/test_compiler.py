"""The compiler: tables follow the token rule, are canonical, and their cost follows what they keep."""

import sys
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.sparse
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash.masks import block_mask, build, rules
from sparse_flash.masks.grid import PARTIAL, BlockGrid

MILLION = 1 << 20


@pytest.mark.parametrize("name", sorted(strategies.by_name))
@settings(max_examples=15)
@given(data=st.data(), lengths=strategies.lengths, block_size=strategies.block_sizes)
def test_table_of_every_pattern_is_its_token_rule(name, data, lengths, block_size):
    pattern = data.draw(strategies.by_name[name])
    mask = block_mask.compile_up_to(pattern.bind_length(lengths[1]), *lengths, block_size, "cpu")  # grids of any length too
    np.testing.assert_array_equal(mask.to_dense().numpy(), strategies.dense(pattern, *lengths))


@settings(max_examples=20)
@given(
    documents=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    other=strategies.leaves,
    block_size=st.sampled_from([16, 32, 64]),
    past=st.integers(-200, 200),
)
def test_long_documents_joined_with_any_pattern_compile_to_their_token_rule(documents, other, block_size, past):
    """Documents of many blocks, where most blocks are like others."""
    pattern = sf.documents([0, *np.cumsum(documents).tolist()])
    tokens = max(1, sum(documents) + past)
    pattern = sf.shifted(pattern, 0) if past else pattern
    for expression in (pattern & other, pattern & sf.causal() & ~other, ~pattern | other):
        mask = sf.compile_mask(expression, tokens, block_size=block_size)
        np.testing.assert_array_equal(mask.to_dense().numpy(), strategies.dense(expression, tokens, tokens))


WHOLE_UNITS = [sf.butterfly(block=64), sf.power_of_two(block=128), sf.strided(3, block=64), sf.fixed(4, block=128), sf.full()]
WHOLE_UNITS += [sf.dilated(3, 2, block=64), sf.random(0.3, block=192), sf.from_blocks(np.eye(9), block=64), sf.sinks(128)]
WHOLE_UNITS += [sf.block_diagonal(192), sf.global_tokens(128), sf.documents([0, 64, 256, 576])]


@pytest.mark.parametrize("pattern", WHOLE_UNITS, ids=str)
def test_block_rules_settle_all_blocks_of_whole_units(pattern):
    assert pattern.block_rule(BlockGrid(576, 576, 64)).count(PARTIAL) == 0


def range_of(step, tokens=1056):
    return list(range(0, tokens + 1, step))


@pytest.mark.parametrize(
    "pattern, pairs",
    [
        (sf.causal() & sf.local(1024), 1024 * MILLION - 1024 * 1023 // 2),
        (sf.local(1000), 1999 * MILLION - 1000 * 999),
        (sf.butterfly(), MILLION * 128 * 14),
        (sf.causal() & sf.butterfly(), MILLION // 128 * (128 * 129 // 2) + MILLION * 128 * 13 // 2),
        (sf.global_tokens(100), 2 * 100 * MILLION - 100 * 100),
        (sf.documents([*range_of(1000, MILLION), MILLION]), 1048 * 1000**2 + 576**2),
        (sf.causal() & sf.documents(range_of(4096, MILLION)), 256 * 4096 * 4097 // 2),
        (sf.dilated(4, 1000, block=128), 128 * 128 * (8192 + 2 * (7192 + 6192 + 5192))),
        (sf.neighborhood((1024, 1024), (5, 7)), MILLION * 35),
        (sf.causal() & ~sf.causal(), 0),
    ],
)
def test_million_token_table_keeps_the_number_of_pairs_of_the_closed_form(pattern, pairs):
    mask = sf.compile_mask(pattern, MILLION)
    assert mask.kept_pairs().tolist() == [pairs]
    assert mask.density == pytest.approx(pairs / MILLION**2)


def peak_of(compile_it) -> int:
    """The most bytes that are allocated meanwhile."""
    peaks, tracer = [], sys.gettrace()
    sys.settrace(None)  # coverage's allocates too
    try:
        for _ in range(2):  # threads left by earlier tests may allocate during one of them
            tracemalloc.start()
            compile_it()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    finally:
        sys.settrace(tracer)
    return min(peaks)


LONG = [sf.causal() & sf.local(1024), sf.causal() & (sf.local(1024) | sf.butterfly()), sf.bigbird(), sf.neighborhood((256, 256), 7)]
LONG += [sf.causal() & sf.documents([0, 5_000, 5_001, 23_456, 65_536]), sf.from_mask_fn(np.equal) & sf.block_diagonal(100)]


@pytest.mark.parametrize("pattern", LONG, ids=str)
def test_compiling_takes_a_hundredth_of_the_memory_of_the_attention_matrix(pattern):
    assert peak_of(lambda: sf.compile_mask(pattern, 65_536)) < 65_536**2 // 100


@pytest.mark.parametrize("pattern", ["causal", "full", "causal & ~local(100_000)"])
def test_a_dense_mask_takes_little_more_memory_than_its_table(pattern):
    tokens = 1 << 18
    assert peak_of(lambda: sf.compile_mask(pattern, tokens)) < 1.25 * sf.compile_mask(pattern, tokens).nbytes


def test_more_blocks_than_a_table_can_number_are_refused_before_they_take_memory():
    def refused():
        with pytest.raises(ValueError, match=r"keeps 3,051,718,750 blocks, more than 2\^31 - 1; use a larger block_size"):
            sf.compile_mask("causal", 10_000_000)

    assert peak_of(refused) < 1 << 28
    build.check_blocks(2**31 - 1)
    with pytest.raises(ValueError, match="keeps 2,147,483,648 blocks"):
        build.check_blocks(2**31)


@dataclass(frozen=True)
class BlocksOnly(sf.Pattern):
    """Whole blocks of the table, where row + column is even."""

    as_bool: bool = True

    def block_rule(self, grid):
        kept = np.add.outer(np.arange(grid.q_blocks), np.arange(grid.kv_blocks)) % 2 == 0
        return scipy.sparse.csr_array(kept if self.as_bool else kept * np.int8(2))


@pytest.mark.parametrize("as_bool", [True, False])
def test_a_pattern_with_only_a_block_rule_compiles_also_in_expressions(as_bool):
    i, near = np.arange(150), strategies.dense(sf.local(9), 150, 150)
    checkers = np.add.outer(i // 32, i // 32) % 2 == 0
    for pattern, kept in ((BlocksOnly(as_bool), checkers), (sf.local(9) & ~BlocksOnly(as_bool), near & ~checkers)):
        np.testing.assert_array_equal(sf.compile_mask(pattern, 150, block_size=32).to_dense().numpy(), kept)


@pytest.mark.parametrize(
    "base, rule, message",
    [
        (sf.RunPattern, {"row_runs": lambda self, q: (q - 3, q + 1)}, r"got int64 of shape \(2,\).*begin with q = q\[..., None\]"),
        (sf.RunPattern, {"row_runs": lambda self, q: (0, q[..., None])}, r"two integer arrays of shape .* got int64 of shape \(\)"),
        (sf.RunPattern, {"row_runs": lambda self, q: (q[..., None] / 2, q[..., None])}, "got float64 of shape"),
        (sf.DistancePattern, {"block": 16, "distance_rule": lambda self, d: d % 3}, "must return booleans; got int64"),
        (sf.DerivedPattern, {"expression": 3}, "the expression of .* must be a property: a Pattern or its spec text; got int$"),
        (sf.DerivedPattern, {}, "Wrong defines no expression"),
        (sf.UnitPattern, {"block": 16, "unit_rule": lambda self, i, j: i - j}, r"unit_rule of .* must return booleans; got int64"),
        (sf.Pattern, {}, "Wrong defines no token_rule"),
        (sf.RunPattern, {}, "Wrong is a RunPattern and defines no row_runs"),
        (sf.UnitPattern, {"block": 16}, "Wrong is a UnitPattern and defines no unit_rule"),
        (sf.DistancePattern, {"block": 16}, "Wrong is a DistancePattern and defines no distance_rule"),
        (sf.Pattern, {"block_rule": lambda self, grid: scipy.sparse.csr_array((3, 3))}, r"got csr_array of shape \(3, 3\)"),
        (sf.Pattern, {"block_rule": lambda self, grid: np.ones((1, 1))}, r"scipy.sparse matrix of shape \(1, 1\); got ndarray of"),
        (sf.Pattern, {"block_rule": lambda self, grid: scipy.sparse.csr_array([[3]])}, r"\(partial\) or 2 \(full\); got 3"),
    ],
)
def test_a_class_without_its_rule_and_a_rule_that_returns_another_form_are_one_clear_error(base, rule, message):
    wrong = dataclass(frozen=True)(type("Wrong", (base,), rule))()
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        sf.compile_mask(sf.causal() & wrong, 64)


def third_units(q, kv):
    return (q // 16 - kv // 16) % 3 == 0


@pytest.mark.parametrize(
    "base, rule, kept",
    [
        (sf.Pattern, {"token_rule": lambda self, q, kv: np.subtract(q, q % 3, out=q) >= kv}, lambda q, kv: q - q % 3 >= kv),
        (
            sf.RunPattern,
            {"row_runs": lambda self, q: (np.subtract(q, 3, out=q)[..., None], q[..., None] + 7)},
            lambda q, kv: (kv >= q - 3) & (kv < q + 4),
        ),
        (sf.DistancePattern, {"block": 16, "distance_rule": lambda self, d: np.abs(d, out=d) % 3 == 0}, third_units),
        (
            sf.UnitPattern,
            {"block": 16, "unit_rule": lambda self, i, j: np.add(i, 3, out=i) % 3 == np.add(j, 3, out=j) % 3},
            third_units,
        ),
    ],
)
def test_rules_may_change_their_arguments_in_place(base, rule, kept, monkeypatch):
    monkeypatch.setattr(rules, "_CHUNK", 8)  # so that units come in several parts
    in_place = dataclass(frozen=True)(type("InPlace", (base,), rule))()
    q, kv = np.arange(200)[:, None], np.arange(200)
    third = sf.from_mask_fn(lambda q, kv: (q + kv) % 3 == 0)
    for pattern, others in ((in_place & third, (q + kv) % 3 == 0), (sf.causal() & in_place, q >= kv), (in_place, True)):
        np.testing.assert_array_equal(sf.compile_mask(pattern, 200, block_size=64).to_dense().numpy(), kept(q, kv) & others)
        np.testing.assert_array_equal(pattern.token_rule(q, kv), kept(q, kv) & others)
    np.testing.assert_array_equal(kv, np.arange(200))


def test_blocks_of_one_diagonal_are_evaluated_once(monkeypatch):
    looked_at, rule = [], sf.strided.token_rule
    monkeypatch.setattr(
        sf.strided, "token_rule", lambda self, q, kv: looked_at.append(np.broadcast(q, kv).size) or rule(self, q, kv)
    )
    mask = sf.compile_mask(sf.causal() & sf.strided(50, block=1), 2000, block_size=16)
    assert 0 < sum(looked_at) < mask.block_states().count_nonzero() * 16**2 / 4
