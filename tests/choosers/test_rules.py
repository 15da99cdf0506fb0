"""Rules keep what their words say, of any scores, by operations and by kernels."""

from fractions import Fraction

import chosen
import numpy as np
import pytest
import torch
from accepted import needs_triton
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import DEVICE

from sparse_flash.choosers import choose, rules_torch
from sparse_flash.core import backends
from sparse_flash.masks import chooser as choosers

parametrize = pytest.mark.parametrize
# Sums of these are exact, so that equal sums are equal everywhere.
EXACT = [0.0, 0.125, 0.25, 0.5, 0.75, 1.0]
OTHERS = [-0.0, -1.0, -3.0, float("-inf"), float("nan")]
NUMBERS = {"keep": [1, 2, 5, 99, 10**12, 0.1, 0.5, 1.0], "budget": [0.07, 0.3, 0.5, 1.0]}
NUMBERS |= {rule: [0.125, 0.25, 0.5, 1.0] for rule in ("mass", "floor")}


@st.composite
def rows(draw, most=3):
    """(scores (batch, heads, rows, blocks) float32, allowed, forced (rows, blocks) bool)"""
    batch, heads, count = draw(st.integers(1, 2)), draw(st.integers(1, most)), draw(st.integers(1, most))
    blocks = draw(st.sampled_from([1, 2, 5, 31, 32, 33, 70]))
    among = draw(st.sampled_from([EXACT, [0.0, 0.5], [0.0], [0.25], [*EXACT, *OTHERS], OTHERS, [0.5, float("inf"), -1.0]]))
    generator = np.random.default_rng(draw(st.integers(0, 999)))
    scores = generator.choice(np.array(among, np.float32), (batch, heads, count, blocks))
    if draw(st.booleans()):
        scores[:] = scores[:1, :1, :1]  # equal rows
    # Which of several infinite scores have some share of their sum, no words say.
    scores[np.isposinf(scores) & (np.isposinf(scores).cumsum(3) > 1)] = 0.5
    allowed = generator.random((count, blocks)) < draw(st.sampled_from([0.0, 0.4, 0.9, 1.0]))
    forced = allowed & (generator.random((count, blocks)) < draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])))
    return scores, allowed, forced


@st.composite
def rules(draw):
    rule = draw(st.sampled_from(choosers.RULES))
    return rule, draw(st.sampled_from(NUMBERS[rule]))


def on_device(*arrays):
    return [torch.from_numpy(array).to(DEVICE) for array in arrays]


def by_operations(scores, allowed, forced, rule, number):
    return rules_torch.apply_rule(*on_device(scores, allowed, forced), rule, number).cpu().numpy()


def unpacked(words, blocks):
    bits = (words.cpu()[..., None] >> torch.arange(32)) & 1
    return bits.flatten(-2)[..., :blocks].bool().numpy()


