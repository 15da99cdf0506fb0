"""Attention of a model's prompts under a spec with choosers, and the rule by which all other calls are dense."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from ...api.attention import attention
from ...api.decode import MAX_QUERIES
from ...api.shared import SharedSequence
from ...compat.dynamo import constant_in_graphs
from ...masks.chooser import HeadChoice, Scored, choices_of, find_lookahead_chooser, has_choosers, is_causal, without_choosers
from ...masks.memory import cached_until_cleared
from ...masks.parsing import parse, text_of
from ...masks.pattern import And, Or, Pattern, PerHead
from ...masks.rules import move_pattern
from ...patterns import last_tokens
from .choice import OWN
from .masks import ModelMask, depends_on_position, is_window, keeps_all

DENSE_BELOW = 4096  # attention to fewer keys is a small part of a prompt's time, and 128 of them are a large part of the keys
DENSE_LAST = 64  # an answer starts from these queries, and they cost one or two rows of blocks
_NO_LIMITS: tuple[tuple[str | Pattern, ...], ...] = ()


class PromptChoice(NamedTuple):
    """A layer's spec with choosers, in the forms that calls need.

    spec: with the last tokens joined. dense: its patterns alone, for calls that do not choose. below, last: ``dense_below`` and
    ``dense_last`` of ``use_sparse_flash``. ahead: the first chooser that looks ahead, as text, or None. moves: whether the patterns
    depend on more than the distance of query and key.
    """

    spec: Pattern | str
    dense: Pattern | str
    below: int
    last: int
    ahead: str | None
    needs_positions: bool

    def applies_to(self, own: object, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether a call chooses; otherwise it is dense. own: the model's mask, whose windows limit a query's keys, or None."""
        keys, limits = key.shape[2], _NO_LIMITS
        if isinstance(own, ModelMask):
            keys, limits = keys if own.end is None else own.end, own.limits
        short = any(is_window(one) and not keeps_all(one, self.below) for limit in limits for one in limit)
        return query.shape[2] > MAX_QUERIES and keys >= self.below and not short


def split_choices(
    masks: Mapping[int, Any], dense_below: int | None, dense_layers: Any, dense_last: int | None
) -> tuple[dict[int, Any], dict[int, PromptChoice]]:
    """Returns (the mask of each layer, which is "own" for ``dense_layers``; the choice of each layer whose mask has a chooser).
    Raises ValueError for specs that no model can follow, and for settings that apply to no layer."""
    chosen = [number for number, mask in masks.items() if mask != OWN and has_choosers(mask)]
    counts = {"dense_below": dense_below, "dense_last": dense_last}
    given = [name for name, value in {**counts, "dense_layers": dense_layers}.items() if value is not None]
    if given and not chosen:
        raise ValueError(f"{', '.join(given)} must come with a mask that has a chooser; got none; leave out {', '.join(given)}")
    check_counts(**counts)
    if not (dense_layers is None or isinstance(dense_layers, Iterable)):
        raise ValueError(f"dense_layers must be numbers of layers, such as [0, 1]; got {dense_layers!r}")
    dense = () if dense_layers is None else tuple(dense_layers)
    if wrong := [number for number in dense if isinstance(number, bool) or number not in chosen]:
        raise ValueError(f"dense_layers must name layers whose mask has a chooser, which are {chosen}; got {wrong}")
    if chosen and any(isinstance(mask, SharedSequence) for mask in masks.values()):
        raise ValueError(
            f"a ContextPlan must be the plan of all layers; got a chooser in layers {chosen}, and ranks choose no blocks by "
            "content; make the plan of a pattern, or leave it out"
        )
    below = DENSE_BELOW if dense_below is None else dense_below
    last = DENSE_LAST if dense_last is None else dense_last
    choices = {number: build_prompt_choice(masks[number], below, last) for number in chosen if number not in dense}
    return {number: OWN if number in dense else mask for number, mask in masks.items()}, choices


def check_counts(**counts: object) -> None:
    """Raises ValueError for numbers of tokens that are none. None passes."""
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ValueError(f"{name} must be a number of tokens, 0 or more; got {value!r}")


@cached_until_cleared(maxsize=256)
def build_prompt_choice(mask: Pattern | str, below: int, last: int) -> PromptChoice:
    """Returns the choice of a layer. Raises ValueError for an expression that cannot be one."""
    choices = choices_of(mask)
    choosers = [chooser for choice in choices for chooser in choice.choosers]
    if any(isinstance(chooser, Scored) for chooser in choosers):
        raise ValueError(f"{mask} must choose by itself, as no model passes scores to scored; write a chooser, by register_chooser")
    patterns = [one for choice in choices for one in (choice.within, choice.always) if one is not None]
    return PromptChoice(
        _join_heads([_expression(choice, last) for choice in choices]),
        without_choosers(mask),
        below,
        last,
        find_lookahead_chooser(mask),
        any(map(depends_on_position, patterns)),
    )


