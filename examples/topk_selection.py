"""Masks chosen at run time: each head visits the blocks whose mean keys score highest with its mean queries.

    python examples/topk_selection.py

The last queries look for one passage far back, another in each head. A window that visits as many blocks misses it, and
``topk_blocks`` finds it. In a model, this goes before each call of ``attention``; it does not wait for the GPU.
"""

import torch

import sparse_flash as sf


def main(tokens: int = 2048, heads: int = 4, head_dim: int = 64, block_size: int = 64, keep: int = 4) -> dict[str, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, tokens, head_dim, generator=generator).to(device)
    start = torch.randint(0, tokens // 4 // block_size, (heads,), generator=generator) * block_size
    for head, first in enumerate(start.tolist()):
        direction = torch.nn.functional.normalize(torch.randn(head_dim, generator=generator), dim=0).to(device)
        k[0, head, first : first + block_size] += head_dim**0.5 * direction
        q[0, head, -tokens // 4 :] += head_dim**0.5 * direction

    dense = sf.attention(q, k, v, sf.compile_mask("causal", tokens, block_size=block_size, device=device))
    masks = {
        "window": sf.compile_mask(
            sf.causal() & sf.local((keep - 1) * block_size + 1), tokens, block_size=block_size, device=device
        ),
        "top blocks": sf.topk_blocks(q, k, keep, block_size=block_size),
        "top blocks and sinks": sf.topk_blocks(q, k, keep, block_size=block_size, always="sinks(4)"),
    }
    errors = {}
    for name, mask in masks.items():
        difference = sf.attention(q, k, v, mask) - dense
        errors[name] = (difference[:, :, -tokens // 4 :].norm() / dense[:, :, -tokens // 4 :].norm()).item()
        print(f"{name:>20}: visits {mask.block_density:.1%} of the blocks, off dense attention by {errors[name]:.1%}")
    return errors


if __name__ == "__main__":
    main()
