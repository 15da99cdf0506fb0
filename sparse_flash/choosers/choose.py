"""Makes the mask of an expression with choosers for given queries and keys."""

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..compat.constants import constant_in_graphs
from ..compat.dynamo import outside_inference
from ..compat.pytorch import is_recorded
from ..core import hopper
from ..core import triton as triton_backend
from ..core.arguments import check_tensors, stand_in_for_empty_batch
from ..core.call import ChosenBlocks
from ..core.definition import clear_nonexistent
from ..core.operators import build_chosen_mask, define_operator
from ..core.torch import block_means, without_autocast
from ..core.variant import Variant
from ..masks.block_mask import BlockMask, MaskLike, from_block_maps, resolve_single_mask, resolve_within
from ..masks.chooser import Chooser, HeadChoice, choices_of, chooser_block_size, is_causal
from ..masks.grid import BlockGrid
from ..masks.memory import cached_until_cleared
from ..masks.parsing import text_of
from ..masks.pattern import Pattern
from ..masks.select_blocks import can_launch_kernel
from . import rules_torch
from .built_in import Scored
from .features import Content, Features
from .rules_torch import Limits

_HELD = 1 << 26  # logits that PyTorch operations hold at a time
_MOST_BYTES = 1 << 29  # of log-sums and scores that kernels hold at a time


def _take_heads(x: Tensor, heads: list[int]) -> Tensor:
    """These heads of x, (batch, heads, ...). By slices: a tensor of their numbers would be copied from the host."""
    return torch.cat([x[:, head : head + 1] for head in heads], 1)


