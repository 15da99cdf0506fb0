"""Models under specs with choosers: prompts equal dense attention to the pairs that choose_blocks keeps, and all else is dense."""

from functools import partial

import pytest
import torch
from test_transformers_models import Shard
from test_transformers_runs import CACHES
from tiny_models import as_oracle, close, close_outcomes, decoder_of, encoder_of, outcome, padded, transformers
from tiny_models import words as words_of
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_flash as sf
from sparse_flash.integrations.transformers import use_sparse_flash
from sparse_flash.integrations.transformers.model_mask import restrict_mask
from sparse_flash.masks.chooser import choices_of

TOKENS = 300
SPEC = "causal & (sampled(8, keep=2, block=64) | sinks(4))"
SHARES = "causal & (sampled(4, floor=0.3, block=64) | pooled(keep=1, block=64))"
HEADS = "per_head([causal & (pooled(keep=1, block=64) | sinks(4)), causal & local(90), causal & pooled(keep=2, block=64), causal])"
WHOLE = "causal & block_diagonal(block=96) & pooled(keep=1.0, block=64)"
SPARSE = {"dense_below": 0, "dense_last": 0}
words = partial(words_of, tokens=TOKENS)


def made(name: str = "llama", specs: list = (), **changes):
    """Under the oracle. specs: of its layers. changes: of the config."""
    if name == "bert":
        return as_oracle(encoder_of(name), specs=specs)
    return as_oracle(decoder_of(name, **{"sliding_window": 150} | changes), specs=specs)


def with_record(record):
    """A model that was loaded with a record of masks in its config."""
    model = made()
    model.config.sparse_flash = record
    return model


def outputs(model, *args, **options) -> torch.Tensor:
    with torch.no_grad():
        return model(*args, **options)[0]


def is_close(ours, theirs) -> bool:
    return torch.allclose(ours, theirs, atol=2e-4 * theirs.abs().max().item(), rtol=2e-4)


SPECS = [(name, specs) for name in ("llama", "mistral", "gemma2") for specs in ([SPEC, SPEC], [SHARES, SPEC], [HEADS, HEADS])]


@pytest.mark.parametrize("name, specs", [*SPECS, ("bert", ["sampled(8, keep=2, block=64) | sinks(4)"] * 2)])
def test_prompts_are_dense_attention_to_the_chosen_pairs_within_the_models_windows_and_steps_are_dense(name, specs):
    model = use_sparse_flash(made(name), per_layer=specs, **({"dense_below": 0} if name == "bert" else SPARSE))
    reference, given = made(name, specs), {"input_ids": words()}
    wanted = outcome(reference, given)
    close_outcomes(outcome(model, given), wanted)
    assert not is_close(wanted[0], outputs(made(name), words()))  # dense
    assert sf.masks_of(model) == {number: sf.parse(spec).to_spec() for number, spec in enumerate(specs)}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    if name == "bert" or HEADS in specs:  # whose heads with patterns have these in steps too
        return
    for cache in (None, "static")[: 1 + (name == "llama")]:
        tokens = model.generate(words(), cache_implementation=cache, **options)
        assert torch.equal(tokens, reference.generate(words(), **options))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prompts_are_dense_unless_their_queries_see_enough_keys(name):
    dense, sees = outputs(made(name), words()), {"llama": TOKENS, "mistral": 150}[name]
    for below, is_dense in ((sees + 1, True), (sees, False), (None, True)):
        model = use_sparse_flash(made(name), SPEC, dense_below=below, dense_last=0)
        assert is_close(outputs(model, words()), dense) == is_dense


def test_layers_and_last_queries_may_stay_dense():
    use_sparse_flash(model := made(), SPEC, dense_layers=[0], **SPARSE)
    close(outputs(model, words()), outputs(made(specs=[None, SPEC]), words()))
    assert sf.masks_of(model)[0] == "own"
    one, dense = made(num_hidden_layers=1), outputs(made(num_hidden_layers=1), words())
    chosen = outputs(use_sparse_flash(one, SPEC, dense_below=0), words())  # dense_last=64: the blocks of the last 64 queries
    close(chosen[:, -64:], dense[:, -64:])
    assert not is_close(chosen[:, :-108], dense[:, :-108])


# Without padding, the first chunk is of whole blocks, to which choices are the same in chunks as at once. WHOLE chooses all.
CHUNKS = [("llama", SPEC, 192, (0,)), ("llama", HEADS, 192, (0,)), ("mistral", WHOLE, 192, (0,))]
CHUNKS += [(name, WHOLE, 230, (0, 140, 235)) for name in ("llama", "mistral")]


