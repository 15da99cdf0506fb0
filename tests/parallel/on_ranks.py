"""What each rank runs for the tests: a plan's results against one process's, in natural order.

A function returns its relative differences from one process, and asserts what else it promises."""

import copy
import gc
from collections.abc import Callable

import torch
import torch.distributed as dist
from oracle import poisoned_memory
from pool import DEVICE
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import sparse_flash as sf
from sparse_flash.parallel import routes

RAGGED = sf.documents([0, 70, 333, 334, 900, 1500, 1801])
# name: (mask, tokens, block, batch, heads, kv_heads)
CASES = {
    "causal": ("causal", 2048, 64, 1, 2, 2),
    "window": ("causal & local(300)", 2048, 64, 1, 2, 2),
    "butterfly": ("butterfly(block=64)", 2048, 64, 2, 2, 2),
    "ragged documents": (sf.causal() & RAGGED, 1801, 64, 1, 2, 2),
    "full": ("full", 1024, 64, 1, 2, 2),
    "full, cut block": ("full", 1000, 64, 1, 2, 2),
    "per head": (("causal", "local(100)", "full", "causal & local(64)"), 1024, 64, 2, 4, 4),
    "per head, grouped": ("per_head([causal, causal, local(100), butterfly(block=64)])", 1000, 32, 1, 4, 2),
    "grouped 8:2": ("causal", 1024, 128, 2, 8, 2),
    "1537 tokens": ("causal | local(200)", 1537, 128, 1, 2, 1),
    "bit tiles": ("causal & (dilated(3, 5) | strided(64))", 1100, 32, 1, 2, 2),
    "rows that keep nothing": ("causal & ~local(200)", 1024, 64, 1, 2, 2),
    "bigbird": ("bigbird(block=64, density=0.05)", 1536, 64, 1, 2, 2),
    "global tokens": ("local(80) | global_tokens(70)", 1400, 32, 1, 4, 2),
    "global tokens, per head": (
        ("global_tokens(40)", "global_tokens(16) | local(60)", "global_tokens(16)", "local(9)"),
        900,
        16,
        2,
        4,
        4,
    ),
    "global tokens, few blocks": ("block_diagonal(32) | global_tokens(20)", 140, 32, 1, 2, 2),
    "global tokens at the end": (sf.local(50) | sf.from_mask_fn(lambda q, kv: (q >= 530) | (q == kv)), 555, 32, 1, 2, 2),
    "every other block": (sf.from_mask_fn(lambda q, kv: kv // 32 % 2 == 0), 1300, 32, 1, 2, 2),
    "nothing travels": ("block_diagonal(256)", 2048, 64, 1, 2, 2),
    "ranks that get nothing": ("causal", 130, 64, 1, 4, 4),
    "grouped 6:3": ("causal & local(200)", 700, 64, 1, 6, 3),
}
HEAD_DIM, V_HEAD_DIM = 32, 16


def mesh():
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def mask_of(name: str):
    mask, tokens, block, *_ = CASES[name]
    return sf.BlockMask.per_head(list(mask), tokens, tokens, block) if isinstance(mask, tuple) else mask


def whole_of(name: str) -> sf.BlockMask:
    """The mask that a process alone attends under."""
    mask, tokens, block, *_ = CASES[name]
    return (mask_of(name) if isinstance(mask, tuple) else sf.compile_mask(mask, tokens, block_size=block)).to(DEVICE)


def inputs(name: str, v_head_dim: int = HEAD_DIM) -> list[torch.Tensor]:
    """q, k, v, dout, dlse of the whole sequence."""
    _, tokens, _, batch, heads, kv_heads = CASES[name]
    generator = torch.Generator(DEVICE).manual_seed(sum(map(ord, name)))
    sizes = [(heads, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, v_head_dim), (heads, v_head_dim)]
    drawn = [torch.randn(batch, h, tokens, d, generator=generator) for h, d in sizes]
    return [*drawn, torch.randn(batch, heads, tokens, generator=generator)]


def results(attend, q, k, v, dout, dlse) -> list[torch.Tensor]:
    """[out, lse, dq, dk, dv]"""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out, lse = attend(*leaves)
    ((out * dout).sum() + (lse.masked_fill(lse == float("-inf"), 0) * dlse).sum()).backward()
    return [out.detach(), lse.detach(), *(t.grad for t in leaves)]


def alone(whole, given, **options) -> list[torch.Tensor]:
    """The results of one process under a mask."""
    return results(lambda q, k, v: sf.attention(q, k, v, whole, return_lse=True, **options), *given)


def together(plan, given, attend=None, **options) -> list[torch.Tensor]:
    """The results of all ranks, gathered."""
    attend = attend or (lambda q, k, v: plan.attention(q, k, v, return_lse=True, **options))
    found = results(attend, *(plan.shard(t, 2) for t in given))
    assert not any(found[which][:, :, ~plan.exists].any() for which in (0, 2, 3, 4)), "padding has results"
    return [plan.unshard(t, 2) for t in found]


def of_one_process(name: str, choose=None) -> list[torch.Tensor]:
    given = inputs(name)
    return alone(choose(*given[:2]) if choose else whole_of(name), given)


def plan_of(name: str, strategy: str = "blocks", on=None, **more):
    _, tokens, block, _, heads, kv_heads = CASES[name]
    options = {"heads": heads, "kv_heads": kv_heads, "block_size": block, "strategy": strategy}
    return sf.context_parallel(mask_of(name), tokens, on or mesh(), **options | more)


def difference(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The worst, relative to the largest value of each."""
    worst = 0.0
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one == float("-inf"), other == float("-inf")) and not one.isnan().any()
        one, other = (t.masked_fill(other == float("-inf"), 0) for t in (one, other))
        worst = max(worst, float((one - other).abs().max() / other.abs().max().clamp(min=1e-3)))
    return worst


def compared(name: str, strategy: str, choice_of=None, **options) -> list[float]:
    """A second run gives the same bits. choice_of: options of ``topk_blocks``, by which queries choose."""

    def choose(q, k):
        return sf.topk_blocks(q, k, 3, block_size=32, **choice_of)

    chosen = {"select": choose} if choice_of else {}
    plan, found = plan_of(name, strategy, **options), []
    for _ in range(2):
        with poisoned_memory():
            found.append(together(plan, inputs(name), deterministic=True, **chosen))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "a second run gives other bits"
    return [difference(found[0], of_one_process(name, chosen.get("select")))]


def varied(strategy: str) -> list[float]:
    """With another size of values, a scale and sinks, and a loss of the first 100 tokens alone."""
    name = "per head, grouped"
    plan, whole = plan_of(name, strategy), whole_of(name)
    q, k, v, dout, dlse = inputs(name, V_HEAD_DIM)
    dout[:, :, 100:], dlse[:, :, 100:] = 0, 0
    given, sinks = (q, k, v, dout, dlse), [torch.linspace(-1, 1, 4).requires_grad_() for _ in range(2)]
    wanted = alone(whole, given, scale=0.3, sinks=sinks[0])
    got = together(plan, given, scale=0.3, sinks=sinks[1])
    dist.all_reduce(sinks[1].grad)
    return [difference(got, wanted), difference([sinks[1].grad], [sinks[0].grad])]


def poisoned(strategy: str, **options) -> list[float]:
    """NaN in what queries that keep nothing receive changes no bit of gradients."""
    pattern = sf.from_mask_fn(lambda q, kv: (q % 7 != 3) & ((q < 40) | (abs(q - kv) < 50)))
    plan = sf.context_parallel(pattern, 700, mesh(), heads=2, kv_heads=2, block_size=32, strategy=strategy, **options)
    leaves = [plan.shard(t[:1, :2, :700], 2).requires_grad_() for t in inputs("per head")[:3]]
    out, lse = plan.attention(*leaves, return_lse=True)
    empty = lse.isneginf()
    assert empty[:, :, plan.exists].any()
    given = [torch.ones_like(out), torch.ones_like(lse)]
    wanted = torch.autograd.grad((out, lse), leaves, given, retain_graph=True)
    given = [given[0].masked_fill(empty[..., None], float("nan")), given[1].masked_fill(empty, float("nan"))]
    assert all(torch.equal(*both) for both in zip(torch.autograd.grad((out, lse), leaves, given), wanted, strict=True))
    return []


def outlived(name: str, strategy: str, compiled: bool) -> list[float]:
    """A plan is gone before its backward pass; what that needs of it lives so long, and no longer."""
    torch._dynamo.reset()
    gc.collect()
    before = len(routes._known)

    def forward(q, k, v):
        plan = plan_of(name, strategy)
        leaves = [plan.shard(t, 2).requires_grad_() for t in (q, k, v)]

        def attend(q, k, v):
            return plan.attention(q * 1.0, k, v)

        run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
        return leaves, run(*leaves), plan.shard(given[3], 2)

    given = inputs(name)
    given[4].zero_()
    leaves, out, dout = forward(*given[:3])
    torch._dynamo.reset()  # compiled code keeps what it saw
    assert len(routes._known) > before
    out.backward(dout)
    del out
    assert compiled or len(routes._known) == before
    back = plan_of(name, strategy)
    wanted = alone(whole_of(name), given)[2:]
    return [difference([back.unshard(leaf.grad, 2) for leaf in leaves], wanted)]


def of_a_layer(compiled: bool = False, select: bool = False) -> list[float]:
    """A layer whose mask is a plan; a copy of the layer shares it."""
    torch.manual_seed(0)
    how = {"select": {"keep": 3, "block_size": 64}} if select else {"mask": "causal & local(200)"}
    layer = sf.SparseAttention(64, 4, kv_heads=2, **how)
    x = torch.randn(2, 1000, 64)
    wanted = results_of_layer(layer, x)
    options = {"heads": 4, "kv_heads": 2, "strategy": "heads"} if select else {}
    plan = layer.mask = sf.context_parallel("causal & local(200)", 1000, mesh(), **options)
    assert sf.SparseAttention(64, 4, plan, kv_heads=2, select=how.get("select")).mask is plan
    assert copy.deepcopy(layer).mask is plan
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    out, *gradients = results_of_layer(layer, plan.shard(x, 1), run, plan.exists[:, None])
    for gradient in gradients:
        dist.all_reduce(gradient)
    return [difference([plan.unshard(out, 1), *gradients], wanted)]


def of_tensor_parallel_heads(strategy: str) -> list[float]:
    """Two ranks share the sequence, and with each of them two share the heads of a layer, by PyTorch's tensor parallelism."""
    both = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("cp", "tp"))
    torch.manual_seed(0)
    layer = sf.SparseAttention(64, 8, "causal & local(200)", kv_heads=4)
    x = torch.randn(2, 1000, 64)
    wanted = results_of_layer(layer, x)
    plan = layer.mask = sf.context_parallel(layer.mask, 1000, both["cp"], heads=4, kv_heads=2, strategy=strategy)  # of a rank
    by_heads = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
    parallelize_module(layer, both["tp"], by_heads | {"out_proj": RowwiseParallel()})
    out, *gradients = results_of_layer(layer, plan.shard(x, 1), layer, plan.exists[:, None])
    gradients = [gradient.full_tensor() for gradient in gradients]
    for gradient in gradients:
        dist.all_reduce(gradient, group=both["cp"].get_group())
    return [difference([plan.unshard(out, 1), *gradients], wanted)]


def results_of_layer(layer, x, run=None, counts=1) -> list[torch.Tensor]:
    """[out, the gradients of parameters]. run: the layer, or compiled. counts: of which tokens the loss is."""
    out = (layer if run is None else run)(x)
    (out.sin() * counts).sum().backward()
    gradients = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    return [out.detach(), *gradients]


def compiled(plans: int, **options) -> list[float]:
    """Plans of one shape are one graph, of a model that computes before and after the call; against calls that are not compiled."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    torch.manual_seed(0)
    weights = [torch.randn(HEAD_DIM, HEAD_DIM) / HEAD_DIM**0.5 for _ in range(2)]

    def attend(q, k, v, plan):
        out, lse = plan.attention(q @ weights[0], k, v, return_lse=True)
        return out @ weights[1], lse

    graph = torch.compile(attend, fullgraph=True, backend=counter)
    worst = []
    for number in range(plans):
        pattern = sf.local(4 + 3 * number) | sf.global_tokens(1 + number)
        plan = sf.context_parallel(pattern, 350, mesh(), heads=4, kv_heads=4, block_size=16, **options)
        given = [plan.shard(t[:1, :, :350], 2) for t in inputs("per head")]
        eager, got = (results(lambda q, k, v, run=run, plan=plan: run(q, k, v, plan), *given) for run in (attend, graph))
        worst.append(difference(got, eager))
    assert counter.frame_count == 1
    return worst


def checkpointed(name: str) -> list[float]:
    plan = plan_of(name)

    def attend(q, k, v):
        return plan.attention(q * 1.0, k, v, return_lse=True)  # a product, so that something is left to recompute

    got = together(plan, inputs(name), lambda *qkv: checkpoint(attend, *qkv, use_reentrant=False))
    return [difference(got, of_one_process(name))]


def error_of(call) -> str:
    """The error of a call that is refused; "" if it is not."""
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return ""


def others_than(calls: list[tuple[str, Callable]]) -> list[tuple[str, str]]:
    """(text, error) of the calls whose error has not the text that stands before them."""
    said = [(text, error_of(call)) for text, call in calls]
    return [(text, error) for text, error in said if text not in error]


def refused(by_rank: dict[int, dict[str, object]]) -> str:
    """The error of a plan for which some ranks pass other arguments."""
    given = {"mask": "causal", "q_len": 1000, "mesh": mesh(), "block_size": 64} | by_rank.get(dist.get_rank(), {})
    return error_of(lambda: sf.context_parallel(**given))


def refused_calls() -> list[tuple[str, str]]:
    """Plans and calls that cannot be; see ``others_than``."""
    here, both = mesh(), init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("dp", "cp"))

    def planned(mask="causal", on=here, **options):
        return sf.context_parallel(mask, 1000, on, **{"block_size": 64} | options)

    plan, of_heads = planned(heads=4, kv_heads=2), planned(heads=4, kv_heads=2, strategy="heads")
    q, k, v = (torch.zeros(1, heads, plan.tokens, 16) for heads in (4, 2, 2))
    layer = sf.SparseAttention(16, 2, plan)
    chosen = sf.topk_blocks(*torch.ones(2, 1, 1, 1000, 16), keep=2, block_size=64, every=1)
    compiled = sf.compile_mask("causal", 1000, block_size=32)
    calls = [
        ("mesh must have one dimension, all of whose", lambda: planned(on=both)),
        ("got 2 ('dp', 'cp'); name one", lambda: planned(on=both)),
        ("kv_heads must divide heads; got 3 and 4", lambda: planned(strategy="heads", heads=4, kv_heads=3)),
        ("got 2 ranks and 3 kv_heads", lambda: planned(strategy="heads", heads=3)),
        ("strategy must be 'auto', 'blocks' or 'heads'; got 'ring'", lambda: planned(strategy="ring")),
        ("kv_heads must divide heads; got 2 and None", lambda: planned(kv_heads=2)),
        ("one block_size, the unit that ranks own; got 32", lambda: planned([compiled, "causal"])),
        ("made before there are queries; got a BlockSelection, which queries choose", lambda: planned(chosen)),
        ("this plan's strategy is 'blocks'; pass strategy='heads'", lambda: plan.attention(q, k, v, select=chosen)),
        ("as topk_blocks does; got Tensor", lambda: of_heads.attention(q, k, v, select=lambda q, k: q)),
        ("unexpected keyword argument 'dropout_p'", lambda: plan.attention(q, k, v, dropout_p=0.1)),
        ("a layer whose mask is a plan takes no dropout", lambda: sf.SparseAttention(16, 2, plan, dropout_p=0.1)(q[:, 0])),
        ("backend 'reference' needs all keys of a query in one call", lambda: plan.attention(q, k, v, backend="reference")),
        ("q must hold the 512 tokens of this rank", lambda: plan.attention(q[:, :, 1:], k, v)),
        ("4 query and 2 key heads; got 2 and 2", lambda: plan.attention(k, k, v)),
        ("must hold the 1000 tokens of the whole sequence", lambda: plan.shard(q, 2)),
        ("a ContextPlan is no mask: it attends itself; call plan.attention(q, k, v) on every", lambda: sf.attention(q, k, v, plan)),
        ("x must hold the 512 tokens of this rank; got 9", lambda: layer(torch.zeros(1, 9, 16))),
        ("no cache", lambda: layer(torch.zeros(1, plan.tokens, 16), layer.new_cache(1, 16))),
    ]
    return others_than(calls)


DOCUMENTS = [[0, 70, 333, 334, 900, 1000], [0, 1000], [0, *range(90, 1000, 90), 1000], [0, 512, 1000]]


def of_documents(strategy: str) -> list[float]:
    """Masks by layer, and documents that change with each step: one graph. Layers of one mask share a plan, and all of them the
    tokens; copies share both. Positions count from the starts of documents."""
    torch._dynamo.reset()
    counter, worst = CompileCounterWithBackend("aot_eager"), []

    @torch.compile(fullgraph=True, backend=counter)
    def attend(plan, q, k, v):
        return plan.attention(q, k, v, return_lse=True)

    given = [t[:, :, :1000] for t in inputs("per head")]
    for cu_seqlens in DOCUMENTS:
        texts = ["causal", "causal & local(100)", "causal", "causal & (local(100))"]
        masks = [sf.parse(text) & sf.documents(cu_seqlens) for text in texts]
        plans = sf.context_parallel(masks, 1000, mesh(), heads=4, kv_heads=4, block_size=64, strategy=strategy)
        assert plans[0] is plans[2] and plans[1] is plans[3] and plans[0].positions is plans[1].positions
        assert copy.deepcopy(plans[0]) is copy.copy(plans[0]) is plans[0]
        for mask, plan in zip(masks[:2], plans, strict=False):
            whole = sf.compile_mask(mask, 1000, block_size=64, device=DEVICE)
            assert torch.equal(plan.mask.to_dense(), whole.to_dense())
            got = together(plan, given, lambda q, k, v, plan=plan: attend(plan, q, k, v))
            worst.append(difference(got, alone(whole, given)))
        starts, token = torch.tensor(cu_seqlens), torch.arange(1000)
        in_document = token - starts[torch.searchsorted(starts, token, right=True) - 1]
        assert torch.equal(plans[0].unshard(plans[0].document_positions, 0), in_document)
    assert counter.frame_count == 1
    return worst
