"""The package runs from another folder, under another name, beside the installed one: as the Hub's ``kernels`` library loads it."""

import base64
import copy
import hashlib
import importlib.util
import io
import json
import pickle
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_flash as sf

build = run_path(str(Path(__file__).parent.parent / ".ci" / "hub.py"))["build"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder torch-universal, and its metadata."""
    folder = build(tmp_path_factory.mktemp("build"))
    return SimpleNamespace(folder=folder, metadata=json.loads((folder / "metadata.json").read_text()))


@pytest.fixture(scope="module")
def other(built):
    """The package of that folder, under the name that its metadata gives it."""
    name = built.metadata["id"]
    spec = importlib.util.spec_from_file_location(name, built.folder / "sparse_flash" / "__init__.py")
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
    package = built.folder / "sparse_flash"
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


def test_metadata_names_the_contents(built, tmp_path):
    digests, files = built.metadata["digest"]["files"], [path for path in built.folder.rglob("*") if path.is_file()]
    names = {path.relative_to(built.folder).as_posix() for path in files if path.suffix != ".pyc"}
    assert digests.keys() == names - {"metadata.json"}
    for name, digest in digests.items():
        assert base64.b64decode(digest) == hashlib.sha256((built.folder / name).read_bytes()).digest()
    assert built.metadata["id"].isidentifier()
    assert json.loads((build(tmp_path) / "metadata.json").read_text()) == built.metadata


def operators(namespace: str) -> set[str]:
    names = [schema.name.split("::") for schema in torch._C._jit_get_all_schemas()]
    return {name for space, name in names if space == namespace}


def test_each_has_all_operators_under_its_own_name(other):
    assert sf.context_parallel is not other.context_parallel  # loads the last operators
    assert operators(other.__name__) == operators("sparse_flash") > {"attention", "attention_backward", "context_attention"}
    modules = [import_module(f"{name}.dispatch.operators") for name in ("sparse_flash", other.__name__)]
    own = [module._forward._opoverload for module in modules]
    assert own == [torch.ops.sparse_flash.attention.default, getattr(torch.ops, other.__name__).attention.default]


def test_public_names_are_the_same_but_for_the_benchmark(other):
    assert set(sf.__all__) - set(other.__all__) <= {"bench", "BenchRow"} and set(other.__all__) <= set(sf.__all__)
    for name in other.__all__:
        assert getattr(other, name).__module__.partition(".")[0] == other.__name__
    assert other.__version__ == sf.__version__ and not hasattr(other, "bench")


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


@pytest.fixture
def registries(other, monkeypatch):
    """Removes the patterns that a test registers with either."""
    modules = [import_module(f"{name}.masks.registry") for name in ("sparse_flash", other.__name__)]
    for module in modules:
        monkeypatch.setattr(module, "_registry", dict(module._registry))
        monkeypatch.setattr(module, "_entry_points_read", False)


def registered(package):
    @package.register_pattern("elsewhere_third")
    @dataclass(frozen=True)
    class EveryThird(package.Pattern):
        def token_rule(self, q, kv):
            return (q - kv) % 3 == 0

    return EveryThird


@pytest.mark.usefixtures("registries")
def test_a_pattern_registered_with_one_is_unknown_to_the_other(other):
    assert set(other.list_patterns()) <= set(sf.list_patterns())  # other tests may register patterns with the latter
    cls = registered(sf)
    assert sf.parse("elsewhere_third & causal") == cls() & sf.causal()
    with pytest.raises(ValueError, match="unknown pattern 'elsewhere_third'"):
        other.parse("elsewhere_third & causal")
    assert registered(other)() == other.parse("elsewhere_third") != sf.parse("elsewhere_third")


def test_a_mask_or_a_pattern_of_the_other_is_refused_with_the_way_out(other):
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
    called = {str(node.target) for node in graph.graphs[0].graph.nodes if node.op == "call_function"}
    assert {"sparse_flash.attention.default", f"{other.__name__}.attention.default"} <= called and len(graph.graphs) == 1


def test_masks_are_copied_pickled_and_saved_as_the_others(other):
    mask, file = other.compile_mask("causal & (local(9) | butterfly(block=16))", 140), io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    for made in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), torch.load(file, weights_only=True)):
        assert type(made) is other.BlockMask is not sf.BlockMask
        assert torch.equal(made.to_dense(), mask.to_dense())


def test_each_switches_its_own_models(other):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    models = [model, copy.deepcopy(model)]
    for package, one in zip((sf, other), models):
        import_module(f"{package.__name__}.integrations.transformers").use_sparse_flash(one, "causal & local(9)")
    names = [one.config._attn_implementation for one in models]
    assert names[0] == "block_sparse" != names[1] and "flash" not in names[1]
    tokens = torch.randint(60, (1, 50))
    with torch.no_grad():
        assert torch.equal(*(one(tokens).logits for one in models))
    masks = [package.masks_of(one) for package, one in zip((sf, other), models)]
    assert masks[0] == masks[1] == dict.fromkeys(range(2), "causal & local(9)")