@pytest.mark.parametrize("name, spec, chunk, padding", CHUNKS)
@pytest.mark.parametrize("cache", ["sliding", "static"])
def test_a_prompt_in_chunks_is_what_each_sequence_is_at_once(name, spec, chunk, padding, cache):
    model, x = use_sparse_flash(made(name), spec, dense_below=0, dense_last=16 * (name == "mistral")), words(len(padding))
    exist, kept, found = (torch.arange(TOKENS) >= torch.tensor(padding)[:, None]).long(), CACHES[cache](model.config), []
    for part in torch.arange(TOKENS).split(chunk):
        given = {"attention_mask": exist[:, : part[-1] + 1], "position_ids": (exist.cumsum(1) - 1).clamp(min=0)[:, part]}
        given = given if any(padding) else {}
        found.append(outputs(model, x[:, part], past_key_values=kept, use_cache=True, **given))
    for row, first in enumerate(padding):
        close(torch.cat(found, 1)[row, first:], outputs(model, x[row, None, first:])[0])


def test_patterns_keep_their_positions_where_a_cache_has_dropped_keys():
    spec = "causal & (pooled(keep=1) | sinks(50) | block_diagonal(block=32) | last_tokens(5))"
    (choice,) = choices_of(restrict_mask(spec, ("local(100)",), 43))
    assert str(choice.within) == "causal & local(100)" and [str(one) for one in choice.choosers] == ["pooled(keep=1)"]
    whole = sf.compile_mask("sinks(50) | block_diagonal(block=32) | last_tokens(5)", 300).to_dense()
    assert torch.equal(sf.compile_mask(choice.always, 120, 300 - 43).to_dense(), whole[..., -120:, 43:])


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("spec", [SPEC, "causal & (sampled(8, budget=0.5, block=64) | sinks(4) | last_tokens(9))"])
def test_sequences_of_a_padded_batch_equal_separate_calls(name, spec):
    model, lengths = use_sparse_flash(made(name), spec, dense_below=150, dense_last=16), (300, 237, 170, 100, 30)
    if name == "llama":  # 230 keys are too few to choose
        model, lengths = use_sparse_flash(model, spec, dense_below=235, dense_last=16), (300, 237, 230, 100, 30)
    x, token = words(len(lengths)), torch.arange(TOKENS)
    alone = [outputs(model, x[row : row + 1, :length]) for row, length in enumerate(lengths)]
    for left in (True, False):
        padded, exist = torch.zeros_like(x), torch.zeros_like(x)
        for row, length in enumerate(lengths):
            place = token >= TOKENS - length if left else token < length
            padded[row, place], exist[row, place] = x[row, :length], 1
        found = outputs(model, padded, attention_mask=exist, position_ids=(exist.cumsum(1) - 1).clamp(min=0))
        for row, wanted in enumerate(alone):
            close(found[row, exist[row].bool()], wanted[0])
        assert found.isfinite().all()


def test_a_compiled_model_chooses_in_one_graph_and_takes_padding_outside_of_it():
    torch._dynamo.reset()
    model = use_sparse_flash(
        made("mistral", num_hidden_layers=1), HEADS.replace("local(90)", "sampled(8, keep=2, block=64)"), dense_below=128
    )
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for tokens in (200, 210, 100, 300):
        wanted = outputs(model, words(tokens=tokens), use_cache=False)
        close(outputs(compiled, words(tokens=tokens), use_cache=False), wanted)
    assert counter.frame_count == 3  # for the first length, for all others, and for prompts that are dense
    model = use_sparse_flash(made(num_hidden_layers=1), SPEC, **SPARSE)
    compiled, exist = torch.compile(model, backend="eager"), padded(words(), "left", 50)
    found, wanted = (outputs(one, words(), attention_mask=exist, use_cache=False) for one in (compiled, model))
    close(found[exist.bool()], wanted[exist.bool()])


def test_a_model_is_saved_with_masks_that_have_text(tmp_path):
    model = use_sparse_flash(made(), SPEC, dense_below=100)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with pytest.raises(ValueError, match=r"runs 'sdpa'; call use_sparse_flash\(model\), for the masks that it was saved with"):
        sf.masks_of(loaded)
    assert "dense_below=100, dense_last=64" in str(use_sparse_flash(loaded))
    close(outputs(use_sparse_flash(loaded, "own"), words()), outputs(made(), words()))
    use_sparse_flash(model, {0: SPEC, 1: sf.compile_mask("causal", TOKENS)})  # tables have no text
    assert not hasattr(loaded.config, "sparse_flash") and not hasattr(model.config, "sparse_flash")


@pytest.mark.parametrize(
    "mask, settings",
    [
        (SPEC, {"dense_below": 80, "dense_last": 7}),
        ({0: HEADS, 1: "causal & local(90)"}, {"dense_below": 80, "dense_last": 0}),
        ("local(9)", {"bidirectional": True}),
    ],
)
def test_a_config_has_a_models_masks_and_settings(tmp_path, mask, settings):
    wanted = use_sparse_flash(made(), mask, **settings)
    layers = {str(number): sf.parse(mask[number] if isinstance(mask, dict) else mask).to_spec() for number in range(2)}
    record = {"format": 1, "layers": layers, **settings}
    unknown = record | {"digests": {SPEC: "0123456789ab"}, "of_tomorrow": 3}  # of earlier and of later versions
    wanted.save_pretrained(tmp_path)
    loaded = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), with_record(record), with_record(unknown)]
    for model in (wanted, *map(use_sparse_flash, loaded)):
        assert sf.masks_of(model) == sf.masks_of(wanted)
        assert model.config.sparse_flash == record
        close(outputs(model, words()), outputs(wanted, words()))


