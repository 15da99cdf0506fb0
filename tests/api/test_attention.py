"""The call: right by the rule of ``oracle.check`` on every back end, and one clear error for arguments that do not fit together."""

import warnings
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import strategies
import torch
import torch.nn.functional as F
from accepted import fitted, shapes
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from oracle import BACKENDS, DEVICE, LAYOUTS, check, make_call, require, tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sparse_flash as sf
from sparse_flash import backends
from sparse_flash.backends import torch as torch_backend

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize
every_backend = parametrize("backend", BACKENDS)
LOCAL = sf.causal() & sf.local(50)
TOKENS = 150 if DEVICE == "cuda" else 80  # some whole tiles and a part of one; the interpreter takes long


def inputs(q_len=100, kv_len=None, *, batch=1, heads=2, kv_heads=2, head_dim=16, seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, q_len, head_dim)] + 2 * [(batch, kv_heads, kv_len or q_len, head_dim)]
    return [tensor(shape, generator=generator, **kwargs) for shape in shapes]


def accepted(backend, *lengths, dtype=torch.float32, head_dim=16, requires_grad=False, **kwargs):
    """``inputs`` of this dtype and head_dim, or of the nearest that the back end accepts."""
    tensors = inputs(*lengths, **fitted(backend, {"dtype": dtype, "head_dim": head_dim}), **kwargs)
    require(backend, make_call(*tensors[:2]), lambda: sf.attention(*tensors, backend=backend))
    return [t.requires_grad_(requires_grad) for t in tensors]


def block_size_near(backend, block_size):
    return fitted(backend, {"dtype": torch.float32, "head_dim": 16, "block_size": block_size})["block_size"]


def budget(backend):
    """Triton's interpreter takes about a second where the others take a millisecond."""
    interpreted = backend == "triton" and DEVICE == "cpu"
    return hypothesis_settings(max_examples=3 if interpreted else 40)


# Correctness.


@parametrize("length", [2, 33, 130])
@parametrize("shift", [-200.0, -30.0])
@parametrize("pattern", [None, "causal & local(20)"])
@parametrize("backend", BACKENDS)
def test_scores_far_below_zero_give_no_weight_to_keys_that_do_not_exist(backend, pattern, shift, length):
    # exp(0 - lse) of a tile's empty rows is infinite in float16 for shifts from 12, in float32 from 90.
    dtype = torch.float32 if backend == "reference" else torch.float16
    for options in ({}, {"deterministic": True}) if DEVICE == "cuda" else ({},):
        check(backend, pattern, length, dtype=dtype, head_dim=64, block_size=128, score_shift=shift, **options)


@parametrize("backend", BACKENDS)
def test_drawn_patterns_shapes_and_layouts_are_right(backend):
    reason = backends.get_backend(backend).why_unavailable()
    if reason:
        pytest.skip(f"{backend}: {reason}")
    longest = 130 if backend == "triton" and DEVICE == "cpu" else 400

    @budget(backend)
    @given(
        pattern=st.none() | strategies.expressions,
        lengths=strategies.lengths,
        shape=shapes(backend),
        heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1)]),
        layout=st.sampled_from(LAYOUTS),
        batch=st.integers(1, 2),
        scale=st.sampled_from([None, 0.05, 0.3]),
    )
    def property_holds(pattern, lengths, shape, heads, **others):
        q_len, kv_len = (min(n, longest) for n in lengths)
        check(backend, pattern, q_len, kv_len, heads=heads[0], kv_heads=heads[1], **shape, **others)

    property_holds()


@every_backend
@parametrize("head_dim", [16, 40, 64, 80, 96, 128, 256])
def test_every_head_dim_is_right(backend, head_dim):
    check(backend, LOCAL, TOKENS, usual={"block_size": 32}, head_dim=head_dim, heads=1)


V_HEAD_DIMS = [(192, 128), (64, 128), (40, 72), (16, 256)]


@every_backend
@parametrize("dtype", [torch.float16, torch.float32])
@parametrize("head_dim, v_head_dim", V_HEAD_DIMS)
def test_v_may_have_a_head_dim_of_its_own(backend, head_dim, v_head_dim, dtype):
    layout = LAYOUTS[V_HEAD_DIMS.index((head_dim, v_head_dim))]
    check(
        backend,
        sf.causal() & sf.local(40),
        40,
        70,
        kv_heads=1,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype,
        layout=layout,
    )


