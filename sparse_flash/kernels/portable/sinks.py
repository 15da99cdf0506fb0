"""Sink logits, which are added to each query's softmax (arXiv:2309.17453): in the state of a forward pass, and their gradient."""

from functools import partial

import torch
import triton
import triton.language as tl

from ..common.config import padded_head_dim
from ..common.grid import tile_and_batch_head
from ..common.layout import as_addressable
from ..common.tiles import LOG2_E, load_tile
from ..launch.launch import Recording, descriptor_or_rows, launch_or_repeat_alike
from .softmax import merge

ROWS = 64  # queries that a program reads at a time


@triton.jit
def add_sink(state, sink):
    """The softmax state after one more natural score, sink, whose value is 0. sink: of each row, or of all rows; -inf adds
    nothing."""
    return merge(state, None, (sink.to(tl.float32) * LOG2_E,), 1)


@triton.jit(do_not_specialize=["heads", "q_len"])
def sum_shares_kernel(
    dout_tensor, out_tensor, dlse_ptr, lse_ptr, sinks, sums, heads, q_len,
    DIM: tl.constexpr, HAS_DLSE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program sums minus a sink's weight times (dout . out - dlse) over ROWS queries of a head."""
    chunks = tl.cdiv(q_len, ROWS)
    chunk, batch_head = tile_and_batch_head(chunks)
    batch, head = batch_head // heads, batch_head % heads
    dout = load_tile(dout_tensor, batch, head, chunk * ROWS, ROWS, DIM).to(tl.float32)
    delta = tl.sum(dout * load_tile(out_tensor, batch, head, chunk * ROWS, ROWS, DIM).to(tl.float32), 1)
    query = chunk * ROWS + tl.arange(0, ROWS)
    row = batch_head.to(tl.int64) * q_len + query
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row, mask=query < q_len, other=0.0)
    # lse is -inf without keys and sink, and for nonexistent queries.
    lse = tl.load(lse_ptr + row, mask=query < q_len, other=-float("inf"))
    weight = tl.exp(tl.load(sinks + head).to(tl.float32) - tl.where(lse == -float("inf"), 0.0, lse))
    tl.store(sums + batch_head.to(tl.int64) * chunks + chunk, -tl.sum(tl.where(lse == -float("inf"), 0.0, weight * delta), 0))


def sum_shares(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """(batch, heads, chunks) float32: minus the weight of each head's sink times (dout . out - dlse), summed over some queries."""
    dout, out = map(as_addressable, (dout, out))
    inputs = dout, out, lse, sinks, *(() if dlse is None else (dlse.contiguous(),))
    return launch_or_repeat_alike(sum_shares_kernel, None, (len(inputs),), inputs, partial(_run, inputs))[0]


def _run(inputs, recording: Recording) -> list[torch.Tensor]:
    dout, out, lse, sinks, *dlse = inputs
    batch, heads, q_len, head_dim = out.shape
    dim, chunks = padded_head_dim(head_dim), triton.cdiv(q_len, ROWS)
    sums = recording.fresh(torch.empty((batch, heads, chunks), dtype=torch.float32, device=out.device))
    arguments = [*(descriptor_or_rows(t, ROWS, dim) for t in (dout, out)), *(dlse or [lse]), lse, sinks, sums, heads, q_len]
    constants = {"DIM": dim, "HAS_DLSE": bool(dlse), "ROWS": ROWS}
    recording.launch(sum_shares_kernel, ((chunks * batch * heads, 1), arguments, constants, {"num_warps": 4}), (sinks.dtype,))
    return [sums]
