"""Spec text: both ways, canonical, with errors that point at the column; and the registry of names."""

import string
from dataclasses import dataclass, field
from enum import IntEnum
from unittest import mock

import numpy as np
import pytest
import strategies
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash.masks import registry as registry_module
from sparse_flash.masks.spec import SpecError


@settings(max_examples=120)
@given(pattern=strategies.expressions)
def test_text_of_every_pattern_reads_back_as_an_equal_one_with_the_same_text(pattern):
    text = pattern.to_spec()
    again = sf.parse(text)
    assert again == pattern and hash(again) == hash(pattern) and again.to_spec() == text
    assert sf.Pattern.from_spec(f"  ( {text} )\n") == pattern and str(pattern) == text


@settings(max_examples=50)
@given(a=strategies.leaves, b=strategies.expressions, c=strategies.expressions)
def test_order_grouping_and_repetition_make_no_difference_to_equality_or_text(a, b, c):
    for same in (
        [a & b & c, c & (b & a), (a & a) & (c & b)],
        [a | b | c, (c | b) | a, a | (b | c) | b],
        [a, ~~a, a & a, a | a],
        [~(a & b), ~(b & a)],
    ):
        assert len(set(same)) == 1 and len({p.to_spec() for p in same}) == 1


def test_and_binds_tighter_than_or_and_not_tightest():
    a, b, c = sf.causal(), sf.local(3), sf.sinks(2)
    assert sf.parse("causal | local(3) & sinks(2)") == a | (b & c) != (a | b) & c
    assert sf.parse("~causal & local(3)") == ~a & b != ~(a & b)
    assert sf.parse("~(causal & local(3))") == ~(a & b) and sf.parse("~~causal") == a


@pytest.mark.parametrize(
    "text, pattern",
    [
        ("butterfly", sf.butterfly()),
        ("butterfly(None, 64,)", sf.butterfly(block=64)),
        ("butterfly( block = 6_4 )", sf.butterfly(block=64)),
        ("random(5e-1, seed=7)", sf.random(0.5, 7)),
        ("documents([0, 5, 9])", sf.documents([0, 5, 9])),
        ('from_blocks("10/11", block=16)', sf.from_blocks([[1, 0], [1, 1]], 16)),
        ("from_blocks(((1, 0), (1, 1)), 16)", sf.from_blocks([[1, 0], [1, 1]], 16)),
        ("neighborhood((300,), 7)", sf.neighborhood([300], 7)),
        ("causal\n & local(4)", sf.causal() & sf.local(4)),
    ],
)
def test_reader_takes_the_notation_that_python_users_would_write(text, pattern):
    assert sf.parse(text) == pattern


@pytest.mark.parametrize(
    "text, column, message",
    [
        ("", 0, "expected a pattern name.*got the end of the spec"),
        ("causal &", 8, "expected a pattern name"),
        ("causal & & local(3)", 9, "got '&'"),
        ("causal local(3)", 7, "expected '&', '|' or the end"),
        ("(causal", 7, r"expected '\)'"),
        ("causal & locl(3)", 9, "unknown pattern 'locl'; did you mean 'local'"),
        ("xyzzy", 0, "unknown pattern 'xyzzy'.*" + ".*".join(sf.list_patterns()[:3])),  # near to none: all are listed
        ("causal & local", 9, r"local takes \(window\): missing a required argument: 'window'"),
        ("causal & local(windw=3)", 9, r"local takes \(window\): missing"),
        ("full(size=4)", 0, "unexpected keyword argument 'size'"),
        ("local(window=3, window=4)", 16, "given twice"),
        ("butterfly(block=3, 4)", 19, "positional argument after a named one"),
        ("local(", 6, "expected a number, a string"),
        ("local(causal)", 0, r"window must be an integer of at least 1; got Causal\(\)"),
        ("per_head(causal)", 0, "per_head: patterns must be a list of patterns"),
        ("per_head([causal, 3])", 0, r"per_head: patterns\[1\] must be a Pattern of one head or its spec text; got int"),
        ("local(1__0)", 6, "cannot read '1__0'"),
        ("documents([0 5])", 13, r"expected ',' or '\]'"),
        ("from_blocks('10/1)", 12, 'unexpected "\'"'),
        ("from_mask_fn(1)", 0, "must be a function"),
        ("causal.__class__", 0, r"unknown pattern"),  # text is never run as code
        ("local(().__class__)", 8, r"unexpected '\.'"),
    ],
)
def test_error_points_at_the_column_and_says_what_was_expected(text, column, message):
    with pytest.raises(SpecError, match=message) as error:
        sf.parse(text)
    assert error.value.column == column and error.value.text == text
    first, shown, caret = str(error.value).rsplit("\n", 2)
    assert first.endswith(f"(column {column + 1})") and shown == f"  {text}" and caret == " " * (column + 2) + "^"