def test_out_of_another_head_dim_lies_in_memory_as_q_does():
    (q, k, _), v = inputs(), inputs(head_dim=24)[2]
    tokens_first = sf.attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, LOCAL)
    assert tokens_first.shape == (1, 2, 100, 24) and tokens_first.transpose(1, 2).is_contiguous()
    repeated = [t.expand(3, -1, -1, -1) for t in (q, k, v)]  # a result cannot have a stride of 0
    assert sf.attention(q, k, v, LOCAL).is_contiguous() and sf.attention(*repeated, LOCAL).is_contiguous()


def test_hopper_names_a_head_dim_of_v_that_it_does_not_run(monkeypatch):
    hopper = backends.get_backend("hopper")
    monkeypatch.setattr(hopper, "why_unavailable", lambda: None)
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    call = backends.Call(torch.device("cuda"), torch.float16, 1, 2, 2, 64, 64, 128, None)
    assert hopper.supports(call) is None
    assert hopper.supports(replace(call, v_head_dim=64)) is None
    assert hopper.supports(replace(call, head_dim=192)) is None
    assert hopper.supports(replace(call, v_head_dim=32)) == "it runs head_dim 33 to 256 of v; got 32"
    assert hopper.supports(replace(call, head_dim=264)) == "it runs head_dim 33 to 256; got 264"


@every_backend
@parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@parametrize("pattern", [None, LOCAL], ids=["dense", "local"])
def test_every_dtype_is_right(backend, dtype, pattern):
    check(backend, pattern, 200, dtype=dtype, head_dim=64)


@every_backend
@parametrize("block_size", [16, 32, 64, 128, 256])
def test_every_block_size_is_right(backend, block_size):
    check(backend, sf.causal() & (sf.local(50) | sf.strided(7)), block_size + 44, block_size=block_size, heads=1)


@every_backend
@parametrize("q_len, kv_len", [(1, 1), (1, 300), (300, 1), (77, 200), (200, 77), (128, 256), (256, 128), (129, 127)])
@parametrize("pattern", [None, "causal", "local(40)"])
def test_queries_and_keys_may_differ_in_number(backend, q_len, kv_len, pattern):
    check(backend, pattern, q_len, kv_len, heads=1)


@every_backend
@parametrize("heads, kv_heads", [(4, 2), (6, 1), (3, 3)])
@parametrize("pattern", [None, LOCAL], ids=["dense", "local"])
def test_query_heads_may_share_keys(backend, heads, kv_heads, pattern):
    check(backend, pattern, TOKENS, batch=2, heads=heads, kv_heads=kv_heads, usual={"head_dim": 16})


@every_backend
@parametrize("layout", LAYOUTS)
@parametrize("kv_heads", [1, 2])
def test_every_memory_order_is_right_and_kept(backend, layout, kv_heads):
    for length in (128 if DEVICE == "cuda" else 64, TOKENS):
        check(backend, LOCAL, length, batch=2, heads=2, kv_heads=kv_heads, usual={"head_dim": 16}, layout=layout)


@every_backend
def test_a_query_that_keeps_nothing_gives_zero_and_no_gradient(backend):
    q, k, v = accepted(backend, 100, 40, requires_grad=True)
    # With more queries than keys, causal leaves nothing for the first 60 queries.
    out, lse = sf.attention(q, k, v, "causal", return_lse=True, backend=backend)
    dq, dk, dv = torch.autograd.grad((out.sum(), lse[:, :, 60:].sum()), (q, k, v))
    assert (out[:, :, :60] == 0).all() and lse[:, :, :60].isneginf().all() and lse[:, :, 60:].isfinite().all()
    assert (dq[:, :, :60] == 0).all() and (dq[:, :, 60:] != 0).any()
    assert all(grad.isfinite().all() for grad in (dq, dk, dv))


