"""Calls of back ends on parts of a rank's attention, and what joins their results."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch

from .. import backends
from ..backends import triton as portable
from ..masks.block_mask import BlockMask
from ..variant.variant import Variant
from .routes import PartMask
from .transfer import of_blocks


class RowResults(NamedTuple):
    """What a backward pass starts from. dlse: None if nothing depends on lse."""

    dout: torch.Tensor
    dlse: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor

    def of_blocks(self, rows: torch.Tensor | None, block_size: int) -> RowResults:
        dlse = None if self.dlse is None else of_blocks(self.dlse, rows, block_size)
        dout, out, lse = (of_blocks(t, rows, block_size) for t in (self.dout, self.out, self.lse))
        return RowResults(dout, dlse, out, lse)


class PartialAttention(NamedTuple):
    """Attention of some of a rank's rows to some columns, by a back end. dropout: a variant of a seed, and of lines where the rank
    has some of the heads; None for none."""

    scale: float
    deterministic: bool
    backend: str
    dropout: Variant | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: PartMask) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse)"""
        run, walked, variant = self._prepared(q, k, v, part)
        return run.forward(q, k, v, walked, self.scale, variant)

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: RowResults, part: PartMask
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) of the pairs of one part. results: of all parts, as a part's probabilities follow from the whole lse."""
        run, walked, variant = self._prepared(q, k, v, part)
        dout, dlse, out, lse = results
        return run.backward(dout, dlse, q, k, v, out, lse, walked, self.scale, self.deterministic, variant)

    def _prepared(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: PartMask
    ) -> tuple[ModuleType, BlockMask | None, Variant | None]:
        walked, variant = walked_of(part, self.dropout, q.is_cuda)
        size = None if walked is None else walked.block_size
        call = backends.Call.of(q, k, v, size, variant, deterministic=self.deterministic)
        return backends.backend(backends.choose(self.backend, call)), walked, variant


def walked_of(part: PartMask, dropout: Variant | None, on_gpu: bool) -> tuple[BlockMask | None, Variant | None]:
    """What a back end receives: a mask, and a variant that says where its tokens stand in the sequence."""
    if dropout is None:
        return part.mask.walked(on_gpu), None
    # The mask's own blocks, neither wider ones nor a dense call: across them, tokens do not stand together in the sequence.
    return part.mask, replace(dropout, q_places=part.q_places, kv_places=part.kv_places)


def join(
    out: torch.Tensor, lse: torch.Tensor, part: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor | None, block_size: int
) -> None:
    """Joins the results of some blocks over other keys to out and lse, in place."""
    part_out, part_lse = part
    if portable.by_kernels(out.device):
        from ..kernels.portable.join import join_rows

        with portable.current_device(out.device):
            join_rows(out, lse, part_out, part_lse, rows, block_size)
        return
    mine = of_blocks(lse, rows, block_size)
    total = torch.logaddexp(mine, part_lse)
    # A query that keeps nothing anywhere has -inf three times: weights of 0, not NaN.
    of_mine, of_part = ((x - total).exp().masked_fill(x == float("-inf"), 0)[..., None] for x in (mine, part_lse))
    joined = of_blocks(out, rows, block_size).mul_(of_mine).addcmul_(part_out, of_part)
    if rows is None:
        lse.copy_(total)
        return
    for tensor, of_rows in ((out, joined), (lse, total)):
        tensor.unflatten(2, (-1, block_size)).index_copy_(2, rows, of_rows.unflatten(2, (-1, block_size)))


def add(dq: torch.Tensor, part: torch.Tensor, rows: torch.Tensor | None, block_size: int) -> None:
    """Adds the gradients of some blocks, in place."""
    if portable.by_kernels(dq.device):
        from ..kernels.portable.join import add_rows

        with portable.current_device(dq.device):
            add_rows(dq, part, rows, block_size)
    elif rows is None:
        dq.add_(part)
    else:
        dq.unflatten(2, (-1, block_size)).index_add_(2, rows, part.unflatten(2, (-1, block_size)))
