"""Which blocks of keys a group of queries picks: its own, and the best of those that end before.

A group's first query chooses for it, and the blocks that it chooses from end before its own begins. So no pick depends on a later
token. Each way of choosing is an operator, so torch.compile does not look inside, and activation checkpointing can keep its result.
On a GPU a kernel chooses (``kernels/selection/choose_blocks``), elsewhere PyTorch operations on some groups at a time. Neither
holds the scores of all groups.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ..backends import triton as portable
from ..backends.torch import own_precision
from .block_selection import group_positions, normalized, own_width

SCORES = ("mean", "max")  # by queries and keys
COMPRESSED = "softmax"  # by queries and compressed keys
_MOST_BYTES = 512  # of a query's head_dim, for shared memory to hold the kernel's tiles
_MOST_KEPT = 128  # blocks that the kernel holds in registers
_CHUNK_CPU, _CHUNK_GPU = 1 << 22, 1 << 26  # scores held at a time


@torch.library.custom_op("sparse_flash::choose_blocks", mutates_args=())
def choose_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    keep: int,
    every: int,
    block_size: int,
    share_group: bool,
    score: str,
    bounds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Picks by queries and keys, (batch, kv_heads if share_group else heads, groups, n) int32, in the format of ``BlockSelection``.

    keep: how many blocks, the own ones of a group's first query among them. score: "mean", products with mean keys, or "max", the
    largest product with a key of the block; in float32, summed over the query heads that share keys if they share the choice.
    bounds: (groups, 2) int32, the first block that a group may choose, and its own, where lengths do not tell them; with every=1.
    """
    heads = k.shape[1] if share_group else q.shape[1]
    q_len, kv_len = q.shape[2], k.shape[2]
    means = block_means(k[:, :, : kv_len // block_size * block_size], block_size) if score == "mean" else None
    if kernel_chooses(q, heads, keep) and q.shape[3] * q.element_size() <= _MOST_BYTES:
        from ..kernels.selection.choose_blocks import choose_blocks as by_kernel

        own = own_width(every, block_size, kv_len - q_len)
        q, k = (portable.unbroken(t) for t in (q, k))
        sizes = keep - 1, own, every, block_size, heads, q_len, kv_len
        with portable.current_device(q.device):
            return by_kernel(q, k if means is None else means, score, *sizes, bounds=bounds)
    exact = torch.promote_types(q.dtype, torch.float32)
    rows, whole = q[:, :, ::every].unflatten(1, (k.shape[1], -1)), kv_len // block_size

    def scored(low: int, high: int) -> torch.Tensor:
        some = rows[:, :, :, low:high].to(exact)
        if means is not None:
            some = some.sum(2, keepdim=True) if share_group else some
            scores = some @ means[:, :, None].mT
        else:
            keys = k[:, :, None, : whole * block_size].to(exact)
            scores = (some @ keys.mT).unflatten(4, (whole, block_size)).amax(-1)
            scores = scores.sum(2, keepdim=True) if share_group else scores
        return scores.flatten(1, 2)

    room = q.shape[0] * q.shape[1] * (whole if score == "mean" else whole * block_size)
    with own_precision(q):
        best = _best(scored, rows.shape[3], room, keep - 1, every, block_size, q_len, kv_len, q.device, bounds)
    if bounds is not None:
        return with_own(best, bounds[:, 1:], -(-kv_len // block_size))
    return normalized(best, every, block_size, q_len, kv_len, True)


@choose_blocks.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    keep: int,
    every: int,
    block_size: int,
    share_group: bool,
    score: str,
    bounds: torch.Tensor | None = None,
) -> torch.Tensor:
    return _fake(q, k.shape[1] if share_group else q.shape[1], keep, every, block_size, q.shape[2], k.shape[2])


@torch.library.custom_op("sparse_flash::choose_by_scores", mutates_args=())
def choose_by_scores(
    scores: torch.Tensor, keep: int, every: int, block_size: int, q_len: int, kv_len: int, bounds: torch.Tensor | None = None
) -> torch.Tensor:
    """Like ``choose_blocks``, by given scores: (batch, heads that pick, groups, blocks) of a floating-point type. -inf and NaN are
    never chosen."""
    if kernel_chooses(scores, scores.shape[1], keep):
        from ..kernels.selection.choose_blocks import choose_blocks as by_kernel

        own = own_width(every, block_size, kv_len - q_len)
        with portable.current_device(scores.device):
            scores = portable.unbroken(scores)
            sizes = keep - 1, own, every, block_size, scores.shape[1], q_len, kv_len
            return by_kernel(scores, None, "given", *sizes, bounds=bounds)
    batch, heads, groups, blocks = scores.shape
    sizes = groups, batch * heads * blocks, keep - 1, every, block_size, q_len, kv_len
    best = _best(lambda low, high: scores[:, :, low:high], *sizes, scores.device, bounds)
    if bounds is not None:
        return with_own(best, bounds[:, 1:], blocks)
    return normalized(best, every, block_size, q_len, kv_len, True)


@choose_by_scores.register_fake
def _(
    scores: torch.Tensor, keep: int, every: int, block_size: int, q_len: int, kv_len: int, bounds: torch.Tensor | None = None
) -> torch.Tensor:
    return _fake(scores, scores.shape[1], keep, every, block_size, q_len, kv_len)


@torch.library.custom_op("sparse_flash::choose_by_compressed", mutates_args=())
def choose_by_compressed(
    q: torch.Tensor,
    keys: torch.Tensor,
    keep: int,
    every: int,
    block_size: int,
    share_group: bool,
    kv_len: int,
    length: int,
    stride: int,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Like ``choose_blocks``, by attention to compressed keys: a block's score is the weight of its tokens.

    keys: (batch, kv_heads, n, head_dim), key i of the tokens i * stride .. i * stride + length - 1, all of them before kv_len. A
    query reads those that have no token after it, at scale 1 / sqrt(head_dim). stride divides length and block_size; a key counts
    for a block by the strides that it has there. Weights are summed over the query heads that share keys if they share the choice.
    lse: (batch, heads, groups), natural, of the groups' first queries over what they read; None: computed.
    """
    heads = keys.shape[1] if share_group else q.shape[1]
    lse = None if lse is None else lse.to(torch.promote_types(q.dtype, torch.float32)).contiguous()
    sizes = keep - 1, every, block_size, q.shape[2], kv_len
    if keys.shape[2] and kernel_chooses(q, heads, keep) and q.shape[3] * q.element_size() <= _MOST_BYTES:
        from ..kernels.selection.choose_blocks import Compressed
        from ..kernels.selection.choose_blocks import choose_blocks as by_kernel

        own = own_width(every, block_size, kv_len - q.shape[2])
        q, keys = (portable.unbroken(t) for t in (q, keys))
        of_kernel = keep - 1, own, every, block_size, heads, q.shape[2], kv_len
        with portable.current_device(q.device):
            return by_kernel(q, keys, COMPRESSED, *of_kernel, compression=Compressed(length, stride, lse))
    rows = q[:, :, ::every].unflatten(1, (keys.shape[1], -1))
    position = group_positions(rows.shape[3], every, q.shape[2], kv_len, q.device)[0]
    scored = partial(_compressed_scores, rows, keys, position, lse, share_group, kv_len // block_size, block_size, length, stride)
    with own_precision(q):
        room = q.shape[0] * q.shape[1] * max(keys.shape[2], kv_len // block_size)
        best = _best(scored, rows.shape[3], room, *sizes, q.device, None)
    return normalized(best, *sizes[1:], True)


def _compressed_scores(
    rows: torch.Tensor,
    keys: torch.Tensor,
    position: torch.Tensor,
    lse: torch.Tensor | None,
    share_group: bool,
    blocks: int,
    block_size: int,
    length: int,
    stride: int,
    low: int,
    high: int,
) -> torch.Tensor:
    """(batch, heads that pick, groups, blocks) scores of the groups low .. high - 1. rows: (batch, kv_heads, group, groups,
    head_dim), their first queries. position: of these."""
    exact = torch.promote_types(rows.dtype, torch.float32)
    scores = rows[:, :, :, low:high].to(exact) @ keys[:, :, None].to(exact).mT * rows.shape[4] ** -0.5
    last = torch.arange(keys.shape[2], device=keys.device) * stride + (length - 1)
    scores = scores.masked_fill(last > position[low:high, None], float("-inf"))
    logs = scores.logsumexp(-1) if lse is None else lse.unflatten(1, rows.shape[1:3])[..., low:high]
    # exp(-inf - inf) is 0, while exp(-inf + inf) would be NaN.
    weights = (scores - logs.masked_fill(logs == float("-inf"), float("inf"))[..., None]).exp()
    weights = (weights.sum(2, keepdim=True) if share_group else weights).flatten(1, 2)
    # Added stride by stride, in one order for all blocks, so that equal blocks have equal scores.
    reach, per_block = length // stride, block_size // stride
    weights = torch.nn.functional.pad(weights, (reach - 1, max(0, blocks * per_block - keys.shape[2])))
    total = weights.new_zeros(*weights.shape[:3], blocks)
    for step in range(1 - reach, per_block):
        inside = min(step + reach, per_block) - max(step, 0)
        total += inside * weights[..., step + reach - 1 :: per_block][..., :blocks]
    return total


@choose_by_compressed.register_fake
def _(
    q: torch.Tensor,
    keys: torch.Tensor,
    keep: int,
    every: int,
    block_size: int,
    share_group: bool,
    kv_len: int,
    length: int,
    stride: int,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    return _fake(q, keys.shape[1] if share_group else q.shape[1], keep, every, block_size, q.shape[2], kv_len)


def kernel_chooses(x: torch.Tensor, heads: int, keep: int) -> bool:
    """Whether the kernel chooses. Elsewhere PyTorch operations do, which do not synchronize either."""
    fits = x.dtype in portable.DTYPES and x.shape[0] * heads > 0 and keep <= _MOST_KEPT
    return fits and portable.by_kernels(x.device)


def _fake(like: torch.Tensor, heads: int, keep: int, every: int, block_size: int, q_len: int, kv_len: int) -> torch.Tensor:
    n = keep - 1 + own_width(every, block_size, kv_len - q_len)
    return like.new_empty(like.shape[0], heads, -(-q_len // every), n, dtype=torch.int32)


def _best(
    scored: Callable[[int, int], torch.Tensor],
    groups: int,
    room: int,
    chosen: int,
    every: int,
    block_size: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    bounds: torch.Tensor | None,
) -> torch.Tensor:
    """(batch, heads, groups, chosen) int64: the blocks with the best scores, -1 for none. scored: (low, high) -> the scores of
    groups low .. high - 1, (batch, heads, groups, blocks). room: how many numbers that takes for a group. bounds: see
    ``choose_blocks``."""
    if bounds is None:
        first = group_positions(groups, every, q_len, kv_len, device)[0]
        before, least = first.clamp(min=0).div(block_size, rounding_mode="floor")[:, None], None
    else:
        least, before = bounds[:, :1], bounds[:, 1:]
    step = max(1, (_CHUNK_GPU if device.type == "cuda" else _CHUNK_CPU) // max(1, room))
    parts = []
    for low in range(0, groups, step):
        some = slice(low, low + step)
        parts.append(ranked(scored(low, low + step), before[some], chosen, None if least is None else least[some]))
    return torch.cat(parts, 2)


def ranked(scores: torch.Tensor, before: torch.Tensor, chosen: int, least: torch.Tensor | None = None) -> torch.Tensor:
    """(batch, heads, groups, chosen) int64: the columns with the best scores, -1 for none. least, before: (.., groups, 1): columns
    from the one on and below the other may be chosen; None: from 0 on."""
    column = torch.arange(scores.shape[3], device=scores.device)
    possible = (column < before) & ~scores.isnan()
    possible = possible if least is None else possible & (column >= least)
    # topk does not say which of equal scores it takes.
    values, columns = scores.masked_fill(~possible, float("-inf")).sort(dim=3, descending=True, stable=True)
    best = torch.where(values == float("-inf"), -1, columns)[..., :chosen]
    return torch.nn.functional.pad(best, (0, chosen - best.shape[3]), value=-1)


def with_own(best: torch.Tensor, own: torch.Tensor, none: int) -> torch.Tensor:
    """Picks in the format of ``BlockSelection`` from the best blocks, all of them before the own one. own: (.., groups, 1). none:
    more than any block."""
    picks = torch.cat([best, own.expand(*best.shape[:3], 1)], 3)
    picks = torch.where(picks < 0, none, picks).sort(3).values
    return torch.where(picks == none, -1, picks).to(torch.int32)


def block_means(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """(batch, heads, blocks, head_dim) means over the tokens of each block, in float32 or x's dtype if that is wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    whole = x.shape[2] // block_size
    means = x[:, :, : whole * block_size].unflatten(2, (whole, block_size)).mean(3, dtype=dtype)
    rest = x[:, :, whole * block_size :]
    return torch.cat([means, rest.mean(2, keepdim=True, dtype=dtype)], 2) if rest.shape[2] else means


def keep_picks() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """For activation checkpointing: picks are kept from the forward pass, not chosen again in the backward pass.

    ``torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=sf.keep_picks)``. Everything else is recomputed.
    Works in eager and in compiled code, under autocast too. Without it the choice is made again, from queries and keys that must
    then be recomputed to the same bits, else gradients are of other blocks than the results.
    """
    operators = torch.ops.sparse_flash
    kept = ("choose_blocks", "choose_by_scores", "choose_by_compressed", "normalized_picks")
    return create_selective_checkpoint_contexts([getattr(operators, name).default for name in kept])
