"""Stand-ins for FlashAttention-4 and cuDNN's blocks compute what they are asked, and peers refuse the rest. Each result of a real
peer is compared with float64 before it is timed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from problems import errors_of, problem, provide

from sparse_flash.benchmarks.baselines import registry
from sparse_flash.benchmarks.measure import throughput
from sparse_flash.benchmarks.workload import cases, masks

CPU = torch.device("cpu")


@pytest.fixture
def flash_attn(monkeypatch):
    """A stand-in for flash_attn.cute: its calls and layouts, computed plainly."""

    def dense(q, k, v, kept):
        """(batch, tokens, heads, head_dim)"""
        assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept, enable_gqa=True)
        return out.transpose(1, 2).contiguous()

    def flash_attn_func(q, k, v, causal=False, window_size=(None, None)):
        distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        kept = (distance >= 0) | (not causal)
        return dense(q, k, v, kept if window_size[0] is None else kept & (distance <= window_size[0])), None

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
        assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
        position = torch.arange(len(q))
        document = torch.bucketize(position, cu_seqlens_q, right=True)
        kept = (position[:, None] >= position) & (document[:, None] == document)
        return dense(q[None], k[None], v[None], kept)[0]

    provide(monkeypatch, "flash_attn.cute", flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)


@pytest.mark.parametrize("spec", ["full", "causal", "causal & local(40)", "causal & documents([0, 100, 180, 256])"])
@pytest.mark.parametrize("shape", [{}, {"heads": 4, "kv_heads": 2, "batch": 2}], ids=["plain", "batch and groups"])
def test_flash_attention_4_computes_what_it_is_asked(flash_attn, spec, shape):
    p, peer = problem(spec, **shape), registry.find_peer("fa4")
    assert peer.refuses(p) is None and max(errors_of(peer, p).values()) < 1e-4


@pytest.fixture
def full_blocks(monkeypatch):
    """Stands in for cuDNN's frontend, in PyTorch's operations."""

    def attend(q, k, v, index, q2k_block_nums, sparse_block_size):
        assert index.dtype == q2k_block_nums.dtype == torch.int32 and index.shape[:2] == q2k_block_nums.shape[:2] == q.shape[:2]
        listed = torch.arange(index.shape[3]) < q2k_block_nums[..., None]
        kept = torch.zeros(*index.shape[:3], k.shape[2] // sparse_block_size + 1, dtype=torch.bool)
        kept.scatter_(3, torch.where(listed, index.long(), kept.shape[3] - 1), True)
        pairs = kept[..., :-1].repeat_interleave(sparse_block_size, 2).repeat_interleave(sparse_block_size, 3)
        scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~pairs, -torch.inf)
        return {"o_tensor": scores.softmax(3) @ v, "lse_tensor": scores.logsumexp(3)}

    def grads(dout, q, k, v, out, lse, index, **options):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            again = attend(*leaves, index, **options)
            assert torch.allclose(again["o_tensor"], out) and torch.allclose(again["lse_tensor"], lse)
            found = torch.autograd.grad(again["o_tensor"], leaves, dout)
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), found, strict=True))

    functions = SimpleNamespace(block_sparse_attention_forward=attend, block_sparse_attention_backward=grads)
    provide(monkeypatch, "cudnn.block_sparse_attention", BSA=functions)


HEADS_THAT_DIFFER = ("full", "butterfly(block=64)")


@pytest.mark.parametrize("spec, batch", [("butterfly(block=64)", 1), ("random(0.4, block=64)", 2), (HEADS_THAT_DIFFER, 1)])
def test_cudnns_blocks_compute_what_they_are_asked(full_blocks, spec, batch):
    p, peer = problem(spec, tokens=512, block_size=64, batch=batch), registry.find_peer("cudnn-blocks")
    assert peer.refuses(p) is None and max(errors_of(peer, p).values()) < 1e-4


PLAIN = {"block_size": 64}
REFUSED = [
    ("sdpa-flash", "local(9)", {}, "dense"),
    ("fa3", "local(9)", {}, "window"),
    ("fa4", "local(9)", {}, "window"),
    ("cudnn-blocks", "causal", PLAIN, "full blocks"),
    ("cudnn-blocks", "full", PLAIN, "full blocks"),
    ("cudnn-blocks", "butterfly(block=32)", {"block_size": 32}, "blocks of 32"),
    ("cudnn-blocks", "butterfly(block=64)", PLAIN | {"heads": 2, "kv_heads": 1}, "as many heads"),
    *(("fastvideo", spec, PLAIN | {"head_dim": 64}, "full blocks") for spec in ("causal", "full", "~local(200)")),
    ("fastvideo", "butterfly(block=128)", {"head_dim": 64}, "blocks of 128"),
    ("fastvideo", "butterfly(block=64)", PLAIN, "head_dim"),
]


@pytest.mark.parametrize("peer, spec, shape, reason", REFUSED, ids=str)
def test_peers_refuse_with_a_reason(flash_attn, full_blocks, peer, spec, shape, reason):
    assert reason in registry.find_peer(peer).refuses(problem(spec, **shape))


def test_peers_refuse_dtypes_and_dropout_and_unknown_ones_are_errors(flash_attn):
    doubled = replace(problem("local(9)"), q=problem("local(9)").q.double())
    assert registry.find_peer("sparse_flash:triton").refuses(doubled)
    assert registry.find_peer("sparse_flash:torch").refuses(doubled) is None
    dropped = replace(problem("full"), dropout_p=0.1)
    assert all("dropout" in registry.find_peer(name).refuses(dropped) for name in ("flex", "fa4"))
    for name in ("flax", "flex:triton"):
        with pytest.raises(ValueError, match="unknown peer"):
            registry.find_peer(name)


def test_operations_are_counted_product_by_product():
    assert cases.Shape(1, 1, 1, 128).flops == (4 * 128, 10 * 128)
    assert cases.Shape(1, 1, 1, 192, v_head_dim=128).flops == (2 * (192 + 128), 2 * (3 * 192 + 2 * 128))


def test_values_of_another_head_dim_are_measured():
    case = cases.Case(cases.Shape(1, 2, 128, 24, v_head_dim=16), masks.CAUSAL, "sparse_flash")
    assert str(case.shape) == "B1 H2 N128 D24/16"
    assert throughput.run(case, CPU, seconds=0.01)["correct"]
