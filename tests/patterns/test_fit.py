"""A pattern that names tokens fits the sequence, or compiling says so: no row is left empty without a word."""

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_flash as sf

GRID = sf.neighborhood((8, 8), 3)
NAMED = [("documents((0, 100, 200))", 300, 200), ("neighborhood((8, 8), 3)", 300, 64), ("from_blocks('10/11', block=64)", 130, 128)]
NAMED += [("global_tokens(64) | neighborhood((8, 8), 3)", 128, 64), ("local(5) & ~(sinks(3) | neighborhood((8, 8), 3))", 65, 64)]


@pytest.mark.parametrize("mask, tokens, named", NAMED)
def test_a_pattern_that_names_fewer_tokens_than_there_are_is_an_error_with_the_way_out(mask, tokens, named):
    with pytest.raises(ValueError, match=rf"must name the {tokens} tokens of the sequence; it names {named}; name all"):
        sf.compile_mask(mask, tokens)
    sf.compile_mask(sf.parse(mask).map_leaves(strategies.of_any_length), tokens)


@pytest.mark.parametrize(
    "mask, tokens", [("documents((0, 100, 200))", 150), ("neighborhood((8, 8), 3)", 63), ("from_blocks('10/11', block=64)", 64)]
)
def test_a_pattern_that_names_more_tokens_than_there_are_is_an_error_unless_they_are_yet_to_come(mask, tokens):
    with pytest.raises(ValueError, match=rf"must name the {tokens} tokens of the sequence; it names .*shifted\(pattern, n\)"):
        sf.compile_mask(mask, tokens)
    whole = sf.compile_mask(mask, sf.parse(mask).named_tokens()[1]).to_dense()
    torch.testing.assert_close(sf.compile_mask(mask, 1, tokens).to_dense(), whole[tokens - 1 : tokens, :tokens])
    begun = sf.compile_mask(sf.shifted(mask, 0), tokens)
    torch.testing.assert_close(begun.to_dense(), whole[:tokens, :tokens])


def test_a_block_map_may_name_the_whole_of_a_unit_that_the_sequence_begins():
    for tokens in (129, 192):
        assert sf.compile_mask("from_blocks('100/110/111', block=64)", tokens).kept_pairs()[0] > 0
    sf.compile_mask("from_blocks('110/111', block=64)", 128, 192)


def packed(mask, n):
    return sf.attention_varlen(*[torch.zeros(n, 1, 8)] * 3, torch.tensor([0, n]), mask=mask)


def decoded(mask, *lengths):
    q, k = (torch.randn(len(lengths), 1, tokens, 8) for tokens in (1, max(lengths)))
    return sf.attention_decode(q, k, k, mask, kv_lens=torch.tensor(lengths))


@settings(max_examples=60)
@given(pattern=strategies.expressions, before=st.integers(0, 100), tokens=st.integers(1, 200), size=strategies.block_sizes)
def test_shifted_tokens_see_only_the_pattern(pattern, before, tokens, size):
    mask = sf.compile_mask(sf.shifted(pattern, before), before + tokens, block_size=size).to_dense()
    torch.testing.assert_close(mask[before:, before:], sf.compile_mask(pattern, tokens, block_size=size).to_dense())
    assert not mask[:before].any() and not mask[:, :before].any()


@settings(max_examples=40)
@given(inner=strategies.by_name["last_tokens"], before=st.integers(0, 100), tokens=st.integers(1, 200), few=st.integers(1, 200))
def test_last_tokens_are_those_of_any_length_also_shifted_and_for_the_last_queries(inner, before, tokens, few):
    n, i = before + tokens, np.arange(before + tokens)
    late = i >= n - inner.tokens
    kept = (late[:, None] | late) & (i[:, None] >= before) & (i >= before)
    mask = sf.shifted(~~inner, before)
    np.testing.assert_array_equal(sf.compile_mask(mask, n).to_dense().numpy(), kept)
    few = min(few, n)
    np.testing.assert_array_equal(sf.compile_mask(mask, few, n).to_dense().numpy(), kept[n - few :])


@pytest.mark.parametrize("mask", ["documents((0, 50, 100))", "causal & per_head([documents((0, 50, 100))])"])
def test_a_sequence_that_grows_past_the_tokens_that_a_pattern_names_is_an_error(mask):
    with pytest.raises(ValueError, match=r"must name the 150 tokens of the sequence; it names 100; name all"):
        decoded(mask, 70, 150)
    assert decoded(mask, 100, 1, 70, 0)[0].ne(0).all()


def test_last_tokens_ignores_padding_on_the_left():
    q = torch.randn(1, 1, 40, 8)
    first = torch.tensor([10])
    out = sf.attention(q, q, q, "local(3) | last_tokens(9)", q_starts=first, kv_starts=first)
    torch.testing.assert_close(out[:, :, 10:], sf.attention(*[q[:, :, 10:]] * 3, "local(3) | last_tokens(9)"))
