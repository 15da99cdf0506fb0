"""Attention of a model's prompts under a spec with choosers, and the rule by which all other calls are dense."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ...api.attention import attention
from ...api.decode import MAX_QUERIES
from ...api.shared import SharedSequence
from ...choosers.built_in import Scored
from ...masks.chooser import HeadChoice, choices_of, has_choosers, is_causal, without_choosers
from ...masks.memory import cached_until_cleared
from ...masks.parsing import text_of
from ...masks.pattern import And, Or, Pattern, PerHead
from ...patterns import last_tokens
from .check_masks import OWN
from .limits import depends_on_position, is_window, keeps_all, limits_of_entry, restrict_mask
from .masks import ModelMask

if TYPE_CHECKING:
    from .attend import LayerCall

DENSE_BELOW = 4096  # attention to fewer keys is a small part of a prompt's time, and 128 of them are a large part of the keys
DENSE_LAST = 64  # an answer starts from these queries, and they cost one or two rows of blocks


class PromptChoice(NamedTuple):
    """A layer's spec with choosers, in the forms that calls need.

    spec: with the last tokens joined. dense: its patterns alone, for calls that do not choose. dense_below, dense_last: as for
    ``use_sparse_flash``. needs_positions: whether the patterns depend on more than the distance of query and key.
    """

    spec: Pattern | str
    dense: Pattern | str
    dense_below: int
    dense_last: int
    needs_positions: bool

    def applies_to(self, model_mask: object, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether a call chooses; otherwise it is dense."""
        return self.why_dense(model_mask, query, key) is None

    def why_dense(self, model_mask: object, query: torch.Tensor, key: torch.Tensor) -> str | None:
        """Why a call is dense; None if it chooses. The windows of a ``ModelMask`` limit a query's keys."""
        keys, limits = key.shape[2], []
        if isinstance(model_mask, ModelMask):
            keys = keys if model_mask.key_count is None else model_mask.key_count
            limits = [one for limit in model_mask.limits for one in limit]
        if query.shape[2] <= MAX_QUERIES:
            return f"up to {MAX_QUERIES} queries"
        if keys < self.dense_below or any(is_window(one) and not keeps_all(one, self.dense_below) for one in limits):
            return f"fewer keys than dense_below={self.dense_below}"
        return None


def split_choices(
    masks: Mapping[int, Any], dense_below: int | None, dense_layers: Any, dense_last: int | None
) -> tuple[dict[int, Any], dict[int, PromptChoice]]:
    """Returns (the mask of each layer, which is "own" for ``dense_layers``; the choice of each layer whose mask has a chooser).
    Raises ValueError for specs that no model can follow, and for settings of the wrong kind."""
    check_counts(dense_below=dense_below, dense_last=dense_last)
    if not (dense_layers is None or isinstance(dense_layers, Iterable)):
        raise ValueError(f"dense_layers must be numbers of layers, such as [0, 1]; got {dense_layers!r}")
    dense = () if dense_layers is None else tuple(dense_layers)
    if wrong := [number for number in dense if isinstance(number, bool) or number not in masks]:
        raise ValueError(f"dense_layers must name layers of the model, {min(masks)} to {max(masks)}; got {wrong}")
    masks = {number: OWN if number in dense else mask for number, mask in masks.items()}
    chosen = [number for number, mask in masks.items() if mask != OWN and has_choosers(mask)]
    if chosen and any(isinstance(mask, SharedSequence) for mask in masks.values()):
        raise ValueError(
            f"a ContextPlan must be the plan of all layers; got a chooser in layers {chosen}, and ranks choose no blocks by "
            "content; make the plan of a pattern, or leave it out"
        )
    below = DENSE_BELOW if dense_below is None else dense_below
    last = DENSE_LAST if dense_last is None else dense_last
    return masks, {number: build_prompt_choice(masks[number], below, last) for number in chosen}


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


def attend_prompt(call: LayerCall, packed: bool) -> torch.Tensor:
    """Attends a layer's prompts. Each sequence of a padded batch is a call of its own, so its blocks and positions start with it.

    packed: whether a row has several sequences. Returns (batch, heads, tokens, head_dim). Raises ValueError for calls that cannot
    choose.
    """
    _check_call(call, packed)
    model_mask, query = call.model_mask, call.query
    key, value = (t[:, :, : model_mask.key_count] for t in (call.key, call.value))
    position = model_mask.first_key_position
    if model_mask.key_starts is None:
        return _attend_sequence(call, limits_of_entry(model_mask.limits, 0), position, position, query, key, value)
    earlier, tokens, out = model_mask.key_count - query.shape[2], query.shape[2], []
    for entry, (first, start, stop) in enumerate(model_mask.key_runs):
        low, high = max(0, start - earlier), max(0, start - earlier, stop - earlier)
        q, k, v = query[entry, None, :, low:high], key[entry, None, :, start:stop], value[entry, None, :, start:stop]
        limits = limits_of_entry(model_mask.limits, entry)
        one = _attend_sequence(call, limits, position + start - first, position + start, q, k, v)
        out.append(torch.nn.functional.pad(one, (0, 0, low, tokens - high)))
    return torch.cat(out)


def _check_call(call: LayerCall, packed: bool) -> None:
    if packed:
        raise ValueError(
            "cu_seq_lens_q and position_ids must be of one sequence in each row if a layer's mask has a chooser, whose blocks lie "
            "within one sequence; got packed sequences; pad each sequence in a row of its own, or use a mask without choosers"
        )
    if call.model_mask.kept_pairs is not None:
        raise ValueError(
            "attention_mask must be 2-D with one run of ones in each row if a layer's mask has a chooser; got one of pairs, or one "
            "with zeros between ones; pad at the ends of rows, or use a mask without choosers. generate() makes a mask of its "
            "own where tokens equal pad_token_id"
        )


def _attend_sequence(
    call: LayerCall,
    limits: tuple[str | Pattern, ...],
    start: int,
    position: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Attends one sequence, or several of one length. start, position: as for ``restrict_mask``."""
    limits = tuple(limit for limit in limits if not keeps_all(limit, key.shape[2]))
    choice = cast(PromptChoice, call.settings.prompt_choice)
    mask = choice.spec if choice.applies_to(None, query, key) else choice.dense
    if torch.compiler.is_compiling() and not choice.needs_positions and all(map(is_window, limits)):
        start = position = 0  # so that graphs do not depend on them
    return cast(torch.Tensor, attention(query, key, value, restrict_mask(mask, limits, start, position), **call.options()))
