"""The masks that a user gives to a model: read from files, configs and arguments, checked before the model is changed, and kept for
saving as plain records, in the model's config and in JSON files.

A layer's mask may have choosers. Its prompts then choose, and all other calls are dense: see ``PromptChoice``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from ...api.arguments import callers_level
from ...api.decode import MAX_QUERIES
from ...api.shared import SharedSequence
from ...choosers.built_in import Scored
from ...masks.block_mask import BlockMask
from ...masks.cache import convert_foreign_mask
from ...masks.chooser import HeadChoice, choices_of, has_choosers, is_causal, map_heads, without_choosers
from ...masks.memory import cached_until_cleared
from ...masks.parsing import parse, text_of
from ...masks.pattern import And, DerivedPattern, Or, Pattern, PerEntry, PerHead, short_text
from ...patterns import causal, last_tokens
from ..models import check_layers
from .layers import unwrap_model
from .model_mask import ModelMask, depends_on_position

OWN = "own"
DENSE_BELOW = 4096  # attention to fewer keys is a small part of a prompt's time, and 128 of them are a large part of the keys
DENSE_LAST = 64  # an answer starts from these queries, and they cost one or two rows of blocks
CONFIG_KEY = "sparse_flash"  # in a model's config
_IMPLEMENTATION = "attn_implementation"  # in the config too, if a user set it: Transformers then loads the model under that name
_FORMAT = 1


class GivenMasks(NamedTuple):
    """The checked masks of a model's layers, by number.

    layers: the masks; "own" for the model's own, or one plan of several ranks. choices: of masks that have a chooser. ahead: which
    masks let queries see later keys. bidirectional: whether a decoder's masks may do so.
    """

    layers: dict[int, Any]
    choices: dict[int, PromptChoice]
    ahead: dict[int, bool]
    bidirectional: bool


def read_masks(
    model: Any, layers: Mapping[int, torch.nn.Module], mask: object, per_layer: object, bidirectional: bool,
    dense_below: int | None, dense_layers: Any, dense_last: int | None
) -> GivenMasks:  # fmt: skip
    """Returns the masks that ``use_sparse_flash`` is called for, with these arguments: given ones, those of a file, or saved ones.
    layers: the model's, by number. Raises ValueError or TypeError for masks and settings that do not fit them."""
    numbers, source = sorted(layers), ""
    if per_layer is None and (found := _find_record(model, mask)) is not None:
        name, record = found
        mask, source = _read_layers(name, record, numbers), f" in {name}"
        bidirectional = bidirectional or bool(record.get("bidirectional"))
        dense_below = record.get("dense_below") if dense_below is None else dense_below
        dense_last = record.get("dense_last") if dense_last is None else dense_last
    check_counts(dense_below=dense_below, dense_last=dense_last)
    below, last = DENSE_BELOW if dense_below is None else dense_below, DENSE_LAST if dense_last is None else dense_last
    masks = _assign_masks(mask, per_layer, numbers)
    dense = check_layers(() if dense_layers is None else dense_layers, masks)
    masks = {number: OWN if number in dense else one for number, one in masks.items()}
    chosen = [number for number, one in masks.items() if one != OWN and has_choosers(one)]
    if chosen and any(isinstance(one, SharedSequence) for one in masks.values()):
        raise ValueError(
            f"a ContextPlan must be the plan of all layers; got a chooser in layers {chosen}, and ranks choose no blocks by "
            "content; make the plan of a pattern, or leave it out"
        )
    choices = {number: build_prompt_choice(masks[number], below, last) for number in chosen}
    _check_heads(masks, layers, source)
    ahead = _find_ahead(masks, [number for number, layer in layers.items() if is_decoder(layer)], bidirectional)
    return GivenMasks(masks, choices, ahead, bidirectional)