LAYERS = {"0": SPEC, "1": SPEC}
UNREADABLE = [
    ({"format": 2, "layers": LAYERS}, "got 2; install the release"),
    ({"format": 1, "layers": {"0": SPEC}}, r"layers of the model, 0 to 1; got \[0\]; pass a mask"),
    ({"format": 1, "layers": LAYERS | {"1": "causal & windmill(4)"}}, "(?s)unknown pattern 'windmill'.*import the file"),
    ({"format": 1, "layers": LAYERS, "dense_below": "4k"}, "dense_below must be a number of tokens, 0 or more; got '4k'"),
]


@pytest.mark.parametrize("record, message", UNREADABLE)
def test_configs_that_do_not_fit_say_what_is_wrong(record, message):
    model = with_record(record)
    with pytest.raises(ValueError, match=message):
        use_sparse_flash(model)
    assert model.config._attn_implementation == "oracle"


@pytest.mark.parametrize("mask", ["causal & local(9)", {0: "causal & local(9)", 1: SPEC}, SPEC, "own"])
def test_settings_of_choosers_change_nothing_else_and_any_layer_may_be_dense(mask):
    model = use_sparse_flash(made(), mask, dense_below=100, dense_last=9, dense_layers=[1])
    wanted = mask[0] if isinstance(mask, dict) else mask
    plain = use_sparse_flash(made(), {0: wanted}, **({"dense_below": 100, "dense_last": 9} if wanted == SPEC else {}))
    assert sf.masks_of(model) == sf.masks_of(plain) and sf.masks_of(model)[1] == "own"
    assert getattr(model.config, "sparse_flash", None) == getattr(plain.config, "sparse_flash", None)
    close(outputs(model, words()), outputs(plain, words()))


def test_a_record_says_what_each_layer_kept_and_why_it_was_dense():
    spec, heads = "causal & sampled(8, keep=2, block=64)", ["causal", "causal & local(9)", "causal", "causal & local(50)"]
    model = made(num_hidden_layers=3)
    use_sparse_flash(model, {0: spec, 1: f"per_head([{', '.join(heads)}])"}, dense_below=200, dense_last=0)
    compiled = torch.compile(model, backend=lambda *_: pytest.fail("a graph records nothing"))
    with sf.record_masks(compiled) as record:
        for tokens in (TOKENS, 100, 3):
            outputs(compiled, words(1, tokens=tokens))
    outputs(model, words(1, tokens=9))
    q = torch.randn(1, 4, TOKENS, 16)
    shares = [sf.choose_blocks(spec, q, q).density / sf.compile_mask("causal", TOKENS).density] * 4
    torch.testing.assert_close(record[0].kept.tolist(), shares)
    counts = [sum(sf.compile_mask(one, n).density * n**2 for n in (TOKENS, 100, 3)) for one in heads]
    torch.testing.assert_close(record[1].kept.tolist(), [count / counts[0] for count in counts])
    assert record[0].dense == {"fewer keys than dense_below=200": 1, "up to 64 queries": 1} and not record[1].dense
    assert record[2].dense == {"the model's own mask": 3} and [one.calls for one in record.values()] == [3, 3, 3]
    assert "layer 0: 3 calls: " in str(record) and "1 dense (up to 64 queries)" in str(record)


def test_calls_that_cannot_choose_say_the_way_out():
    with pytest.raises(ValueError, match=r"a ContextPlan must be the plan of all layers; got a chooser in layers \[1\]"):
        use_sparse_flash(made(), {0: Shard(0, 1), 1: SPEC})
    model = use_sparse_flash(made(), SHARES, **SPARSE)
    restarting = torch.arange(TOKENS)[None] % 150
    bounds = torch.tensor([0, 150, TOKENS, 2 * TOKENS], dtype=torch.int32)
    holes = torch.ones(2, TOKENS, dtype=torch.long)
    holes[0, 9] = 0
    for given, message in (
        ({"position_ids": restarting}, "got packed sequences; pad each sequence in a row of its own"),
        ({"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}, "got packed sequences; pad each sequence in a row of its own"),
        ({"attention_mask": holes}, "got zeros between ones"),
    ):
        with pytest.raises(ValueError, match=message):
            outputs(model, words(), use_cache=False, **given)
        outputs(use_sparse_flash(made(), SHARES), words(), use_cache=False, **given)  # dense
    outputs(model, words())
    assert use_sparse_flash(made(), SPEC, **SPARSE).train()(words()).logits.requires_grad
