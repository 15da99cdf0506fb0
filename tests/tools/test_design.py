"""``design``: its masks against the dense masks of their patterns, token by token."""

import importlib
import re
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash.masks import memory, registry
from sparse_flash.masks.costs import Counts
from sparse_flash.masks.fields import Positive
from sparse_flash.masks.rules import UnitPattern

module = importlib.import_module("sparse_flash.tools.design")  # the name in the package is the function
LENGTH, BLOCK = 250, 16  # 16 units, the last cut off


@pytest.fixture
def whole_blocks(monkeypatch):
    """Units are blocks, as in long sequences."""
    monkeypatch.setattr(module, "MOST_UNITS", 64)


def kept_by_head(pattern, tokens=LENGTH):
    position = np.arange(tokens)
    return [one.token_rule(position[:, None], position) for one in getattr(pattern, "patterns", (pattern,))]


def received(found, layers, tokens=LENGTH):
    """After each of so many layers, which tokens have received from which: (tokens, tokens) bool, row by row."""
    reached, after = np.eye(tokens, dtype=bool), []
    for layer in range(layers):
        seen = np.logical_or.reduce(kept_by_head(found.patterns[layer % len(found.patterns)], tokens))
        reached = reached | ((seen.astype(np.float32) @ reached.astype(np.float32)) > 0)
        after.append(reached)
    return after


arguments = st.fixed_dictionaries(
    {
        "budget": st.floats(0.3, 0.9).map(lambda share: round(share, 2)),
        "heads": st.sampled_from([None, 1, 3, 4]),
        "layers": st.sampled_from([None, 2, 5]),
        "keep": st.sampled_from([None, "local(20)", "sinks(16)", "local(5) | sinks(3)"]),
        "causal": st.booleans(),
        "count": st.integers(1, 6),
    }
)


@pytest.mark.parametrize("most_units", [1024, 64], ids=["tokens", "blocks"])
@given(arguments)
@settings(max_examples=5)
def test_every_design_is_within_its_budget_keeps_what_it_must_and_reaches_what_it_says(most_units, drawn):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_UNITS", most_units)
        found = sf.design(LENGTH, block_size=BLOCK, **drawn)
    assert 1 <= len(found) <= drawn["count"]
    allowed = np.tri(LENGTH, dtype=bool) if drawn["causal"] else np.ones((LENGTH, LENGTH), bool)
    keep = kept_by_head(sf.parse(drawn["keep"]))[0] & allowed if drawn["keep"] else np.zeros_like(allowed)
    for one in found:
        heads = [kept_by_head(pattern) for pattern in one.patterns]
        kept = np.mean([np.mean([head.sum() for head in layer]) for layer in heads])
        assert one.kept_pairs == pytest.approx(kept) and one.density == pytest.approx(kept / allowed.sum())
        assert one.density <= drawn["budget"]
        assert all(not (keep & ~head).any() and not (head & ~allowed).any() for layer in heads for head in layer)
        assert len(one.patterns) in (1, drawn["layers"]) and one.unit == (1 if most_units > LENGTH else BLOCK)
        assert [tuple(mask.mask_index.shape)[1] in (1, drawn["heads"]) for mask in one.masks] == [True] * len(one.layers)
        for share, reached in zip(one.reach, received(one, len(one.reach)), strict=True):
            most = (reached & allowed).sum() / allowed.sum()
            assert share == pytest.approx(most) if one.unit == 1 else share <= most + 1e-9
        if one.connected_in:
            assert received(one, one.connected_in)[-1][allowed].all()
    order = [(one.connected_in or 65, 0 if one.connected_in else 1 - one.reach[-1], one.density) for one in found]
    assert order == sorted(order)


def test_a_dense_layer_goes_first_if_the_budget_has_room_for_it():
    """The arm "mixed" of experiments/recall: of the masks at this budget, the one that answers what is far."""
    first, *others = sf.design(16384, "30%", layers=4, keep="local(256)", count=2)
    assert first.layers == ("causal", *["causal & local(256)"] * 3) and first.connected_in == 1
    assert first.density == pytest.approx(0.273, abs=5e-4)
    assert all(one.connected_in > 1 for one in others)


