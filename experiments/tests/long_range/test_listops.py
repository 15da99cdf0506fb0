"""ListOps: its grammar, and its values by another evaluation."""

import numpy as np
import pytest

from experiments.long_range.listops import ListOps, text


def evaluated(symbols: list[str], argument_counts: list[int], depth: int = 1) -> tuple[int, int]:
    """Value and depth of the expression at the front of a list, which it takes off."""
    first = symbols.pop(0)
    if first.isdigit():
        return int(first), depth
    values, deepest = [], depth
    while symbols[0] != "]":
        value, below = evaluated(symbols, argument_counts, depth + 1)
        values.append(value)
        deepest = max(deepest, below)
    symbols.pop(0)
    argument_counts.append(len(values))
    by_name = {"[MIN": np.min, "[MAX": np.max, "[MED": lambda v: np.floor(np.median(v)), "[SM": lambda v: np.sum(v) % 10}
    return int(by_name[first](values)), deepest


def test_values_and_grammar_are_those_of_long_range_arena():
    inputs, labels = ListOps().make(40, np.random.default_rng(0))
    assert inputs.shape == (40, 2048) and inputs.dtype == labels.dtype == np.uint8
    lengths = (inputs > 0).sum(1)
    assert lengths.min() >= 500 and lengths.max() <= 2000 and np.ptp(lengths) > 500
    arguments, depths = [], []
    for tokens, label, length in zip(inputs, labels, lengths, strict=True):
        assert not tokens[length:].any()  # padding is at the end
        symbols = text(tokens).split()
        value, depth = evaluated(symbols, arguments)
        assert value == label and not symbols
        depths.append(depth)
    assert set(arguments) == set(range(2, 11)) and max(depths) == 10


def test_the_median_of_an_even_number_is_rounded_down_and_the_sum_is_modulo_ten():
    task = ListOps(depth=2, arguments=4, shortest=4, longest=6)
    inputs, labels = task.make(300, np.random.default_rng(0))
    found = {text(tokens): label for tokens, label in zip(inputs, labels, strict=True)}
    halves = [name for name in found if name.startswith("[MED") and np.median([int(s) for s in name.split()[1:-1]]) % 1]
    over = [name for name in found if name.startswith("[SM") and sum(int(s) for s in name.split()[1:-1]) > 9]
    assert halves and over
    assert all(found[name] == evaluated(name.split(), [])[0] for name in found)


def test_a_seed_gives_the_same_expressions_and_another_seed_others():
    one, again, other = (ListOps().make(3, np.random.default_rng(seed)) for seed in (7, 7, 8))
    assert np.array_equal(one[0], again[0]) and np.array_equal(one[1], again[1])
    assert not np.array_equal(one[0], other[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"depth": 1}, "depth and arguments must be at least 2; got 1 and 10"),
        ({"shortest": 3}, "shortest must be from 4 to longest, 2000, and to .* of depth 10 with 10 arguments; got 3"),
        ({"shortest": 300, "longest": 200}, "from 4 to longest, 200"),
        ({"depth": 2, "arguments": 4, "shortest": 7}, "to 6, the most tokens of an expression of depth 2 with 4 arguments; got 7"),
    ],
)
def test_a_grammar_without_expressions_of_the_lengths_is_an_error(given, message):
    with pytest.raises(ValueError, match=message):
        ListOps(**given)
