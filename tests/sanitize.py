"""A few small calls, forward and backward, for compute-sanitizer, under which each takes seconds:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitize.py --backend hopper

Between them they have full, run and bit tiles, empty and full rows, cut blocks and grouped heads. Results are only checked for NaN;
the tests check whether they are right.
"""

from __future__ import annotations

import argparse

import torch
from oracle import heavy_rows_split

import sparse_flash as sf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cases():
    """(name, q_len, kv_len, heads, key heads, mask)."""
    compiled = {
        "causal": "causal",
        "window": "causal & local(90)",
        "bits": "causal & dilated(9, 3, block=1)",
    }
    yield "dense", 256, 256, 2, 2, None
    yield "dense, odd lengths, grouped heads", 130, 257, 4, 2, None
    for name, spec in compiled.items():
        yield name, 300, 385, 2, 1, sf.compile_mask(spec, 300, 385, block_size=128, device=DEVICE)
    with heavy_rows_split():
        mask = sf.compile_mask("local(90) | global_tokens(5)", 300, 400, block_size=128, device=DEVICE)
        yield "split rows", 300, 400, 2, 1, mask
        blocks = torch.ones(1, 2, 3, 4, dtype=torch.bool, device=DEVICE)
        yield "split rows of a block map", 300, 400, 2, 2, sf.BlockMask.from_blocks(blocks, 128, 300, 400)
    for name, rows in (("empty rows", ("111", "000", "010")), ("nothing kept", ("000",) * 3)):
        blocks = torch.tensor([[char == "1" for char in row] for row in rows], device=DEVICE)
        yield f"block map, {name}", 384, 300, 4, 2, sf.BlockMask.from_blocks(blocks, 128, 384, 300)
    yield "one query", 1, 300, 2, 1, sf.compile_mask("causal & local(200)", 1, 300, block_size=128, device=DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(",")[0])
    parser.add_argument("--backend", default="auto", choices=("auto", "hopper", "triton", "torch"))
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--v-head-dim", type=int)
    options = parser.parse_args()
    dims = options.head_dim, options.v_head_dim or options.head_dim
    for name, q_len, kv_len, heads, kv_heads, mask in cases():
        for deterministic in (False, True):
            q, k, v = (
                torch.randn(2, n, length, width, device=DEVICE, dtype=torch.float16, requires_grad=True)
                for n, length, width in ((heads, q_len, dims[0]), (kv_heads, kv_len, dims[0]), (kv_heads, kv_len, dims[1]))
            )
            out = sf.attention(q, k, v, mask, backend=options.backend, deterministic=deterministic)
            out.backward(torch.randn_like(out))
            assert not any(t.isnan().any() for t in (out, q.grad, k.grad, v.grad)), name
        print(name, flush=True)


if __name__ == "__main__":
    main()