def _assign_masks(mask: object, per_layer: object, numbers: list[int]) -> dict[int, Any]:
    """Returns the checked mask of each layer; "own" for the model's own. numbers: of the layers. See ``use_sparse_flash``."""
    if per_layer is not None:
        if mask is not None:
            raise ValueError("mask and per_layer were both given; pass one of them")
        if isinstance(per_layer, str) or not isinstance(per_layer, Sequence):
            raise TypeError(f"per_layer must be a list with a mask for each layer; got {type(per_layer).__name__}")
        if len(per_layer) != len(numbers):
            raise ValueError(f"per_layer must have {len(numbers)} masks, one for each attention layer; got {len(per_layer)}")
        given = dict(zip(numbers, per_layer, strict=True))
    elif isinstance(mask, Mapping):
        if unknown := [number for number in mask if isinstance(number, bool) or number not in numbers]:
            raise ValueError(f"mask must name layers of the model, {numbers[0]} to {numbers[-1]}; got layers {unknown}")
        given = {number: mask.get(number) for number in numbers}
    elif isinstance(mask, Sequence) and not isinstance(mask, str):
        if not mask or not all(isinstance(one, SharedSequence) for one in mask):
            raise TypeError(
                f"mask must be one for all layers; got a {type(mask).__name__} of {len(mask)}, which layers and heads may both "
                "fit; say per_layer=[...] for a mask per layer, or mask=sparse_flash.per_head([...]) for a mask per head"
            )
        return _assign_masks(None, mask, numbers)
    else:
        given = dict.fromkeys(numbers, mask)
    return {number: _normalize_mask(one) for number, one in given.items()}


def _normalize_mask(mask: object) -> object:
    if mask is None:
        return OWN
    if isinstance(mask, str):
        return mask if mask == OWN else parse(mask).to_spec()  # raises now if something is wrong with it
    if isinstance(mask, Pattern):
        return text_of(mask) or mask  # text, which compiled code accepts on every PyTorch
    if isinstance(mask, (BlockMask, SharedSequence)):
        return mask
    return convert_foreign_mask(mask)


def _check_heads(masks: Mapping[int, object], layers: Mapping[int, torch.nn.Module], source: str) -> None:
    """Raises ValueError if a mask has another number of heads than its layer, as far as the layer or its config says it. source:
    where the masks are from, for the error."""
    for number, given in masks.items():
        mask = parse(given) if isinstance(given, str) and given != OWN else given
        heads = len(mask.patterns) if isinstance(mask, PerHead) else mask.mask_index.shape[1] if isinstance(mask, BlockMask) else 1
        layer = layers[number]
        wanted = getattr(layer, "num_heads", None) or getattr(getattr(layer, "config", None), "num_attention_heads", heads)
        if heads not in (1, wanted):
            raise ValueError(
                f"the mask of layer {number}{source} must be of its {wanted} heads, or one for all; got one of {heads} heads; "
                f"make it for {wanted}"
            )


def _find_ahead(masks: Mapping[int, object], decoders: Iterable[int], bidirectional: bool) -> dict[int, bool]:
    """Returns for each layer whether its mask looks ahead: lets queries see later keys. Raises ValueError if a layer in
    ``decoders`` looks ahead without ``bidirectional``, as it is to predict these tokens; and if no mask looks ahead with it."""
    known = {id(mask): looks_ahead(mask) for mask in {id(mask): mask for mask in masks.values()}.values()}
    ahead = {number: known[id(mask)] for number, mask in masks.items()}
    wrong = [number for number in decoders if ahead[number]]
    if bidirectional and not any(ahead.values()):
        raise ValueError("bidirectional=True must come with a mask that looks ahead; got none; pass one, such as 'full'")
    if wrong and not bidirectional:
        raise ValueError(future_error(f"the mask of layers {wrong}", masks[wrong[0]]))
    return ahead


def future_error(subject: str, mask: object) -> str:
    """Returns the error of a decoder's mask that looks ahead."""
    way_out = f"write 'causal & ({mask})'" if isinstance(mask, (str, Pattern)) else "make it of 'causal & ...'"
    return (
        f"{subject} must be within causal and say so, as a decoder's tokens may not see the tokens that they predict; got "
        f"{mask}; {way_out}, or say bidirectional=True if they are to see them"
    )


def warn_of_lost_pairs(layer: torch.nn.Module, mask: object) -> None:
    """Warns of a mask within causal where the model's own lets some tokens see later ones."""
    warnings.warn(
        f"the mask of {type(layer).__name__}, {mask}, removes pairs of image or prefix tokens, which see later tokens in the "
        "model; pass 'own' for the model's own mask, or a mask that looks ahead, without 'causal &', and bidirectional=True",
        stacklevel=callers_level(),
    )


def looks_ahead(mask: Any) -> bool:
    """Whether a mask may let a query see a later key: judged by a pattern's expression, which must say causal, or by a table."""
    if isinstance(mask, (BlockMask, SharedSequence)):
        return not (mask if isinstance(mask, BlockMask) else cast(Any, mask).mask).is_causal
    if isinstance(mask, str):
        return mask != OWN and looks_ahead(parse(mask))
    if isinstance(mask, DerivedPattern):
        return looks_ahead(mask.expand_expression())
    if isinstance(mask, And):
        return all(map(looks_ahead, mask.operands))
    if isinstance(mask, (Or, PerEntry)):
        return any(map(looks_ahead, mask.operands if isinstance(mask, Or) else mask.patterns))
    return not isinstance(mask, causal)