@every_backend
@parametrize("compiled", [False, True])
def test_what_the_lse_of_a_query_that_keeps_nothing_receives_reaches_no_gradient(backend, compiled):
    q, k, v = accepted(backend, 50, 40, requires_grad=True)
    attend = torch.compile(sf.attention, backend="aot_eager", fullgraph=True) if compiled else sf.attention
    out, lse = attend(q, k, v, "causal", return_lse=True, backend=backend)
    dlse = torch.ones_like(lse)
    wanted = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), dlse), retain_graph=True)
    dlse[:, :, :5], dlse[:, :, 5:10] = float("nan"), float("inf")
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), dlse))
    assert all(torch.equal(grad, same) for grad, same in zip(grads, wanted, strict=True))


@parametrize("backend", ["torch", "reference"])
@parametrize("mask, q_len, kv_len", [("causal", 50, 40), ("causal & ~local(20)", 64, 64), ("full", 5, 4)])
def test_what_the_out_of_a_query_that_keeps_nothing_receives_reaches_no_gradient(backend, mask, q_len, kv_len):
    q, k, v = accepted(backend, q_len, kv_len, requires_grad=True)
    lens = torch.tensor([0] + [kv_len] * (len(q) - 1), device=DEVICE) if mask == "full" else None
    out, lse = sf.attention(q, k, v, mask, kv_lens=lens, return_lse=True, backend=backend)
    empty, dout = lse.isneginf()[..., None], torch.ones_like(out)
    wanted = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    grads = torch.autograd.grad(out, (q, k, v), dout.masked_fill(empty, float("nan")))
    assert empty.any() and all(torch.equal(grad, same) for grad, same in zip(grads, wanted, strict=True))


@every_backend
def test_a_mask_that_keeps_nothing_gives_zero(backend):
    q, k, v = accepted(backend, requires_grad=True)
    out, lse = sf.attention(q, k, v, ~sf.full(), return_lse=True, backend=backend)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert (out == 0).all() and lse.isneginf().all() and all((grad == 0).all() for grad in grads)


@every_backend
@parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1)])
def test_each_head_may_have_its_own_mask(backend, heads, kv_heads):
    patterns = ["causal", LOCAL, "causal", sf.causal() & sf.strided(5)]
    mask = sf.BlockMask.per_head(patterns, q_len=TOKENS, block_size=block_size_near(backend, 32))
    check(backend, mask, TOKENS, batch=2, heads=heads, kv_heads=kv_heads, usual={"head_dim": 16})


@every_backend
@parametrize("batch, heads", [(1, 1), (2, 1), (1, 4), (2, 4)])
@parametrize("q_missing, kv_missing", [(0, 0), (28, 8)])
def test_block_maps_made_at_run_time_are_right(backend, batch, heads, q_missing, kv_missing):
    blocks = torch.rand(batch, heads, 3, 3, generator=torch.Generator().manual_seed(batch + heads)) < 0.4
    block_size = block_size_near(backend, 32)
    q_len, kv_len = 3 * block_size - q_missing, 3 * block_size - kv_missing
    mask = sf.BlockMask.from_blocks(blocks, block_size, q_len, kv_len)
    check(backend, mask, q_len, kv_len, batch=2, heads=4, kv_heads=2, usual={"head_dim": 16})


@every_backend
def test_a_mask_that_keeps_all_takes_the_dense_path(backend):
    q, k, v = accepted(backend, 150)
    dense = sf.attention(q, k, v, backend=backend)
    for everything in (sf.full(), sf.causal() | ~sf.causal(), sf.compile_mask("full", 150, block_size=16, device=DEVICE)):
        assert torch.equal(sf.attention(q, k, v, everything, backend=backend), dense)


# Gradients.


@every_backend
def test_gradients_are_right_under_expanded_cotangents(backend):
    q, k, v = accepted(backend, requires_grad=True)
    mask = sf.compile_mask(LOCAL, 100, device=DEVICE)
    out = sf.attention(q, k, v, mask, backend=backend, deterministic=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)  # its cotangent has strides of 0
    for grad, wanted in zip(grads, torch.autograd.grad(out, (q, k, v), torch.ones_like(out)), strict=True):
        assert torch.equal(grad, wanted)


