"""Masks of FlexAttention: the pairs that they keep, and what flex_attention makes of them."""

import gc
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask, noop_mask, or_masks

import sparse_flash as sf
from sparse_flash.masks import block_mask

# Mask functions as people write them: the kinds in attention-gym, and some more.
TOKENS, BATCH, HEADS = 300, 2, 3
_index = torch.arange(TOKENS)
_starts = torch.tensor([0, 41, 42, 130, 131, 260])
_document = torch.bucketize(_index, _starts[1:], right=True)
_lengths = torch.tensor([180, 271])
_is_image = (_index % 60 >= 10) & (_index % 60 < 25)
_image = torch.cumsum((_index % 60 == 10).int(), 0)


def causal(b, h, q, kv):
    return q >= kv


def document(b, h, q, kv):
    return _document[q] == _document[kv]


def prefix_in_each_document(b, h, q, kv):
    of_q, of_kv = q - _starts[_document[q]], kv - _starts[_document[kv]]
    return (_document[q] == _document[kv]) & ((of_kv < 9) | (of_q >= of_kv))


def dilated_window(b, h, q, kv):
    return ((q - kv).abs() <= 60) & ((q - kv) % 4 == 0)


def images_before_text(b, h, q, kv):
    within = _is_image[q] & _is_image[kv] & (_image[q] == _image[kv])
    last_image = ~_is_image[q] & _is_image[kv] & (_image[q] == _image[kv])
    return within | last_image | (~_is_image[q] & ~_is_image[kv] & (q >= kv))


def padded_batch(b, h, q, kv):
    return (q < _lengths[b]) & (kv < _lengths[b]) & (q >= kv)


def by_batch_and_head(b, h, q, kv):
    return (q >= kv) & (q - kv < 30 * (h + 1) + 100 * b)


def nobody_listens(b, h, q, kv):
    return (kv > q) & (kv < q)


RULES = causal, document, prefix_in_each_document, dilated_window, images_before_text
RULES += padded_batch, by_batch_and_head, nobody_listens
MODS = {rule.__name__: rule for rule in RULES} | {
    "and_masks": and_masks(causal, document, dilated_window),
    "or_masks": or_masks(dilated_window, and_masks(causal, document)),
}


def window(b, h, q, kv):
    return (q >= kv) & (q - kv < 70)


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("lengths", [(TOKENS, TOKENS), (256, 130), (130, TOKENS), (1, TOKENS)], ids=str)
@pytest.mark.parametrize("name", MODS)
def test_a_mask_of_flex_attention_keeps_the_pairs_of_the_rule_which_counts_queries_from_0(name, lengths, size):
    rule, shape = MODS[name], (BATCH, HEADS, *lengths)
    kept = create_mask(rule, *shape, device="cpu")
    mask = sf.BlockMask.from_flex(create_block_mask(rule, *shape, device="cpu", BLOCK_SIZE=size))
    assert torch.equal(mask.to_dense(), kept)
    assert mask.equal(sf.BlockMask.from_dense(kept, size))


def of_blocks(kept, lengths=None, size=64, lists="full"):
    """A FlexAttention mask without a token rule, as Kandinsky 5 makes them. lists: which list holds the blocks of a map."""
    count, index = kept.sum(-1, dtype=torch.int32), kept.byte().argsort(dim=-1, descending=True).int()
    if lists == "partial":
        return FlexMask.from_kv_blocks(count, index, BLOCK_SIZE=size, seq_lengths=lengths)
    first = (count + 1) // 2 if lists == "both" else torch.zeros_like(count)
    backwards = (count[..., None] - 1 - torch.arange(index.shape[-1])).clamp(min=0)  # from the last kept block of each row
    return FlexMask.from_kv_blocks(first, index, count - first, index.gather(-1, backwards), BLOCK_SIZE=size, seq_lengths=lengths)


SIDES = [(16, 16), (64, 64), (256, 256)]


@pytest.mark.parametrize("sides", SIDES, ids=str)
@pytest.mark.parametrize("lists", ["full", "partial", "both"])
@pytest.mark.parametrize("rule", [None, noop_mask])
def test_a_mask_without_a_rule_keeps_the_blocks_that_it_lists(rule, lists, sides):
    kept = torch.rand(2, 3, 4, 5) < 0.5
    lengths = tuple(n * side - cut for n, side, cut in zip((4, 5), sides, (0, 13), strict=True))
    flex = of_blocks(kept, lengths, sides, lists)
    flex.mask_mod = rule
    expected = kept.repeat_interleave(sides[0], 2).repeat_interleave(sides[1], 3)[:, :, : lengths[0], : lengths[1]]
    assert torch.equal(sf.BlockMask.from_flex(flex).to_dense(), expected)


def dense_attention(q, kept, size=64):
    kept = kept.repeat_interleave(size, -2).repeat_interleave(size, -1)[..., : q.shape[2], : q.shape[2]]
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, kept).nan_to_num()


