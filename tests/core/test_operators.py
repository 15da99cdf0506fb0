"""torch.compile has no graph break and no needless recompile, exported programs run, and what would go wrong is refused."""

import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from calls import one_rank
from oracle import DEVICE, Sizes, normal
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_flash as sf
from sparse_flash.masks.parsing import text_of

TOKENS = 200
LOCAL = sf.causal() & sf.local(50)
parametrize = pytest.mark.parametrize
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
TRACES_PATTERNS = torch.__version__ >= "2.13"
needs_213 = pytest.mark.skipif(not TRACES_PATTERNS, reason="PyTorch before 2.13 traces no Pattern objects")


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def inputs(tokens=TOKENS):
    return [t.requires_grad_() for t in normal(Sizes(batch=1, heads=2, q_len=tokens, kv_len=tokens, seed=tokens))]


def plain_inputs(tokens=TOKENS, device=DEVICE):
    return [t.detach().to(device) for t in inputs(tokens)]


def compiled(function):
    """(function under torch.compile with no graph break allowed, counter of its compilations)."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def attend(q, k, v, mask):
    return sf.attention(q, k, v, mask, return_lse=True)


def outcome(function, q, k, v, *arguments):
    """[out, lse, dq, dk, dv] of a function that returns (out, lse)."""
    out, lse = function(q, k, v, *arguments)
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse.masked_fill(lse.isneginf(), 0).sum(), (q, k, v))]


def assert_same(function, qkv, mask, *arguments):
    """function: called with the mask if that is among the arguments."""
    assert all(map(torch.equal, outcome(function, *qkv, *arguments), outcome(attend, *qkv, mask)))


def test_a_compiled_function_does_not_recompile_when_only_the_mask_changes():
    function, counter = compiled(attend)
    for pattern in (LOCAL, sf.causal(), sf.local(9) & ~sf.strided(7), ~sf.full(), sf.random(0.3, 0, block=1)):
        # Without coarse: else a GPU gets blocks of 128.
        mask = replace(sf.compile_mask(pattern, TOKENS, block_size=32, device=DEVICE), coarse=None)
        assert_same(function, inputs(), mask, mask)
    assert counter.frame_count == 1


OF_40 = sf.compile_mask("causal & local(9)", 40, block_size=16)
MADE_ON_THE_HOST = {
    "compile_mask": lambda kept: sf.compile_mask("causal", 40),
    "from_dense": lambda kept: sf.BlockMask.from_dense(kept, 16),
    "per_head": lambda kept: sf.BlockMask.per_head(["causal", "local(3)"], 40),
    "transpose": lambda kept: OF_40.transpose(),
    "select": lambda kept: OF_40.select(0),
    "to_dense": lambda kept: sf.BlockMask.from_blocks(OF_40.to_dense()[::16, ::16], 16, 40, 40),
    "block_states": lambda kept: sf.BlockMask.from_blocks(OF_40.block_states() > 0, 16, 40, 40),
}


@parametrize("name", MADE_ON_THE_HOST)
def test_a_mask_made_on_the_host_breaks_the_graph_there_and_a_full_graph_says_where_to_make_it(name):
    def attend(q, kept):
        return sf.attention(q, q, q, MADE_ON_THE_HOST[name](kept)).square()

    q, kept = torch.randn(1, 2, 40, 16), torch.rand(40, 40) < 0.5
    torch.testing.assert_close(torch.compile(attend, backend="eager")(q, kept), attend(q, kept))
    torch._dynamo.reset()
    said = f"{name} works on the host .* call it outside of the compiled function"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=said):
        torch.compile(attend, backend="eager", fullgraph=True)(q, kept)


def test_numbers_may_change_between_calls_of_a_compiled_function_which_raises_what_the_call_raises():
    def attend(q, k, scale, softcap):
        return sf.attention(q, k, k, "causal", scale=scale, softcap=softcap)

    (function, _), (q, k, _) = compiled(attend), plain_inputs(30)
    for number in (0.25, 0.5, 2.0):
        assert torch.equal(function(q, k, number, 9 * number), attend(q, k, number, 9 * number))
    with pytest.raises(Exception, match="scale must be positive"):
        function(q, k, -1.0, 1.0)
    with pytest.raises(Exception, match="the number of key heads must divide that of query heads"):
        function(q[:, :1], k, 1.0, 1.0)


@sf.register_pattern("every_third")
@dataclass(frozen=True)
class EveryThird(sf.Pattern):
    def token_rule(self, q, kv):
        return (q - kv) % 3 == 0


@dataclass(frozen=True)
class Unregistered(EveryThird):
    name = None


@parametrize(
    "mask, text, graphs",
    [
        (None, None, 2),
        ("full", "full", 2),
        ("causal & every_third", "causal & every_third", 2),
        pytest.param(LOCAL, "causal & local(50)", 2, marks=needs_213),
        pytest.param(sf.causal() & Unregistered(), None, 3, marks=needs_213),  # one for each length
    ],
    ids=["dense", "full", "registered", "built in", "unregistered"],
)
def test_only_patterns_with_spec_text_compile_for_all_lengths(mask, text, graphs):
    assert mask is None or text_of(sf.parse(mask) if isinstance(mask, str) else mask) == text
    function, counter = compiled(lambda q, k, v: attend(q, k, v, mask))
    for tokens in (60, 70, 80):
        assert_same(function, inputs(tokens), mask)
    assert counter.frame_count == graphs


@pytest.mark.skipif(TRACES_PATTERNS, reason="PyTorch from 2.13 on traces Pattern objects")
def test_older_versions_of_pytorch_name_the_text_to_pass():
    with pytest.raises(Exception, match=r"does not trace Pattern objects; pass pattern\.to_spec\(\)"):
        compiled(attend)[0](*inputs(), Unregistered())


@needs_gpu
def test_compiled_code_in_cuda_graphs_takes_new_lengths():
    function = torch.compile(lambda q, k, v: attend(q, k, v, "causal & local(50)"), fullgraph=True, mode="reduce-overhead")
    for tokens in (200, 300):
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            qkv = inputs(tokens)
            got = [t.clone() for t in outcome(function, *qkv)]
            torch.testing.assert_close(got, outcome(attend, *qkv, "causal & local(50)"))


@needs_gpu
def test_tables_are_not_made_while_a_cuda_graph_is_captured():
    q = torch.randn(1, 2, 300, 64, device=DEVICE)
    sf.attention(q, q, q, "causal & local(31)")
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="make the call once before"):
        sf.attention(q, q, q, "causal & local(32)")


@needs_213
def test_compiled_functions_may_format_patterns_into_text():
    layout = sf.VideoLayout(2, 4, 8, tile=(2, 4, 8))
    qkv = plain_inputs(layout.tokens)
    with_s, _ = compiled(lambda q, k, v: sf.attention(q, k, v, f"tile_window({layout!s}, 1) & {LOCAL!s}"))
    assert torch.equal(with_s(*qkv), sf.attention(*qkv, f"tile_window({layout}, 1) & {LOCAL}"))


class Calls(torch.nn.Module):
    """The operators of all calls in one program, as the compilation of each takes long."""

    def forward(self, q, k, v, lens, bounds, picks):
        packed, last = (t[0].transpose(0, 1) for t in (q, k, v)), q[:, :, -1:]
        return (
            sf.attention(q, k, v, "causal & local(50)", kv_lens=lens, softcap=2.0),
            sf.attention(q, k, v, sf.BlockSelection.from_picks(picks, 64)),
            sf.attention(q, k, v, "causal & sampled(8, keep=1, block=64)"),
            sf.attention_decode(last, k, v, "causal & local(20)", kv_lens=lens),
            sf.attention_varlen(*packed, bounds, mask="causal", max_seqlen_q=TOKENS),
        )


# Compiles for seconds. On machines without a GPU alone: with one, torch 2.11 ends the process while it loads the program.
@pytest.mark.skipif(not shutil.which("g++") or torch.cuda.is_available(), reason="needs a C++ compiler and a machine without a GPU")
def test_a_program_that_aotinductor_compiles_runs(tmp_path):
    lens, bounds = torch.tensor([150]), torch.tensor([0, 90, TOKENS], dtype=torch.int32)
    given = *plain_inputs(device="cpu"), lens, bounds, torch.zeros(1, 2, TOKENS, 1, dtype=torch.int32)
    with torch.no_grad():
        program = torch.export.export(Calls(), given)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "program.pt2"))
        results = torch._inductor.aoti_load_package(path)(*given)
    torch.testing.assert_close(tuple(results), Calls()(*given))


def test_masks_of_blocks_are_not_made_under_vmap():
    q, _, _ = plain_inputs(60)
    for make in (lambda q: sf.topk_blocks(q, q, 1).mask_index, lambda q: sf.BlockMask.from_blocks(q[:, :, :4] > 0, 16).mask_index):
        with pytest.raises(NotImplementedError, match=r"masks of blocks are not made under vmap .*; make the mask before"):
            torch.vmap(make)(q[None])


def test_distributed_tensors_are_refused_with_what_takes_them():
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import local_map

    mesh, whole, shards = one_rank(), inputs(20), [Shard(1)]
    try:
        q, k, v = (DTensor.from_local(t.detach(), mesh, shards).requires_grad_() for t in whole)
        chosen = sf.topk_blocks(*(t.detach() for t in whole[:2]), 1, every=1, block_size=16)
        for call in (
            lambda: sf.attention(q, k, v, "causal"),
            lambda: sf.attention(q, k, v, chosen),
            lambda: sf.attention_decode(q[:, :, -1:], k, v),
            lambda: sf.topk_blocks(q, k, 1),
        ):
            with pytest.raises(TypeError, match=r"q must be a tensor of one rank; got a DTensor; .*local_map"):
                call()
        attend = local_map(lambda *qkv: sf.attention(*qkv, "causal"), shards, (shards, shards, shards), device_mesh=mesh)
        attend(q, k, v).sum().backward()
        wanted = torch.autograd.grad(sf.attention(*whole, "causal").sum(), whole)
        assert all(torch.equal(got.grad.to_local(), one) for got, one in zip((q, k, v), wanted, strict=True))
    finally:
        torch.distributed.destroy_process_group()


def test_second_derivatives_raise_in_compiled_code_though_the_gradient_that_arrives_is_constant():
    q, k, v = inputs(60)
    rel_bias, sinks = (torch.randn(shape, device=DEVICE, requires_grad=True) for shape in ((2, 9), (2,)))
    function = torch.compile(lambda: sf.attention(q, k, v, rel_bias=rel_bias, sinks=sinks), backend="aot_eager")
    for leaf in (q, rel_bias, sinks):
        (gradient,) = torch.autograd.grad(function().sum(), leaf, create_graph=True)
        for other in (q, k, v, rel_bias, sinks):
            with pytest.raises(RuntimeError, match=r"differentiable once|not currently support double backward"):
                torch.autograd.grad(gradient.sum(), other, allow_unused=True, retain_graph=True)
        with pytest.raises(RuntimeError, match=r"differentiable once|not currently support double backward"):
            gradient.sum().backward()
