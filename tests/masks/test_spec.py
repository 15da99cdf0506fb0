"""Spec text: both ways, canonical, with errors that point at the column; and the registry of names."""

import string
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import metadata
from unittest import mock

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash.masks import parsing
from sparse_flash.masks import registry as registry_module
from sparse_flash.masks.parsing import MOST_NESTED
from sparse_flash.masks.spec import SpecError, write_call


@pytest.fixture
def registry(monkeypatch):
    """A registry that a test may add to."""
    monkeypatch.setattr(registry_module, "_registry", dict(registry_module._registry))
    return registry_module._registry


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
        ("butterfly()", sf.butterfly()),
        ("butterfly(None, 64,)", sf.butterfly(block=64)),
        ("butterfly( block = 6_4 )", sf.butterfly(block=64)),
        ("random(5e-1, seed=7)", sf.random(0.5, 7)),
        ("random(.5)", sf.random(0.5)),
        ("documents([0, 5, 9])", sf.documents([0, 5, 9])),
        ("documents((0, 5, 9,))", sf.documents([0, 5, 9])),
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
        ("   ", 3, "got the end of the spec"),
        ("causal &", 8, "expected a pattern name"),
        ("causal & & local(3)", 9, "got '&'"),
        ("causal local(3)", 7, "expected '&', '|' or the end"),
        ("(causal", 7, r"expected '\)'"),
        ("causal)", 6, "or the end of the spec, got"),
        ("causal & $", 9, r"unexpected '\$'"),
        ("causal & locl(3)", 9, "unknown pattern 'locl'; did you mean 'local'"),
        ("CAUSAL", 0, "unknown pattern 'CAUSAL'; did you mean 'causal'"),
        ("xyzzy", 0, "unknown pattern 'xyzzy'.*" + ".*".join(sf.list_patterns()[:3])),  # near to none: all are listed
        ("causal & local", 9, r"local\(window: int\): missing a required argument: 'window'"),
        ("causal & local(windw=3)", 9, r"local\(window: int\): unknown argument 'windw'; did you mean 'window'\?"),
        ("local(3, size=4)", 0, r"local\(window: int\): unknown argument 'size'; known: window"),
        ("full(size=4)", 0, r"full\(\): unknown argument 'size'; known: none"),
        ("causal | local(0)", 9, "window must be an integer of at least 1; got 0"),
        ("local(window=3, window=4)", 16, "given twice"),
        ("butterfly(block=3, 4)", 19, "positional argument after a named one"),
        ("local(3 4)", 8, r"expected ',' or '\)'"),
        ("local(", 6, "expected a number, a string"),
        ("local(causal)", 0, r"window must be an integer of at least 1; got Causal\(\)"),
        ("local(casual)", 6, "unknown pattern 'casual'; did you mean 'causal'"),
        ("local(/)", 6, "unexpected '/'"),
        ("shifted(causal & , 3)", 17, "expected a pattern name"),
        ("shifted((causal, 3), 3)", 15, r"expected '\)'"),
        ("shifted(3, 3)", 0, "shifted: pattern must be a Pattern or its spec text; got int"),
        ("per_head(causal)", 0, "per_head: patterns must be a list of patterns"),
        ("per_head([causal, 3])", 0, r"per_head: patterns\[1\] must be a Pattern of one head or its spec text; got int"),
        ("local(1__0)", 6, "cannot read '1__0'"),
        ("documents((0, 5)", 16, r"expected ',' or '\)'"),
        ("documents([0 5])", 13, r"expected ',' or '\]'"),
        ("from_blocks('10/1)", 12, 'unexpected "\'"'),
        ("from_mask_fn(1)", 0, "must be a function"),
    ],
)
def test_error_points_at_the_column_and_says_what_was_expected(text, column, message):
    with pytest.raises(SpecError, match=message) as error:
        sf.parse(text)
    assert error.value.column == column and error.value.text == text
    first, shown, caret = str(error.value).rsplit("\n", 2)
    assert first.endswith(f"(column {column + 1})") and shown == f"  {text}" and caret == " " * (column + 2) + "^"


@pytest.mark.parametrize("levels", [MOST_NESTED + 1, 5000])
@pytest.mark.parametrize(
    "before, inner, after",
    [
        ("(", "causal", ")"),
        ("~", "causal", ""),
        ("~(sinks(1) & ", "causal", ")"),
        ("[", "documents(%s)", "]"),
        ("(", "documents(%s)", ")"),
    ],
)
def test_text_that_is_nested_too_deep_is_refused_with_the_way_out(before, inner, after, levels):
    text = inner % (before * levels + "0" + after * levels) if "%s" in inner else before * levels + inner + after * levels
    with pytest.raises(SpecError, match=r"nested more than 100 deep; leave out .* combine patterns with & \| ~ in Python"):
        sf.parse(text)


