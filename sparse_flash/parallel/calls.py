"""Calls back ends on some rows and columns of a rank's attention, and merges their results."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import backends
from ..backends import hopper
from ..backends import triton as triton_backend
from ..kernels.common.streams import current_device
from ..masks.block_mask import BlockMask
from ..variant.variant import Variant
from .routes import LocalMask, TwoCalls
from .transfer import pack, unpacked

if TYPE_CHECKING:
    from ..kernels.hopper.backward import JointBackward

Addends = tuple[torch.Tensor, torch.Tensor]


class RowResults(NamedTuple):
    """Holds the inputs of a backward pass that belong to query rows. dlse: None if nothing depends on lse."""

    dout: torch.Tensor
    dlse: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor


class PartialAttention(NamedTuple):
    """Attends some of a rank's rows to some columns, by a back end. dropout: a variant with a seed, and with the batch-heads
    (``batch_heads``) if the rank has only some heads; None for no dropout."""

    scale: float
    deterministic: bool
    backend: str
    dropout: Variant | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: LocalMask) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (out, lse) over the columns of the mask."""
        run, table, variant = self._prepared(q, k, v, mask)
        return run.forward(q, k, v, table, self.scale, self.deterministic, variant)

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: RowResults, mask: LocalMask
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (dq, dk, dv) from the pairs of the mask. results: out and lse over all columns, as the probabilities need the
        whole lse."""
        run, table, variant = self._prepared(q, k, v, mask)
        dout, dlse, out, lse = results
        return run.backward(dout, dlse, q, k, v, out, lse, table, self.scale, self.deterministic, variant)

    def split_backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fetched: torch.Tensor, results: RowResults, calls: TwoCalls
    ) -> SeparateCalls | JointCalls:
        """Returns the backward pass in two calls, not started. fetched: blocks, which need not have arrived yet."""
        separate = SeparateCalls(self, q, results, calls)
        if calls.far is None or self.dropout is not None or self.deterministic:
            return separate
        theirs = unpacked(fetched, k.shape[3])
        near, far = self._prepared(q, k, v, calls.near), self._prepared(q, *theirs, calls.far)
        if not near[0] is far[0] is hopper:
            return separate
        dout, dlse, out, lse = results
        joint = hopper.joint_backward(dout, dlse, q, out, lse, [(k, v, near[1]), (*theirs, far[1])], self.scale)
        return separate if joint is None else JointCalls(joint, near[1], far[1])

    def _prepared(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: LocalMask
    ) -> tuple[ModuleType, BlockMask | None, Variant | None]:
        table, variant = table_and_variant(mask, self.dropout, q.is_cuda)
        size = None if table is None else table.block_size
        call = backends.Call.from_tensors(q, k, v, size, variant, deterministic=self.deterministic)
        return backends.get_backend(backends.choose_backend(self.backend, call)), table, variant


class SeparateCalls:
    """Runs a backward pass in two calls of a back end, in either order. ``queries`` adds their dq at the end."""

    def __init__(self, run: PartialAttention, q: torch.Tensor, results: RowResults, calls: TwoCalls) -> None:
        self._run, self._q, self._results, self._calls = run, q, results, calls
        self._dq_far: torch.Tensor | None = None

    def near(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (dk, dv) of the rank's own columns."""
        self._dq, dk, dv = self._run.backward(self._q, k, v, self._results, self._calls.near)
        return dk, dv

    def far(self, fetched: torch.Tensor, gradients: torch.Tensor) -> None:
        """Writes the gradients of fetched blocks to ``gradients``."""
        if self._calls.far is None:
            return
        theirs = unpacked(fetched, self._q.shape[3])
        self._dq_far, dk, dv = self._run.backward(self._q, *theirs, self._results, self._calls.far)
        pack(dk, dv, gradients)

    def queries(self) -> torch.Tensor:
        """Returns dq of both calls."""
        return self._dq if self._dq_far is None else self._dq.add_(self._dq_far)


class JointCalls(NamedTuple):
    """Replaces ``SeparateCalls`` on Hopper. Both calls accumulate into one dq, and write
    gradients of fetched blocks straight to the message."""

    joint: JointBackward
    near_mask: BlockMask | None
    far_mask: BlockMask | None

    def near(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with current_device(k.device):
            return self.joint.add_keys(k, v, self.near_mask)

    def far(self, fetched: torch.Tensor, gradients: torch.Tensor) -> None:
        head_dim = self.joint.q.shape[3]
        with current_device(fetched.device):
            self.joint.add_keys(*unpacked(fetched, head_dim), self.far_mask, unpacked(gradients, head_dim))

    def queries(self) -> torch.Tensor:
        with current_device(self.joint.q.device):
            return self.joint.round_dq()


def table_and_variant(mask: LocalMask, dropout: Variant | None, on_gpu: bool) -> tuple[BlockMask | None, Variant | None]:
    """Returns (mask, variant) for a back end. With dropout, the variant has the positions of the mask's tokens in the sequence."""
    if dropout is None:
        return mask.mask.kernel_table(on_gpu), None
    # Only the mask's own blocks are contiguous in the sequence, so neither coarser blocks nor a dense call are used.
    return mask.mask, replace(dropout, q_positions=mask.q_positions, kv_positions=mask.kv_positions)


def merge(out: torch.Tensor, lse: torch.Tensor, part: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Merges results of the same rows over other keys into out and lse, in place."""
    part_out, part_lse = part
    if triton_backend.can_use_kernels(out.device):
        from ..kernels.portable.merge import merge_results

        with current_device(out.device):
            merge_results(out, lse, part_out, part_lse)
        return
    total = torch.logaddexp(lse, part_lse)
    # A query that keeps nothing has lse -inf in both results and in total: its weights are 0, not NaN.
    mine, theirs = ((x - total).exp().masked_fill(x == float("-inf"), 0)[..., None] for x in (lse, part_lse))
    out.mul_(mine).addcmul_(part_out, theirs)
    lse.copy_(total)


def add_blocks(
    whole: torch.Tensor, part: torch.Tensor, rows: torch.Tensor, block_size: int, addends: Addends | None = None
) -> None:
    """Adds gradients of some blocks to ``whole``, in place, and rounds once. Arguments: as for ``merge.add_rows``."""
    if triton_backend.can_use_kernels(whole.device):
        from ..kernels.portable.merge import add_rows

        with current_device(whole.device):
            add_rows(whole, part, rows, block_size, addends)
    else:
        of_whole, of_part = (t.unflatten(2, (-1, block_size)) for t in (whole, part))
        first, blocks = addends or (torch.arange(len(rows) + 1, device=rows.device), torch.arange(len(rows), device=rows.device))
        total = of_whole.index_select(2, rows).to(torch.promote_types(whole.dtype, torch.float32))
        for number in range(int(first.diff().amax()) if len(rows) else 0):
            some = (first.diff() > number).nonzero()[:, 0]
            total.index_add_(2, some, of_part.index_select(2, blocks[first[some] + number]).to(total.dtype))
        of_whole.index_copy_(2, rows, total.to(whole.dtype))
