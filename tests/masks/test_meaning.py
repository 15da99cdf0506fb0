"""Digests follow what masks keep, not how they are written."""

from dataclasses import dataclass

import numpy as np
import pytest
import strategies
from changed import other_sinks
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash.masks.meaning import digest_of, why_changed
from sparse_flash.masks.spec import SpecError


@dataclass(frozen=True)
class OneMore(sf.Pattern):
    """A pattern that keeps other pairs at one distance, or of one key."""

    pattern: sf.Pattern
    position: int
    is_distance: bool

    def token_rule(self, q, kv):
        return self.pattern.token_rule(q.copy(), kv.copy()) ^ ((q - kv if self.is_distance else kv) == self.position)


@settings(max_examples=30)
@given(a=strategies.expressions, b=strategies.expressions)
def test_expressions_of_one_meaning_have_one_digest(a, b):
    assert digest_of(a & b) == digest_of(~(~a | ~b)) == digest_of((a & b).to_spec())
    assert digest_of(sf.per_head([a, b])) == digest_of(sf.per_head([a & a, ~~b]))


@settings(max_examples=60)
@given(pattern=strategies.leaves, position=st.integers(0, 2000) | st.sampled_from([2**k for k in range(11, 17)]), data=st.data())
def test_one_distance_or_key_that_is_kept_or_not_changes_the_digest(pattern, position, data):
    is_distance = data.draw(st.booleans())
    sign = data.draw(st.sampled_from([1, -1])) if is_distance and position <= 300 else 1
    assert digest_of(OneMore(pattern, sign * position, is_distance)) != digest_of(pattern) is not None


@pytest.mark.parametrize("template", ["local({})", "last_tokens({})", "sinks({})", "window(3, {})", "block_diagonal({})"])
def test_a_number_that_is_larger_by_one_changes_the_digest(template):
    digests = [digest_of(template.format(number)) for number in (*range(1, 20), *range(1020, 1030))]
    assert len(set(digests)) == len(digests)


def test_a_pattern_that_names_its_tokens_is_sampled_among_them():
    layouts = [sf.video_layout(33, 62, 66, tile=(4, 4, 8), prefix=prefix) for prefix in (0, 512)]
    digests = {digest_of(sf.tile_window(layout, (window, 3, 3))) for layout in layouts for window in (3, 4)}
    assert len(digests) == 4
    assert len({digest_of(sf.documents([0, first, 9])) for first in range(9)}) == 9


def test_a_chooser_counts_by_its_text_and_the_patterns_beside_it_by_their_pairs():
    specs = [f"causal & (sampled({queries}, keep=3) | sinks({tokens}))" for queries in (4, 8) for tokens in (4, 5)]
    digests = [digest_of(spec) for spec in specs]
    assert len(set(digests)) == 4 and None not in digests
    assert digest_of("causal & (sampled(4, keep=3) | sinks(4))") == digest_of(
        "causal & (sampled(4, keep=3) | (sinks(5) & sinks(4)))"
    )
    with other_sinks():
        assert why_changed(specs[0], digests[0]) and digest_of(specs[0]) == digests[1]


def test_a_rule_that_fails_on_the_sample_has_no_digest():
    known = np.arange(50) % 3 == 0

    @dataclass(frozen=True)
    class Looked(sf.Pattern):
        def token_rule(self, q, kv):
            return known[kv]

    assert digest_of(sf.causal() & Looked()) is None
    with pytest.raises(SpecError, match="unknown pattern 'windmill'"):
        digest_of("causal & windmill(3)")


def test_a_changed_meaning_is_said_with_both_digests_and_the_way_out():
    spec = "causal & sinks(4)"
    saved = digest_of(spec)
    assert why_changed(spec, saved) is None
    with other_sinks():
        message = why_changed(spec, saved)
        assert message.startswith("the mask 'causal & sinks(4)' means something else than when it was saved: its digest is ")
        assert f"{digest_of(spec)} here, with sparse_flash {sf.__version__}, and {saved} there; install the releases" in message
