"""VSA against its definition, token by token in float64."""

import pytest
import torch

import sparse_flash as sf
from examples.selection_layers.vsa import VSA

HEADS, HEAD_DIM, DIM, KEEP = 2, 16, 24, 2


def layer_and_input(layout: sf.VideoLayout, keep: int = KEEP):
    generator = torch.Generator().manual_seed(0)
    layer = VSA(layout, keep, DIM, HEADS, HEAD_DIM).double()
    for parameter in layer.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    x, q, k, v = (
        torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        for shape in ((layout.tokens, DIM), *[(HEADS, layout.tokens, HEAD_DIM)] * 3)
    )
    return layer, x, *(2 * t + t.roll(1, 2) for t in (q, k)), v


def by_definition(layer: VSA, layout: sf.VideoLayout, keep: int, x, q, k, v):
    """In the video's own order, by loops over tiles."""
    cells = torch.tensor([[(f, r, c) for r in range(layout.height) for c in range(layout.width)] for f in range(layout.frames)])
    tile_of = [tuple((cell // torch.tensor(layout.tile)).tolist()) for cell in cells.flatten(0, 1)]
    members = [torch.tensor([at == tile for at in tile_of]) for tile in dict.fromkeys(tile_of)]
    means = [torch.stack([t[:, :, of].mean(2) for of in members], 2) for t in (q, k, v)]
    weights = (means[0] @ means[1].mT / HEAD_DIM**0.5).softmax(-1)
    coarse, fine = torch.zeros_like(q), torch.zeros_like(q)
    for own, of in enumerate(members):
        coarse[:, :, of] = (weights[:, :, own, None] @ means[2]).expand(-1, -1, int(of.sum()), -1)
        ranked = weights[:, :, own].clone()
        ranked[..., own] = 2
        for b, h in torch.cartesian_prod(torch.arange(2), torch.arange(HEADS)).tolist():
            seen = torch.stack([members[tile] for tile in ranked[b, h].topk(keep).indices.tolist()]).any(0)
            scores = q[b, h, of] @ k[b, h, seen].T / HEAD_DIM**0.5
            fine[b, h, of] = scores.softmax(-1) @ v[b, h, seen]
    gates = layer.gates(x).unflatten(2, (2, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
    return gates[0] * coarse + gates[1] * fine


@pytest.mark.parametrize("grid", [(8, 8, 8), (5, 6, 9)])  # the second has tiles that are not whole
def test_vsa_and_its_gradients_are_the_definitions(grid):
    layout = sf.VideoLayout(*grid, tile=(4, 4, 4))
    layer, *inputs = layer_and_input(layout)
    found, wanted = [], []
    for results, compute in ((found, "layer"), (wanted, "definition")):
        leaves = [t.clone().requires_grad_() for t in inputs]
        if compute == "layer":
            tiled = [layout.to_tiles(t, dim) for t, dim in zip(leaves, (1, 2, 2, 2), strict=True)]
            out = layout.to_raster(layer(*tiled), 2)
        else:
            out = by_definition(layer, layout, KEEP, *leaves)
        out.square().sum().backward()
        results += [out, *(t.grad for t in leaves), *(parameter.grad.clone() for parameter in layer.parameters())]
        layer.zero_grad()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)
