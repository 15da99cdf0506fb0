"""Decoding: with fewer queries than keys, patterns align at the end, so the last query sees the last key.

    python examples/decode_alignment.py

A prompt is read in one call (prefill); then tokens come one or a few at a time against a growing key/value cache. Each piece equals
the same rows of one call over the whole text, with no positions to pass.
"""

import torch

import sparse_flash as sf


def main(prompt: int = 300, pieces: tuple[int, ...] = (1, 1, 1, 5, 64), heads: int = 4, head_dim: int = 32) -> torch.Tensor:
    pattern = sf.causal() & (sf.local(64) | sf.sinks(16))
    tokens = prompt + sum(pieces)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, tokens, head_dim, generator=generator)
    whole = sf.attention(q, k, v, pattern)

    read, outputs = 0, []
    for count in (prompt, *pieces):
        new = slice(read, read + count)
        read += count
        cached_k, cached_v = k[:, :, :read], v[:, :, :read]
        outputs.append(sf.attention(q[:, :, new], cached_k, cached_v, pattern))
        difference = (outputs[-1] - whole[:, :, new]).abs().max()
        print(f"{count:>4} queries against {read:>4} keys: within {difference:.1e} of the whole text's rows")
    decoded = torch.cat(outputs, dim=2)
    torch.testing.assert_close(decoded, whole)

    # The picture of 3 queries against 8 keys: the lower right corner of the 8 x 8 mask.
    for row in sf.compile_mask("causal & local(3)", q_len=3, kv_len=8, block_size=16).to_dense().tolist():
        print("    " + "".join(".#"[kept] for kept in row))
    return decoded


if __name__ == "__main__":
    main()
