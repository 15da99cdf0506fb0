"""Errors of attention and its gradients by dtype, next to those of PyTorch's own, as shown in docs/numbers.md.

    python tests/numerics.py                        # the back end that takes the calls on this machine
    python tests/numerics.py --backend triton       # another; on a GPU: hopper, triton, torch

Both get the same inputs, normal numbers, and are compared with dense attention in float64 on these inputs. PyTorch's is
``scaled_dot_product_attention`` under a dense bool mask.
"""

import argparse

import torch
import torch.nn.functional as F
from accepted import refusal
from oracle import DEVICE, NAMES, dense_attention, gradients, kept_pairs

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


def pytorch_attention(q, k, v, kept, scale):
    """(out, lse) of PyTorch: scaled_dot_product_attention under the dense mask; lse, which it does not return, in float32
    (float64 for float64) from the same inputs."""
    group = q.shape[1] // k.shape[1]
    # On a GPU it refuses some memory orders, and contiguous() would keep odd strides of dimensions of size 1.
    q = q.clone(memory_format=torch.contiguous_format)
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    some = kept.any(-1)
    allowed = (kept | ~some[..., None]).expand(q.shape[0], q.shape[1], -1, -1)
    # Its GPU kernels need head dims divisible by 8. For others it computes in float32, which no 16-bit kernel can match.
    padded = [F.pad(t, (0, -t.shape[3] % 8)) if t.is_cuda else t for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*padded, attn_mask=allowed, scale=scale)[..., : v.shape[3]]
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = (scale * (q.to(exact) @ k.to(exact).mT)).masked_fill(~allowed, float("-inf"))
    return torch.where(some[..., None], out, 0.0), torch.where(some, scores.logsumexp(-1), float("-inf"))


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