def _select_heads(content: Content, heads: list[int]) -> Content:
    keys = [head // content.group for head in heads]
    if len(set(keys)) * content.group == len(keys):  # in whole groups
        keys = keys[:: content.group]
    scores = None if content.user_scores is None else _take_heads(content.user_scores, heads)
    return content._replace(q=_take_heads(content.q, heads), k=_take_heads(content.k, keys), user_scores=scores)


@outside_inference
@torch.no_grad()
def chosen_mask(
    spec: Pattern | str, q: Tensor, k: Tensor, scale: float | None, scores: Tensor | None, lengths: Variant | None = None
) -> BlockMask:
    """See ``choose_blocks``. lengths: which tokens exist; padding is ignored, and blocks of only padding are not chosen."""
    if torch.compiler.is_compiling():
        return build_chosen_mask(q, k, chosen_in_graph(spec, q, k, scale, scores, lengths))
    grid = BlockGrid(q.shape[2], k.shape[2], chooser_block_size(spec))
    q, k, ends = _clear_missing_tokens(q, k, lengths)
    maps = _choose_maps(spec, q, k, scale, scores, *ends)
    return from_block_maps(maps, resolve_within(choices_of(spec)[0].within, grid, q.device))


@torch.no_grad()
def chosen_in_graph(
    spec: Pattern | str, q: Tensor, k: Tensor, scale: float | None, scores: Tensor | None, lengths: Variant | None = None
) -> ChosenBlocks:
    """``chosen_mask`` within torch.compile, for attention, whose operator makes the table."""
    text, within, size = _as_text(spec)
    q, k, ends = _clear_missing_tokens(q, k, lengths)
    return ChosenBlocks(chosen_bits(q, k, text, scale, scores, *ends), size, within)


def _clear_missing_tokens(q: Tensor, k: Tensor, lengths: Variant | None) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """q and k, 0 where tokens do not exist; and (starts, ends, q_ends), see ``Content``."""
    if lengths is None:
        return q, k, (None, None, None)
    q, k = clear_nonexistent(q, lengths.q_starts, lengths.q_lens), clear_nonexistent(k, lengths.kv_starts, lengths.kv_lens)
    return q, k, (lengths.kv_starts, lengths.kv_lens, lengths.q_lens)


@constant_in_graphs
def _as_text(spec: Pattern | str) -> tuple[str, str, int]:
    """(the expression, what limits it or "", its block size), for operators, which take text."""
    if (text := text_of(spec)) is None:
        raise TypeError(
            f"torch.compile takes choosers that have spec text; register the choosers of {spec}, or call choose_blocks outside"
        )
    choice = choices_of(text)[0]
    return text, "" if choice.within is None else choice.within.to_spec(), chooser_block_size(text)


@define_operator(
    "chosen_bits",
    "Tensor q, Tensor k, str spec, float? scale, Tensor? scores, Tensor? starts, Tensor? ends, Tensor? q_ends",
    "Tensor",
)
def chosen_bits(q: Tensor, k: Tensor, spec: str, *arguments: Any) -> Tensor:
    """The bits of ``ChosenBlocks``. arguments: the others of ``_choose_maps``."""
    maps = _choose_maps(spec, q, k, *arguments)
    maps = pack_block_bits(maps) if maps.dtype == torch.bool else maps
    return torch.nn.functional.pad(maps.flatten(), (0, 1))


def pack_block_bits(blocks: Tensor) -> Tensor:
    """(..., ceil(n / 32)) int32 of (..., n) bool: block c is bit c % 32 of word c // 32."""
    words = torch.nn.functional.pad(blocks, (0, -blocks.shape[-1] % 32)).unflatten(-1, (-1, 32))
    return (words.long() << torch.arange(32, device=blocks.device)).sum(-1).to(torch.int32)


@chosen_bits.register_fake
def _(q: Tensor, k: Tensor, spec: str, *_: object) -> Tensor:
    size = chooser_block_size(spec)
    words = q.shape[0] * q.shape[1] * -(-q.shape[2] // size) * -(-k.shape[2] // (32 * size))
    return q.new_empty(words + 1, dtype=torch.int32)


def _choose_maps(
    spec: Pattern | str, q: Tensor, k: Tensor, scale: float | None, scores: Tensor | None, *ends: Tensor | None
) -> Tensor:
    """The maps of the kept blocks for ``from_block_maps``: bits where kernels choose, else bool. ends: the last of ``Content``."""
    choices, grid = choices_of(spec), BlockGrid(q.shape[2], k.shape[2], chooser_block_size(spec))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if len(choices) not in (1, q.shape[1]):
        raise ValueError(f"per_head must have an expression for each of q's {q.shape[1]} heads, or one for all; got {len(choices)}")
    content = Content(q, k, grid, is_causal(choices[0].within), scale, scores, *ends)
    if scores is not None:
        if not any(isinstance(chooser, Scored) for choice in choices for chooser in choice.choosers):
            raise ValueError("scores= needs the chooser scored, which is not in the expression; write scored(keep=8)")
        _check_scores(scores, "scores", content)
    if len(set(choices)) == 1:
        return _apply_choice(choices[0], content)
    made: dict[int, Tensor] = {}
    for choice in dict.fromkeys(choices):
        heads = [head for head, other in enumerate(choices) if other == choice]
        made |= zip(heads, _apply_choice(choice, _select_heads(content, heads)).split(1, 1), strict=True)
    return torch.cat([made[head] for head in range(len(choices))], 1)


def _can_use_kernels(x: Tensor) -> bool:
    """Whether kernels choose. x: queries or scores."""
    return can_launch_kernel(x) and x.dtype in triton_backend.DTYPES


@outside_inference
def mask_by_means(
    q: Tensor, k: Tensor, keep: int | float, block_size: int, within: MaskLike | None, always: MaskLike | None, share_group: bool
) -> BlockMask:
    """Returns the mask of the blocks that blocks of queries choose: see ``topk_blocks``."""
    q, k, _ = stand_in_for_empty_batch(q, k, k)
    check_tensors(q, k, k)
    # Plain numbers instead of symbolic lengths: a graph holds the mask of one length.
    grid = BlockGrid(operator.index(q.shape[2]), operator.index(k.shape[2]), block_size)
    group = q.shape[1] // k.shape[1]
    queries = torch.unflatten(block_means(q, block_size), 1, (-1, group))
    queries = queries.mean(2, keepdim=True) if share_group else queries
    with without_autocast(q):
        scores = queries.flatten(2, 3) @ block_means(k, block_size).mT
    scores = torch.unflatten(scores, 2, queries.shape[2:4]).flatten(1, 2)
    kept, limits = _init_maps(scores, within, always, grid)
    _add_kept_blocks(kept, scores, limits, 0, ("keep", keep), False)
    mask = from_block_maps(kept, resolve_within(within, grid, q.device))
    return replace(mask, mask_index=mask.mask_index.repeat_interleave(group, 1)) if share_group else mask


def _apply_choice(choice: HeadChoice, content: Content) -> Tensor:
    """The blocks that a choice keeps, as ``_init_maps`` returns them."""
    kept, limits = _init_maps(content.q, choice.within, choice.always, content.grid)
    for number, chooser in enumerate(choice.choosers):
        for low, scores in _iter_scores(chooser, content, kept.dtype != torch.bool):
            _add_kept_blocks(kept, _mask_missing_keys(scores, content), limits, low, chooser.rule, number > 0)
    return kept if choice.choosers else kept.copy_(limits.forced)


def _init_maps(like: Tensor, within: MaskLike | None, always: MaskLike | None, grid: BlockGrid) -> tuple[Tensor, Limits]:
    """(blocks to keep, limits): (batch, heads, q_blocks, kv_blocks) bool, none yet, or uninitialized bits if kernels choose."""
    # The limits of patterns are computed once; a BlockMask may differ on each call.
    is_fixed = all(mask is None or isinstance(mask, (Pattern, str)) for mask in (within, always)) and not is_recorded(like.device)
    limits = (_cached_limits if is_fixed else _make_limits)(within, always, grid, like.device, _can_use_kernels(like))
    # Made of ``like``, so that under vmap maps have its dimensions too.
    make = like.new_zeros if limits.forced.dtype == torch.bool else like.new_empty
    return make((*like.shape[:2], *limits.forced.shape), dtype=limits.forced.dtype), limits


def _make_limits(within: MaskLike | None, always: MaskLike | None, grid: BlockGrid, device: torch.device, as_bits: bool) -> Limits:
    """See ``Limits``. The blocks in which the positions of a row's queries fall are kept."""
    first = torch.arange(grid.q_blocks, device=device)[:, None] * grid.block_size + grid.offset
    last = (first + grid.block_size - 1).clamp(max=grid.kv_len - 1)
    col = torch.arange(grid.kv_blocks, device=device)
    # Positions before the first key round down, to blocks that do not exist.
    own = [position.div(grid.block_size, rounding_mode="floor") for position in (first, last)]
    forced = (col >= own[0]) & (col <= own[1])
    if always is not None:
        forced = forced | resolve_single_mask("always", always, grid, device).kept_blocks()
    allowed = torch.ones_like(forced) if within is None else resolve_single_mask("within", within, grid, device).kept_blocks()
    forced, counts = forced & allowed, allowed.sum(1)
    if as_bits:
        allowed, forced = pack_block_bits(allowed), pack_block_bits(forced)
    return Limits(allowed, forced, counts, {})


_cached_limits = cached_until_cleared(maxsize=64)(_make_limits)


def _add_kept_blocks(
    kept: Tensor, scores: Tensor, limits: Limits, first: int, rule: tuple[str, int | float], after_others: bool
) -> None:
    """Adds the blocks that a rule keeps, and those kept in any case, to ``kept`` from row ``first`` on."""
    allowed, forced, some = limits.allowed, limits.forced, slice(first, first + scores.shape[2])
    if kept.dtype == torch.bool:
        kept[:, :, some] |= rules_torch.apply_rule(scores, allowed[some], forced[some], *rule)
        return
    from .kernels.rules import apply_rule

    numbers = limits.numbers(*rule, scores.shape[1])
    if scores.shape[2] < len(numbers):
        allowed, forced, numbers = (x[some] for x in (allowed, forced, numbers))
    apply_rule(scores.contiguous(), allowed, forced, numbers, kept, first, rule[0], float(rule[1]), after_others)


def _iter_scores(chooser: Chooser, content: Content, with_kernels: bool) -> Iterator[tuple[int, Tensor]]:
    """(low, scores of the blocks of queries from ``low`` on), chunk by chunk."""
    features, grid, batch_heads = chooser.compared_features(content), content.grid, content.q.shape[0] * content.q.shape[1]
    score: Callable[[int, int], Tensor]
    if features is None:
        given = _get_user_scores(chooser, content)
        step, score = grid.q_blocks, lambda low, high: given
    elif with_kernels:
        step = _MOST_BYTES // (batch_heads * grid.kv_blocks * (4 + 4 * features.per_q_block))
        score = partial(_score_by_kernels, features, grid)
    else:
        step = _HELD // (batch_heads * features.per_q_block * features.column_count)
        score = partial(rules_torch.score_blocks, features, grid)
    for low in range(0, grid.q_blocks, max(1, step)):
        with without_autocast(content.q):
            yield low, score(low, min(low + max(1, step), grid.q_blocks))


def _score_by_kernels(features: Features, grid: BlockGrid, low: int, high: int) -> Tensor:
    """Returns what ``rules_torch.score_blocks`` returns."""
    from .kernels import log_sums

    by, device = log_sums, features.rows.device
    if hopper.runs_on(device):
        from .kernels import hopper_log_sums

        by = hopper_log_sums if hopper_log_sums.supports(features.rows, features.per_kv_block) else log_sums
    return log_sums.scores_of_blocks(features, grid.kv_blocks, low, high, by)


def _mask_missing_keys(scores: Tensor, content: Content) -> Tensor:
    """Scores, -inf of the blocks that have no existing key."""
    if content.starts is None and content.ends is None:
        return scores
    size = content.grid.block_size
    first = torch.arange(content.grid.kv_blocks, device=scores.device) * size
    if content.starts is not None:
        scores = scores.masked_fill(first + size <= content.starts.view(-1, 1, 1, 1), -math.inf)
    if content.ends is not None:
        scores = scores.masked_fill(first >= content.ends.view(-1, 1, 1, 1), -math.inf)
    return scores


def _get_user_scores(chooser: Chooser, content: Content) -> Tensor:
    """The scores of a chooser that a user wrote, or that a caller computed, in float32."""
    if isinstance(chooser, Scored):
        if content.user_scores is None:
            raise ValueError("scored needs the scores; call choose_blocks(spec, q, k, scores=...)")
        return content.user_scores.float()
    scores = chooser.scores(content.q, content.k, content.grid)
    _check_scores(scores, f"the scores of {chooser}", content)
    return scores.float()


def _check_scores(scores: object, name: str, content: Content) -> None:
    """Raises ValueError for scores that do not fit."""
    wanted = (*content.q.shape[:2], *content.grid.shape)
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.shape != wanted:
        found = f"{scores.dtype} of {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(
            f"{name} must be a floating-point tensor of shape {wanted}, (batch, heads, q_blocks, kv_blocks); got {found}"
        )
    if scores.device != content.q.device:
        raise ValueError(f"{name} must be on {content.q.device}, as q is; got {scores.device}; use .to(q.device)")
