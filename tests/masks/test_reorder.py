"""Tokens in another order: index_select and its gradient, which is gathered."""

import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DEVICE

import sparse_flash as sf

RAGGED = sf.VideoLayout(3, 5, 7, (2, 4, 4), prefix=6, suffix=3)
EVEN = sf.VideoLayout(2, 4, 8, (2, 4, 4), suffix=5)
MOVED = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
SUMMED = [torch.float16, torch.float32, torch.float64]

parametrize = pytest.mark.parametrize


def index_of(layout, to: str) -> torch.Tensor:
    return torch.from_numpy(layout.token_at if to == "to_tiles" else layout.position_of).to(DEVICE)


@st.composite
def strided(draw, length: int):
    """(shape, dim, function that gives a contiguous tensor of this shape other strides)."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3) | st.sampled_from([[2, 40], [80], [1, 2, 24]]))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, length)
    order, gaps = draw(st.permutations(range(len(shape)))), draw(st.booleans())

    def with_strides(x):
        memory = x.permute(order).contiguous()
        if gaps:
            memory = torch.stack([memory, memory], -1)[..., 0]
        return memory.permute([order.index(axis) for axis in range(len(shape))])

    return shape, dim - draw(st.sampled_from([0, len(shape)])), with_strides


@settings(max_examples=30)
@given(data=st.data(), layout=strategies.layouts, to=st.sampled_from(["to_tiles", "to_raster"]))
def test_tensors_of_any_strides_and_dtype_move_as_index_select_moves_them(data, layout, to):
    shape, dim, with_strides = data.draw(strided(layout.tokens if to == "to_tiles" else layout.length))
    x = with_strides(torch.randint(0, 100, shape, device=DEVICE).to(data.draw(st.sampled_from(MOVED + SUMMED))))
    moved = getattr(layout, to)(x, dim)
    wanted = x.index_select(dim, index_of(layout, to))
    assert moved.dtype == x.dtype and moved.stride() == wanted.stride()
    assert torch.equal(moved.view(torch.uint8), wanted.view(torch.uint8))


@settings(max_examples=30)
@given(data=st.data(), layout=strategies.layouts, to=st.sampled_from(["to_tiles", "to_raster"]))
def test_gradients_are_those_of_index_select_rounded_once_and_repeatable(data, layout, to):
    before, after = (layout.tokens, layout.length)[:: 1 if to == "to_tiles" else -1]
    shape, dim, with_strides = data.draw(strided(after))
    gradient = with_strides(torch.randn(shape, device=DEVICE, dtype=data.draw(st.sampled_from(SUMMED))))
    shape[dim] = before
    x = torch.zeros(shape, device=DEVICE, dtype=gradient.dtype, requires_grad=True)
    first, second = (torch.autograd.grad(getattr(layout, to)(x, dim), x, gradient)[0] for _ in range(2))
    wide = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(wide.index_select(dim, index_of(layout, to)), wide, gradient.double())
    assert torch.equal(first, second)
    # A sum of up to 256 elements in float32 or wider, and one rounding.
    eps = torch.finfo(gradient.dtype).eps
    slack = 256 * max(eps**2, torch.finfo(torch.float32).eps) if gradient.dtype != torch.float64 else 256 * eps
    torch.testing.assert_close(first.double(), wanted, rtol=eps, atol=slack)


def test_a_sum_of_16_bit_gradients_is_rounded_once():
    layout = sf.VideoLayout(1, 1, 1, (1, 1, 256))
    gradient = torch.full((256,), 1 / 2048, device=DEVICE, dtype=torch.float16)
    gradient[0] = 1  # to which float16 adds 1 / 2048 in vain
    x = torch.zeros(1, device=DEVICE, dtype=torch.float16, requires_grad=True)
    (found,) = torch.autograd.grad(layout.to_tiles(x, 0), x, gradient)
    assert found.item() == torch.tensor(1 + 255 / 2048).half().item()


@parametrize("layout", [RAGGED, EVEN], ids=["ragged", "even"])
@parametrize("to", ["to_tiles", "to_raster"])
def test_gradients_of_gradients_are_the_map_itself(layout, to):
    x = torch.randn(2, layout.tokens if to == "to_tiles" else layout.length, 3, dtype=torch.float64, device=DEVICE)
    assert torch.autograd.gradgradcheck(lambda x: getattr(layout, to)(x, 1), x.requires_grad_(), fast_mode=True)


def test_function_transforms_and_batched_gradients_see_operations():
    x = torch.randn(3, RAGGED.tokens, 2, device=DEVICE)
    tiled = RAGGED.to_tiles(x, 1)
    assert torch.equal(torch.func.vmap(lambda x: RAGGED.to_tiles(x, 0))(x), tiled)
    assert torch.equal(torch.func.jvp(lambda x: RAGGED.to_tiles(x, 1), (x,), (2 * x,))[1], 2 * tiled)
    held = index_of(RAGGED, "to_tiles").bincount()[:, None]
    torch.testing.assert_close(torch.func.grad(lambda x: (RAGGED.to_tiles(x, 1) ** 2).sum())(x), 2 * held * x)
    leaf = x.clone().requires_grad_()
    out, gradients = RAGGED.to_tiles(leaf, 1), torch.randn(2, *tiled.shape, device=DEVICE)
    (batched,) = torch.autograd.grad(out, leaf, gradients, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(batched, torch.stack([torch.autograd.grad(out, leaf, g, retain_graph=True)[0] for g in gradients]))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_captured_graph_reorders_what_it_is_given():
    x = torch.randn(2, RAGGED.tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        out = RAGGED.to_tiles(x, 1)
        return out, *torch.autograd.grad(out, x, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.normal_()
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(captured, step(), strict=True))
