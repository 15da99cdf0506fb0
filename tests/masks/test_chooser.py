"""Choosers as values: their text, order and copies; what they refuse; expressions taken apart; the registry of names."""

import copy
import pickle
from dataclasses import dataclass, replace

import chosen
import numpy as np
import pytest
import strategies
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash.masks.chooser import choices_of, chooser_block_size, has_choosers

parametrize = pytest.mark.parametrize
POOLED = sf.parse("pooled(keep=2)")
limits = st.none() | st.just(sf.causal()) | strategies.expressions


def same_block(some):
    return [replace(one, block=some[0].block) for one in some]


several = st.lists(chosen.drawn(), min_size=1, max_size=3).map(same_block)


def test_a_number_of_blocks_and_a_share_of_them_differ_as_numpys_do():
    one, all_of_them = type(POOLED)(keep=np.int64(1), block=np.int32(64)), type(POOLED)(keep=np.float32(1), block=64)
    assert (one.to_spec(), all_of_them.to_spec()) == ("pooled(keep=1, block=64)", "pooled(keep=1.0, block=64)")
    assert one != all_of_them and one.rule == ("keep", 1) and all_of_them.rule == ("keep", 1.0)
    assert type(one.keep) is int and type(all_of_them.keep) is float
    assert {one, all_of_them} == {sf.parse("pooled(keep=1, block=64)"), sf.parse("pooled(keep=1.0, block=64)")}
    assert sf.parse("pooled(budget=1)") == sf.parse("pooled(budget=1.0)")


@settings(max_examples=100)
@given(within=limits, some=several, always=st.none() | strategies.expressions, as_text=st.booleans())
def test_an_expression_equals_its_text_and_copies_and_is_taken_apart_into_its_parts(within, some, always, as_text):
    expression = chosen.joined(within, some, always)
    text = expression.to_spec()
    assert str(expression) == text and chosen.joined(within, some[::-1] * 2, always) == expression
    for again in (sf.parse(text), copy.copy(expression), copy.deepcopy(expression), pickle.loads(pickle.dumps(expression))):
        assert again == expression and hash(again) == hash(expression) and again.to_spec() == text
    assume(chosen.fit(within, always))
    found = choices_of(text if as_text else expression)
    assert len(found) == 1 and found[0].within == within and found[0].always == always
    assert set(found[0].choosers) == set(some) and has_choosers(expression)
    assert chooser_block_size(expression) == (some[0].block or 128)
    assert within is None or not has_choosers(within)


def test_a_head_without_choosers_has_the_limits_of_heads_with_choosers():
    text = "causal & documents([0, 50, 99]) & per_head([pooled(keep=2), local(9), full, sinks(3) & local(9)])"
    within = sf.causal() & sf.documents([0, 50, 99])
    always = [None, sf.local(9), sf.full(), sf.sinks(3) & sf.local(9)]
    assert [(one.within, one.always) for one in choices_of(text)] == [(within, one) for one in always]


@parametrize("name", chosen.BUILT_IN)
@parametrize(
    "options, error, message",
    [
        ({}, ValueError, "{name} must have one rule of keep=, mass=, floor=, budget=; got none; pass one"),
        ({"keep": 2, "mass": 0.5}, ValueError, "must have one rule .*; got keep=2 and mass=0.5; pass one"),
        ({"keep": 0}, ValueError, "{name}: keep must be at least one block a row.*; got 0"),
        ({"keep": 0.0}, ValueError, r"keep must be .* or a share in \(0, 1\], a float; got 0.0"),
        ({"keep": True}, TypeError, "keep must be an int, blocks a row, or a float, a share of them; got True"),
        ({"mass": 0}, ValueError, "{name}: mass must be a number, 0 < mass <= 1; got 0"),
        ({"floor": 1.1}, ValueError, "floor must be a number, 0 < floor <= 1; got 1.1"),
        ({"budget": float("nan")}, ValueError, "budget must be a number, 0 < budget <= 1; got nan"),
        ({"keep": 2, "block": 32}, ValueError, "{name}: block must be one of 64, 128; got 32"),
        ({"keep": 2, "block": 0}, ValueError, "block must be an integer of at least 1; got 0"),
    ],
)  # fmt: skip
def test_fields_out_of_range_are_refused(name, options, error, message):
    with pytest.raises(error, match=message.format(name=name)):
        replace(sf.parse(chosen.SPECIMENS[name]), **{"keep": None} | options)


