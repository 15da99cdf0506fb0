"""Packed documents: several texts in one sequence that do not see each other, equal to one call per text.

    python examples/packed_documents.py

Packing wastes no token on padding, and the blocks between documents are never visited. A mask of documents is compiled for its
lengths; ``attention_varlen`` takes lengths that change at every step. Its positions start at 0 in each document.
"""

import torch

import sparse_flash as sf


def main(lengths: tuple[int, ...] = (700, 33, 1200, 115), heads: int = 4, kv_heads: int = 2, head_dim: int = 64) -> torch.Tensor:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    tokens = ends[-1]
    pattern = sf.causal() & sf.documents(cu_seqlens=(0, *ends))
    mask = sf.compile_mask(pattern, tokens, block_size=64)
    print(f"{len(lengths)} documents of {lengths} tokens: {mask.density:.1%} of all pairs kept, causal alone keeps 50%")

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, tokens, head_dim, generator=generator, requires_grad=True)
    k, v = (torch.randn(1, kv_heads, tokens, head_dim, generator=generator, requires_grad=True) for _ in range(2))

    packed = sf.attention(q, k, v, mask)
    parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    separate = torch.cat([sf.attention(*part, sf.causal()) for part in parts], dim=2)

    weight = torch.randn(packed.shape, generator=generator)
    gradients = torch.autograd.grad((packed * weight).sum(), (q, k, v))
    expected = torch.autograd.grad((separate * weight).sum(), (q, k, v))
    torch.testing.assert_close(packed, separate)
    torch.testing.assert_close(gradients, expected)
    print(f"packed equals separate: out within {(packed - separate).abs().max():.1e}, gradients too")

    rows = (x[0].transpose(0, 1) for x in (q, k, v))  # (tokens, heads, head_dim)
    starts = torch.tensor((0, *ends), dtype=torch.int32)
    varlen = sf.attention_varlen(*rows, starts, mask="causal", max_seqlen_q=max(lengths)).transpose(0, 1)[None]
    torch.testing.assert_close(varlen, separate)
    torch.testing.assert_close(torch.autograd.grad((varlen * weight).sum(), (q, k, v)), expected)
    print("and so does attention_varlen, with lengths that it reads from a tensor")
    return packed


if __name__ == "__main__":
    main()