@every_backend
def test_gradients_of_lse_alone_are_right(backend):
    q, k, v = accepted(backend, requires_grad=True)
    _, lse = sf.attention(q, k, v, "causal", return_lse=True, backend=backend)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
    kept = torch.ones(100, 100, dtype=torch.bool, device=DEVICE).tril()
    exact = [t.detach().double().requires_grad_() for t in (q, k)]
    wanted = (exact[0] @ exact[1].mT * q.shape[3] ** -0.5).masked_fill(~kept, float("-inf")).logsumexp(-1)
    tolerances = {"rtol": 1e-3, "atol": 1e-5} if q.dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for grad, right in zip((dq, dk), torch.autograd.grad(wanted.sum(), exact), strict=True):
        torch.testing.assert_close(grad.double(), right, **tolerances)
    assert dv is None or (dv == 0).all()


@every_backend
@parametrize("deterministic", [None, True])
def test_gradients_repeat_bit_for_bit(backend, deterministic):
    tokens, heads = (260, 4) if DEVICE == "cuda" else (130, 2)  # the interpreter takes long
    q, k, v = accepted(backend, tokens, heads=heads, requires_grad=True)
    pattern = "causal & (local(40) | strided(9))"
    mask = sf.compile_mask(pattern, tokens, block_size=block_size_near(backend, 16), device=DEVICE)

    def once():
        out = sf.attention(q, k, v, mask, backend=backend, deterministic=deterministic)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    # On a GPU, these back ends sum gradients in varying order unless asked not to: the same up to rounding.
    in_any_order = not deterministic and DEVICE == "cuda" and backend in ("torch", "hopper")
    tolerances = {"rtol": 1e-2, "atol": 1e-2} if q.dtype == torch.float16 else {"rtol": 1e-4, "atol": 1e-4}
    for first, second in zip(once(), once(), strict=True):
        torch.testing.assert_close(first, second, **(tolerances if in_any_order else {"rtol": 0, "atol": 0}))


@every_backend
def test_autocast_casts_as_for_pytorch_attention(backend):
    cast = accepted(backend, dtype=torch.bfloat16, head_dim=32)
    dtype = cast[0].dtype
    assert dtype in (torch.bfloat16, torch.float16)
    q, k, v = (t.float() for t in cast)
    q.requires_grad_()
    with torch.autocast(DEVICE, dtype):
        ours, theirs = sf.attention(q, k, v, backend=backend), F.scaled_dot_product_attention(q, k, v)
    assert ours.dtype == theirs.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert torch.equal(ours, sf.attention(*cast, backend=backend)), "cast once more inside"
    ours.float().sum().backward()
    assert q.grad.dtype == torch.float32


# The choice of a back end.


def test_auto_takes_torch_on_a_cpu():
    q, k, v = inputs(device="cpu")
    assert backends.choose_backend("auto", make_call(q, k)) == "torch"
    assert torch.equal(sf.attention(q, k, v), sf.attention(q, k, v, backend="torch"))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_auto_takes_triton_on_a_gpu():
    assert backends.choose_backend("auto", make_call(*inputs(dtype=torch.bfloat16)[:2])) == "triton"


def test_where_no_back_end_can_run_the_error_gives_every_reason(monkeypatch):
    monkeypatch.setattr(backends.get_backend("torch"), "supports", lambda call: "not today")
    q, k, v = inputs(dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"no back end can run this call \(hopper: .*; triton: .*; torch: not today\); .*'reference'"
    ):
        sf.attention(q, k, v)


# Bad input: one clear error before any kernel runs.


@parametrize("known", [1, "yes", 0])
def test_no_call_before_lets_another_kind_of_deterministic_pass(known):
    tensors = inputs()
    for settled in (True, False):
        sf.attention(*tensors, deterministic=settled)
        for call in (lambda: sf.attention(*tensors, deterministic=known), lambda: sf.SparseAttention(32, 2, deterministic=known)):
            with pytest.raises(TypeError, match="deterministic must be"):
                call()
    for nothing in (t[:0] for t in tensors[:1]):
        with pytest.raises(TypeError, match="deterministic must be"):
            sf.attention(nothing, nothing, nothing, deterministic=known)


