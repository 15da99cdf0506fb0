"""Which blocks of keys a query picks: its own, and the best of the blocks that end before.

The blocks that it chooses from end before its own begins. So no pick depends on a later token. Each kind of choice is an operator:
torch.compile does not look inside, and activation checkpointing can keep its result. On a GPU a kernel chooses
(``selection/kernels/pick_blocks``), elsewhere PyTorch operations on some queries at a time. Neither holds the scores of all
queries.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ..compat.names import NAMESPACE, operator_name
from ..core import triton as triton_backend
from ..core.results import compute_dtype, lse_to_subtract
from ..core.torch import block_means, without_autocast
from ..kernels.common.layout import as_contiguous_rows
from ..kernels.common.streams import current_device
from .block_selection import order_picks

SCORES = ("mean", "max")  # by queries and keys
COMPRESSED = "softmax"  # by queries and compressed keys
_MOST_BYTES = 512  # of a query's head_dim, for shared memory to hold the kernel's tiles
_MOST_KEPT = 128  # blocks that the kernel holds in registers
_CHUNK_CPU, _CHUNK_GPU = 1 << 22, 1 << 26  # scores held at a time


class BlockChoice(NamedTuple):
    """A choice of ``keep`` blocks by each query. heads: that pick. bounds: see ``choose_by_keys``."""

    heads: int
    keep: int
    block_size: int
    q_len: int
    kv_len: int
    bounds: Tensor | None = None

    def make_fake_picks(self, like: Tensor) -> Tensor:
        return like.new_empty((like.shape[0], self.heads, self.q_len, self.keep), dtype=torch.int32)

    def pick_with_kernel(self, source: Tensor, keys: Tensor | None, kind: str, **compressed: Any) -> Tensor:
        """See ``selection/kernels/pick_blocks``."""
        from .kernels.pick_blocks import pick_blocks

        with current_device(source.device):
            return pick_blocks(as_contiguous_rows(source), keys, kind, self, **compressed)

    def pick_in_chunks(self, score: Callable[[int, int], Tensor], numbers: int, device: torch.device) -> Tensor:
        """Picks in PyTorch operations. score: (low, high) -> the scores of queries low .. high - 1, (batch, heads, queries,
        blocks). numbers: how many a query's scores take."""
        if self.bounds is None:
            position = torch.arange(self.q_len, device=device)[:, None] + (self.kv_len - self.q_len)
            own = position.div(self.block_size, rounding_mode="floor").clamp(min=-1)
            least = torch.zeros_like(own)
        else:
            least, own = self.bounds[:, :1], self.bounds[:, 1:]
        step = max(1, (_CHUNK_GPU if device.type == "cuda" else _CHUNK_CPU) // max(1, numbers))
        some = [slice(low, low + step) for low in range(0, self.q_len, step)]
        best = [rank_columns(score(rows.start, rows.stop), least[rows], own[rows], self.keep - 1) for rows in some]
        picks = torch.cat(best, 2)
        return order_picks(torch.cat([picks, own.expand(*picks.shape[:3], 1)], 3))


@torch.library.custom_op(operator_name("choose_blocks"), mutates_args=())
def choose_by_keys(
    q: Tensor, k: Tensor, keep: int, block_size: int, share_group: bool, score: str, bounds: Tensor | None = None
) -> Tensor:
    """Picks by queries and keys, (batch, kv_heads if share_group else heads, q_len, n) int32, in the format of ``BlockSelection``.

    keep: how many blocks, the query's own among them. score: "mean", products with mean keys, or "max", the largest product with a
    key of the block; in float32, summed over the query heads that share keys if they share the choice. bounds: (q_len, 2) int32,
    the first block that a query may choose, and its own, where lengths do not tell them.
    """
    q_len, kv_len = q.shape[2], k.shape[2]
    choice = BlockChoice(k.shape[1] if share_group else q.shape[1], keep, block_size, q_len, kv_len, bounds)
    means = block_means(k[:, :, : kv_len // block_size * block_size], block_size) if score == "mean" else None
    if kernel_chooses(q, choice.heads, keep) and q.shape[3] * q.element_size() <= _MOST_BYTES:
        return choice.pick_with_kernel(q, as_contiguous_rows(k) if means is None else means, score)
    exact = compute_dtype(q)
    rows, whole = q.unflatten(1, (k.shape[1], -1)), kv_len // block_size

    def score_queries(low: int, high: int) -> Tensor:
        some = rows[:, :, :, low:high].to(exact)
        if means is not None:
            some = some.sum(2, keepdim=True) if share_group else some
            scores = some @ means[:, :, None].mT
        else:
            keys = k[:, :, None, : whole * block_size].to(exact)
            scores = (some @ keys.mT).unflatten(4, (whole, block_size)).amax(-1)
            scores = scores.sum(2, keepdim=True) if share_group else scores
        return scores.flatten(1, 2)

    numbers = q.shape[0] * q.shape[1] * (whole if score == "mean" else whole * block_size)
    with without_autocast(q):
        return choice.pick_in_chunks(score_queries, numbers, q.device)


@choose_by_keys.register_fake
def _(q: Tensor, k: Tensor, keep: int, block_size: int, share_group: bool, *_: object) -> Tensor:
    heads = k.shape[1] if share_group else q.shape[1]
    return BlockChoice(heads, keep, block_size, q.shape[2], k.shape[2]).make_fake_picks(q)


@torch.library.custom_op(operator_name("choose_by_scores"), mutates_args=())
def choose_by_scores(scores: Tensor, keep: int, block_size: int, kv_len: int, bounds: Tensor | None = None) -> Tensor:
    """Like ``choose_by_keys``, by floating-point scores, (batch, picking heads, q_len, blocks); -inf and NaN are never chosen."""
    batch, heads, q_len, blocks = scores.shape
    choice = BlockChoice(heads, keep, block_size, q_len, kv_len, bounds)
    if kernel_chooses(scores, heads, keep):
        return choice.pick_with_kernel(scores, None, "given")
    return choice.pick_in_chunks(lambda low, high: scores[:, :, low:high], batch * heads * blocks, scores.device)


@choose_by_scores.register_fake
def _(scores: Tensor, keep: int, block_size: int, kv_len: int, *_: object) -> Tensor:
    return BlockChoice(scores.shape[1], keep, block_size, scores.shape[2], kv_len).make_fake_picks(scores)


@torch.library.custom_op(operator_name("choose_by_compressed"), mutates_args=())
def choose_by_compressed(
    q: Tensor, keys: Tensor, lse: Tensor, keep: int, block_size: int, share_group: bool, kv_len: int, length: int, stride: int
) -> Tensor:
    """Like ``choose_by_keys``, by attention to compressed keys: a block's score is the weight of its tokens.

    keys: (batch, kv_heads, n, head_dim), key i of the tokens i * stride .. i * stride + length - 1, all of them before kv_len. A
    query reads the keys that have no token after it, at scale 1 / sqrt(head_dim). lse: (batch, heads, q_len), natural, of what it
    reads. stride divides length and block_size; a key counts for a block by the strides that it has there. Weights are summed over
    the query heads that share keys if they share the choice.
    """
    exact = compute_dtype(q)
    choice = BlockChoice(keys.shape[1] if share_group else q.shape[1], keep, block_size, q.shape[2], kv_len)
    lse = lse.to(exact).contiguous()
    if keys.shape[2] and kernel_chooses(q, choice.heads, keep) and q.shape[3] * q.element_size() <= _MOST_BYTES:
        return choice.pick_with_kernel(q, as_contiguous_rows(keys), COMPRESSED, compression=(length, stride), lse=lse)
    rows, logs = (torch.unflatten(x, 1, (keys.shape[1], -1)) for x in (q, lse))
    position = torch.arange(q.shape[2], device=q.device)[:, None] + (kv_len - q.shape[2])
    last = torch.arange(keys.shape[2], device=keys.device) * stride + (length - 1)
    blocks = kv_len // block_size

    def score_queries(low: int, high: int) -> Tensor:
        scores = rows[:, :, :, low:high].to(exact) @ keys[:, :, None].to(exact).mT * rows.shape[4] ** -0.5
        scores = scores.masked_fill(last > position[low:high], float("-inf"))
        weights = (scores - lse_to_subtract(logs[:, :, :, low:high, None])).exp()
        weights = (weights.sum(2, keepdim=True) if share_group else weights).flatten(1, 2)
        return _sum_strides(weights, blocks, block_size // stride, length // stride)

    with without_autocast(q):
        return choice.pick_in_chunks(score_queries, q.shape[0] * q.shape[1] * max(keys.shape[2], blocks), q.device)


@choose_by_compressed.register_fake
def _(q: Tensor, keys: Tensor, lse: Tensor, keep: int, block_size: int, share_group: bool, kv_len: int, *_: object) -> Tensor:
    return BlockChoice(keys.shape[1] if share_group else q.shape[1], keep, block_size, q.shape[2], kv_len).make_fake_picks(q)


def _sum_strides(weights: Tensor, blocks: int, per_block: int, reach: int) -> Tensor:
    """Weights of blocks, (batch, heads, queries, blocks), from the weights of compressed keys. per_block: strides of a block.
    reach: strides of a compressed key, of which the first of key i is stride i."""
    # Added stride by stride, in one order for all blocks, so that equal blocks have equal scores.
    padded = torch.nn.functional.pad(weights, (reach - 1, max(0, blocks * per_block - weights.shape[3])))
    total = weights.new_zeros(*weights.shape[:3], blocks)
    for step in range(1 - reach, per_block):
        inside = min(step + reach, per_block) - max(step, 0)
        total += inside * padded[..., step + reach - 1 :: per_block][..., :blocks]
    return total


def kernel_chooses(x: Tensor, heads: int, keep: int) -> bool:
    """Whether the kernel chooses. Elsewhere PyTorch operations do, which do not synchronize either."""
    fits = x.dtype in triton_backend.DTYPES and x.shape[0] * heads > 0 and keep <= _MOST_KEPT
    return fits and triton_backend.can_use_kernels(x.device)


def rank_columns(scores: Tensor, least: Tensor, before: Tensor, chosen: int) -> Tensor:
    """(batch, heads, queries, chosen) int64: the columns with the best scores, -1 for none. least, before: (queries, 1): columns
    from the one on and below the other may be chosen."""
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
    operators = getattr(torch.ops, NAMESPACE)
    kept = ("choose_blocks", "choose_by_scores", "choose_by_compressed", "normalized_picks")
    return create_selective_checkpoint_contexts([getattr(operators, name).default for name in kept])
