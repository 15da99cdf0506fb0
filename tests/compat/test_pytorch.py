"""Tests each of PyTorch's private names that the package needs: a release that changes one fails here."""

import re

import pytest
import torch
from oracle import dense_attention
from torch._dynamo.testing import CompileCounterWithBackend

from sparse_flash.compat import constants, dynamo, pytorch


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


def test_a_name_that_a_release_lacks_is_told_with_the_release():
    with pytest.raises(
        ImportError, match=re.escape(f"PyTorch {torch.__version__} has no _C.no_such_name, which sparse_flash relies")
    ):
        pytorch.import_private("_C.no_such_name")
    with pytest.raises(ImportError, match=r"utils\._no_such\.name"):
        pytorch.import_private("utils._no_such:name")


def test_function_transforms_are_seen_and_functionalize_is_none_that_differentiates():
    seen = []

    def look(x):
        seen.append((pytorch.in_function_transform(), pytorch.in_differentiating_transform()))
        return x.sum()

    look(torch.ones(2))
    torch.func.grad(look)(torch.ones(2))
    torch.vmap(look)(torch.ones(2, 2))
    torch.func.functionalize(look)(torch.ones(2))
    assert seen == [(False, False), (True, True), (True, True), (True, False)]


def test_batches_of_gradients_are_seen():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(pytorch.is_batched_gradient(gradient)))
    torch.autograd.grad(y, x, torch.ones(2), retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True, retain_graph=True)
    torch.vmap(lambda of: torch.autograd.grad(y, x, of, retain_graph=True)[0])(torch.ones(3, 2))
    assert seen == [False, True, True]


def test_tangents_of_forward_mode_are_seen():
    x = torch.ones(2)
    assert not pytorch.has_forward_derivative(x)
    with torch.autograd.forward_ad.dual_level():
        assert not pytorch.has_forward_derivative(x)
        assert pytorch.has_forward_derivative(x, torch.autograd.forward_ad.make_dual(x, x))


def test_a_condition_that_is_false_fails_where_it_is_known_and_compiled_code_keeps_it():
    pytorch.assert_in_graph(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="not so"):
        pytorch.assert_in_graph(torch.tensor(False), "not so")

    def positive(x):
        pytorch.assert_in_graph((x > 0).all(), "not positive")
        return x + 1

    compiled = torch.compile(positive, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="not positive"):
        compiled(-torch.ones(2))


def test_a_function_marked_constant_is_called_while_a_graph_is_traced_and_not_looked_into():
    calls = []

    @constants.constant_in_graphs
    def number():
        calls.append(1)
        return __import__("math").pi  # an import, which cannot be traced

    compiled = torch.compile(lambda x: x * number(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(1)), torch.full((1,), torch.pi)) and len(calls) == 1
    compiled(torch.ones(1))
    assert len(calls) == 1


def test_a_length_that_may_vary_compiles_nothing_anew():
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x: x * 2, backend=counter)
    for length in (5, 7, 9):
        x = torch.ones(length)
        dynamo.mark_lengths_dynamic(x, 0)
        compiled(x)
    assert counter.frame_count == 1


def test_a_compiled_backward_pass_runs_twice_over_one_graph():
    import torch._functorch.config as config

    with config.patch(donated_buffer=True):
        dynamo.keep_saved_tensors()
        x = torch.ones(3, requires_grad=True)
        out = torch.compile(lambda x: (x.sin() * x).sum(), backend="aot_eager")(x)
        first = torch.autograd.grad(out, x, retain_graph=True)[0]
        assert torch.equal(torch.autograd.grad(out, x)[0], first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_for_cpus_takes_and_gives_lse(dtype):
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=dtype) for _ in range(3))
    out, lse = pytorch.cpu_attention(q, k, v, 0.0, True, attn_mask=None, scale=0.3)
    wanted = dense_attention(q.double(), k.double(), v.double(), torch.ones(9, 9).tril().bool(), 0.3)
    torch.testing.assert_close((out.double(), lse.double()), wanted, atol=0.02, rtol=0.02)
    grads = pytorch.cpu_attention_backward(torch.ones_like(out), q, k, v, out, lse, 0.0, True, attn_mask=None, scale=0.3)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape] and all(g.isfinite().all() for g in grads)
