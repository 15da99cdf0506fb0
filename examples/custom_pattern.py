"""A pattern of your own: one class that works in expressions, in spec text, and next to others on separate heads.

python examples/custom_pattern.py
"""

from dataclasses import dataclass

import torch

import sparse_flash as sf


@sf.register_pattern("ring")
@dataclass(frozen=True)
class Ring(sf.Pattern):
    """Keys whose distance is a multiple of ``period`` tokens, give or take ``width``."""

    period: int
    width: int = 0
    shift_invariant = True  # only q - kv matters, so the compiler evaluates one block per diagonal

    def token_rule(self, q, kv):
        distance = abs(q - kv) % self.period
        return (distance <= self.width) | (self.period - distance <= self.width)


def main(tokens: int = 1024, heads: int = 4) -> torch.Tensor:
    pattern = sf.causal() & (sf.local(32) | Ring(256, width=16))
    assert sf.parse("causal & (ring(256, width=16) | local(32))") == pattern  # the order of | does not matter
    print(f"spec text: {pattern}")

    mask = sf.compile_mask(pattern, tokens, block_size=32)
    print(f"{mask.density:.1%} of all pairs in {mask.block_density:.1%} of all blocks, {mask.nbytes:,} bytes of tables")

    # Half of the heads look near, half look far; equal masks are stored once, however many heads use them.
    far = ["causal & ring(256, width=16)"] * (heads // 2)
    near = ["causal & local(32)"] * (heads - len(far))
    per_head = sf.BlockMask.per_head(near + far, q_len=tokens, block_size=32)
    print(f"per head: {per_head.mask_index.tolist()} of {per_head.masks} stored masks")

    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, tokens, 32, generator=generator)
    out = sf.attention(q, k, v, per_head)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=per_head.to_dense())
    print(f"greatest difference from dense attention under the same mask: {(out - expected).abs().max():.1e}")
    torch.testing.assert_close(out, expected)
    return out


if __name__ == "__main__":
    main()