def test_text_that_is_nested_as_deep_as_it_may_be_is_compiled():
    text, i = "local(3)", np.arange(128)
    expected = abs(i[:, None] - i) < 3
    for level in range(MOST_NESTED):
        sinks, column = f"sinks({level + 1})", i <= level
        if level % 2:
            text, expected = f"{sinks} | ({text})", column | expected
        else:
            text, expected = f"~{sinks} & ({text})", ~column & expected
    assert sf.parse(sf.parse(text).to_spec()) == sf.parse(text)
    np.testing.assert_array_equal(sf.compile_mask(text, 128, block_size=16).to_dense().numpy(), expected)


@settings(max_examples=150)
@given(text=st.text(st.sampled_from("causl(&|~)[],=13.'\"_ \n" + string.ascii_lowercase), max_size=30))
def test_any_text_either_reads_or_raises_the_one_error(text):
    try:
        sf.parse(text)
    except SpecError as error:
        assert 0 <= error.column <= len(text)


@pytest.mark.parametrize(
    "text", ["__import__('os')", "causal.__class__", "local(().__class__)", "local(3) if 1 else full", "local(1+1)"]
)
def test_spec_text_is_never_run_as_code(text):
    with pytest.raises(SpecError):
        sf.parse(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


@settings(max_examples=50)
@given(positional=st.lists(VALUES, max_size=3), keyword=st.dictionaries(st.sampled_from(["block", "seed", "x"]), VALUES))
def test_every_value_that_can_be_written_reads_back(positional, keyword):
    text = write_call("ring", positional, keyword)
    with mock.patch.object(parsing, "pattern_class", lambda name: lambda *given, **named: (name, given, named)):
        name, given, named = sf.parse(text)
    assert ", ".join(map(repr, positional)) in text  # as Python writes it
    assert name == "ring" and repr(given) == repr(tuple(positional)) and named == keyword


def define_ring():
    @sf.register_pattern("ring")
    @dataclass(frozen=True)
    class Ring(sf.Pattern):
        period: int
        phase: int | None = None

        def token_rule(self, q, kv):
            return (q - kv) % self.period == (self.phase or 0)

    return Ring


def test_registered_class_is_usable_in_text_and_expressions(registry):
    ring = define_ring()
    assert "ring" in sf.list_patterns()
    assert sf.parse("causal & ring(4)") == sf.causal() & ring(4) and (sf.causal() & ring(4)).to_spec() == "causal & ring(4)"
    assert ring(4, phase=1).to_spec() == "ring(4, phase=1)" and sf.parse("ring(4, phase=1)") == ring(4, 1)
    i = np.arange(100)
    expected = ((i[:, None] - i) % 4 == 0) & (i[:, None] >= i)
    np.testing.assert_array_equal(sf.compile_mask("causal & ring(4)", 100, block_size=16).to_dense().numpy(), expected)


def test_a_field_called_name_is_a_field_like_any_other(registry):
    @sf.register_pattern("labelled")
    @dataclass(frozen=True)
    class Labelled(sf.Pattern):
        name: str = "all"
        period: int = 3

        def token_rule(self, q, kv):
            return (q - kv) % self.period == 0

    one = Labelled("causal", 5)
    assert one.to_spec() == "labelled(name='causal', period=5)" and sf.parse(one.to_spec()) == one
    assert sf.compile_mask(one, 40).kept_keys(39).nonzero().flatten().tolist() == list(range(4, 40, 5))


def test_a_class_that_derives_from_a_registered_one_does_not_go_by_its_name(registry):
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


def test_name_that_is_taken_is_refused_naming_both_owners(registry):
    first = define_ring()
    with pytest.raises(ValueError) as error:
        define_ring()
    assert str(error.value).count(f"{first.__module__}.{first.__qualname__}") == 2 and "another name" in str(error.value)
    with pytest.raises(ValueError, match=r"test_spec.*already registered by sparse_flash\.patterns\.local\.Local"):
        sf.register_pattern("local")(first)
    assert registry["ring"] is first and sf.local is registry_module.pattern_class("local")


def test_class_of_a_notebook_may_be_defined_again(registry):
    def define():
        cls = dataclass(frozen=True)(type("Cell", (sf.Pattern,), {"__module__": "__main__", "__qualname__": "Cell"}))
        return sf.register_pattern("cell")(cls)

    define()
    again = define()
    assert registry_module.pattern_class("cell") is again


def test_only_frozen_dataclasses_of_patterns_with_identifier_names_can_be_registered(registry):
    class Bare(sf.Pattern):
        pass

    @dataclass
    class Thawed(sf.Pattern):
        n: int

    @dataclass(frozen=True)
    class Unregistered(sf.Pattern):
        n: int

    for cls in (Bare, Thawed):
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
    with pytest.raises(ValueError, match="Unregistered has no spec text: register it"):
        Unregistered(3).to_spec()


class Step(IntEnum):
    TWO = 2


@pytest.mark.parametrize("far", [None, 3, 0.5, np.float64(0.5), np.str_("a"), Step.TWO, (Step.TWO, None)], ids=repr)
@pytest.mark.parametrize("near", [None, 3, np.float64(0.5)], ids=repr)
def test_text_says_every_field_that_differs_from_its_default_in_literals(near, far, registry):
    @sf.register_pattern("optional")
    @dataclass(frozen=True)
    class Optional(sf.Pattern):
        near: object = 3
        far: object = None

    pattern = Optional(near, far)
    assert sf.parse(pattern.to_spec()) == pattern


def test_patterns_whose_fields_are_equal_numbers_of_other_kinds_are_others(registry):
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
def test_patterns_that_compare_no_fields_are_equal_to_themselves_alone(decorated):
    @decorated
    class Table(sf.Pattern):
        kept: object = field(default_factory=lambda: np.eye(9, dtype=bool))

        def token_rule(self, q, kv):
            return q == kv

    one = Table()
    assert one == one and one != Table()
    assert sf.compile_mask(one, 9).equal(sf.compile_mask("local(1)", 9))


@pytest.mark.parametrize("far, got", [([1], "list"), (np.arange(2), "ndarray"), (([1],), "tuple"), ({1: 2}, "dict")])
def test_field_that_cannot_be_hashed_is_named_with_its_pattern_and_the_way_out(far, got, registry):
    @dataclass(frozen=True)
    class Ring(sf.Pattern):
        seen: list = field(default_factory=list, compare=False)
        far: object = None

    assert hash(Ring(far=(1,))) == hash(Ring([3], (1,)))
    with pytest.raises(TypeError, match=rf"Ring: far must be hashable, .*; got {got}; .* tuple"):
        Ring(far=far)
    ring = sf.register_pattern("ring")(Ring)
    with pytest.raises(TypeError, match=r"^ring: far must"):
        ring(far=far)


@dataclass(frozen=True)
class Offered(sf.Pattern):
    """A module as another package would provide it."""

    n: int = 1

    def token_rule(self, q, kv):
        return kv < self.n


@pytest.fixture
def installed(registry, monkeypatch):
    """Simulates packages that provide patterns: the group is read again, with the test's entry points."""
    monkeypatch.setattr(Offered, "name", None)

    def install(*entries):
        points = [metadata.EntryPoint(name, value, "sparse_flash.patterns") for name, value in entries]
        monkeypatch.setattr(registry_module, "_entry_points_read", False)
        monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == "sparse_flash.patterns" else [])

    return install


def test_patterns_of_installed_packages_are_found_at_the_first_look(installed):
    installed(("offered", f"{__name__}:Offered"))
    assert sf.parse("offered(3) & causal") == Offered(3) & sf.causal()
    assert "offered" in sf.list_patterns() and Offered(3).to_spec() == "offered(n=3)"


def test_broken_plug_in_is_named_and_does_not_take_the_others_away(installed):
    entries = {"broken": "no_such_module:Pattern", "ordered": "collections:OrderedDict"}
    installed(*entries.items(), ("local", f"{__name__}:Offered"), ("offered", f"{__name__}:Offered"))
    with pytest.warns(UserWarning) as warned:
        names = sf.list_patterns()
    messages = [str(w.message) for w in warned]
    assert any("'broken' (no_such_module:Pattern)" in m and "No module named" in m for m in messages)
    assert any("'ordered'" in m and "must decorate a subclass of sparse_flash.Pattern" in m for m in messages)
    assert any("'local'" in m and "already registered by sparse_flash.patterns.local.Local" in m for m in messages)
    assert "offered" in names and "broken" not in names and sf.parse("local(3)") == sf.local(3)
