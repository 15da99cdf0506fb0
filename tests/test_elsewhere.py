"""The package runs from another folder, under another name, beside the installed one: as the Hub's ``kernels`` library loads it."""

import copy
import importlib.util
import io
import json
import pickle
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import packaging.version
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_flash as sf

TESTS = Path(__file__).parent
build = run_path(str(TESTS.parent / ".ci" / "hub.py"))["build"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder torch-cpu, and its metadata."""
    folder = build(tmp_path_factory.mktemp("build"))["cpu"]
    return SimpleNamespace(folder=folder, metadata=json.loads((folder / "metadata.json").read_text()))


@pytest.fixture(scope="module")
def other(built):
    """The package of that folder, under the name that its metadata gives it."""
    name = built.metadata["id"]
    spec = importlib.util.spec_from_file_location(name, built.folder / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    torch._dynamo.reset()
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == name]:
        del sys.modules[loaded]


def drawn(seed: int, tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, tokens, 16, generator=generator).to(DEVICE).requires_grad_() for _ in "qkv"]


def test_files_of_the_folder_import_each_other_by_relative_names_and_lack_none(built):
    package = built.folder
    files = sorted(package.rglob("*.py"))
    assert len(files) > 150 and not (package / "cli").exists() and not (package / "benchmarks").exists()
    for file in files:
        text = re.sub(r'"""(.|\n)*?"""', "", file.read_text())
        text = re.sub(r"^if TYPE_CHECKING:\n( .*\n|\n)*", "", text, flags=re.M)
        assert not re.search(r"^ *(import|from) sparse_flash\b", text, re.M), file
        for dots, module in re.findall(r"^ *from (\.+)([\w.]*) import ", text, re.M):
            target = file.parents[len(dots) - 1].joinpath(*filter(None, module.split(".")))
            assert package in (target, *target.parents), file
            assert target.is_dir() or target.with_suffix(".py").exists(), (file, module)


def operators(namespace: str) -> set[str]:
    names = [schema.name.split("::") for schema in torch._C._jit_get_all_schemas()]
    return {name for space, name in names if space == namespace}


def test_each_copy_has_all_operators_under_its_name(other):
    assert sf.context_parallel is not other.context_parallel  # loads the last operators
    assert operators(other.__name__) == operators("sparse_flash") > {"attention", "attention_backward", "context_attention"}
    modules = [import_module(f"{name}.core.operators") for name in ("sparse_flash", other.__name__)]
    own = [module._forward._opoverload for module in modules]
    assert own == [torch.ops.sparse_flash.attention.default, getattr(torch.ops, other.__name__).attention.default]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("spec, tokens", [("causal & (local(9) | butterfly(block=16))", 70), ("~local(5)", 33)])
def test_results_and_gradients_are_the_same(other, backend, spec, tokens):
    if backend == "triton":
        pytest.importorskip("triton")
    found = []
    for package in (sf, other):
        q, k, v = drawn(0, tokens)
        out, lse = package.attention(q, k, v, spec, return_lse=True, backend=backend)
        found.append((out, lse, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert all(map(torch.equal, *found))


def test_a_mask_or_a_pattern_of_another_copy_is_refused_with_the_way_out(other):
    q, k, v = drawn(0, 40)
    for package, stranger in ((sf, other), (other, sf)):
        for mask in (stranger.causal(), stranger.compile_mask("causal", 40)):
            with pytest.raises(TypeError, match=rf"got .* of {stranger.__name__}\..* than {package.__name__}; pass spec text"):
                package.attention(q, k, v, mask)


def test_both_run_in_one_compiled_graph(other):
    def both(q, k, v):
        return sf.attention(q, k, v, "causal & local(20)") + other.attention(q, k, v, "causal & sinks(4)")

    graph = CompileCounterWithBackend("aot_eager")
    q, k, v = drawn(1, 130)
    out, expected = torch.compile(both, fullgraph=True, backend=graph)(q, k, v), both(q, k, v)
    torch.testing.assert_close(out, expected)
    gradients = [torch.autograd.grad(one.square().sum(), (q, k, v)) for one in (out, expected)]
    torch.testing.assert_close(*gradients)
    assert len(graph.graphs) == 1


def test_masks_of_a_copy_are_copied_pickled_and_saved(other):
    mask, file = other.compile_mask("causal & (local(9) | butterfly(block=16))", 140), io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    for made in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), torch.load(file, weights_only=True)):
        assert type(made) is other.BlockMask is not sf.BlockMask
        assert torch.equal(made.to_dense(), mask.to_dense())


def test_each_copy_switches_its_models(other):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model, tokens = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval(), torch.randint(60, (1, 50))
    logits, names = [], []
    for package, one in ((sf, model), (other, copy.deepcopy(model))):
        import_module(f"{package.__name__}.integrations.transformers").use_sparse_flash(one, "causal & local(9)")
        names.append(one.config._attn_implementation)
        logits.append(one(tokens).logits)
        assert package.masks_of(one) == dict.fromkeys(range(2), "causal & local(9)")
    assert torch.equal(*logits)
    assert names[0] == "block_sparse" != names[1] and "flash" not in names[1]


@pytest.mark.parametrize(
    "missing, what", [("numpy", "import sparse_flash"), ("scipy", "sparse_flash.compile_mask('butterfly', 300)")]
)
def test_a_folder_says_which_library_it_lacks(missing, what):
    program = f"import sys; sys.modules[{missing!r}] = None; import sparse_flash; sparse_flash.compile_mask('causal', 300); {what}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"ModuleNotFoundError: {missing} is missing: pip install {missing}\n" in done.stderr


def test_models_load_the_package_by_a_name_of_the_hub(built):
    """In a process of its own, which loads it as Transformers does, and knows it by no other name."""
    pytest.importorskip("kernels")
    if packaging.version.parse(pytest.importorskip("transformers").__version__) < packaging.version.parse("5.18"):
        pytest.skip("Transformers loads attention of this form since 5.18")
    program = TESTS / "integrations" / "by_name.py"
    done = subprocess.run([sys.executable, program, built.folder.parent], capture_output=True, text=True)
    assert not done.returncode, done.stderr[-5000:]
