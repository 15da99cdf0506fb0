"""Masks fitted to a model: the best of what was measured, within the budget, in a file that use_sparse_flash reads."""

import json

import pytest
import torch
from typer.testing import CliRunner

import sparse_flash as sf

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from sparse_flash.cli.app import app  # noqa: E402
from sparse_flash.integrations.transformers import fit as fitting  # noqa: E402
from sparse_flash.integrations.transformers import use_sparse_flash  # noqa: E402

TOKENS, BLOCK, BUDGET = 768, 64, 0.5
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 97, "pad_token_id": 0, "max_position_embeddings": 1024}


def made(kind: str = "Llama", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.15 * torch.randn(parameter.shape)
    return model


def words(windows: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (windows, TOKENS), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def fitted():
    return fitting.fit(made(), words(2), BUDGET, BLOCK)


def caught(model, ids) -> dict[int, tuple]:
    """The queries, keys, values and dense outputs of the layers."""
    found, attend = {}, transformers.AttentionInterface()["sdpa"]

    def seen(module, query, key, value, mask, **options):
        out = attend(module, query, key, value, mask, **options)
        found[module.layer_idx] = query, key, value, out[0].transpose(1, 2)
        return out

    transformers.AttentionInterface.register("caught", seen)
    model.set_attn_implementation("caught")
    with torch.no_grad():
        model(ids)
    return found


def error(spec, q, k, v, dense) -> float:
    return float((sf.attention(q, k, v, spec) - dense).norm() / dense.norm())


def test_errors_are_those_of_attention_under_the_layers_mask(fitted):
    for layer, call in caught(made(), words(2)).items():
        assert error(fitted[layer].spec, *call) == pytest.approx(fitted[layer].error, rel=1e-3)
        for kind, spec in fitting.candidates(TOKENS, BUDGET, BLOCK).items():
            assert error(spec, *call) == pytest.approx(fitted[layer].candidate_errors[kind], rel=1e-3)


def test_a_window_beside_choosers_is_measured_in_whole_blocks_as_it_runs(monkeypatch):
    measured, apart = [], fitting._measure_errors

    def in_favour_of_the_window(*call):
        measured.append(apart(*call))
        found = measured[-1].clone()
        found[-2, 0] = 0
        return found

    monkeypatch.setattr(fitting, "_measure_errors", in_favour_of_the_window)
    layers = fitting.fit(made(), words(), BUDGET, BLOCK)
    for layer, (q, k, v, dense) in caught(made(), words()).items():
        assert layers[layer].kinds[0] == fitting.WINDOW != layers[layer].kinds[1]
        distance = (sf.attention(q, k, v, layers[layer].spec) - dense)[:, 0].square().sum()
        assert float(distance) == pytest.approx(float(measured[layer][-2, 0]), rel=1e-3)


def test_no_candidate_in_all_heads_is_better(fitted):
    assert all(layer.error <= min(layer.candidate_errors.values()) for layer in fitted.values())
    mean = fitting.mean_errors(fitted)
    assert mean["fit"] == min(mean.values()) > 0
    assert any(len(set(layer.kinds)) > 1 for layer in fitted.values())  # some heads differ, or this shows nothing


def test_a_budget_below_what_is_always_kept_is_an_error():
    with pytest.raises(ValueError, match=r"^budget must be at least 0.423 for 768 tokens in blocks of 64"):
        fitting.candidates(TOKENS, 0.4, BLOCK)


@pytest.mark.parametrize("budget", [0.43, BUDGET, 1.0])
def test_candidates_keep_the_budget_and_the_blocks_that_are_always_kept(budget):
    q, k = caught(made(), words())[1][:2]
    blocks = TOKENS // BLOCK
    always = sum(min(row, 3) for row in range(1, blocks + 1))
    allowed = max(sum(-int(-budget * row // 1) for row in range(1, blocks + 1)), always) + blocks  # each row rounds up
    for kind, spec in fitting.candidates(TOKENS, budget, BLOCK).items():
        mask = sf.compile_mask(spec, TOKENS, TOKENS, BLOCK) if kind == fitting.WINDOW else sf.choose_blocks(spec, q, k)
        kept = mask.block_density * blocks**2
        assert always <= kept + 1e-6 and kept <= allowed + 1e-6, kind


@pytest.mark.parametrize("tokens, block, budget", [(TOKENS, BLOCK, 0.43), (TOKENS, BLOCK, 1.0), (1100, 128, 0.6), (700, 64, 0.5)])
def test_kept_shares_are_those_of_the_masks(tokens, block, budget):
    heads, blocks = 3, -(-tokens // block)
    q, k = (torch.randn(1, heads, tokens, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    shares = fitting.kept_shares(tokens, budget, block)
    for kind, spec in fitting.candidates(tokens, budget, block).items():
        mask = sf.compile_mask(spec, tokens, tokens, block) if kind == fitting.WINDOW else sf.choose_blocks(spec, q, k)
        kept = mask.block_density * 2 * blocks / (blocks + 1)
        rounding = 2 / (heads * (blocks + 1)) if kind == fitting.BUDGET else 1e-6  # less than one block of a row of all heads
        assert shares[kind] <= kept + 1e-6 and kept <= shares[kind] + rounding, kind


def test_windows_of_the_models_own_stay(fitted):
    changes = {"sliding_window": 150, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
    layers = fitting.fit(made("Gemma2", **changes, attn_logit_softcapping=5.0), words(), BUDGET, BLOCK)
    assert layers[0] == ("own", ("own",) * 4, 0.0, {}) and layers[1].candidate_errors
    with pytest.raises(ValueError, match="must have layers that attend to all earlier keys; MistralForCausalLM has none"):
        fitting.fit(made("Mistral", sliding_window=150), words(), BUDGET, BLOCK)
    with pytest.raises(ValueError, match="MambaForCausalLM has no self-attention layers"):
        fitting.fit(transformers.MambaForCausalLM(transformers.MambaConfig(hidden_size=16, num_hidden_layers=1)), words(), BUDGET)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model with a tokenizer of 90 words, and a text of 1,600 of them."""
    path = tmp_path_factory.mktemp("model")
    made().save_pretrained(path)
    known = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(word): word for word in range(90)}, unk_token="0"))
    known.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=known, unk_token="0").save_pretrained(path)
    (path / "text.txt").write_text(" ".join(str(word * word % 89) for word in range(1600)))
    return path


def invoke(*arguments, code=0):
    result = CliRunner().invoke(app, ["fit", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_the_command_writes_a_file_that_use_sparse_flash_reads(folder, tmp_path):
    path, picture = tmp_path / "new" / "masks.json", tmp_path / "fit.png"
    options = ["--text", folder / "text.txt", "--budget", BUDGET, "--block", BLOCK, "-n", TOKENS, "--device", "cpu"]
    said = invoke(folder, *options, "--out", path, "--picture", picture).output
    assert all(kind in said for kind in fitting.candidates(TOKENS, BUDGET, BLOCK)) and "best of one kind" in said
    lines = {line.split("  ")[0]: line for line in said.splitlines()}
    counts = {kind: int(lines[kind][len(kind) :].split()[0]) for kind in (*fitting.candidates(TOKENS, BUDGET, BLOCK), "fit")}
    assert sum(counts.values()) == 2 * counts["fit"] == 2 * 8
    for kind, share in fitting.kept_shares(TOKENS, BUDGET, BLOCK).items():
        assert lines[kind][len(kind) :].split()[1:3] == [f"{counts[kind] / 8:.0%}", f"{share:.1%}"]
    assert f'use_sparse_flash(model, "{path}") reads the masks\n' in said
    assert f"wrote {path}\n" in said and picture.stat().st_size > 1000
    record = json.loads(path.read_text())
    assert record["made_by"]["tokens"] == TOKENS and record["made_by"]["text"].startswith("sha256:")
    assert record["made_by"]["versions"]["sparse-flash"] == sf.__version__
    assert record["dense_below"] == TOKENS  # otherwise prompts of this length would be dense
    model = use_sparse_flash(made(), path)
    assert {str(layer): spec for layer, spec in sf.masks_of(model).items()} == record["layers"]
    dense = made()(words())[0]
    with torch.no_grad():
        assert not torch.allclose(model(words())[0], dense, atol=1e-3)
    assert f"{path} exists; pass --force" in invoke(folder, *options, "--out", path, code=2).stderr


@pytest.mark.parametrize(
    "options, message",
    [
        (["--budget", "0"], "budget must be in (0, 1]"),
        (["--budget", "15"], "budget must be in (0, 1]"),
        (["--block", "32"], "block must be one of 64, 128; got 32"),
        (["--windows", "2"], "text must have at least 2048 tokens"),
        (["-n", "100"], "tokens must be at least 8 blocks of 128; got 100"),
        (["-n", "2000"], "tokens must be at most 1024, the positions of the model; got 2000"),
        (["--out", "masks.txt"], "--out must be a .json file"),
        (["--picture", "fit.gif"], ".png or .svg"),
        (["--device", "meta"], "device must be"),
        (["--text", "nowhere.txt"], "nowhere.txt: No such file"),
    ],
)
def test_a_bad_option_is_one_message_and_writes_nothing(folder, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    result = invoke(folder, "--text", folder / "text.txt", *options, code=2)
    assert message in result.stderr and "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_an_unknown_model_is_one_message(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    result = invoke(tmp_path / "empty", "--text", folder / "text.txt", "--out", tmp_path / "masks.json", code=2)
    assert result.stderr.startswith("error: ") and "empty" in result.stderr and "Traceback" not in result.output