def is_decoder(layer: torch.nn.Module) -> bool:
    """Whether a layer is a decoder's: under its own mask, its tokens see no later tokens."""
    return bool(getattr(layer, "is_causal", False) and getattr(getattr(layer, "config", None), "is_causal", True))


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

    def why_dense(self, model_mask: object, query: torch.Tensor, key: torch.Tensor) -> str | None:
        """Why a call is dense; None if it chooses. The window of a ``ModelMask`` limits a query's keys."""
        keys, window = key.shape[2], None
        if isinstance(model_mask, ModelMask):
            keys, window = keys if model_mask.key_count is None else model_mask.key_count, model_mask.window
        if query.shape[2] <= MAX_QUERIES:
            return f"up to {MAX_QUERIES} queries"
        if keys < self.dense_below or (window is not None and window < self.dense_below):
            return f"fewer keys than dense_below={self.dense_below}"
        return None


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
        map_heads(mask, lambda choice: _join_last_tokens(choice, last)),
        without_choosers(mask),
        below,
        last,
        any(map(depends_on_position, patterns)),
    )


def _join_last_tokens(choice: HeadChoice, last: int) -> Pattern:
    """Returns the expression of a head. Under causal its choosers are joined by the last tokens."""
    joined = last_tokens(last) if last and choice.choosers and is_causal(choice.within) else None
    inner = Or.of(*(one for one in (*choice.choosers, choice.always, joined) if one is not None))
    return inner if choice.within is None else And.of(choice.within, inner)


def saved_records(model: Any) -> dict[str, Any]:
    """Returns the records of masks that a model was loaded with, by the name of what holds them: those of its adapters, otherwise
    that of its config, otherwise none."""
    of_adapters = {f"adapter {name!r}": _mapping_of(one).get(CONFIG_KEY) for name, one in _adapters_of(model).items()}
    found = {name: record for name, record in of_adapters.items() if record is not None}
    record = getattr(model.config, CONFIG_KEY, None)
    return found or ({} if record is None else {f"config.{CONFIG_KEY}": record})


def _adapters_of(model: Any) -> dict[str, Any]:
    """Returns the configs of a model's adapters, as PEFT and Transformers attach them, by name."""
    return getattr(model, "peft_config", None) or {}


def _mapping_of(adapter: Any) -> dict[str, Any]:
    return dict(getattr(adapter, "auto_mapping", None) or {})


def keep_in_adapters(model: Any, replaces: bool) -> str | None:
    """Keeps the record of a model's config in the configs of its adapters, which are saved with them: under ``auto_mapping``, an
    entry that PEFT leaves as it is if there is a task_type. replaces: whether an earlier record is replaced. Returns the name of an
    adapter that cannot hold the record, or None."""
    record, refused = getattr(model.config, CONFIG_KEY, None), None
    for name, adapter in _adapters_of(model).items():
        mapping = _mapping_of(adapter)
        if replaces or CONFIG_KEY not in mapping:
            mapping.pop(CONFIG_KEY, None)
            if record is None or adapter.task_type is None:
                refused = name
            else:
                mapping[CONFIG_KEY] = record
            adapter.auto_mapping = mapping or None
    return refused


def _find_record(model: Any, mask: object) -> tuple[str, Any] | None:
    """Returns the name and the record of what a call without a mask or with a file's name asks for; None for any other mask."""
    if mask is None and (found := saved_records(model)):
        (name, record), *others = found.items()
        if unlike := [other for other, one in others if one != record]:
            raise ValueError(f"adapters must have been saved with the same masks; {name} and {unlike[0]} were not; pass a mask")
        return name, record
    if not (isinstance(mask, PathLike) or (isinstance(mask, str) and mask.endswith(".json"))):
        return None
    try:
        return str(mask), json.loads(Path(mask).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"mask must be a spec or a JSON file of masks; got {mask}, which does not exist; call write_masks to make it"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{mask} must be a JSON file of masks, as write_masks makes them; got other text, or a part of one: {error}"
        ) from None


