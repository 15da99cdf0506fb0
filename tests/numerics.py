"""Errors of attention and its gradients by dtype, next to those of PyTorch's own, as shown in docs/numbers.md.

    python tests/numerics.py                        # the back end that takes the calls on this machine
    python tests/numerics.py --backend triton       # another; on a GPU: hopper, triton, torch

Both get the same inputs, normal numbers, and are compared with dense attention in float64 on these inputs. PyTorch's is
``scaled_dot_product_attention`` under a dense bool mask.
"""

import argparse

import torch
from accepted import refusal
from oracle import DEVICE, NAMES, dense_attention, gradients, kept_pairs, pytorch_attention

import sparse_flash as sf

SPECS = ("full", "causal & (local(128) | sinks(16))")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOKENS, HEADS, HEAD_DIM = 512, 2, 64


def errors(spec: str, dtype: torch.dtype, backend: str = "auto") -> dict[str, tuple[float, float]]:
    """For each of ``NAMES`` (our error, PyTorch's): the root mean square of the error over that of the exact values; for lse, the
    largest difference."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, HEADS, TOKENS, HEAD_DIM, generator=generator).to(DEVICE, dtype) for _ in range(4))
    pattern = sf.parse(spec)
    kept = kept_pairs(pattern, None, TOKENS, TOKENS).to(DEVICE)
    scale = HEAD_DIM**-0.5
    right = gradients(lambda *t: dense_attention(*t, kept, scale), [t.double() for t in (q, k, v)], dout.double(), None)
    ours = gradients(lambda *t: sf.attention(*t, pattern, return_lse=True, backend=backend), (q, k, v), dout, None)
    theirs = gradients(lambda *t: pytorch_attention(*t, kept, scale), (q, k, v), dout, None)
    return {name: tuple(_error(name, got, wanted) for got in pair) for name, *pair, wanted in zip(NAMES, ours, theirs, right)}


def _error(name: str, got: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = got.double() - wanted
    return float(difference.abs().max() if name == "lse" else difference.norm() / wanted.norm())


def table(backend: str = "auto") -> list[str]:
    """Lines of Markdown."""
    lines = ["| mask | dtype | out | lse, absolute | dQ | dK | dV |", "|---|---|---|---|---|---|---|"]
    for spec in SPECS:
        for dtype in (dtype for dtype in DTYPES if backend == "auto" or refusal(backend, dtype=dtype, head_dim=HEAD_DIM) is None):
            found = errors(spec, dtype, backend)
            cells = [f"{ours:.1e}" if name == "lse" else f"{ours:.1e} / {theirs:.1e}" for name, (ours, theirs) in found.items()]
            lines.append(f"| `{spec.replace('|', chr(92) + '|')}` | {str(dtype).removeprefix('torch.')} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto")
    print("\n".join(table(parser.parse_args().backend)))
