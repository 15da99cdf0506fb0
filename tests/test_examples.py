"""Every example runs, at a small size, and does what it says."""

import ast
import importlib.util
import inspect
import math
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
import serving
import torch
from test_contributing import ROOT

import sparse_flash as sf
from sparse_flash.masks import registry as registry_module


def load(name: str):
    """The example as a module, under its own name."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def own_registry(monkeypatch):
    """Removes the patterns that a test registers."""
    monkeypatch.setattr(registry_module, "_registry", dict(registry_module._registry))


def test_every_example_is_tested_here():
    source = Path(__file__).read_text()
    assert [p.stem for p in sorted((ROOT / "examples").glob("*.py")) if f'"{p.stem}"' not in source] == []


# What an example is run with, what its result must be, and a part of what it prints.
RUNS = {
    "custom_pattern": ({"tokens": 320}, lambda out: out.shape == (1, 4, 320, 32), "of 2 stored masks"),
    "packed_documents": ({"lengths": (100, 1, 64, 35)}, lambda out: out.shape == (1, 4, 200, 64), ""),
    "decoding": (
        {"lengths": (40, 1), "steps": 20, "heads": 2, "kv_heads": 1, "head_dim": 16},
        lambda out: out.shape == (2, 2, 20, 16),
        "",
    ),
    "topk_selection": ({"tokens": 1024, "heads": 2}, lambda errors: errors["top blocks"] < 0.1 < errors["window"], "visits"),
    "score_terms": ({"tokens": 300}, lambda outs: len(outs) == 7 and not outs["lengths and dropout"][1, :, 100:].any(), ""),
    "long_context": (
        {"pattern": "causal & local(64)", "longest": 2048, "rows": 3, "heads": 1, "head_dim": 16},
        lambda seconds: len(seconds) == 3,
        "2,048",
    ),
}


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("name", RUNS)
def test_an_example_does_what_it_says(name, capsys):
    arguments, is_right, printed = RUNS[name]
    assert is_right(load(name).main(**arguments))
    assert printed in capsys.readouterr().out


def codes(page: str) -> list[str]:
    """Blocks of Python. A page has no others: commands are indented."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert text.count("```") == 2 * len(blocks) > 0, page
    return blocks


README = codes("README.md")
# Pages that need nothing from another page open with their own imports; the others follow the first block of getting started.
PAGES = ["docs/index.md", "docs/getting-started.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs/guides").glob("*.md"))]


@pytest.fixture(scope="module")
def first_of_readme():
    """The names that the first block of code defines, which runs by itself and says what is kept."""
    names = {"__name__": "readme"}
    exec(compile(README[0], "README.md", "exec"), names)
    assert names["mask"].density < 0.3 and torch.isfinite(names["out"]).all() and torch.isfinite(names["q"].grad).all()
    return names


def test_all_code_in_tables_of_the_readme_runs(first_of_readme):
    cells = [cell.replace(r"\|", "|") for cell in re.findall(r"\| `((?:sf\.|use_)[^`]*)` \|", (ROOT / "README.md").read_text())]
    q = first_of_readme["q"]
    stand_ins = {
        "packed": [q[0].transpose(0, 1)] * 3,
        "starts": torch.tensor([0, 1000, 4096], dtype=torch.int32, device=q.device),
        "newest": q[:, :, -1:].detach(),
        "cache_k": q.detach(),
        "cache_v": q.detach(),
        "lens": torch.tensor([3000], dtype=torch.int32, device=q.device),
        # These take models and ranks, which their guides' code has.
        "use_sparse_flash": lambda model, mask, **_: sf.parse(mask.replace("layout", str(sf.VideoLayout(21, 45, 80, (1, 8, 16))))),
        "mesh": None,
        "model": None,
        "transformer": None,
    }
    for cell in cells:
        if "mesh=" in cell:
            call = ast.parse(cell, mode="eval").body
            inspect.signature(sf.context_parallel).bind(*call.args, **{keyword.arg: keyword.value for keyword in call.keywords})
        else:
            eval(cell, {**first_of_readme, **stand_ins})
    assert len(cells) > 6


def test_getting_started_begins_with_the_code_of_the_readme():
    assert codes("docs/getting-started.md")[:1] == README


@pytest.fixture
def run(first_of_readme, own_registry, monkeypatch, tmp_path):
    """Runs all blocks of a page in order, as a module, in a folder that its files may go to; returns its names."""

    def run(page: str) -> dict:
        torch.manual_seed(0)
        blocks = codes(page)
        monkeypatch.syspath_prepend(ROOT)
        monkeypatch.chdir(tmp_path)
        # torch.compile imports the module of the code that it traces.
        monkeypatch.setitem(sys.modules, "page", module := types.ModuleType("page"))
        if not blocks[0].startswith("import torch\n"):
            module.__dict__.update(first_of_readme, __name__="page")
        for code in blocks:
            exec(compile(code, page, "exec"), module.__dict__)
        return module.__dict__

    return run


@pytest.mark.parametrize("page", PAGES)
def test_every_code_of_a_page_runs_as_it_stands(page, run, monkeypatch, tmp_path):
    for library in ("transformers", "diffusers", "peft"):
        if library in "".join(codes(page)):
            pytest.importorskip(library)
    if page == "docs/guides/serving.md":
        serving.provide(monkeypatch)
        runpy.run_path(str(ROOT / ".ci" / "hub.py"))["build"](tmp_path / "build")
    run(page)


MIGRATIONS = ["docs/guides/from-flex-attention.md", "docs/guides/from-flash-attn.md"]


def rows(page: str) -> list[tuple[str, str]]:
    """(what you wrote, what you write) for every row of a page's code tables."""
    cells = re.findall(r"^\| `(.*)` \| `(.*)` \|$", (ROOT / page).read_text(), re.M)
    return [tuple(cell.replace(r"\|", "|") for cell in row) for row in cells]


@pytest.mark.parametrize("page", MIGRATIONS)
def test_what_you_wrote_and_what_you_write_give_the_same(page, run, monkeypatch, tmp_path):
    # Provides the other libraries' calls under their names, so they need not be installed.
    for name in ("flash_attn", "block_sparse_attn"):
        monkeypatch.setitem(sys.modules, name, importlib.import_module(f"sparse_flash.integrations.{name}"))
    names = run(page)
    assert len(rows(page)) == (ROOT / page).read_text().count("\n| `") > 10
    for row in rows(page):
        theirs, ours = (dict(names) for _ in row)
        for code, found in zip(row, (theirs, ours), strict=True):
            torch.manual_seed(0)
            exec(compile(code, page, "exec"), found)
        if "mask" in ours:
            kept = ours["mask"].to_dense()
            assert torch.equal(sf.BlockMask.from_flex(theirs["mask"]).to_dense().expand_as(kept), kept), row
        if "out" in ours:
            out = theirs["out"] if theirs["out"].shape == ours["out"].shape else theirs["out"].transpose(1, 2)
            torch.testing.assert_close(ours["out"], out, atol=1e-5, rtol=1e-4)


def test_a_hugging_face_model_learns_to_copy_under_its_masks_and_generates_so():
    pytest.importorskip("transformers")
    loss, right = load("huggingface").main(steps=70)
    assert loss < 0.8 * math.log(49) and right > 0.9


def test_a_pretrained_model_is_measured_by_its_loss_on_text_and_by_what_it_recalls(capsys):
    transformers = pytest.importorskip("transformers")
    example = load("pretrained")
    tokens, plain, answers = example.make_sequence(list(b"Words. " * 400), lambda text: list(text.encode()), 1200, seed=3)
    assert tokens.shape == plain.shape == (1200,) and len(answers) == 5
    # A model that knows the next token, except one of one answer and one of the text.
    logits = torch.nn.functional.one_hot(tokens.roll(-1), 256).float() * 100
    logits[answers[2].stop - 2] *= -1
    logits[plain.nonzero()[5] - 1] *= -1
    loss, recalled = example.measure(
        lambda tokens, use_cache: types.SimpleNamespace(logits=logits[None]), [(tokens, plain, answers)]
    )
    assert recalled == 4 and loss == pytest.approx((100 + math.log(255)) / plain[1:].sum().item())

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 3}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    found = example.compare(model, lambda text: list(text.encode()), 1100, window=1100, count=1, masks=("causal & local(20)",))
    losses = [loss for loss, _ in found.values()]
    assert losses[1:6] == pytest.approx(losses[:1] * 5) and abs(losses[6] - losses[0]) > 1e-4
    assert "the same, layers 2 to 2           " in capsys.readouterr().out
