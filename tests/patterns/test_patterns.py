"""Each pattern keeps the pairs of its formula, and accepts and refuses the right parameters."""

import copy
import math
import pickle
import sys
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise, product

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash import patterns
from sparse_flash.masks.registry import find_docstring_line, pattern_class
from sparse_flash.masks.rules import move_pattern

TOKENS = 36
EARLIEST = -9  # queries before the first key, as with more queries than keys


def in_window_of(p, q, kv):
    """``neighborhood``: cell by cell, as lists of the cells of one remainder, of those that share a window, and of the window."""
    cells, ones = int(np.prod(p.shape)), (1,) * len(p.shape)
    if not (0 <= q < cells and 0 <= kv < cells):
        return False
    options = (p.stride or ones, p.dilation or ones, p.causal or [False] * len(ones))
    for axis, (extent, window, stride, dilation, causal) in enumerate(zip(p.shape, p.window, *options, strict=True)):
        after = int(np.prod(p.shape[axis + 1 :]))
        at, key = q // after % extent, kv // after % extent
        alike = list(range(at % dilation, extent, dilation))
        strides = [alike[low : low + stride] for low in range(0, len(alike), stride)]
        (own,) = (cells for cells in strides if at in cells)
        if causal:
            last = alike.index(own[-1])
            seen = [cell for cell in alike[max(0, last - window + 1) : last + 1] if cell <= at]
        else:
            leader = alike.index(own[min(stride // 2, len(own) - 1)])
            seen = [alike[number] for number in moved_inward(leader, window, len(alike))]
        if key not in seen:
            return False
    return True


@lru_cache
def in_tile_order(layout):
    """What each position holds: (frame, row, column), "beside" the video, or None for padding, tile by tile and cell by cell."""
    held = []
    for start in product(*(range(0, extent, side) for extent, side in zip(layout.grid, layout.tile, strict=True))):
        inside = (range(s, min(s + side, extent)) for s, side, extent in zip(start, layout.tile, layout.grid, strict=True))
        cells = list(product(*inside))
        held += cells + [None] * (int(np.prod(layout.tile)) - len(cells))
    return held + ["beside"] * (layout.prefix + layout.suffix)


def held_by(layout, q, kv):
    """What the query and the key hold. Padding of a tile asks as the tile's first token does, and is seen by nothing."""
    held, size = in_tile_order(layout), int(np.prod(layout.tile))
    if not (0 <= q < len(held) and 0 <= kv < len(held)):
        return None, None
    return held[q] or held[q // size * size], held[kv]


def by_tiles(rule):
    """The function of a pattern of tiles, from ``rule(p, layout, tile of q, tile of kv)``, tiles as (layer, row, column)."""

    def keeps_pair(p, q, kv):
        cells = held_by(p.layout, q, kv)
        if None in cells or "beside" in cells:
            return None not in cells and p.keep_beside
        return rule(p, p.layout, *(tuple(c // side for c, side in zip(cell, p.layout.tile, strict=True)) for cell in cells))

    return keeps_pair


def moved_inward(at, window, tiles):
    """The cells of a window about ``at``, moved step by step until all are on the axis."""
    seen = list(range(at - window // 2, at - window // 2 + window))
    while seen[0] < 0:
        seen = [s + 1 for s in seen]
    while seen[-1] >= tiles:
        seen = [s - 1 for s in seen]
    return seen


def in_tile_window(p, layout, q, kv):
    return all(k in moved_inward(*axis) for k, *axis in zip(kv, q, p.window, layout.tile_grid, strict=True))


def in_frame_window(p, layout, q, kv):
    return kv[0] < p.anchors or kv[0] in moved_inward(q[0], p.window, layout.tile_grid[0])


def is_radial(p, layout, q, kv):
    _, rows, columns = layout.tile_grid
    s, k, l, apart = rows * columns, q[1] * columns + q[2], kv[1] * columns + kv[2], abs(q[0] - kv[0])  # noqa: E741
    width = 2 ** math.floor(math.log2(max(apart * layout.tile[0], 1)))
    near = width <= s and abs(k - l) + 1 <= s / width
    return kv[0] < p.anchors or near or (k == l and apart % math.ceil(width / s) == 0)


def block_is_set(p, i, j):
    rows = p.blocks.split("/")
    row = i - (len(rows[0]) - len(rows))
    return 0 <= row < len(rows) and j < len(rows[0]) and rows[row][j] == "1"


# Formulas in the docstrings that are not Python.
IN_WORDS = {
    "frame_window": by_tiles(in_frame_window),
    "from_blocks": lambda p, q, kv: block_is_set(p, q // p.block, kv // p.block),
    "neighborhood": in_window_of,
    "radial": by_tiles(is_radial),
    "tile_window": by_tiles(in_tile_window),
    "video_layout": lambda p, q, kv: all(held_by(p, q, kv)),
}
POWERS = [2**k for k in range(16)]
BUILT_IN = [name for name in sf.list_patterns() if pattern_class(name).__module__.startswith("sparse_flash.patterns.")]


def formula_of(pattern):
    """The ``formula:`` of the docstring as a function of q and kv. None is no limit; i and j are the units of q and kv."""
    if pattern.name in IN_WORDS:
        return partial(IN_WORDS[pattern.name], pattern)
    text = find_docstring_line(type(pattern), "formula").partition(", with ")[0].replace(", ...}", ", *POWERS}")
    fields = {name: math.inf if value is None else value for name, value in vars(pattern).items()}
    known = {**vars(patterns), "pairwise": pairwise, "POWERS": POWERS, "kv_len": TOKENS, **fields}

    def kept(q, kv):
        block = getattr(pattern, "block", 1)
        found = eval(text, known | {"q": q, "kv": kv, "i": q // block, "j": kv // block})
        return bool(keeps(found, q, kv) if isinstance(found, sf.Pattern) else found)

    if isinstance(known.get("pattern"), sf.Pattern):  # a formula in terms of another pattern calls it
        known["pattern"] = partial(keeps, known["pattern"])
    return kept


def keeps(pattern, q, kv):
    return pattern.token_rule(np.array(q), np.array(kv))


@pytest.mark.parametrize("name", sorted(set(strategies.by_name) - {"random"}))  # whose numbers golden.json holds
@settings(max_examples=10)
@given(data=st.data())
def test_token_rule_is_the_formula(name, data):
    p = data.draw(strategies.by_name[name])
    q, kv = np.arange(EARLIEST, TOKENS), np.arange(TOKENS)
    formula = formula_of(p)
    expected = np.array([[formula(i, j) for j in kv.tolist()] for i in q.tolist()])
    kept = p.bind_length(TOKENS).token_rule(q[:, None], kv[None, :])
    np.testing.assert_array_equal(np.broadcast_to(kept, expected.shape), expected)


def test_every_built_in_pattern_is_public_under_a_sorted_name_and_drawn_for_the_tests():
    assert list(patterns.__all__) == sorted(patterns.__all__) == BUILT_IN
    assert set(strategies.by_name) == set(BUILT_IN) - {"from_mask_fn"}
    assert all(getattr(sf, name) is pattern_class(name) for name in BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_pattern_says_what_it_is_for_where_it_is_from_and_how_it_is_shown(name):
    cls = pattern_class(name)
    lines = [line.partition(":")[0] for line in sys.modules[cls.__module__].__doc__.split("\n\n")[1].splitlines()]
    source = [] if name in ("from_blocks", "from_mask_fn", "shifted") else ["source"]
    assert lines == ["use", "formula", *source, "specimen"] and len(find_docstring_line(cls, "use").split()) > 3
    specimen = eval(find_docstring_line(cls, "specimen"), vars(patterns))
    assert isinstance(specimen, cls) and sf.compile_mask(specimen, 4096, block_size=64).density > 0


@pytest.mark.parametrize("name", BUILT_IN)
def test_picture_in_the_docstring_is_the_pattern(name):
    lines = [line.split(maxsplit=1) for line in sys.modules[f"sparse_flash.patterns.{name}"].__doc__.splitlines() if line.strip()]
    rows = [line for line in lines if set(line[0]) <= set(".#")]
    (made,) = (line[1] for line in rows if len(line) > 1)
    shown = np.array([[cell == "#" for cell in row] for row, *_ in rows])
    pictured = eval(made, vars(patterns))
    assert isinstance(pictured, pattern_class(name))
    np.testing.assert_array_equal(shown, strategies.dense(pictured, *shown.shape))


@settings(max_examples=120)
@given(pattern=strategies.leaves.filter(lambda pattern: pattern.shift_period), periods=st.integers(-2, 2))
def test_a_rule_repeats_where_queries_and_keys_move_by_its_period(pattern, periods):
    q, kv, move = np.arange(EARLIEST, TOKENS)[:, None], np.arange(TOKENS) + 2 * pattern.shift_period, periods * pattern.shift_period
    np.testing.assert_array_equal(*np.broadcast_arrays(pattern.token_rule(q, kv), pattern.token_rule(q + move, kv + move)))


@settings(max_examples=100)
@given(pattern=strategies.expressions, by=st.integers(-300, 300))
def test_a_moved_expression_keeps_from_its_first_position_on_what_the_expression_keeps(pattern, by):
    q, kv = np.arange(max(by, 0) + EARLIEST, max(by, 0) + TOKENS)[:, None], np.arange(max(by, 0), max(by, 0) + TOKENS)
    expected = pattern.bind_length(TOKENS).token_rule(q - by, kv - by)
    np.testing.assert_array_equal(*np.broadcast_arrays(move_pattern(pattern.bind_length(TOKENS), by).token_rule(q, kv), expected))


@pytest.mark.parametrize(
    "pattern, by, moved",
    [
        (sf.block_diagonal(8), 3, move_pattern(sf.block_diagonal(8), 19)),
        (sf.block_diagonal(8), -16, sf.block_diagonal(8)),
        (sf.causal() & sf.local(9), 5, sf.causal() & sf.local(9)),
        (sf.longformer(5, 2), -1, sf.local(5) | move_pattern(sf.global_tokens(2), -1)),
    ],
)
def test_moves_of_one_meaning_make_equal_patterns(pattern, by, moved):
    assert move_pattern(pattern, by) == moved


def test_random_pairs_have_the_density_asked_for_in_every_row_block_and_depend_on_the_seed():
    one, other = (strategies.dense(sf.random(0.2, seed, block=1), 600, 600) for seed in (0, 1))
    spread = 5 * (0.2 * 0.8 / 600) ** 0.5
    assert abs(one.mean() - 0.2) < 0.005 and (abs(one.mean(0) - 0.2) < spread).all() and (abs(one.mean(1) - 0.2) < spread).all()
    # Independent of the other seed and of the transpose: kept together as often as by chance.
    assert abs((one & other).mean() - 0.04) < 0.004 and abs((one & one.T).mean() - 0.04) < 0.004
    assert strategies.dense(sf.random(1, block=1), 50, 50).all()


def test_neighborhood_keeps_exactly_the_window_of_every_query_of_many():
    """numpy's own unravel_index is wrong on some arrays of this size."""
    q, pattern = np.arange(8 * 32 * 32), sf.neighborhood((8, 32, 32), (3, 7, 5))
    per_query = sum(pattern.token_rule(q[:, None], kv[None, :]).sum(1) for kv in np.array_split(q, 16))
    assert (per_query == 3 * 7 * 5).all() and sf.compile_mask(pattern, len(q)).kept_pairs().tolist() == [len(q) * 3 * 7 * 5]


def test_a_mask_function_is_evaluated_only_where_the_rest_keeps_pairs():
    looked_at, i = [], np.arange(1024)

    def parity(q, kv):
        looked_at.append(np.broadcast(q, kv).size)
        return (q * kv) % 3 == 0

    mask = sf.compile_mask(sf.from_mask_fn(parity) & sf.local(64), 1024, block_size=64)
    assert 0 < sum(looked_at) < 1024**2 / 4
    np.testing.assert_array_equal(mask.to_dense().numpy(), parity(i[:, None], i) & (abs(i[:, None] - i) < 64))


def test_mask_function_has_no_spec_text_and_the_error_says_what_to_write_instead():
    for pattern in (sf.from_mask_fn(max), sf.causal() & ~sf.from_mask_fn(max)):
        with pytest.raises(ValueError, match="@register_pattern"):
            pattern.to_spec()
        assert "max" in str(pattern)


@settings(max_examples=100)
@given(pattern=strategies.expressions)
def test_pickled_pattern_is_equal_has_the_same_hash_and_carries_no_caches(pattern):
    data = pickle.dumps(pattern)
    again = pickle.loads(data)
    assert again == pattern and hash(again) == hash(pattern) and {again: 1}[pattern] == 1
    strategies.dense(again, 20, 20)
    assert data == pickle.dumps(again)  # a hash would be another elsewhere


KINDS = [list, np.array, np.int32, torch.tensor, torch.IntTensor]


@pytest.mark.parametrize(
    "one, other",
    [
        (lambda: sf.local(np.int64(8)), lambda: sf.local(8)),
        (lambda: sf.random(np.float64(0.5)), lambda: sf.random(0.5)),
        (lambda: sf.random(1), lambda: sf.random(1.0)),
        (lambda: sf.neighborhood([64, 64], 7), lambda: sf.neighborhood(np.array([64, 64]), (7, 7))),
        (lambda: sf.neighborhood((9, 9), 3, 1, (1, 1), False), lambda: sf.neighborhood((9, 9), 3)),
        (lambda: sf.neighborhood((9, 9), 3, causal=[True, False]), lambda: sf.neighborhood((9, 9), 3, causal=(True, False))),
        (lambda: sf.neighborhood((9, 9), 3, torch.tensor([2, 1]), np.int64(3)), lambda: sf.neighborhood((9, 9), 3, (2, 1), (3, 3))),
        (lambda: sf.neighborhood((9,), torch.tensor(3)), lambda: sf.neighborhood((9,), [3])),
        *((lambda kind=kind: sf.documents(kind([0, 5, 5, 9])), lambda: sf.parse("documents((0, 5, 9))")) for kind in KINDS),
        *(
            (lambda kind=kind: sf.from_blocks(kind([[1, 1, 0], [0, 1, 1]])), lambda: sf.from_blocks("110/011"))
            for kind in (*KINDS, np.bool_, torch.BoolTensor)
        ),
    ],
)
def test_parameters_of_one_meaning_make_equal_patterns_with_equal_text(one, other):
    assert one() == other() and hash(one()) == hash(other()) and one().to_spec() == other().to_spec()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: sf.local(0), "window must be an integer of at least 1; got 0"),
        (lambda: sf.local(2**63), r"at most 2\*\*62"),
        (lambda: sf.butterfly(-1), "factors must be an integer of at least 0"),
        (lambda: sf.power_of_two(63), "factors must be an integer of at least 0 and at most 62"),
        (lambda: sf.fixed(4, 5), "summary must be at most stride=4; got 5"),
        (lambda: sf.documents([1, 2]), r"must start with 0.*itertools\.accumulate"),
        (lambda: sf.documents([0, 5, 3]), r"not decrease, .*; got \(0, 5, 3\)"),
        (lambda: sf.documents(9), "sequence of integers; got 9"),
        (lambda: sf.random(0.0), "0 < density <= 1; got 0.0"),
        (lambda: sf.random(True), "0 < density <= 1; got True"),
        (lambda: sf.neighborhood((4, 4), 5), r"one number for each axis, at most .*; got \(5, 5\)"),
        (lambda: sf.neighborhood((4, 4), (3,)), "one number for each axis"),
        (lambda: sf.neighborhood((2, 2, 2, 2), 1), "1 to 3 axes"),
        (lambda: sf.neighborhood(64, 7), "shape must be a sequence"),
        (lambda: sf.neighborhood((9, 9), 3, stride=4), r"stride must have one number .* at most \(3, 3\); got \(4, 4\)"),
        (lambda: sf.neighborhood((9, 9), (3, 5), dilation=2), r"dilation must have .* at most \(3, 1\); got \(2, 2\)"),
        (lambda: sf.video_layout(1, 2, 2, (4, 4)), r"tile must be \(frames, height, width\); got \(4, 4\)"),
        (lambda: sf.video_layout(9, 9, 9, (3, 4, 8)), r"power of two of tokens, at most 256.*got \(3, 4, 8\), 96 tokens; Vid.*of"),
        (lambda: sf.VideoLayout.of(9, 9, 9, block_size=32), "block_size must be 64 or 128.*got 32"),
        (lambda: sf.tile_window("video_layout(8, 8, 8)", (2, 2)), r"window must be \(frames, height, width\).*got \(2, 2\)"),
        (lambda: sf.from_blocks("110/01"), "one length"),
        (lambda: sf.from_blocks([[1, 2]]), "zeros and ones"),
        (lambda: sf.from_blocks(torch.ones(2, 2, 2)), r"shape \(2, 2, 2\).*per_head"),
    ],
)
def test_bad_parameters_are_refused_with_what_was_got_and_the_way_out(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("huge", [2**40, 2**62])
def test_parameters_far_beyond_the_sequence_neither_overflow_nor_take_memory(huge):
    n = 200
    assert sf.compile_mask(sf.local(huge), n).keeps_all
    assert sf.compile_mask(sf.butterfly(block=huge), n).keeps_all
    assert sf.compile_mask(sf.dilated(huge, huge, block=1), n).equal(sf.compile_mask(sf.local(1), n))
    assert sf.compile_mask(sf.block_diagonal(huge) & ~sf.sinks(huge), n).kept_pairs().tolist() == [0]
    pattern = ~sf.shifted(sf.documents([0, 100, huge]), 0) | sf.local(3)
    np.testing.assert_array_equal(sf.compile_mask(pattern, n).to_dense().numpy(), strategies.dense(pattern, n, n))
    assert sf.compile_mask(sf.shifted("full", huge), n).kept_pairs().tolist() == [0]


class OnlyARule(sf.Pattern):
    def __init__(self, window):
        self.window = window

    def token_rule(self, q, kv):
        return abs(q - kv) < self.window


def test_a_pattern_that_is_no_dataclass_compiles_and_is_copied_with_what_it_holds():
    pattern = OnlyARule(3)
    for other in (pattern, copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern))):
        assert sf.compile_mask(other, 50).equal(sf.compile_mask(sf.local(3), 50))


@dataclass(frozen=True)
class Looking(sf.RunPattern):
    """Its runs are looked up, where a number past 40 is none."""

    def row_runs(self, q):
        return q[..., None] * 0, np.vectorize(dict(enumerate(range(41))).__getitem__)(q)[..., None]


WITHIN = sf.causal() & sf.shifted(sf.from_mask_fn(lambda q, kv: 1 / 0), 0)


@pytest.mark.parametrize("pattern, kind, said", [(Looking(), KeyError, "41"), (WITHIN, ZeroDivisionError, "division")], ids=str)
def test_an_exception_of_a_rule_is_raised_unchanged_and_names_the_pattern(pattern, kind, said):
    q = torch.zeros(1, 1, 70, 8)
    for call in (lambda: sf.compile_mask(pattern, 70), lambda: sf.attention(q, q, q, pattern)):
        with pytest.raises(kind, match=said) as raised:
            call()
        assert type(raised.value) is kind
        assert any("while compiling" in note and str(pattern)[:40] in note for note in raised.value.__notes__)