def test_without_keys_a_query_that_does_not_exist_has_no_sink_and_biases_have_gradients_of_zero():
    q, k, v = inputs(16)
    bias = torch.randn(q.shape[1], 5, device=DEVICE, requires_grad=True)
    given = {"q_lens": torch.tensor([10], device=DEVICE), "sinks": torch.zeros(q.shape[1], device=DEVICE), "rel_bias": bias}
    out, lse = sf.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True, **given)
    assert (lse[:, :, :10] == 0).all() and lse[:, :, 10:].isneginf().all()
    assert (torch.autograd.grad(out.sum(), bias)[0] == 0).all()


@parametrize("layout", ["jagged", "nested", "sparse"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_a_tensor_of_another_layout_is_one_clear_error(layout):
    q, k, v = inputs(16)
    sequences = list(q.transpose(1, 2))
    others = {
        "jagged": lambda: torch.nested.nested_tensor(sequences, layout=torch.jagged).transpose(1, 2),
        "nested": lambda: torch.nested.nested_tensor(sequences).transpose(1, 2),
        "sparse": q.to_sparse,
    }
    for _ in range(2):
        with pytest.raises(ValueError, match=r"q must be a tensor of layout torch.strided; got (torch|a nested).*attention_varlen"):
            sf.attention(others[layout](), k, v)
        sf.attention(q, k, v)  # the same shapes, checked and remembered


@parametrize("kv_heads", [8, 2])
@parametrize("mask", [None, "causal", sf.local(5)], ids=str)
def test_tokens_before_heads_are_warned_of_at_the_line_of_the_call(mask, kv_heads):
    q, k = (torch.randn(1, 300, heads, 16, device=DEVICE) for heads in (8, kv_heads))
    with pytest.warns(UserWarning, match="tokens come before heads") as seen:
        sf.attention(q, k, k, mask)
    (said,) = (one for one in seen if "tokens come before heads" in str(one.message))  # compilers warn too
    assert said.filename == __file__ and "q of shape (1, 300, 8, 16), 300 heads of 8 tokens; if tokens" in str(said.message)


@parametrize(
    "shape, kv_shape",
    [
        ((2, 128, 4), (2, 128, 4)),  # many heads, few tokens
        ((2, 128, 1), (2, 128, 300)),  # a decoding step
        ((400, 8, 2), (400, 8, 2)),  # windows
        ((1, 300, 4), (1, 300, 40)),  # more keys than queries
        ((1, 200, 140), (1, 200, 140)),  # more tokens than models have heads
    ],
)
def test_calls_with_heads_before_tokens_are_not_warned_of(shape, kv_shape):
    q, k = (torch.randn(*sizes, 16, device=DEVICE) for sizes in (shape, kv_shape))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sf.attention(q, k, k, "causal")


# Memory.


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@parametrize("lse_gradient", [False, True])
@parametrize("pattern", [LOCAL, sf.causal() & (sf.local(64) | sf.sinks(4))], ids=str)
def test_the_torch_back_end_takes_memory_linear_in_tokens(pattern, lse_gradient):
    tokens = 32768
    q, k, v = inputs(tokens, heads=1, kv_heads=1, device="cpu")
    mask = sf.compile_mask(pattern, tokens, block_size=64)
    with LargestTensor() as seen:  # which does not see inside operators
        out, lse = torch_backend.forward(q, k, v, mask, 0.25, False, None)
        torch_backend.backward(out, lse if lse_gradient else None, q, k, v, out, lse, mask, 0.25, False, None)
    assert tokens * 16 <= seen.elements <= max(tokens * 16, torch.get_num_threads() << 21)


@parametrize("lse_gradient", [False, True])
def test_the_dense_torch_back_end_never_builds_the_attention_matrix(lse_gradient):
    q, k, v = inputs(4096, heads=1, kv_heads=1, device="cpu")
    with LargestTensor() as seen:
        out, lse = torch_backend.forward(q, k, v, None, 0.25, False, None)
        torch_backend.backward(out, lse if lse_gradient else None, q, k, v, out, lse, None, 0.25, False, None)
    assert 4096 * 16 <= seen.elements <= torch.get_num_threads() << 18 < 4096**2
