"""A pattern for each head goes wherever a pattern goes, and means what a mask for each head means."""

import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash.parallel.planning import to_square_mask

LOCAL = sf.causal() & sf.local(20)
HEADS = sf.per_head([LOCAL, sf.causal(), LOCAL, "full"])


def inputs(tokens=70, heads=4, kv_heads=2, **options):
    torch.manual_seed(0)
    return (torch.randn(1, h, tokens, 16, **options) for h in (heads, kv_heads, kv_heads))


@settings(max_examples=30)
@given(
    heads=st.lists(strategies.expressions, min_size=1, max_size=4),
    other=strategies.expressions,
    lengths=strategies.lengths,
    size=strategies.block_sizes,
)
def test_patterns_by_head_read_back_compile_and_combine_head_by_head(heads, other, lengths, size):
    mine = sf.per_head(heads)
    assert sf.parse(mine.to_spec()) == mine == sf.per_head(tuple(heads)) and hash(mine) == hash(sf.parse(mine.to_spec()))
    for by_head, each in (
        (mine, heads),
        (~mine, [~one for one in heads]),
        (mine & other, [one & other for one in heads]),
        (other | mine, [one | other for one in heads]),
        (mine & ~mine, [one & ~one for one in heads]),
        (sf.shifted(mine, 7, allow_uncovered=True), [sf.shifted(one, 7, allow_uncovered=True) for one in heads]),
    ):
        wanted = sf.BlockMask.per_head(each, *lengths, size)
        assert sf.compile_mask(by_head, *lengths, size).equal(wanted)
        assert sf.parse(by_head.to_spec()) == by_head


def test_attention_takes_a_pattern_by_head_for_any_length_as_value_and_as_text():
    for tokens in (70, 200):
        q, k, v = inputs(tokens)
        wanted = sf.attention(q, k, v, sf.BlockMask.per_head(HEADS.patterns, tokens))
        for mask in (HEADS, HEADS.to_spec(), "per_head([causal & local(20), causal, local(20) & causal, full])"):
            torch.testing.assert_close(sf.attention(q, k, v, mask), wanted)
            few = sf.attention(q[:, :, -3:], k, v, mask)
            torch.testing.assert_close(few[:, :3], wanted[:, :3, -3:])
    one = sf.per_head(["causal"])
    torch.testing.assert_close(sf.attention(q, k, v, one), sf.attention(q, k, v, "causal"))


@pytest.mark.parametrize("text", [False, True])
def test_compiled_code_takes_a_pattern_by_head_and_refuses_another_number_of_heads(text):
    if not text and torch.__version__ < "2.13":
        pytest.skip("PyTorch before 2.13 traces no Pattern objects")
    mask = HEADS.to_spec() if text else HEADS
    call = torch.compile(lambda q, k, v: sf.attention(q, k, v, mask), backend="aot_eager", fullgraph=True)
    for tokens in (70, 90):
        q, k, v = inputs(tokens, requires_grad=True)
        torch.testing.assert_close(call(q, k, v), sf.attention(q, k, v, HEADS))
    with pytest.raises(Exception, match=r"the mask's heads must be q's, 6, or 1 for a mask of all; got 4"):
        call(*inputs(70, 6))


@pytest.mark.parametrize("call", ["attention", "decode", "decode by text", "layer"])
def test_as_many_patterns_as_query_heads_are_needed(call):
    q, k, v = inputs(70, 6)
    with pytest.raises(ValueError, match=r"the mask's heads must be q's, 6, or 1 for a mask of all; got 4"):
        match call:
            case "attention":
                sf.attention(q, k, v, HEADS)
            case "layer":
                sf.SparseAttention(48, 6, mask=HEADS)(torch.zeros(1, 30, 48))
            case _:
                sf.attention_decode(q[:, :, -1:], k, v, HEADS.to_spec() if "text" in call else HEADS)


def test_decoding_follows_each_head():
    q, k, v = inputs(150)
    whole = sf.attention(q, k, v, HEADS & "causal")
    lens = torch.tensor([150], dtype=torch.int32)
    for options in ({}, {"kv_lens": lens}):
        torch.testing.assert_close(sf.attention_decode(q[:, :, -2:], k, v, HEADS & "causal", **options), whole[:, :, -2:])
    mask = HEADS & "causal"
    step = torch.compile(lambda q, k, v: sf.attention_decode(q, k, v, mask, kv_lens=lens), backend="aot_eager")
    torch.testing.assert_close(step(q[:, :, -2:], k, v), whole[:, :, -2:])


def test_a_layer_follows_each_head_with_and_without_a_cache():
    layer = sf.SparseAttention(64, 4, mask=(HEADS & "causal").to_spec()).eval()
    x = torch.randn(1, 40, 64)
    with torch.no_grad():
        whole, cache = layer(x), layer.new_cache(1, 40)
        steps = [layer(part, cache) for part in (x[:, :30], *x[:, 30:].split(1, 1))]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    assert "per_head" in repr(layer)


@pytest.mark.parametrize(
    "use, said",
    [
        (lambda: sf.per_head([]), r"must be a list of patterns or spec texts, one for each head; got \[\]"),
        (lambda: sf.per_head("causal"), "must be a list of patterns"),
        (
            lambda: sf.per_head([sf.compile_mask("causal", 64)]),
            r"patterns\[0\] .*; got BlockMask; BlockMask\.per_head takes compiled",
        ),
        (lambda: sf.per_head([HEADS]), r"patterns\[0\] must be a Pattern of one head"),
        (lambda: HEADS & sf.per_head(["causal", "full"]), r"as many heads to combine; got \[2, 4\]"),
        (lambda: HEADS.token_rule(0, 0), "has a token rule for each head"),
        (
            lambda: sf.topk_blocks(*list(inputs())[:2], keep=1, within=HEADS),
            r"within must be one mask for all heads; got .*\(1, 4\)",
        ),
        (
            lambda: sf.attention_varlen(*(t[0].transpose(0, 1) for t in inputs()), torch.tensor([0, 30, 70]), mask=HEADS),
            "packed documents take one pattern for all heads; got per_head",
        ),
    ],
)
def test_patterns_by_head_are_refused_where_heads_cannot_differ(use, said):
    with pytest.raises((TypeError, ValueError), match=said):
        use()


def test_a_sequence_over_ranks_is_planned_by_head():
    mask = HEADS & sf.documents([0, 100, 300])
    whole = sf.BlockMask.per_head([one & sf.documents([0, 100, 300]) for one in HEADS.patterns], 300)
    assert to_square_mask(mask, 300, 128).equal(whole) and to_square_mask(mask.to_spec(), 300, 128).equal(whole)


def test_models_of_transformers_follow_each_head_in_packed_sequences():
    transformers = pytest.importorskip("transformers")
    from sparse_flash.integrations.transformers import use_sparse_flash

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
    config = transformers.MistralConfig(**sizes, num_key_value_heads=2, sliding_window=30)
    model = transformers.MistralForCausalLM(config).eval()
    use_sparse_flash(model, (HEADS & "causal").to_spec())
    words, places = torch.randint(0, 97, (1, 70)), torch.cat([torch.arange(30), torch.arange(40)])[None]
    with torch.no_grad():
        packed, alone = model(words, position_ids=places).logits, model(words[:, :30]).logits
    torch.testing.assert_close(packed[:, :30], alone, rtol=1e-4, atol=1e-4)