@pytest.mark.parametrize("way", ["attention", "from_flex"])
def test_a_mask_without_a_rule_may_be_new_in_each_step_in_and_outside_of_one_compiled_graph(way):
    torch._dynamo.reset()
    read = sf.BlockMask.from_flex if way == "from_flex" else lambda mask: mask

    def attend(q, kept):
        return sf.attention(q, q, q, read(of_blocks(kept, (300, 300))))

    compiled, q = torch.compile(attend, backend="aot_eager", fullgraph=True), torch.randn(2, 3, 300, 16)
    known = len(block_mask._flex_cache)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            kept = torch.rand(2, 3, 5, 5) < 0.5
            for call in (attend, compiled):
                torch.testing.assert_close(call(q, kept), dense_attention(q, kept), atol=1e-5, rtol=1e-4)
    assert len(block_mask._flex_cache) == known


def test_a_mask_without_a_rule_is_converted_anew_when_its_lists_change():
    q, kept = torch.randn(1, 1, 300, 16), torch.rand(1, 1, 5, 5) < 0.5
    flex, other = of_blocks(kept, (300, 300)), of_blocks(~kept, (300, 300))
    made = block_mask.from_flex_cached(flex)
    assert block_mask.from_flex_cached(flex) is made
    flex.full_kv_num_blocks.copy_(other.full_kv_num_blocks)
    flex.full_kv_indices.copy_(other.full_kv_indices)
    torch.testing.assert_close(sf.attention(q, q, q, flex), dense_attention(q, ~kept), atol=1e-5, rtol=1e-4)


def of_rule(size, tokens=1024):
    return create_block_mask(causal, None, None, tokens, tokens, device="cpu", BLOCK_SIZE=size)


ALL = torch.ones(1, 1, 3, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    "flex, message",
    [
        (of_rule((128, 64)), r"square blocks; got BLOCK_SIZE=\(128, 64\)"),
        (of_rule(512), "512"),
        (of_blocks(ALL, size=(48, 24)), r"square blocks; got BLOCK_SIZE=\(48, 24\)"),
        (of_blocks(ALL, (192, 128)), "kv_indices must be blocks of keys, 0 to 1; got 2"),
        (of_blocks(ALL, (193, 192)), "kv_indices must have a row for each of 4 blocks"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_way_out(flex, message):
    with pytest.raises(ValueError, match=message):
        sf.BlockMask.from_flex(flex)


@pytest.mark.parametrize("rule, batch, heads", [(window, None, None), (by_batch_and_head, 2, 4)])
def test_a_flex_mask_passed_as_the_mask_is_read_once_until_it_changes_and_goes_with_it(rule, batch, heads):
    q, k, v = torch.randn(2, 4, 300, 16), *torch.randn(2, 2, 2, 300, 16)
    flex = create_block_mask(rule, batch, heads, 300, 300, device="cpu")
    kept = create_mask(rule, 2, 4, 300, 300, device="cpu")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, kept, enable_gqa=True)
    torch.testing.assert_close(sf.attention(q, k, v, flex), expected, atol=1e-5, rtol=1e-4)
    made = block_mask.from_flex_cached(flex)
    torch.testing.assert_close(sf.attention(q, k, v, flex, softcap=1e6), expected, atol=1e-4, rtol=1e-3)
    assert block_mask.from_flex_cached(flex) is made
    flex.mask_mod = causal  # as done to shift a mask for decoding
    assert not torch.allclose(sf.attention(q, k, v, flex), expected, atol=1e-3)
    for count in (flex.kv_num_blocks, flex.full_kv_num_blocks):
        count.zero_()
    assert not sf.attention(q, k, v, flex).any()
    alive = weakref.ref(flex)
    del flex
    gc.collect()
    assert alive() is None


def test_a_flex_mask_goes_wherever_a_mask_does():
    q = torch.randn(1, 2, 256, 16)
    flex = create_block_mask(window, None, None, 256, 256, device="cpu")
    ours = sf.BlockMask.from_flex(flex)
    layer = sf.SparseAttention(32, 2, flex)
    assert layer.mask.equal(ours)
    assert sf.BlockMask.per_head([flex, "causal"]).masks == 2
    torch.testing.assert_close(sf.attention_decode(q[:, :, -2:], q, q, flex), sf.attention(q, q, q, ours)[:, :, -2:])
    assert sf.draw(flex).mask.equal(ours)
    assert sf.BlockMask.from_blocks(torch.ones(2, 2, dtype=torch.bool), 128, within=flex).kept_pairs() == ours.kept_pairs()
    with pytest.raises(TypeError, match="pass the pattern"):
        sf.attention_varlen(*(q[0].transpose(0, 1),) * 3, torch.tensor([0, 256]), mask=flex)


def test_a_flex_mask_that_cannot_be_read_now_is_refused_with_the_way_out(monkeypatch):
    q = torch.randn(1, 2, 256, 16)
    flex = create_block_mask(window, None, None, 256, 256, device="cpu")
    with pytest.raises(Exception, match=r"BlockMask.from_flex\(mask\) outside of the compiled"):
        torch.compile(lambda q: sf.attention(q, q, q, flex), fullgraph=True, backend="eager")(q)
    monkeypatch.setattr(block_mask, "is_recorded", lambda device: True)
    with pytest.raises(ValueError, match="call attention with it once before"):
        sf.attention(q, q, q, flex)
    monkeypatch.undo()
    expected = sf.attention(q, q, q, flex)
    torch.testing.assert_close(torch.compile(lambda q: sf.attention(q, q, q, flex), backend="eager")(q), expected)
    monkeypatch.setattr(block_mask, "is_recorded", lambda device: True)
    torch.testing.assert_close(sf.attention(q, q, q, flex), expected)  # it was already read
