"""Sink logits, which join the softmax of each query (arXiv:2309.17453): in the state of a forward pass, and their gradient."""

import torch
import triton
import triton.language as tl

from ..common.config import padded_head_dim
from ..common.tiles import LOG2_E
from ..launch.launch import launch

ROWS = 64  # queries that a program reads at a time


@triton.jit
def add_sink(state, sink):
    """The softmax state after one more score, natural, whose value is 0. sink: of each row, or of all; -inf for none."""
    accumulator, running_max, running_sum = state
    sink = sink.to(tl.float32) * LOG2_E
    new_max = tl.maximum(running_max, sink)
    rescale = tl.exp2(running_max - new_max)
    return accumulator * rescale[:, None], new_max, running_sum * rescale + tl.exp2(sink - new_max)


@triton.jit
def _load_rows(pointer, strides, batch, head, query, q_len, dim, HEAD_DIM: tl.constexpr):
    place = pointer + batch * strides[0] + head * strides[1] + query[:, None] * strides[2] + dim[None, :]
    return tl.load(place, mask=(query < q_len)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["dout_batch", "dout_head", "dout_token", "out_batch", "out_head", "out_token", "heads", "q_len"])
def sum_shares_kernel(
    dout_ptr,
    dlse_ptr,
    out_ptr,
    lse_ptr,
    sinks,
    sums,
    dout_batch: tl.int64,
    dout_head: tl.int64,
    dout_token: tl.int64,
    out_batch: tl.int64,
    out_head: tl.int64,
    out_token: tl.int64,
    heads,
    q_len,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program sums a sink's weight times (dout . out - dlse) over ROWS queries of a head."""
    chunk, batch_head = tl.program_id(0), tl.program_id(1)
    batch, head = (batch_head // heads).to(tl.int64), (batch_head % heads).to(tl.int64)
    query, dim = chunk * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    dout = _load_rows(dout_ptr, (dout_batch, dout_head, dout_token), batch, head, query.to(tl.int64), q_len, dim, HEAD_DIM)
    out = _load_rows(out_ptr, (out_batch, out_head, out_token), batch, head, query.to(tl.int64), q_len, dim, HEAD_DIM)
    delta = tl.sum(dout * out, 1)
    row = batch_head.to(tl.int64) * q_len + query
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row, mask=query < q_len, other=0.0)
    # lse -inf: neither a key nor a sink, or no query.
    lse = tl.load(lse_ptr + row, mask=query < q_len, other=-float("inf"))
    weight = tl.exp(tl.load(sinks + head).to(tl.float32) - tl.where(lse == -float("inf"), 0.0, lse))
    total = tl.sum(tl.where(lse == -float("inf"), 0.0, weight * delta), 0)
    tl.store(sums + batch_head.to(tl.int64) * tl.num_programs(0) + chunk, total)


def sum_shares(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """(batch, heads, chunks) float32: the weight of each head's sink times (dout . out - dlse), summed over some queries.

    dout, out: (batch, heads, q_len, head_dim). dlse, lse: (batch, heads, q_len) float32. sinks: (heads,)."""
    dout, out = (t if t.stride(3) == 1 else t.contiguous() for t in (dout, out))
    dlse = None if dlse is None else dlse.contiguous()
    batch, heads, q_len, head_dim = out.shape
    sums = torch.empty((batch, heads, triton.cdiv(q_len, ROWS)), dtype=torch.float32, device=out.device)
    arguments = [dout, lse if dlse is None else dlse, out, lse, sinks, sums, *dout.stride()[:3], *out.stride()[:3], heads, q_len]
    constants = {"HEAD_DIM": head_dim, "DIM": padded_head_dim(head_dim), "HAS_DLSE": dlse is not None, "ROWS": ROWS}
    launch(sum_shares_kernel, (sums.shape[2], batch * heads), arguments, constants, {"num_warps": 4}, (sinks.dtype,))
    return sums
