"""A pattern for each head, or each sequence of a batch, goes wherever a pattern goes, and means what a mask for each means."""

from dataclasses import replace
from itertools import pairwise

import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash.parallel.planning import to_square_mask

LOCAL = sf.causal() & sf.local(20)
HEADS = sf.per_head([LOCAL, sf.causal(), LOCAL, "full"])
BATCH = sf.per_batch([LOCAL, sf.causal(), LOCAL, "full"])
both = pytest.mark.parametrize("patterns", [HEADS, BATCH], ids=["heads", "sequences"])


def joined(name, masks, *lengths):
    """The table of a mask for each head, or for each sequence."""
    mask = sf.BlockMask.per_head(masks, *lengths)
    return mask if name == "per_head" else replace(mask, mask_index=mask.mask_index.T.contiguous())


def inputs(tokens=70, heads=4, kv_heads=2, batch=4, **options):
    torch.manual_seed(0)
    return [torch.randn(batch, h, tokens, 16, **options) for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("name", ["per_head", "per_batch"])
@settings(max_examples=8)
@given(
    heads=st.lists(strategies.expressions, min_size=1, max_size=4),
    other=strategies.expressions,
    lengths=strategies.lengths,
    size=strategies.block_sizes,
)
def test_patterns_by_head_read_back_compile_and_combine_head_by_head(name, heads, other, lengths, size):
    listed = getattr(sf, name)
    mine = listed(heads)
    assert sf.parse(mine.to_spec()) == mine == listed(tuple(heads)) and hash(mine) == hash(sf.parse(mine.to_spec()))
    for by_head, each in (
        (mine, heads),
        (~mine, [~one for one in heads]),
        (mine & other, [one & other for one in heads]),
        (other | mine, [one | other for one in heads]),
        (mine & ~mine, [one & ~one for one in heads]),
        (sf.shifted(mine, 7), [sf.shifted(one, 7) for one in heads]),
    ):
        wanted = joined(name, each, *lengths, size)
        assert sf.compile_mask(by_head, *lengths, size).equal(wanted)
        assert wanted.mask_index.shape == ((1, len(heads)) if name == "per_head" else (len(heads), 1))
        assert sf.parse(by_head.to_spec()) == by_head


@both
def test_decoding_and_a_layer_follow_each_head_or_sequence(patterns):
    mask = patterns & "causal"
    q, k, v = inputs(150)
    whole, lens = sf.attention(q, k, v, mask), torch.full((4,), 150, dtype=torch.int32)

    def step(q, **options):
        return sf.attention_decode(q, k, v, mask, **options)

    for call, options in ((step, {}), (step, {"kv_lens": lens}), (torch.compile(step, backend="aot_eager"), {"kv_lens": lens})):
        torch.testing.assert_close(call(q[:, :, -2:], **options), whole[:, :, -2:])
    layer, x = sf.SparseAttention(64, 4, mask=mask.to_spec()).eval(), torch.randn(4, 40, 64)
    with torch.no_grad():
        whole, cache = layer(x), layer.new_cache(4, 40)
        steps = [layer(part, cache) for part in (x[:, :38], *x[:, 38:].split(1, 1))]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    assert str(mask) in repr(layer) and bytes(layer.state_dict()["mask_spec"].tolist()).decode() == str(mask)


@both
def test_a_sequence_over_ranks_is_planned_by_head(patterns):
    mask = patterns & sf.documents([0, 100, 300])
    whole = joined(patterns.name, [one & sf.documents([0, 100, 300]) for one in patterns.patterns], 300)
    assert to_square_mask(mask, 300, 128).equal(whole) and to_square_mask(mask.to_spec(), 300, 128).equal(whole)


@torch.no_grad()
def test_models_of_transformers_follow_each_sequence_in_padded_and_packed_batches():
    transformers = pytest.importorskip("transformers")
    from sparse_flash.integrations.transformers import use_sparse_flash

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
    config = transformers.MistralConfig(**sizes, num_key_value_heads=2, sliding_window=15)
    model, words = transformers.MistralForCausalLM(config).eval(), torch.randint(0, 97, (4, 40))
    mask = sf.per_batch([f"causal & (local(5) | sinks({n}))" for n in (1, 5, 9, 1)])
    starts, firsts = [0, 3, 9, 20], [10, 25, 10, 30]  # of a padded row's text, and of a packed row's second text
    padded = {"attention_mask": (torch.arange(40) >= torch.tensor(starts)[:, None]).long()}
    packed = {"position_ids": torch.stack([torch.cat([torch.arange(first), torch.arange(40 - first)]) for first in firsts])}
    use_sparse_flash(model, mask)
    results = [model(words, **options).logits for options in (padded, packed)]
    for wrong, said in ((padded, "the mask's batch must be q's, 3.*; got 4"), (packed, "batch's 3 sequences; got 4 patterns")):
        with pytest.raises(ValueError, match=said):
            model(words[1:], **{name: one[1:] for name, one in wrong.items()})
    for row, pattern in enumerate(mask.patterns):
        use_sparse_flash(model, pattern)
        for found, begins in zip(results, ([starts[row]], [0, firsts[row]]), strict=True):
            texts = [model(words[row : row + 1, slice(*pair)]).logits[0] for pair in pairwise([*begins, 40])]
            torch.testing.assert_close(found[row, begins[0] :], torch.cat(texts), rtol=1e-4, atol=1e-4)
