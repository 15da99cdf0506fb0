"""ListOps: its grammar, and its values by another evaluation."""

import numpy as np

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