def _expression(choice: HeadChoice, last: int) -> Pattern:
    """Returns the expression of a head. Under causal its choosers are joined by the last tokens."""
    joined = last_tokens(last) if last and choice.choosers and is_causal(choice.within) else None
    inner = [one for one in (*choice.choosers, choice.always, joined) if one is not None]
    return Or.of(*inner) if choice.within is None else And.of(choice.within, Or.of(*inner))


def _join_heads(patterns: list[Pattern]) -> Pattern | str:
    one = patterns[0] if len(set(patterns)) == 1 else PerHead(tuple(patterns))
    return text_of(one) or one


def attend_by_content(
    module: torch.nn.Module,
    choice: PromptChoice,
    own: ModelMask,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    packed: bool,
    **options: Any,
) -> torch.Tensor:
    """Attends a layer's prompts. Each sequence of a padded batch is a call of its own, so its blocks and positions start with it.

    own: the model's mask. packed: whether a row has several sequences. options: for ``attention``. Returns (batch, tokens, heads,
    head_dim). Raises ValueError for calls that cannot choose.
    """
    _check(module, choice, own, packed)
    key, value = key[:, :, : own.end], value[:, :, : own.end]
    if own.starts is None:
        limits = tuple(limit[0] for limit in own.limits)
        return _attend_sequence(choice, limits, own.kv_offset, 0, query, key, value, options).transpose(1, 2).contiguous()
    earlier, tokens, out = own.end - query.shape[2], query.shape[2], []
    for entry, (first, start, stop) in enumerate(_rows(own)):
        low, high = max(0, start - earlier), max(0, start - earlier, stop - earlier)
        q, k, v = query[entry, None, :, low:high], key[entry, None, :, start:stop], value[entry, None, :, start:stop]
        limits = tuple(limit[entry if len(limit) > 1 else 0] for limit in own.limits)
        one = _attend_sequence(choice, limits, own.kv_offset + start, first, q, k, v, options)
        out.append(torch.nn.functional.pad(one, (0, 0, low, tokens - high)))
    return torch.cat(out).transpose(1, 2).contiguous()


def _check(module: torch.nn.Module, choice: PromptChoice, own: ModelMask, packed: bool) -> None:
    if packed:
        raise ValueError(
            "cu_seq_lens_q and position_ids must be of one sequence in each row if a layer's mask has a chooser, whose blocks lie "
            "within one sequence; got packed sequences; pad each sequence in a row of its own, or use a mask without choosers"
        )
    if own.dense is not None:
        raise ValueError(
            "attention_mask must be 2-D with one run of ones in each row if a layer's mask has a chooser; got one of pairs, or one "
            "with zeros between ones; pad at the ends of rows, or use a mask without choosers. generate() makes a mask of its "
            "own where tokens equal pad_token_id"
        )
    if choice.ahead is not None and module.training and torch.is_grad_enabled():
        raise ValueError(
            f"{choice.ahead} must not be trained with, as later queries change what its blocks keep; call model.eval() "
            "under torch.no_grad() for prompts, or another chooser for training"
        )


def _rows(own: ModelMask) -> Iterator[list[int]]:
    """Yields [first, start, stop] of each sequence: see ``ModelMask``. Reads them once for all layers of a kind."""
    if "rows" not in own._made:
        own._made["rows"] = torch.stack([own.first, own.starts, own.stops], 1).tolist()
    yield from own._made["rows"]


def _attend_sequence(
    choice: PromptChoice,
    limits: tuple[str | Pattern, ...],
    position: int,
    first: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attends one sequence, or several of one length. position: of the first key, in the row. first: that of the first token."""
    limits = tuple(limit for limit in limits if not keeps_all(limit, key.shape[2]))
    mask = choice.spec if choice.applies_to(None, query, key) else choice.dense
    if torch.compiler.is_compiling() and not choice.needs_positions and all(map(is_window, limits)):
        position = first = 0  # so that graphs do not depend on them
    return cast(torch.Tensor, attention(query, key, value, restrict_mask(mask, limits, position - first, position), **options))


@constant_in_graphs
def restrict_mask(mask: Pattern | str, limits: tuple[str | Pattern, ...], start: int, position: int) -> Pattern | str:
    """Returns the mask within the model's restrictions, for keys from a position on. start: the first key's position counted from
    the sequence's first token, as masks count. position: the same counted from the row's first token, as limits count."""
    return _restrict_mask(mask, limits, start, position)


@cached_until_cleared(maxsize=1024)
def _restrict_mask(mask: Pattern | str, limits: tuple[str | Pattern, ...], start: int, position: int) -> Pattern | str:
    if not limits and not start:
        return mask
    pattern = (parse(mask) if isinstance(mask, str) else mask).map_leaves(partial(_shift_leaf, by=-start))
    parts = [move_pattern(parse(limit) if isinstance(limit, str) else limit, -position) for limit in limits]
    joined = And.of(pattern, *parts)
    return text_of(joined) or joined


def _shift_leaf(leaf: Pattern, by: int) -> Pattern:
    counts_from_the_end = leaf.bind_length(0) != leaf
    return leaf if leaf.chooses or counts_from_the_end else move_pattern(leaf, by)
