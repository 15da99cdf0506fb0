"""Which blocks of keys a query picks: its own, and the best of the blocks that end before.

So no pick depends on a later token. The choice is an operator, so activation checkpointing can keep its result. On a GPU a kernel
chooses (``kernels/pick_blocks``; ``kernels/hopper_pick_blocks`` by the largest product), elsewhere PyTorch operations. Neither
holds the scores of all queries.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ..compat.names import NAMESPACE, operator_name
from ..core import hopper
from ..core import triton as triton_backend
from ..core.results import compute_dtype, lse_to_subtract
from ..core.torch import block_means, without_autocast
from ..kernels.common.layout import as_contiguous_rows
from ..kernels.common.streams import current_device
from .block_selection import order_picks

SCORES = ("mean", "max")  # by queries and keys
COMPRESSED = "softmax"  # by queries and compressed keys
GIVEN = "given"  # by scores
_MOST_BYTES = 512  # of a query's head_dim, for shared memory to hold the kernel's tiles
_MOST_KEPT = 128  # blocks that the kernel holds in registers
_CHUNK_CPU, _CHUNK_GPU = 1 << 22, 1 << 26  # scores held at a time


class BlockChoice(NamedTuple):
    """A choice of ``keep`` blocks by each query. heads: that pick. For the rest see ``choose``."""

    kind: str
    heads: int
    keep: int
    block_size: int
    kv_len: int
    length: int = 1
    stride: int = 1


def choose(
    choice: BlockChoice, source: Tensor, keys: Tensor | None = None, *, bounds: Tensor | None = None, lse: Tensor | None = None
) -> Tensor:
    """Picks in the format of ``BlockSelection``: (batch, heads that pick, q_len, keep) int32, each query's own block among them.

    source: q, (batch, heads, q_len, head_dim); of the kind "given" scores, (batch, heads that pick, q_len, blocks), floating-point,
    of which -inf and NaN are never chosen. keys: (batch, kv_heads, n, head_dim). Scores are in float32 or wider. If fewer heads
    pick than q has, they are summed over the query heads that share picks. kind "mean": products with the mean keys of blocks;
    "max": the largest product with a key of the block; "softmax": the weight that attention to compressed keys, at scale
    1 / sqrt(head_dim), gives to the block's tokens. Compressed key i is of the tokens i * stride .. i * stride + length - 1, all of
    them before kv_len. A query reads the keys that have no token after it. stride divides length and block_size; a key counts for
    a block by the strides that it has there. lse: (batch, heads, q_len), natural, of that attention.
    bounds: (q_len, 2) int32, the first block that a query may choose, and its own, where lengths do not tell them.
    """
    return _choose(source, keys, bounds, lse, *choice)


@torch.library.custom_op(operator_name("choose_blocks"), mutates_args=())
def _choose(
    source: Tensor,
    keys: Tensor | None,
    bounds: Tensor | None,
    lse: Tensor | None,
    kind: str,
    heads: int,
    keep: int,
    block_size: int,
    kv_len: int,
    length: int,
    stride: int,
) -> Tensor:
    whole, exact = kv_len // block_size, compute_dtype(source)
    if keys is not None and kind != COMPRESSED:
        keys = keys[:, :, : whole * block_size]
    keys = block_means(keys, block_size) if keys is not None and kind == "mean" else keys
    lse = None if lse is None else lse.to(exact).contiguous()
    fits = keys is None or (keys.shape[2] > 0 and source.shape[3] * source.element_size() <= _MOST_BYTES)
    if fits and kernel_chooses(source, heads, keep):
        from .kernels.pick_blocks import pick_blocks

        with current_device(source.device):
            choice = BlockChoice(kind, heads, keep, block_size, kv_len, length, stride)
            if keys is not None and hopper.runs_on(source.device):
                from .kernels import hopper_pick_blocks

                if hopper_pick_blocks.supports(source, choice):
                    return hopper_pick_blocks.pick_blocks(source, keys, choice, bounds)
            return pick_blocks(as_contiguous_rows(source), keys if keys is None else as_contiguous_rows(keys), choice, bounds, lse)
    position = torch.arange(source.shape[2], device=source.device)[:, None] + (kv_len - source.shape[2])
    own = position.div(block_size, rounding_mode="floor").clamp(min=-1) if bounds is None else bounds[:, 1:]
    least = torch.zeros_like(own) if bounds is None else bounds[:, :1]

    def score_queries(some: slice) -> Tensor:
        """(batch, heads that pick, queries, blocks)"""
        if keys is None:
            return source[:, :, some]
        rows = torch.unflatten(source[:, :, some].to(exact), 1, (keys.shape[1], -1))
        shares = heads < source.shape[1]
        if kind == "mean":  # the mean of scores is the score of the mean, except for a factor that changes no order
            rows = rows.sum(2, keepdim=True) if shares else rows
            return (rows @ keys[:, :, None].mT).flatten(1, 2)
        scores = rows @ keys[:, :, None].to(exact).mT
        if kind == "max":
            scores = scores.unflatten(4, (whole, block_size)).amax(-1)
        elif lse is not None:
            last = torch.arange(keys.shape[2], device=keys.device) * stride + (length - 1)
            logs = torch.unflatten(lse[:, :, some, None], 1, rows.shape[1:3])
            scores = (scores * rows.shape[4] ** -0.5).masked_fill(last > position[some], float("-inf"))
            scores = (scores - lse_to_subtract(logs)).exp()
        scores = (scores.sum(2, keepdim=True) if shares else scores).flatten(1, 2)
        return _sum_strides(scores, whole, block_size // stride, length // stride) if kind == COMPRESSED else scores

    numbers = source.shape[0] * source.shape[1] * max(whole, source.shape[3] if keys is None else keys.shape[2])
    step = max(1, (_CHUNK_GPU if source.is_cuda else _CHUNK_CPU) // max(1, numbers))
    with without_autocast(source):
        some = [slice(low, low + step) for low in range(0, source.shape[2], step)]
        picks = torch.cat([rank_columns(score_queries(rows), least[rows], own[rows], keep - 1) for rows in some], 2)
    return order_picks(torch.cat([picks, own.expand(*picks.shape[:3], 1)], 3))


@_choose.register_fake
def _(source: Tensor, keys: Any, bounds: Any, lse: Any, kind: str, heads: int, keep: int, *_: int) -> Tensor:
    return source.new_empty((source.shape[0], heads, source.shape[2], keep), dtype=torch.int32)


def _sum_strides(weights: Tensor, blocks: int, per_block: int, reach: int) -> Tensor:
    """Weights of blocks, (.., blocks), from weights of compressed keys. per_block, reach: strides of a block, of such a key."""
    # Added stride by stride, in one order for all blocks, so that equal blocks have equal scores.
    padded = torch.nn.functional.pad(weights, (reach - 1, max(0, blocks * per_block - weights.shape[-1])))
    total = weights.new_zeros(*weights.shape[:-1], blocks)
    for step in range(1 - reach, per_block):
        inside = min(step + reach, per_block) - max(step, 0)
        total += inside * padded[..., step + reach - 1 :: per_block][..., :blocks]
    return total


def kernel_chooses(x: Tensor, heads: int, keep: int) -> bool:
    """Whether the kernel chooses. Elsewhere PyTorch operations do, which do not synchronize either."""
    fits = x.dtype in triton_backend.DTYPES and x.shape[0] * heads > 0 and keep <= _MOST_KEPT
    return fits and triton_backend.can_use_kernels(x.device)


def rank_columns(scores: Tensor, least: Tensor, before: Tensor, chosen: int) -> Tensor:
    """(batch, heads, queries, chosen) int64: the best columns in least .. before - 1, (queries, 1) each; -1 for none."""
    column = torch.arange(scores.shape[3], device=scores.device)
    possible = (column >= least) & (column < before) & ~scores.isnan()
    # topk does not say which of equal scores it takes.
    values, columns = scores.masked_fill(~possible, float("-inf")).sort(dim=3, descending=True, stable=True)
    best = torch.where(values == float("-inf"), -1, columns)[..., :chosen]
    return torch.nn.functional.pad(best, (0, chosen - best.shape[3]), value=-1)


def keep_picks() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """For activation checkpointing: picks are kept from the forward pass, not chosen again in the backward pass.

    ``torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=sf.keep_picks)``. Everything else is recomputed.
    Works in eager and in compiled code, under autocast too. Without it the choice is made again, from queries and keys that must
    then be recomputed to the same bits, else gradients are of other blocks than the results.
    """
    operators: Any = getattr(torch.ops, NAMESPACE)
    return create_selective_checkpoint_contexts([operators.choose_blocks.default, operators.normalized_picks.default])