def _read_layers(name: str, record: object, numbers: list[int]) -> dict[int, str]:
    """Returns the masks of a record by layer. name: of the record. Raises ValueError if its layers are not these numbers."""
    if not isinstance(record, dict) or record.get("format") != _FORMAT or not isinstance(record.get("layers"), dict):
        found = f"format {record.get('format')!r}" if isinstance(record, dict) else type(record).__name__
        raise ValueError(
            f'{name} must be {{"format": {_FORMAT}, "layers": {{"0": spec, ...}}}}; got {found}; make it by '
            "write_masks, or install the release of sparse_flash that wrote it"
        )
    layers = {}
    for number, text in record["layers"].items():
        try:
            layers[int(number)] = text if text == OWN else parse(text).to_spec()
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{name}: layer {number!r} must have a number and a spec; got {text!r}: {error}") from None
    if set(layers) != set(numbers):
        missing, others = sorted(set(numbers) - set(layers)), sorted(set(layers) - set(numbers))
        raise ValueError(
            f"{name} must have the layers of the model, {numbers[0]} to {numbers[-1]}; missing: {missing}; not in the model: "
            f"{others}; make a file for this model by write_masks, or pass a mapping for some of its layers"
        )
    return layers


def write_masks(
    path: str | PathLike[str],
    masks: Mapping[int, Pattern | str | None] | torch.nn.Module,
    *,
    dense_below: int | None = None,
    dense_last: int | None = None,
    bidirectional: bool = False,
) -> None:
    """Writes the masks of a model's layers to a JSON file, for ``use_sparse_flash(model, path)``.

    masks: a model that ``use_sparse_flash`` switched, for its masks and their settings. Or masks by layer, as ``masks_of`` gives
    them, which have no settings; "own" or None for the model's own. dense_below, dense_last, bidirectional: as for
    ``use_sparse_flash``; instead of the model's. Raises ValueError for masks without spec text, TypeError for what is neither a
    model nor a mapping.
    """
    check_counts(dense_below=dense_below, dense_last=dense_last)
    given = {"dense_below": dense_below, "dense_last": dense_last, "bidirectional": bidirectional or None}
    if isinstance(masks, torch.nn.Module):
        record = getattr(unwrap_model(masks).config, CONFIG_KEY, None)
    elif isinstance(masks, Mapping):
        record = _record_of(masks, {})
    else:
        raise TypeError(f"masks must be a model, or masks by layer such as masks_of(model); got {type(masks).__name__}")
    if record is None:
        found = f"{type(masks).__name__} without them; call use_sparse_flash(model, mask)"
        found = found if isinstance(masks, torch.nn.Module) else f"{masks}; register their patterns"
        raise ValueError(f"masks must be patterns that have spec text, by layer; got {found}")
    text = json.dumps(record | {name: value for name, value in given.items() if value is not None}, indent=1)
    Path(path).write_text(f"{text}\n", encoding="utf-8")


def warn_of_difference(model: Any, masks: Mapping[int, Any]) -> None:
    """Names the first two masks that differ between what a model was saved with and its layers. Masks without text are not
    compared."""
    found = saved_records(model)
    name = next(iter(found), "")
    saved = found[name].get("layers", {}) if found else {}
    other = ((number, saved.get(str(number), mask), mask) for number, mask in masks.items() if isinstance(mask, str))
    for number, there, here in other:
        if there != here:
            warnings.warn(
                f"{name} says {short_text(there, 200)!r} for layer {number}, and the model was switched to "
                f"{short_text(here, 200)!r}; use_sparse_flash(model) without a mask takes the saved ones",
                stacklevel=callers_level(),
            )
            break


def keep_masks(model: Any, given: GivenMasks) -> None:
    """Keeps the masks in the configs of a model and its adapters, or nothing if they have no text, or are all the model's own."""
    one, config = next(iter(given.choices.values()), None), model.config
    settings = {} if one is None else {"dense_below": one.dense_below, "dense_last": one.dense_last}
    record = _record_of(given.layers, {**settings, "bidirectional": given.bidirectional or None})
    if record is not None and set(record["layers"].values()) != {OWN}:
        setattr(config, CONFIG_KEY, record)
    else:
        for name in {CONFIG_KEY, _IMPLEMENTATION} & set(vars(config)):
            delattr(config, name)
    keep_in_adapters(model, replaces=True)


def _record_of(masks: Mapping[int, Any], settings: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the record of masks; None if one of them has no text."""
    given = {str(number): OWN if mask is None else mask for number, mask in masks.items()}
    if not all(isinstance(mask, (str, Pattern)) for mask in given.values()):
        return None
    layers = {number: mask if mask == OWN else text_of(mask) for number, mask in given.items()}
    if None in layers.values():
        return None
    return {"format": _FORMAT, "layers": layers, **{name: value for name, value in settings.items() if value is not None}}