@settings(max_examples=150)
@given(text=st.text(st.sampled_from("causl(&|~)[],=13.'\"_ \n" + string.ascii_lowercase), max_size=30))
def test_any_text_either_reads_or_raises_the_one_error(text):
    try:
        sf.parse(text)
    except SpecError as error:
        assert 0 <= error.column <= len(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


class Step(IntEnum):
    TWO = 2


@dataclass(frozen=True)
class Optional(sf.Pattern):
    near: object = 3
    far: object = None


@settings(max_examples=100)
@given(near=st.just(3) | VALUES, far=VALUES)
@example(3, (Step.TWO, None))
@example(np.float64(0.5), np.str_("a"))
@example(Step.TWO, 3)
def test_every_field_that_differs_from_its_default_is_written_as_python_writes_it_and_reads_back(near, far):
    with mock.patch.dict(registry_module._registry):
        pattern = sf.register_pattern("optional")(Optional)(near, far)
        again = sf.parse(pattern.to_spec())
    assert again == pattern and (far is None or repr(again.far) in pattern.to_spec())


def define_ring():
    @sf.register_pattern("ring")
    @dataclass(frozen=True)
    class Ring(sf.Pattern):
        period: int
        name: int | None = None  # a field like any other

        def token_rule(self, q, kv):
            return (q - kv) % self.period == (self.name or 0)

    return Ring


def test_registered_class_is_usable_in_text_and_expressions():
    ring = define_ring()
    assert "ring" in sf.list_patterns()
    assert sf.parse("causal & ring(4)") == sf.causal() & ring(4) and (sf.causal() & ring(4)).to_spec() == "causal & ring(4)"
    assert ring(4, name=1).to_spec() == "ring(4, name=1)" and sf.parse("ring(4, name=1)") == ring(4, 1)
    assert sf.compile_mask("causal & ring(4, 3)", 100).kept_keys(41).nonzero().flatten().tolist() == list(range(2, 41, 4))


def test_a_class_that_derives_from_a_registered_one_does_not_go_by_its_name():
    @dataclass(frozen=True)
    class Twice(sf.local):
        def row_runs(self, q):
            return sf.local(2 * self.window).row_runs(q)

    for make in (Twice(4).to_spec, (Twice(4) & sf.causal()).to_spec):
        with pytest.raises(ValueError, match=r"Twice has no spec text: register it with @register_pattern"):
            make()
    twice = sf.compile_mask(Twice(4) | sf.sinks(1), 40)
    assert twice.equal(sf.compile_mask("local(8) | sinks(1)", 40))
    layer = sf.SparseAttention(16, 2, Twice(4))
    x = torch.randn(1, 40, 16)
    wanted = layer(x)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x), wanted)
    sf.register_pattern("twice")(Twice)
    assert (Twice(4) & sf.causal()).to_spec() == "causal & twice(4)"


def test_name_that_is_taken_is_refused_naming_both_owners():
    first = define_ring()
    with pytest.raises(ValueError) as error:
        define_ring()
    assert str(error.value).count(f"{first.__module__}.{first.__qualname__}") == 2 and "another name" in str(error.value)
    with pytest.raises(ValueError, match=r"test_spec.*already registered by sparse_flash\.patterns\.local\.Local"):
        sf.register_pattern("local")(first)
    assert registry_module.pattern_class("ring") is first and sf.local is registry_module.pattern_class("local")


def test_only_frozen_dataclasses_of_patterns_with_identifier_names_can_be_registered():
    @dataclass
    class Thawed(sf.Pattern):
        n: int

    for cls in (type("Bare", (sf.Pattern,), {}), Thawed):
        with pytest.raises(TypeError, match=r"must be a frozen dataclass; put @dataclass\(frozen=True\)"):
            sf.register_pattern("bare")(cls)
    with pytest.raises(TypeError, match=r"must decorate a subclass of sparse_flash\.Pattern"):
        sf.register_pattern("bare")(lambda q, kv: q > kv)
    for name in ("two words", "", 3, "a-b", "inf", "größe"):  # of the last two, spec text can write neither
        with pytest.raises(ValueError, match="must be an identifier"):
            sf.register_pattern(name)
    assert "bare" not in sf.list_patterns()
    with pytest.raises(TypeError, match=r"Thawed must be hashable.*make it a frozen dataclass"):
        Thawed(3)


def test_patterns_whose_fields_differ_only_in_type_differ():
    @sf.register_pattern("nearest")
    @dataclass(frozen=True)
    class Nearest(sf.Pattern):
        keep: int | float  # tokens, or a share of the past
        beside: tuple = ()

        def token_rule(self, q, kv):
            return (kv <= q) & (q - kv < (self.keep * (q + 1) if isinstance(self.keep, float) else self.keep))

    q, token, whole = torch.randn(1, 1, 40, 8), Nearest(1), Nearest(1.0)
    for pattern, same in ((token, "local(1)"), (whole, "causal"), (token | whole, "causal"), (Nearest(np.float64(1)), "causal")):
        for mask in (pattern, pattern.to_spec()):
            assert torch.equal(sf.attention(q, q, q, mask), sf.attention(q, q, q, f"causal & {same}"))
        assert sf.parse(pattern.to_spec()) == pattern
    assert token != whole and Nearest(2, (1,)) != Nearest(2, (True,)) and Nearest(2, (1,)) == Nearest(2, (1,))


@pytest.mark.parametrize("decorated", [dataclass(frozen=True, eq=False), lambda cls: cls])
def test_patterns_that_compare_no_fields_equal_only_themselves(decorated):
    @decorated
    class Table(sf.Pattern):
        kept: object = field(default_factory=lambda: np.eye(9, dtype=bool))

        def token_rule(self, q, kv):
            return q == kv

    one = Table()
    assert one == one and one != Table()
    assert sf.compile_mask(one, 9).equal(sf.compile_mask("local(1)", 9))


@pytest.mark.parametrize("far, got", [([1], "list"), (np.arange(2), "numpy.ndarray"), (([1],), "list"), ({1: 2}, "dict")])
def test_field_that_cannot_be_hashed_is_an_error_that_names_the_pattern_and_the_way_out(far, got):
    @dataclass(frozen=True)
    class Ring(sf.Pattern):
        seen: list = field(default_factory=list, compare=False)
        far: object = None

    assert hash(Ring(far=(1,))) == hash(Ring([3], (1,)))
    with pytest.raises(TypeError, match=rf"Ring must be hashable, .*; unhashable type: '{got}'; pass tuples"):
        Ring(far=far)
