"""The PyTorch operators pass opcheck, and torch.compile has no graph break and no needless recompile."""

import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from oracle import DEVICE, tensor
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_flash as sf
from sparse_flash.dispatch import operators
from sparse_flash.masks.cache import compile_cached
from sparse_flash.masks.parsing import text_of

TOKENS = 200
LOCAL = sf.causal() & sf.local(50)
parametrize = pytest.mark.parametrize


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


# On a CPU not Triton, whose interpreter would only make these tests slower.
BACKEND = "triton" if DEVICE == "cuda" else "torch"


def inputs(tokens=TOKENS, kv_heads=2, **kwargs):
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(1, heads, tokens, 16) for heads in (2, kv_heads, kv_heads)]
    return [tensor(shape, generator=generator, **kwargs).requires_grad_() for shape in shapes]


def compiled(function):
    """(function under torch.compile with no graph break allowed, counter of its compilations)."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def outcome(function, q, k, v, *arguments):
    """[out, lse, dq, dk, dv] of a function that returns (out, lse)."""
    out, lse = function(q, k, v, *arguments)
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse.masked_fill(lse.isneginf(), 0).sum(), (q, k, v))]


def attend(q, k, v, mask):
    return sf.attention(q, k, v, mask, return_lse=True)


def assert_same(function, *arguments):
    for got, wanted in zip(outcome(function, *arguments), outcome(attend, *arguments), strict=True):
        assert torch.equal(got, wanted)


def test_a_compiled_function_does_not_recompile_when_only_the_mask_changes():
    function, counter = compiled(attend)
    patterns = (LOCAL, sf.causal(), sf.local(9) & ~sf.strided(7), sf.local(3), ~sf.full(), sf.random(0.3, 0, block=1))
    for number, pattern in enumerate(patterns):
        # Without coarse: else a GPU gets blocks of 128. slow: some warn that dense attention is as fast, outside of graphs.
        mask = replace(sf.compile_mask(pattern, TOKENS, block_size=32, device=DEVICE), coarse=None, slow=number % 2 == 0)
        assert_same(function, *inputs(), mask)
    assert counter.frame_count == 1


LENGTHS = (33, 64, 100, 128, 129, 150, 200, 256, 257, 300, 333, 400)


@parametrize("pattern", ["causal & local(50)", "full", LOCAL, None], ids=["spec text", "full", "pattern", "dense"])
def test_twelve_lengths_take_three_graphs_at_most_and_give_what_eager_calls_give(pattern):
    if isinstance(pattern, sf.Pattern) and torch.__version__ < "2.13":
        pytest.skip("older versions of torch.compile take spec text and tables, but no Pattern object")
    function, counter = compiled(lambda q, k, v: attend(q, k, v, pattern))
    for tokens in LENGTHS:
        qkv = inputs(tokens)
        for got, wanted in zip(outcome(function, *qkv), outcome(attend, *qkv, pattern), strict=True):
            assert torch.equal(got, wanted)
    assert counter.frame_count <= 3


MADE_AT_RUN_TIME = {
    "blocks": lambda q, blocks: sf.BlockMask.from_blocks(blocks, 16, q.shape[2], q.shape[2]),
    "blocks within text": lambda q, blocks: sf.BlockMask.from_blocks(blocks, 16, q.shape[2], q.shape[2], within="causal"),
    "chosen": lambda q, blocks: sf.topk_blocks(q, q, keep=2, block_size=16),
    "share": lambda q, blocks: sf.topk_blocks(q, q, keep=0.5, block_size=16, within="causal & local(40)"),
}


@parametrize("made", sorted(MADE_AT_RUN_TIME))
def test_masks_made_at_run_time_compile_with_dynamic_sizes(made):
    def attend(q, blocks):
        return sf.attention(q, q, q, MADE_AT_RUN_TIME[made](q, blocks))

    function = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (70, 90):
        q = torch.randn(1, 2, tokens, 16, device=DEVICE)
        blocks = torch.rand(1, 2, *[-(-tokens // 16)] * 2, device=DEVICE) < 0.7
        assert torch.equal(function(q, blocks), attend(q, blocks))


OF_40 = sf.compile_mask("causal & local(9)", 40, block_size=16)
MADE_ON_THE_HOST = {
    "compile_mask": lambda kept: sf.compile_mask("causal", 40),
    "from_dense": lambda kept: sf.BlockMask.from_dense(kept, 16),
    "from_mask_mod": lambda kept: sf.BlockMask.from_mask_mod(lambda b, h, q, kv: q >= kv, None, None, 40),
    "per_head": lambda kept: sf.BlockMask.per_head(["causal", "local(3)"], 40),
    "transpose": lambda kept: OF_40.transpose(),
    "in_blocks_of": lambda kept: OF_40.in_blocks_of(32),
    "select": lambda kept: OF_40.select(0),
    "to_dense": lambda kept: sf.BlockMask.from_blocks(OF_40.to_dense()[::16, ::16], 16, 40, 40),
    "block_states": lambda kept: sf.BlockMask.from_blocks(OF_40.block_states() > 0, 16, 40, 40),
}


@parametrize("name", sorted(MADE_ON_THE_HOST))
def test_a_mask_made_on_the_host_breaks_the_graph_there_and_a_full_graph_says_where_to_make_it(name):
    def attend(q, kept):
        return sf.attention(q, q, q, MADE_ON_THE_HOST[name](kept)).square()

    q, kept = torch.randn(1, 2, 40, 16), torch.rand(40, 40) < 0.5
    torch.testing.assert_close(torch.compile(attend, backend="aot_eager")(q, kept), attend(q, kept))
    torch._dynamo.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=f"{name} works on the host .* call it outside of the compiled function"
    ):
        torch.compile(attend, backend="aot_eager", fullgraph=True)(q, kept)


def test_numbers_may_change_between_calls_of_a_compiled_function():
    function, _ = compiled(lambda q, scale, softcap: sf.attention(q, q, q, "causal", scale=scale, softcap=softcap))
    q = torch.randn(1, 2, 30, 16, device=DEVICE)
    for number in (0.25, 0.5, 2.0):
        assert torch.equal(function(q, number, 9 * number), sf.attention(q, q, q, "causal", scale=number, softcap=9 * number))
    with pytest.raises(Exception, match="scale must be positive"):
        function(q, -1.0, 1.0)


@sf.register_pattern("every_third")
@dataclass(frozen=True)
class EveryThird(sf.Pattern):
    def token_rule(self, q, kv):
        return (q - kv) % 3 == 0


@dataclass(frozen=True)
class Unregistered(EveryThird):
    name = None


def test_patterns_of_users_compile_and_those_without_spec_text_for_one_length():
    assert text_of(sf.causal() & EveryThird()) == "causal & every_third"
    assert text_of(sf.causal() & Unregistered()) is None
    function, counter = compiled(attend)
    for tokens in (60, 70, 80):
        assert_same(function, *inputs(tokens), "causal & every_third")
    assert counter.frame_count <= 2
    if torch.__version__ >= "2.13":
        pattern = Unregistered()
        unregistered, counter = compiled(lambda q, k, v: attend(q, k, v, pattern))
        for tokens in (60, 70, 80):
            for got, wanted in zip(outcome(unregistered, *inputs(tokens)), outcome(attend, *inputs(tokens), pattern), strict=True):
                assert torch.equal(got, wanted)
        assert counter.frame_count == 3
    else:
        with pytest.raises(Exception, match=r"does not trace Pattern objects; pass pattern\.to_spec\(\)"):
            function(*inputs(), Unregistered())


# Under these names, calls whose tables are remembered: of (batch, heads, tokens, head_dim) and, in varlen, of packed documents.
CALLS_WITH_TABLES = {
    "dense": lambda x, spec, starts: sf.attention(x, x, x),
    "attention": lambda x, spec, starts: sf.attention(x, x, x, spec),
    "varlen, in place": lambda x, spec, starts: sf.attention_varlen(*[x[0].transpose(0, 1)] * 3, starts, mask=spec),
    "varlen, moved": lambda x, spec, starts: sf.attention_varlen(*[x[0].transpose(0, 1)] * 3, starts, mask=f"{spec} | sinks(1)"),
    "decode": lambda x, spec, starts: sf.attention_decode(x[:, :, -2:].detach(), x.detach(), x.detach(), spec),
}


@parametrize("name", CALLS_WITH_TABLES)
def test_calls_on_meta_tensors_have_the_shapes_of_real_ones(name):
    def shapes(device):
        x = torch.randn(1, 2, 90, 16, device=device, requires_grad=True)
        out = CALLS_WITH_TABLES[name](x, "causal & local(23)", torch.tensor([0, 40, 90], device=device))
        if out.requires_grad:
            out.sum().backward()
        return [out.shape, x.grad is not None and x.grad.shape]

    assert shapes("meta") == shapes(DEVICE)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_compiled_code_in_cuda_graphs_takes_other_lengths():
    function = torch.compile(lambda q, k, v: attend(q, k, v, "causal & local(50)"), fullgraph=True, mode="reduce-overhead")
    for tokens in (200, 300):
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            qkv = inputs(tokens)
            got = [t.clone() for t in outcome(function, *qkv)]
            for ours, wanted in zip(got, outcome(attend, *qkv, "causal & local(50)"), strict=True):
                torch.testing.assert_close(ours, wanted)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_tables_that_a_cuda_graph_reads_stay_and_are_not_made_while_it_is_captured():
    q = torch.randn(1, 2, 300, 64, device=DEVICE)
    wanted = sf.attention(q, q, q, "causal & local(31)")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sf.attention(q, q, q, "causal & local(31)")
    for window in range(100, 180):  # more than are kept
        compile_cached(f"local({window})", 300, 300, 128, q.device)
    torch.cuda.empty_cache()
    graph.replay()
    torch.testing.assert_close(out, wanted)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="make the call once before"):
        sf.attention(q, q, q, "causal & local(32)")


def test_a_compiled_function_raises_what_the_call_raises():
    q, k, v = inputs()
    function, _ = compiled(attend)
    with pytest.raises(Exception, match="the number of key heads must divide that of query heads"):
        function(q[:, :1], k, v, None)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch before 2.13 traces no Pattern objects")
def test_compiled_functions_may_format_patterns_into_text():
    layout = sf.VideoLayout(2, 4, 8, tile=(2, 4, 8))
    q, k, v = (t.detach() for t in inputs(layout.tokens))
    with_s, _ = compiled(lambda q, k, v: sf.attention(q, k, v, f"tile_window({layout!s}, 1) & {LOCAL!s}"))
    assert torch.equal(with_s(q, k, v), sf.attention(q, k, v, f"tile_window({layout}, 1) & {LOCAL}"))


def test_exported_programs_hold_the_operator_and_take_other_lengths():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return sf.attention(q, k, v, "causal & local(50)")

    q, k, v = (t.detach() for t in inputs())
    tokens = {2: torch.export.Dim("tokens", min=2, max=4096)}
    program = torch.export.export(Model(), (q, k, v), dynamic_shapes={"q": tokens, "k": tokens, "v": tokens})
    assert any("sparse_flash.attention" in str(node.target) for node in program.graph.nodes)
    for other in (TOKENS, 77, 300):
        q, k, v = (t.detach() for t in inputs(other))
        assert torch.equal(program.module()(q, k, v), sf.attention(q, k, v, LOCAL))


# Compiles for 20 s. The operators of all calls are in one program, as each program takes most of that.
@pytest.mark.skipif(DEVICE == "cpu" and not shutil.which("g++"), reason="needs a C++ compiler")
def test_a_program_that_aotinductor_compiles_runs(tmp_path):
    mask = sf.compile_mask(LOCAL, TOKENS, block_size=32, device=DEVICE)

    class Model(torch.nn.Module):
        def forward(self, q, k, v, lens, bounds, picks):
            packed, last = (t[0].transpose(0, 1) for t in (q, k, v)), q[:, :, -1:]
            chosen = sf.BlockSelection.from_picks(picks, 64, always="sinks(4)")
            return (
                sf.attention(q, k, v),
                sf.attention(q, k, v, "causal", softcap=2.0),
                sf.attention(q, k, v, mask, kv_lens=lens, alibi_slopes=lens.expand(2).float()),
                sf.attention(q, k, v, chosen),
                sf.attention(q, k, v, "causal & sampled(8, keep=1, block=64)"),
                sf.attention(q, k, v, sf.BlockSelection.from_picks(picks, 64)),
                sf.attention_decode(last, k, v),
                sf.attention_decode(last, k, v, "causal & local(20)", kv_lens=lens),
                sf.attention_varlen(*packed, bounds, mask="causal", max_seqlen_q=TOKENS),
            )

    q, k, v = (t.detach() for t in inputs())
    lens, bounds = torch.tensor([150], device=DEVICE), torch.tensor([0, 90, TOKENS], dtype=torch.int32, device=DEVICE)
    given = q, k, v, lens, bounds, torch.zeros(1, 2, TOKENS, 1, dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        program = torch.export.export(Model(), given)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "program.pt2"))
        results = torch._inductor.aoti_load_package(path)(*given)
    for got, wanted in zip(results, Model()(*given), strict=True):
        torch.testing.assert_close(got, wanted)


def test_transforms_that_would_go_wrong_are_refused():
    q, k, v = (t.detach() for t in inputs())

    def attend(q):
        return sf.attention(q, k, v, LOCAL).sum()

    calls = [lambda: torch.func.grad(attend)(q), lambda: torch.func.jvp(attend, (q,), (q,)), lambda: torch.vmap(attend)(q[None])]
    for call in calls:
        with pytest.raises(NotImplementedError, match="reverse-mode autograd"):
            call()
    for call in (lambda q: sf.topk_blocks(q, q, 1).mask_index, lambda q: sf.BlockMask.from_blocks(q[:, :, :4] > 0, 16).mask_index):
        with pytest.raises(NotImplementedError, match=r"masks of blocks are not made under vmap .*; make the mask before"):
            torch.vmap(call)(q[None])
    with torch.autograd.forward_ad.dual_level():
        attend(q)
        with pytest.raises(NotImplementedError, match="reverse-mode autograd"):
            attend(torch.autograd.forward_ad.make_dual(q, q))


def batched_gradients():
    q, k, v = inputs(60)
    chosen = sf.topk_blocks(q, k, 1, every=1, block_size=16)
    bounds = torch.tensor([0, 20, 60], dtype=torch.int32, device=DEVICE)
    packed = [t[0].transpose(0, 1) for t in (q, k, v)]
    return q, {
        "out": lambda: sf.attention(q, k, v, LOCAL),
        "lse": lambda: sf.attention(q, k, v, return_lse=True)[1],
        "a bias beside": lambda: sf.attention(q, k, v, rel_bias=torch.zeros(2, 9, device=DEVICE, requires_grad=True)),
        "a selection": lambda: sf.attention(q, k, v, chosen),
        "lse of blocks": lambda: sf.attention(q, k, v, chosen, return_block_lse=True)[1],
        "documents in place": lambda: sf.attention_varlen(*packed, bounds, mask="causal"),
        "documents moved": lambda: sf.attention_varlen(*packed, bounds, mask="strided(4, block=1)"),
    }


@parametrize("way", batched_gradients()[1])
def test_batches_of_gradients_are_refused(way):
    q, calls = batched_gradients()
    result = calls[way]()
    gradients = torch.randn(3, *result.shape, device=DEVICE)

    def gradient(of):
        return torch.autograd.grad(result, q, of, retain_graph=True)[0]

    for call in (
        lambda: torch.autograd.grad(result, q, gradients, is_grads_batched=True, retain_graph=True),
        lambda: torch.vmap(gradient)(gradients),
    ):
        with pytest.raises(NotImplementedError, match=r"not under .*is_grads_batched=True.*; .*loop over the gradients"):
            call()


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_tracing_by_torch_jit_names_what_traces_instead():
    q, k, v = (t.detach() for t in inputs(20))
    bounds = torch.tensor([0, 20], dtype=torch.int32, device=DEVICE)
    for call in (
        sf.attention,
        lambda q, k, v: sf.attention(q, k, v, "causal"),
        lambda q, k, v: sf.attention_decode(q[:, :, -1:], k, v),
        lambda q, k, v: sf.attention_varlen(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), bounds),
        lambda q, k, v: sf.topk_blocks(q, k, 1, every=1, block_size=16).picks,
    ):
        with pytest.raises(NotImplementedError, match=r"torch.jit.trace turns into constants; use torch.export.export"):
            torch.jit.trace(call, (q, k, v))


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh(DEVICE, (1,))
    torch.distributed.destroy_process_group()


def test_distributed_tensors_are_refused_with_what_takes_them(one_rank):
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import local_map

    whole = inputs(20)
    q, k, v = (DTensor.from_local(t.detach(), one_rank, [Shard(1)]).requires_grad_() for t in whole)
    chosen = sf.topk_blocks(*(t.detach() for t in whole[:2]), 1, every=1, block_size=16)
    for call in (
        lambda: sf.attention(q, k, v),
        lambda: sf.attention(q, k, v, "causal"),
        lambda: sf.attention(q, k, v, chosen),
        lambda: sf.attention_decode(q[:, :, -1:], k, v),
        lambda: sf.topk_blocks(q, k, 1),
    ):
        with pytest.raises(TypeError, match=r"q must be a tensor of one rank; got a DTensor; .*local_map"):
            call()
    shards = [Shard(1)]
    attend = local_map(lambda *qkv: sf.attention(*qkv, "causal"), shards, (shards, shards, shards), device_mesh=one_rank)
    attend(q, k, v).sum().backward()
    wanted = torch.autograd.grad(sf.attention(*whole, "causal").sum(), whole)
    for got, one in zip((q, k, v), wanted, strict=True):
        assert torch.equal(got.grad.to_local(), one)


@parametrize("compiler", ["eager", "aot_eager"])
@parametrize("name", ["out", "rel_bias"])
def test_second_derivatives_raise_in_compiled_code_though_the_gradient_that_arrives_is_constant(name, compiler):
    q, k, v = inputs(60)
    rel_bias = torch.randn(2, 9, device=DEVICE, requires_grad=True)
    given, leaves = ({"mask": LOCAL}, (q, k, v)) if name == "out" else ({"rel_bias": rel_bias}, (q, k, v, rel_bias))
    function = torch.compile(lambda: sf.attention(q, k, v, **given), backend=compiler)
    for leaf in leaves:
        (gradient,) = torch.autograd.grad(function().sum(), leaf, create_graph=True)
        for other in leaves:
            with pytest.raises(RuntimeError, match=r"differentiable once|not currently support double backward"):
                torch.autograd.grad(gradient.sum(), other, allow_unused=True, retain_graph=True)
        with pytest.raises(RuntimeError, match=r"differentiable once|not currently support double backward"):
            gradient.sum().backward()


def test_second_derivatives_by_sinks_are_those_of_the_definition():
    q, k, v = (t.detach().double().requires_grad_() for t in inputs(30))
    sinks = torch.randn(2, dtype=torch.float64, device=DEVICE, requires_grad=True)

    def defined():
        scores = (q @ k.mT / 4).masked_fill(~sf.compile_mask(LOCAL, 30).to_dense().to(DEVICE), float("-inf"))
        with_sink = torch.cat([scores, sinks[None, :, None, None].expand(1, 2, 30, 1)], -1)
        return with_sink.softmax(-1)[..., :-1] @ v

    def second(out):
        (gradient,) = torch.autograd.grad(out.square().sum(), sinks, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), (q, k, v, sinks))

    for got, wanted in zip(second(sf.attention(q, k, v, LOCAL, sinks=sinks)), second(defined()), strict=True):
        torch.testing.assert_close(got, wanted)


def test_first_derivatives_are_the_same_with_create_graph_and_are_marked_only_then(monkeypatch):
    q, k, v = inputs(60)

    def gradients(**options):
        return torch.autograd.grad(attend(q, k, v, LOCAL)[0].square().sum(), (q, k, v), **options)

    marked = gradients(create_graph=True)
    monkeypatch.setattr(operators._OnceDifferentiable, "mark", None)
    for got, wanted in zip(marked, gradients(), strict=True):
        assert torch.equal(got, wanted) and not wanted.requires_grad