@parametrize(
    "text, message",
    [
        ("causal & pooled(keep=1) & sampled(8, keep=2)", r"are joined by \|, as in within & \(chooser"),
        ("causal & (pooled(keep=1) | sinks(4)) & (pooled(keep=2) | sinks(9))", r"are joined by \|, as in"),
        ("(causal & pooled(keep=1)) | sinks(4)", r"are joined by \|, as in within"),
        ("pooled(keep=1, block=64) | pooled(keep=1)", "all choosers of .* must have one block; pass the same block="),
        ("per_head([pooled(keep=1, block=64), pooled(keep=2)])", "must have one block"),
        ("per_head([causal & pooled(keep=1), pooled(keep=2)])", "all heads of .* must have the same pattern before their chooser"),
        ("per_head([pooled(keep=2), causal & local(9)])", "must have the same pattern before their chooser"),  # not causal blocks
        ("per_head([causal & local(8) & pooled(keep=1), causal & local(9)])", "must have the same pattern before their chooser"),
        ("per_head([pooled(keep=1), pooled(budget=0.5)])", "compete for a budget, so all must have one chooser; use keep="),
        ("antidiagonal(48, keep=1)", "antidiagonal: .* got 48"),
        ("sampled(65, keep=1)", "sampled: .* got 65"),
        ("~pooled(keep=1)", "what a chooser leaves out is no mask; write the expression without ~"),
        ("~(local(9) & pooled(keep=1))", r"are joined by \|, as in"),
        ("pooled(keep=1) | causal", r"causal must stand before choosers: .*; write causal & \(.* \| \.\.\.\)$"),
        ("local(9) & (pooled(keep=1) | (causal & sinks(4)))", "causal must stand before choosers"),
        ("causal & local(9)", r"causal & local\(9\) has no chooser; known: antidiagonal, .*; compile_mask takes patterns"),
    ],
)  # fmt: skip
def test_expressions_of_another_form_are_refused_with_the_way_out(text, message):
    for parse in (str, sf.parse):
        with pytest.raises(ValueError, match=message):
            choices_of(parse(text))


def test_heads_may_compete_for_one_budget():
    assert len(choices_of("per_head([causal & pooled(budget=0.5), causal & pooled(budget=0.5)])")) == 2


@parametrize("always, text", [("~causal", "pooled(keep=1) | {}"), ("causal & ~causal", "causal & (pooled(keep=1) | {})")])
def test_negated_causal_is_allowed_with_choosers(always, text):
    assert [choice.always for choice in choices_of(text.format(always))] == [sf.parse(always)]


def test_a_derived_pattern_is_taken_apart_like_its_expression():
    @sf.register_pattern("ours")
    @dataclass(frozen=True)
    class Ours(sf.DerivedPattern):
        keep: int

        @property
        def expression(self):
            return sf.causal() & (type(POOLED)(keep=self.keep) | sf.sinks(4))

    @sf.register_pattern("more")
    @dataclass(frozen=True)
    class More(sf.DerivedPattern):
        expression = "sampled(4, keep=2) | local(100)"

    written = "causal & (pooled(keep=3) | sinks(4))"
    assert choices_of(Ours(3)) == choices_of("ours(3)") == choices_of(written) and chooser_block_size("ours(3)") == 128
    assert choices_of("ours(3) & prefix(9)") == choices_of(f"{written} & prefix(9)")
    assert choices_of(sf.causal() & More()) == choices_of("causal & (sampled(4, keep=2) | local(100))")
    assert choices_of("per_head([ours(3), ours(4), causal & more])")[2] == choices_of("causal & more")[0]


def test_a_chooser_works_without_a_name_and_has_text_and_is_listed_with_one():
    @dataclass(frozen=True)
    class Mine(sf.Chooser):
        near: int
        far: bool = False

    nameless = Mine(3, keep=2)
    assert "Mine(keep=2" in str(nameless) and choices_of(sf.causal() & nameless)[0].choosers == (nameless,)
    with pytest.raises(ValueError, match="Mine has no spec text: register it"):
        nameless.to_spec()
    sf.register_chooser("mine")(Mine)
    mine = sf.parse("mine(3, keep=2)")
    assert mine == Mine(3, keep=2) and mine.to_spec() == "mine(3, keep=2, far=False)" and "mine" in sf.list_choosers()
    assert "mine" not in sf.list_patterns() and Mine(3, True, floor=0.5).to_spec() == "mine(3, floor=0.5, far=True)"
    assert sf.parse(Mine(3, True, floor=0.5).to_spec()) == Mine(3, True, floor=0.5)
    assert mine.block_size == 128 and sf.list_choosers() == sorted({*chosen.BUILT_IN, "mine"})
    with pytest.raises(ValueError, match="mine must have one rule"):
        Mine(3)
    with pytest.raises(NotImplementedError, match=r"Mine defines no scores; define scores\(self, q, k, grid\)"):
        mine.scores(None, None, None)