@dataclass(frozen=True)
class Segments(UnitPattern):
    """Segments whose first unit everyone sees, which ``fixed`` has at strides of powers of two only."""

    stride: Positive
    block: Positive = 16

    @classmethod
    def design_ranges(cls, q_len, block):
        return {"stride": (3, 5, 6, 7, 9), "block": (block,)}

    def unit_rule(self, i, j):
        return (i // self.stride == j // self.stride) | ((j + 1) % self.stride == 0)


@pytest.fixture
def planted(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    sf.register_pattern("segments")(Segments)
    yield
    memory.clear_memories()


def test_a_pattern_of_the_user_is_found_at_its_best_value(planted, whole_blocks):
    length = 36 * BLOCK
    best, *_ = sf.design(length, "40%", connected_in=2, block_size=BLOCK)
    costs = {stride: sf.compile_mask(sf.causal() & Segments(stride, BLOCK), length).density for stride in (3, 5, 6, 7, 9)}
    assert best.pattern == sf.causal() & Segments(min(costs, key=costs.get), BLOCK)


@dataclass(frozen=True)
class Halves(sf.Pattern):
    """Half of what connects all in two layers, and every other key of the first 64, so that blocks are partial."""

    side: int

    @classmethod
    def design_ranges(cls, q_len, block):
        return {"side": (0, 1)}

    def token_rule(self, q, kv):
        segment, summary = q // 64 == kv // 64, kv // BLOCK % 4 == 3
        return (summary if self.side else segment) | ((kv < 64) & (kv % 2 == self.side))


def test_a_union_whose_parts_share_blocks_is_counted_by_its_pairs(monkeypatch, whole_blocks):
    """Before it is compiled, a block that both parts keep in part counts as one of them does."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    sf.register_pattern("halves")(Halves)
    both = sf.causal() & (Halves(0) | Halves(1))
    kept, keys = (sf.compile_mask(pattern, LENGTH, block_size=BLOCK).density for pattern in (both, sf.causal()))
    found = sf.design(LENGTH, kept / keys + 1e-9, block_size=BLOCK, count=50)
    assert both in [one.pattern for one in found]
    found = sf.design(LENGTH, kept / keys - 1e-3, block_size=BLOCK, count=50)
    assert found and all(one.density <= kept / keys - 1e-3 for one in found)
    memory.clear_memories()


def test_designs_do_not_depend_on_the_order_of_registration(monkeypatch, whole_blocks):
    arguments = {"heads": 4, "keep": "local(32)", "block_size": BLOCK}
    found = [one.layers for one in sf.design(LENGTH, 0.4, **arguments)]
    monkeypatch.setattr(registry, "_registry", dict(reversed(registry._registry.items())))
    assert [one.layers for one in sf.design(LENGTH, 0.4, **arguments)] == found


@pytest.mark.parametrize("most_units", [1024, 64], ids=["tokens", "blocks"])
def test_a_budget_of_time_is_kept_by_the_tables_of_the_designs(most_units, monkeypatch):
    monkeypatch.setattr(module, "MOST_UNITS", most_units)
    tokens, blocks = 960, {"block_size": 64}
    found = sf.design(tokens, "60%", of="time", heads=4, layers=3, count=6, **blocks)
    assert len(found) > 2
    for one in found:
        dense = Counts.dense(tokens, tokens, 0).both_passes_us
        shares = [Counts.of_mask(mask).both_passes_us / dense for mask in one.masks]
        assert one.time == pytest.approx(np.mean(shares), rel=1e-3) and one.time <= 0.6
    order = [(one.connected_in or 65, 0 if one.connected_in else 1 - one.reach[-1], one.time) for one in found]
    assert order == sorted(order) and any(one.density > 0.6 for one in found) != all(one.density <= one.time for one in found)


def test_no_design_repeats_the_patterns_of_a_better_one(whole_blocks):
    found = sf.design(LENGTH, 0.6, keep="local(16)", block_size=BLOCK, count=20)
    names = [set(re.findall(r"(\w+)\(", one.summary.replace("local(16)", ""))) for one in found]
    assert len(found) > 2
    assert not any(names[better] <= names[worse] for worse in range(len(found)) for better in range(worse))


def test_without_a_number_of_layers_the_best_reach_comes_even_if_nothing_connects(whole_blocks):
    length = 60 * BLOCK
    found = sf.design(length, "3.5%", block_size=BLOCK)
    assert found and not any(one.connected_in for one in found)
    reach = [one.reach[-1] for one in found]
    assert reach == sorted(reach, reverse=True) and "not connected" in str(found[0])


def test_a_budget_below_every_mask_names_the_least_that_is_enough(whole_blocks):
    for keep, said in (("local(40)", "what keep=local(40) takes"), (None, "the least that the search knows")):
        with pytest.raises(ValueError, match=re.escape(said)) as raised:
            sf.design(LENGTH, 1e-4, keep=keep, block_size=BLOCK)
        least = re.search(r"budget must be at least (\S+%)", str(raised.value))[1]
        assert sf.design(LENGTH, least, keep=keep, block_size=BLOCK)
        with pytest.raises(ValueError, match="budget must be at least"):
            sf.design(LENGTH, float(least[:-1]) / 100 - 2e-6, keep=keep, block_size=BLOCK)


def test_too_few_layers_name_the_fewest_and_the_budget_that_allows_them(whole_blocks):
    length = 60 * BLOCK
    arguments = {"keep": "local(32)", "block_size": BLOCK}
    with pytest.raises(ValueError, match=r"connected_in must be at least \d") as raised:
        sf.design(length, "20%", connected_in=1, **arguments)
    fewest = int(re.search(r"at least (\d+)", str(raised.value))[1])
    budget = re.search(r"budget='(\S+%)'", str(raised.value))[1]
    assert sf.design(length, "20%", connected_in=fewest, **arguments)[0].connected_in == fewest > 1
    assert sf.design(length, budget, connected_in=1, **arguments)[0].connected_in == 1
    with pytest.raises(ValueError, match=r"budget must be more than 3.4% .*the best that the search knows reaches") as raised:
        sf.design(length, "3.4%", connected_in=2, **arguments | {"keep": "local(16)"})
    budget = re.search(r"budget='(\S+%)'", str(raised.value))[1]
    assert sf.design(length, budget, connected_in=2, **arguments | {"keep": "local(16)"})


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"of": "blocks"}, "of must be 'pairs' or 'time'; got 'blocks'"),
        ({"budget": "ten"}, "budget must be a share, 0 < budget <= 1, or text such as '10%'; got 'ten'"),
        ({"budget": "110%"}, "got '110%'"),
        ({"budget": True}, "got True"),
        ({"q_len": 0}, "q_len must be an integer of at least 1; got 0"),
        ({"heads": 0}, "heads must be an integer of at least 1; got 0"),
        ({"connected_in": 5, "layers": 4}, "connected_in must be at most layers=4; got 5"),
        ({"connected_in": 65}, "connected_in must be at most 64"),
        ({"q_len": 1 << 18}, "q_len must be at most 131,072 tokens in blocks of 128; got 262,144; pass block_size=256"),
        ({"keep": "per_head([causal, full])"}, "the pattern must be that of one head"),
        ({"keep": "lokal(4)"}, "did you mean 'local'"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        sf.design(**({"q_len": LENGTH, "budget": 0.5} | arguments))


def test_layers_that_differ_have_no_pattern_of_all(whole_blocks):
    first = sf.design(LENGTH, "70%", layers=2, keep="local(16)", block_size=BLOCK)[0]
    assert len(first.patterns) == 2 and first.summary.startswith("1 layer of causal, 1 layer of ")
    with pytest.raises(ValueError, match=r"differs between layers; take \.patterns"):
        first.pattern  # noqa: B018


def test_a_search_at_65536_tokens_takes_seconds():
    begin = time.process_time()
    found = sf.design(65536, "10%", connected_in=12, heads=8, keep="local(512)")
    assert len(found) == 5 and time.process_time() - begin < 40  # about 6 s of one core
    assert all(one.connected_in <= 12 and one.density <= 0.1 for one in found)
