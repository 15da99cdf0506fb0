"""PyTorch's own attention kernel for CPUs, which scaled_dot_product_attention takes there. Its operators are private: their names
stand here alone, and a test holds them to what is relied on.

One call is one parallel region, however long it is, where as many operations would wait at the end of each for the slowest
thread: on a machine with other work that is most of the time.
"""

from __future__ import annotations

import torch


def forward(q, k, v, scale: float, causal: bool = False, bias=None):
    """(out, lse): out like q in any memory order, lse (batch, heads, q_len) float32 (float64 for float64).

    q: (batch, heads, q_len, head_dim). k, v: (batch, kv_heads, kv_len, head_dim), kv_heads dividing heads. causal: query i sees
    keys 0 .. i. bias: None, or (batch | 1, heads | 1, q_len, kv_len) of q's dtype, which is added to the scores; a query whose
    biases are all -inf has out 0 and an lse without meaning.
    """
    q, k, v = (_in_rows(t) for t in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)


def backward(dout, q, k, v, out, lse, scale: float, causal: bool = False, bias=None):
    """(dq, dk, dv) in any memory order, of what depends on out alone. lse may be that over more keys than these."""
    dout, q, k, v, out = (_in_rows(t) for t in (dout, q, k, v, out))
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return operator(dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)


def _in_rows(x):
    """x with an unbroken last dimension, which the kernel takes for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()
