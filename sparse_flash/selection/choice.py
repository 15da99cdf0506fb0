"""Which blocks of keys a group of queries picks: its own, and the best of the blocks that end before.

A group's first query chooses for it, and the blocks that it chooses from end before its own begins. So no pick depends on a later
token. Each kind of choice is an operator: torch.compile does not look inside, and activation checkpointing can keep its result. On
a GPU a kernel chooses (``selection/kernels/pick_blocks``), elsewhere PyTorch operations on some groups at a time. Neither holds
the scores of all groups.
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
from .block_selection import group_positions, most_own_blocks, normalize_picks

SCORES = ("mean", "max")  # by queries and keys
COMPRESSED = "softmax"  # by queries and compressed keys
_MOST_BYTES = 512  # of a query's head_dim, for shared memory to hold the kernel's tiles
_MOST_KEPT = 128  # blocks that the kernel holds in registers
_CHUNK_CPU, _CHUNK_GPU = 1 << 22, 1 << 26  # scores held at a time


class BlockChoice(NamedTuple):
    """A choice of ``keep`` blocks by each group of ``every`` queries. heads: that pick. bounds: see ``choose_by_keys``."""

    heads: int
    keep: int
    every: int
    block_size: int
    q_len: int
    kv_len: int
    bounds: Tensor | None = None

    @property
    def own_blocks(self) -> int:
        """The most blocks in which the queries of one group are."""
        return most_own_blocks(self.every, self.block_size, self.kv_len - self.q_len)

    def make_fake_picks(self, like: Tensor) -> Tensor:
        shape = like.shape[0], self.heads, -(-self.q_len // self.every), self.keep - 1 + self.own_blocks
        return like.new_empty(shape, dtype=torch.int32)

    def pick_with_kernel(self, source: Tensor, keys: Tensor | None, kind: str, compression: Any = None) -> Tensor:
        """See ``selection/kernels/pick_blocks``."""
        from .kernels.pick_blocks import pick_blocks

        with current_device(source.device):
            return pick_blocks(as_contiguous_rows(source), keys, kind, self, compression=compression)

    def pick_in_chunks(self, score: Callable[[int, int], Tensor], groups: int, numbers: int, device: torch.device) -> Tensor:
        """Picks in PyTorch operations. score: (low, high) -> the scores of groups low .. high - 1, (batch, heads, groups, blocks).
        numbers: how many a group's scores take."""
        if self.bounds is None:
            first = group_positions(groups, self.every, self.q_len, self.kv_len, device)[0]
            before, least = first.clamp(min=0).div(self.block_size, rounding_mode="floor")[:, None], None
        else:
            least, before = self.bounds[:, :1], self.bounds[:, 1:]
        step = max(1, (_CHUNK_GPU if device.type == "cuda" else _CHUNK_CPU) // max(1, numbers))
        parts = []
        for low in range(0, groups, step):
            some = slice(low, low + step)
            parts.append(rank_columns(score(low, low + step), before[some], self.keep - 1, None if least is None else least[some]))
        best = torch.cat(parts, 2)
        if self.bounds is not None:  # all of the best are before the own block
            none = -(-self.kv_len // self.block_size)
            picks = torch.cat([best, before.expand(*best.shape[:3], 1)], 3)
            picks = torch.where(picks < 0, none, picks).sort(3).values
            return torch.where(picks == none, -1, picks).to(torch.int32)
        return normalize_picks(best, self.every, self.block_size, self.q_len, self.kv_len, True)


@torch.library.custom_op(operator_name("choose_blocks"), mutates_args=())
def choose_by_keys(
    q: Tensor, k: Tensor, keep: int, every: int, block_size: int, share_group: bool, score: str, bounds: Tensor | None = None
) -> Tensor:
    """Picks by queries and keys, (batch, kv_heads if share_group else heads, groups, n) int32, in the format of ``BlockSelection``.

    keep: how many blocks, the own ones of a group's first query among them. score: "mean", products with mean keys, or "max", the
    largest product with a key of the block; in float32, summed over the query heads that share keys if they share the choice.
    bounds: (groups, 2) int32, the first block that a group may choose, and its own, where lengths do not tell them; with every=1.
    """
    q_len, kv_len = q.shape[2], k.shape[2]
    choice = BlockChoice(k.shape[1] if share_group else q.shape[1], keep, every, block_size, q_len, kv_len, bounds)
    means = block_means(k[:, :, : kv_len // block_size * block_size], block_size) if score == "mean" else None
    if kernel_chooses(q, choice.heads, keep) and q.shape[3] * q.element_size() <= _MOST_BYTES:
        return choice.pick_with_kernel(q, as_contiguous_rows(k) if means is None else means, score)
    exact = compute_dtype(q)
    rows, whole = q[:, :, ::every].unflatten(1, (k.shape[1], -1)), kv_len // block_size

    def score_groups(low: int, high: int) -> Tensor:
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
        return choice.pick_in_chunks(score_groups, rows.shape[3], numbers, q.device)


@choose_by_keys.register_fake
def _(q: Tensor, k: Tensor, keep: int, every: int, block_size: int, share_group: bool, *_: object) -> Tensor:
    heads = k.shape[1] if share_group else q.shape[1]
    return BlockChoice(heads, keep, every, block_size, q.shape[2], k.shape[2]).make_fake_picks(q)


@torch.library.custom_op(operator_name("choose_by_scores"), mutates_args=())
def choose_by_scores(
    scores: Tensor, keep: int, every: int, block_size: int, q_len: int, kv_len: int, bounds: Tensor | None = None
) -> Tensor:
    """Like ``choose_by_keys``, by floating-point scores, (batch, picking heads, groups, blocks); -inf and NaN are never chosen."""
    batch, heads, groups, blocks = scores.shape
    choice = BlockChoice(heads, keep, every, block_size, q_len, kv_len, bounds)
    if kernel_chooses(scores, heads, keep):
        return choice.pick_with_kernel(scores, None, "given")
    return choice.pick_in_chunks(lambda low, high: scores[:, :, low:high], groups, batch * heads * blocks, scores.device)


@choose_by_scores.register_fake
def _(scores: Tensor, keep: int, every: int, block_size: int, q_len: int, kv_len: int, *_: object) -> Tensor:
    return BlockChoice(scores.shape[1], keep, every, block_size, q_len, kv_len).make_fake_picks(scores)


@torch.library.custom_op(operator_name("choose_by_compressed"), mutates_args=())
def choose_by_compressed(
    q: Tensor,
    keys: Tensor,
    keep: int,
    every: int,
    block_size: int,
    share_group: bool,
    kv_len: int,
    length: int,
    stride: int,
    lse: Tensor | None = None,
) -> Tensor:
    """Like ``choose_by_keys``, by attention to compressed keys: a block's score is the weight of its tokens.

    keys: (batch, kv_heads, n, head_dim), key i of the tokens i * stride .. i * stride + length - 1, all of them before kv_len. A
    query reads the keys that have no token after it, at scale 1 / sqrt(head_dim). stride divides length and block_size; a key
    counts for a block by the strides that it has there. Weights are summed over the query heads that share keys if they share the
    choice. lse: (batch, heads, groups), natural, of the groups' first queries over what they read; None: computed.
    """
    choice = BlockChoice(keys.shape[1] if share_group else q.shape[1], keep, every, block_size, q.shape[2], kv_len)
    lse = None if lse is None else lse.to(compute_dtype(q)).contiguous()
    if keys.shape[2] and kernel_chooses(q, choice.heads, keep) and q.shape[3] * q.element_size() <= _MOST_BYTES:
        from .kernels.pick_blocks import Compressed

        return choice.pick_with_kernel(q, as_contiguous_rows(keys), COMPRESSED, Compressed(length, stride, lse))
    rows = q[:, :, ::every].unflatten(1, (keys.shape[1], -1))
    position = group_positions(rows.shape[3], every, q.shape[2], kv_len, q.device)[0]
    last = torch.arange(keys.shape[2], device=keys.device) * stride + (length - 1)
    blocks, exact = kv_len // block_size, compute_dtype(q)

    def score_groups(low: int, high: int) -> Tensor:
        scores = rows[:, :, :, low:high].to(exact) @ keys[:, :, None].to(exact).mT * rows.shape[4] ** -0.5
        scores = scores.masked_fill(last > position[low:high, None], float("-inf"))
        logs = scores.logsumexp(-1) if lse is None else torch.unflatten(lse, 1, rows.shape[1:3])[..., low:high]
        weights = (scores - lse_to_subtract(logs)[..., None]).exp()
        weights = (weights.sum(2, keepdim=True) if share_group else weights).flatten(1, 2)
        return _sum_strides(weights, blocks, block_size // stride, length // stride)

    with without_autocast(q):
        return choice.pick_in_chunks(score_groups, rows.shape[3], q.shape[0] * q.shape[1] * max(keys.shape[2], blocks), q.device)


def _sum_strides(weights: Tensor, blocks: int, per_block: int, reach: int) -> Tensor:
    """Weights of blocks, (batch, heads, groups, blocks), from the weights of compressed keys. per_block: strides of a block. reach:
    strides of a compressed key, of which the first of key i is stride i."""
    # Added stride by stride, in one order for all blocks, so that equal blocks have equal scores.
    padded = torch.nn.functional.pad(weights, (reach - 1, max(0, blocks * per_block - weights.shape[3])))
    total = weights.new_zeros(*weights.shape[:3], blocks)
    for step in range(1 - reach, per_block):
        inside = min(step + reach, per_block) - max(step, 0)
        total += inside * padded[..., step + reach - 1 :: per_block][..., :blocks]
    return total


@choose_by_compressed.register_fake
def _(q: Tensor, keys: Tensor, keep: int, every: int, block_size: int, share_group: bool, kv_len: int, *_: object) -> Tensor:
    return BlockChoice(keys.shape[1] if share_group else q.shape[1], keep, every, block_size, q.shape[2], kv_len).make_fake_picks(q)


def kernel_chooses(x: Tensor, heads: int, keep: int) -> bool:
    """Whether the kernel chooses. Elsewhere PyTorch operations do, which do not synchronize either."""
    fits = x.dtype in triton_backend.DTYPES and x.shape[0] * heads > 0 and keep <= _MOST_KEPT
    return fits and triton_backend.can_use_kernels(x.device)


def rank_columns(scores: Tensor, before: Tensor, chosen: int, least: Tensor | None = None) -> Tensor:
    """(batch, heads, groups, chosen) int64: the columns with the best scores, -1 for none. least, before: (.., groups, 1): columns
    from the one on and below the other may be chosen; None: from 0 on."""
    column = torch.arange(scores.shape[3], device=scores.device)
    possible = (column < before) & ~scores.isnan()
    possible = possible if least is None else possible & (column >= least)
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
