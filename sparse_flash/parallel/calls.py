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
from .transfer import pack, unpack

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
        run, table, variant = self._prepare_call(q, k, v, mask)
        return run.forward(q, k, v, table, self.scale, self.deterministic, variant)

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: RowResults, mask: LocalMask
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (dq, dk, dv) from the pairs of the mask. results: out and lse over all columns, as the probabilities need the
        whole lse."""
        run, table, variant = self._prepare_call(q, k, v, mask)
        dout, dlse, out, lse = results
        return run.backward(dout, dlse, q, k, v, out, lse, table, self.scale, self.deterministic, variant)

    def split_backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fetched: torch.Tensor, results: RowResults, calls: TwoCalls
    ) -> SeparateCalls | JointCalls:
        """Returns the backward pass in two calls, not started. fetched: blocks, which need not have arrived yet."""
        separate = SeparateCalls(self, q, results, calls)
        if calls.far is None or self.dropout is not None or self.deterministic:
            return separate
        fetched_keys, fetched_values = unpack(fetched, k.shape[3])
        own_backend, own_mask, _ = self._prepare_call(q, k, v, calls.near)
        fetched_backend, fetched_mask, _ = self._prepare_call(q, fetched_keys, fetched_values, calls.far)
        if not own_backend is fetched_backend is hopper:
            return separate
        keys = [(k, v, own_mask), (fetched_keys, fetched_values, fetched_mask)]
        joint = hopper.joint_backward(results.dout, results.dlse, q, results.out, results.lse, keys, self.scale)
        return separate if joint is None else JointCalls(joint, own_mask, fetched_mask)

    def _prepare_call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: LocalMask
    ) -> tuple[ModuleType, BlockMask | None, Variant | None]:
        table, variant = table_and_variant(mask, self.dropout, q.is_cuda)
        size = None if table is None else table.block_size
        call = backends.Call.from_tensors(q, k, v, size, variant, deterministic=self.deterministic)
        return backends.get_backend(backends.choose_backend(self.backend, call)), table, variant


class SeparateCalls:
    """Runs a backward pass in two calls of a back end, in either order, and adds their dq."""

    def __init__(self, run: PartialAttention, q: torch.Tensor, results: RowResults, calls: TwoCalls) -> None:
        self._run, self._q, self._results, self._calls = run, q, results, calls
        self._dq: torch.Tensor | None = None

    def own_gradients(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (dk, dv) of the rank's own columns."""
        return self._call(k, v, self._calls.near)

    def write_fetched_gradients(self, fetched: torch.Tensor, gradients: torch.Tensor) -> None:
        """Writes the gradients of fetched blocks to ``gradients``."""
        if self._calls.far is not None:
            pack(*self._call(*unpack(fetched, self._q.shape[3]), self._calls.far), gradients)

    def query_gradients(self) -> torch.Tensor:
        """Returns dq, after both calls."""
        assert self._dq is not None
        return self._dq

    def _call(self, k: torch.Tensor, v: torch.Tensor, mask: LocalMask) -> tuple[torch.Tensor, torch.Tensor]:
        dq, dk, dv = self._run.backward(self._q, k, v, self._results, mask)
        self._dq = dq if self._dq is None else self._dq.add_(dq)
        return dk, dv


class JointCalls(NamedTuple):
    """Replaces ``SeparateCalls`` on Hopper. Both calls accumulate into one dq, and write gradients of fetched blocks straight to
    the message."""

    joint: JointBackward
    own_mask: BlockMask | None
    fetched_mask: BlockMask | None

    def own_gradients(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with current_device(k.device):
            return self.joint.add_keys(k, v, self.own_mask)

    def write_fetched_gradients(self, fetched: torch.Tensor, gradients: torch.Tensor) -> None:
        head_dim = self.joint.q.shape[3]
        with current_device(fetched.device):
            self.joint.add_keys(*unpack(fetched, head_dim), self.fetched_mask, unpack(gradients, head_dim))

    def query_gradients(self) -> torch.Tensor:
        with current_device(self.joint.q.device):
            return self.joint.round_dq()


def table_and_variant(mask: LocalMask, dropout: Variant | None, on_gpu: bool) -> tuple[BlockMask | None, Variant | None]:
    """Returns (mask, variant) for a back end. With dropout, the variant has the positions of the mask's tokens in the sequence."""
    if dropout is None:
        return mask.mask.kernel_table(on_gpu), None
    # Only the mask's own blocks are contiguous in the sequence, so neither coarser blocks nor a dense call are used.
    return mask.mask, replace(dropout, q_positions=mask.q_positions, kv_positions=mask.kv_positions)


def merge(out: torch.Tensor, lse: torch.Tensor, partial: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Merges (out, lse) of the same rows over other keys into out and lse, in place."""
    other_out, other_lse = partial
    if triton_backend.can_use_kernels(out.device):
        from ..kernels.portable.merge import merge_results

        with current_device(out.device):
            merge_results(out, lse, other_out, other_lse)
        return
    total = torch.logaddexp(lse, other_lse)
    # A query that keeps nothing has lse -inf in both results and in total: its weights are 0, not NaN.
    weight, other_weight = ((x - total).exp().masked_fill(x == float("-inf"), 0)[..., None] for x in (lse, other_lse))
    out.mul_(weight).addcmul_(other_out, other_weight)
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
