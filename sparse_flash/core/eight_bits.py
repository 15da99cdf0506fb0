"""The definition of attention in e4m3 (``precision="fp8"``) in PyTorch: the arithmetic of Hopper's kernels, with exact sums.

Sources: arXiv:2407.08608, Sec. 3.3 (blocks with a scale each, the rotation); arXiv:2411.10958 (the mean of keys, sums in fp32).
"""

import math

import torch

from ..kernels.common.eight_bits import E4M3_MAX, MIN_AMAX, QUERIES, TOP_EXPONENT, columns_of_eight_bits

EIGHT_BITS = "precision='fp8'"  # among the features of a call


def quantize_blocks(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(x rounded to e4m3; scales, (..., tokens, 1)), both float64. The largest number of each block of tokens becomes 448."""
    tokens = x.shape[2]
    blocks = torch.unflatten(torch.nn.functional.pad(x, (0, 0, 0, -tokens % block)), 2, (-1, block))
    largest = blocks.abs().amax((-2, -1), keepdim=True).clamp(min=MIN_AMAX)
    scales = largest * (1 / E4M3_MAX)
    rounded, scales = (blocks * (1 / scales)).to(torch.float8_e4m3fn), scales.expand(*blocks.shape[:-1], 1)
    return rounded.double().flatten(2, 3)[:, :, :tokens], scales.double().flatten(2, 3)[:, :, :tokens]


def rotate(x: torch.Tensor, columns: int) -> torch.Tensor:
    """x, padded to ``columns`` and rotated by a Hadamard matrix whose rows have signs, which spreads large columns over many."""
    row, column = torch.arange(columns, device=x.device)[:, None], torch.arange(columns, device=x.device)
    bits = row & (column ^ (row >> 1 & 0x55))
    for shift in (4, 2, 1):
        bits = bits ^ (bits >> shift)
    return torch.nn.functional.pad(x, (0, columns - x.shape[-1])) @ (1.0 - 2.0 * (bits & 1)) * columns**-0.5


def attention_in_eight_bits(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) in float64. q: (batch, heads, q_len, head_dim). k, v: as q, with kv_heads. kept: bool, broadcastable to
    (batch, heads, q_len, kv_len), or None."""
    q, k, v = q.float(), k.float(), v.float()
    group = q.shape[1] // k.shape[1]
    # A scale for each block of 64 queries, and for all keys or values of a head.
    q, k = (rotate(t, columns_of_eight_bits(q.shape[3], v.shape[3])) for t in (q, k))
    mean = k.mean(2, keepdim=True)
    (q8, of_q), (k8, of_k), (v8, of_v) = (
        quantize_blocks(x, block) for x, block in ((q, QUERIES), (k - mean, k.shape[2]), (v, v.shape[2]))
    )
    k8, of_k, v8, of_v = (t.repeat_interleave(group, 1) for t in (k8, of_k, v8, of_v))
    scores = q8 @ k8.mT * (of_q * of_k.mT) * (scale / math.log(2))  # in base 2
    if kept is not None:
        scores = scores.masked_fill(~kept, float("-inf"))
    # A row's largest weight is in (2^5, 2^6]. Maxima are integers, so weights round the same under any running maximum.
    maximum = scores.amax(-1, keepdim=True).ceil() - TOP_EXPONENT
    weights = (scores - torch.where(maximum.isinf(), 0.0, maximum)).exp2().to(torch.float8_e4m3fn).double()
    total = weights.sum(-1, keepdim=True)
    out = (weights * of_v.mT) @ v8 / torch.where(total == 0, 1.0, total)
    lse = (maximum + total.log2())[..., 0] * math.log(2)
    return out, lse + (q @ mean.repeat_interleave(group, 1).mT)[..., 0] * scale
