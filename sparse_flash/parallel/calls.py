"""Calls back ends on some rows and columns of a rank's attention, and merges their results."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..core import backends, hopper
from ..core import triton as triton_backend
from ..core.call import AttentionCall, prepare
from ..core.results import QueryRows, merge_results
from ..kernels.common.streams import current_device
from ..masks.block_mask import BlockMask
from .routes import TwoCalls
from .transfer import Message, PendingExchange, pack, unpack

if TYPE_CHECKING:
    from ..kernels.hopper.backward import JointBackward

Addends = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]
_KeyValues = tuple[Tensor, Tensor]
_Keys = tuple[Tensor, Tensor, object]  # k, v, table


class PartialAttention(NamedTuple):
    """Attends a rank's rows to some columns, by a back end. Its fields are the last arguments of both operators. handle: Route."""

    handle: Tensor
    scale: float | None
    deterministic: bool
    backend: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
        """Returns (out, lse) over the columns of the mask."""
        call = self._prepare_call(q, k, v, mask)
        return backends.get_backend(call.backend).forward(call)

    def backward(self, rows: QueryRows, k: Tensor, v: Tensor, mask: BlockMask) -> Gradients:
        """Returns (dq, dk, dv) from the pairs of the mask. rows: with out and lse over all columns, for the probabilities."""
        q, dout, dlse, out, lse = rows
        call = self._prepare_call(q, k, v, mask)
        return backends.get_backend(call.backend).backward(call, dout, dlse, out, lse)

    def backward_in_two_calls(
        self, rows: QueryRows, own: _KeyValues, fetched: Tensor, calls: TwoCalls, message: Message
    ) -> tuple[Gradients, PendingExchange]:
        """Returns ((dq, dk, dv) of the rank's tokens, the gradients of the blocks that it sent, on their way, meanwhile)."""
        head_dim = rows.q.shape[3]
        others = unpack(fetched, head_dim)
        joined = self.join_calls(rows, own, others, calls)
        if joined is not None:
            joint, own_keys, other_keys = joined
            with current_device(fetched.device):
                joint.add_keys(*other_keys, unpack(message.pieces, head_dim))
                sent = message.send()
                sent.wait_for_start()
                dk, dv = joint.add_keys(*own_keys)
                return (joint.round_dq(), dk, dv), sent
        partial_dq = None
        if calls.far is not None:
            partial_dq, dk, dv = self.backward(rows, *others, calls.far)
            pack(dk, dv, message.pieces)
        sent = message.send()
        sent.wait_for_start()
        dq, dk, dv = self.backward(rows, *own, calls.near)
        return (dq if partial_dq is None else dq.add_(partial_dq), dk, dv), sent

    def join_calls(
        self, rows: QueryRows, own: _KeyValues, others: _KeyValues, calls: TwoCalls
    ) -> "tuple[JointBackward, _Keys, _Keys] | None":
        """Returns two backward calls of Hopper's kernels of the same rows and dq, and the keys to add, own ones first; or None."""
        if calls.far is None or self.deterministic:
            return None
        of_own, of_others = self._prepare_call(rows.q, *own, calls.near), self._prepare_call(rows.q, *others, calls.far)
        if {of_own.backend, of_others.backend} != {"hopper"}:
            return None
        keys = (*own, of_own.table), (*others, of_others.table)
        joint = hopper.joint_backward(rows.dout, rows.dlse, rows.q, rows.out, rows.lse, keys, of_own.scale)
        return None if joint is None else (joint, *keys)

    def _prepare_call(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> AttentionCall:
        scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
        table = mask.kernel_table(q.is_cuda)
        call = AttentionCall(q, k, v, mask, table, scale, self.deterministic, self.backend)
        return prepare(call, call.key, mask)


def merge(out: Tensor, lse: Tensor, partial: tuple[Tensor, Tensor]) -> None:
    """Merges (out, lse) of the same rows over other keys into out and lse, in place."""
    other_out, other_lse = partial
    if triton_backend.can_use_kernels(out.device):
        from ..kernels.portable import merge as kernels

        with current_device(out.device):
            kernels.merge_results(out, lse, other_out, other_lse)
        return
    merged, total = merge_results(out, lse, other_out, other_lse)
    out.copy_(merged)
    lse.copy_(total)


def add_blocks(whole: Tensor, part: Tensor, rows: Tensor, block_size: int, addends: Addends) -> None:
    """Adds gradients of some blocks to ``whole``, in place, and rounds once. Arguments: as for ``merge.add_rows``."""
    if triton_backend.can_use_kernels(whole.device):
        from ..kernels.portable.merge import add_rows

        with current_device(whole.device):
            add_rows(whole, part, rows, block_size, addends)
    else:
        of_whole, of_part = (t.unflatten(2, (-1, block_size)) for t in (whole, part))
        first, blocks = addends
        total = of_whole.index_select(2, rows).to(torch.promote_types(whole.dtype, torch.float32))
        for number in range(int(first.diff().amax()) if len(rows) else 0):
            some = (first.diff() > number).nonzero()[:, 0]
            total.index_add_(2, some, of_part.index_select(2, blocks[first[some] + number]).to(total.dtype))
        of_whole.index_copy_(2, rows, total.to(whole.dtype))