def by_kernel(scores, allowed, forced, rule, number, before=None, first=0):
    """before: bits that are set already, of the rows of all ranges; rows from ``first`` on are added."""
    scores, allowed, forced = on_device(scores, allowed, forced)
    batch, heads, count, blocks = scores.shape
    pad = (0, 0, first, 0)
    limits = rules_torch.Limits(
        *(torch.nn.functional.pad(choose.pack_block_bits(x), pad) for x in (allowed, forced)),
        torch.nn.functional.pad(allowed.sum(1), (first, 0)),
        {},
    )
    bits = torch.zeros(batch, heads, first + count, -(-blocks // 32), dtype=torch.int32, device=DEVICE)
    if before is not None:
        bits |= choose.pack_block_bits(torch.from_numpy(before).to(DEVICE))
    choose._add_kept_blocks(bits, scores, limits, first, (rule, number), before is not None)
    return unpacked(bits, blocks)


FORCED_WITHOUT_SCORE = np.array([[[[-np.inf, 0.5]]]], np.float32), np.array([[True, True]]), np.array([[True, False]])
WAYS = [by_operations]
if backends.get_backend("triton").why_unavailable() is None:
    WAYS = [by_kernel, by_operations]


@settings(max_examples=120)
@given(by=st.sampled_from(WAYS), rows=rows(), rule=rules())
@example(by=WAYS[0], rows=FORCED_WITHOUT_SCORE, rule=("floor", 0.5))
def test_a_rule_keeps_what_its_docstring_says(by, rows, rule):
    scores, allowed, forced = rows
    found = by(*rows, *rule)
    for batch, mine in enumerate(scores):
        np.testing.assert_array_equal(found[batch], chosen.kept_by(*rule, mine, allowed, forced))


@needs_triton
@settings(max_examples=6)
@given(rows=rows(most=2), rule=rules(), first=st.integers(0, 2), seed=st.integers(0, 9))
def test_the_kernel_adds_to_the_rows_that_it_is_given(rows, rule, first, seed):
    batch, heads, count, blocks = rows[0].shape
    before = np.random.default_rng(seed).random((batch, heads, first + count, blocks)) < 0.2
    found = by_kernel(*rows, *rule, before=before, first=first)
    wanted = before.copy()
    wanted[:, :, first:] |= by_kernel(*rows, *rule)
    np.testing.assert_array_equal(found, wanted)


@needs_triton
@parametrize("rule, number", [("keep", 70), ("budget", 0.4), ("mass", 0.5), ("floor", 0.5)])
def test_the_kernel_reads_long_rows_in_chunks(rule, number, monkeypatch):
    from sparse_flash.choosers.kernels import rules

    monkeypatch.setattr(rules, "_TOGETHER", 64)
    generator = np.random.default_rng(0)
    scores = generator.choice(np.array(EXACT, np.float32), (1, 2, 1, 200))
    allowed, forced = generator.random((1, 200)) < 0.8, np.zeros((1, 200), bool)
    scores[..., -1], allowed[:, -1] = 1.5, True  # the largest comes last
    found = by_kernel(scores, allowed, forced, rule, number)[0]
    np.testing.assert_array_equal(found, chosen.kept_by(rule, number, scores[0], allowed, forced))


# Half of the least number is 0, which no block would have to reach.
numbers = st.floats(0, 1, width=32, allow_subnormal=False) | st.sampled_from([0.0, 1e-30, 1.0])


@parametrize("by", [by_operations, pytest.param(by_kernel, marks=needs_triton)])
@settings(max_examples=40)
@given(scores=st.lists(numbers, min_size=1, max_size=40), mass=st.floats(0.01, 1))
@example(scores=[0.3, 0.0, 0.0], mass=1.0)
@example(scores=[1e-30] * 3, mass=0.5)
def test_mass_keeps_the_fewest_blocks_that_have_it(by, scores, mass):
    row = np.array(scores, np.float32)[None, None, None]
    every = np.ones((1, len(scores)), bool)
    kept = by(row, every, ~every, "mass", mass)[0, 0, 0]
    exact = [Fraction(float(score)) for score in row[0, 0, 0]]
    has, total = sum(score for score, one in zip(exact, kept) if one), sum(exact)
    rounding = total * Fraction(1, 1 << 20)
    assert has >= Fraction(mass) * total - rounding
    if kept.any():
        smallest = min(score for score, one in zip(exact, kept) if one)
        assert has - smallest < Fraction(mass) * total + rounding
        assert all(score <= smallest for score, one in zip(exact, kept) if not one)
    assert kept.any() == (total > 0)


@parametrize("share", [0.07, 0.1, 0.29, 0.58, 1 / 3])
def test_a_share_is_rounded_up_but_not_for_the_rounding_of_its_product(share):
    blocks = torch.arange(1, 2000)
    found = rules_torch.count_kept_blocks("keep", share, blocks, 1)
    exact = Fraction(share).limit_denominator(1000)
    assert found.tolist() == [-(-n * exact.numerator // exact.denominator) for n in blocks.tolist()]
