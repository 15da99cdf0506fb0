"""The masks that a user gives to a model: read from arguments and configs, checked, and kept in the model's config."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch

from ...api.shared import SharedSequence
from ...choosers.built_in import Scored
from ...compat.constants import constant_in_graphs
from ...decoding.arguments import MAX_QUERIES
from ...masks.block_mask import BlockMask, convert_foreign_mask
from ...masks.chooser import HeadChoice, choices_of, has_choosers, is_causal, map_heads, without_choosers
from ...masks.memory import cached_until_cleared
from ...masks.parsing import parse, text_of
from ...masks.pattern import And, DerivedPattern, Or, Pattern, PerEntry
from ...patterns import causal, last_tokens
from ..models import check_layers, depends_on_position
from .layers import is_decoder
from .model_mask import ModelMask

OWN = "own"
_COUNTS = {
    "dense_below": 4096,  # attention to fewer keys is a small part of a prompt's time, and 128 of them are a large part of the keys
    "dense_last": 64,  # an answer starts from these queries, and they cost one or two rows of blocks
}
CONFIG_KEY = "sparse_flash"  # in a model's config
_FORMAT = 1


class LayerSettings(NamedTuple):
    """Holds a layer's checked mask, and its settings of ``use_sparse_flash``."""

    given: Any  # the mask as ``masks_of`` returns it
    kept: Any  # what calls keep: the same, with the last tokens joined to its choosers; None for the model's own mask and a plan
    needs_positions: bool  # whether the mask depends on more than the distance of query and key
    looks_ahead: bool  # whether queries may see later keys
    dense_below: int
    dense_last: int
    bidirectional: bool
    backend: str
    deterministic: bool | None
    precision: str | None
    plan: SharedSequence | None = None
    dense: "LayerSettings | None" = None  # of calls that do not choose; None without choosers

    def why_dense(self, model_mask: object, query: torch.Tensor, key: torch.Tensor) -> str | None:
        """Why a call is dense although the mask has choosers; None if it is not. A ``ModelMask``'s window limits a query's keys."""
        if self.dense is None:
            return None
        keys, window = key.shape[2], None
        if isinstance(model_mask, ModelMask):
            keys, window = keys if model_mask.key_count is None else model_mask.key_count, model_mask.window
        if query.shape[2] <= MAX_QUERIES:
            return f"up to {MAX_QUERIES} queries"
        if keys < self.dense_below or (window is not None and window < self.dense_below):
            return f"fewer keys than dense_below={self.dense_below}"
        return None


def read_masks(
    model: Any, layers: Mapping[int, torch.nn.Module], mask: object, per_layer: object, bidirectional: bool,
    dense_below: int | None, dense_layers: Any, dense_last: int | None, **options: Any
) -> tuple[dict[int, LayerSettings], dict[str, Any] | None]:  # fmt: skip
    """Returns the settings that ``use_sparse_flash`` is called for, with given or saved masks, and the record of the masks, None if
    one has no text. Raises ValueError or TypeError for masks and settings that do not fit."""
    numbers, counts, record = sorted(layers), _COUNTS, getattr(model.config, CONFIG_KEY, None)
    if mask is None and per_layer is None and record is not None:
        mask = _read_layers(record, numbers)
        bidirectional = bidirectional or bool(record.get("bidirectional"))
        counts = counts | {name: record[name] for name in counts if name in record}
    counts = _COUNTS | _check_counts(**counts) | _check_counts(dense_below=dense_below, dense_last=dense_last)
    given = _assign_masks(mask, per_layer, numbers)
    dense = check_layers(() if dense_layers is None else dense_layers, given)
    given |= dict.fromkeys(dense, OWN)
    chosen = [number for number, one in given.items() if one != OWN and has_choosers(one)]
    if chosen and any(isinstance(one, SharedSequence) for one in given.values()):
        got = f"a chooser in layers {chosen}; make the plan of a pattern, or leave it out"
        raise ValueError(f"a ContextPlan must be the plan of all layers; got {got}")
    make = cache(partial(_make_settings, **counts, bidirectional=bidirectional, **options))
    masks = {number: make(one) for number, one in given.items()}
    ahead = [number for number, one in masks.items() if one.looks_ahead]
    wrong = [number for number in ahead if is_decoder(layers[number])]  # whose tokens are trained to predict the later ones
    if wrong and not bidirectional:
        raise ValueError(future_error(f"the mask of layers {wrong}", given[wrong[0]]))
    _check_plans({number: one.plan for number, one in masks.items()})
    return masks, _record_of(given, **(counts if chosen else {}), **({"bidirectional": True} if bidirectional else {}))


def settings_by_name(layer: Any) -> LayerSettings:
    """Returns the settings of a layer with ``attn_implementation="org/name:MASK"``: of that mask, otherwise of the config's record,
    otherwise of the model's own mask. Transformers cuts a name at "|", which is "or" in it. Raises ValueError for masks of layers
    that see both ways, as these may belong to another part of the model."""
    name, _, mask = layer.config._attn_implementation.partition(":")
    mask, record = mask.replace(" or ", " | "), getattr(layer.config, CONFIG_KEY, None)
    others: tuple[Any, ...] = ()
    if record is not None and not mask and "/" in name:  # NAME is that of a layer left unchanged
        _check_format(record)
        mask = record["layers"][str(layer.layer_idx)]
        others = tuple((key, value) for key, value in record.items() if key not in ("format", "layers"))
    if mask and not is_decoder(layer):
        way_out = "leave it out, and call use_sparse_flash(model, mask) of the loaded kernel"
        raise ValueError(f"a mask by name must be of a decoder's layers; got {mask} for {type(layer).__name__}; {way_out}")
    return _settings_of(mask or OWN, others)


@constant_in_graphs
@cached_until_cleared(maxsize=64)
def _settings_of(mask: str, others: tuple[Any, ...]) -> LayerSettings:
    options: dict[str, Any] = {"bidirectional": False, "backend": "auto", "deterministic": None, "precision": None}
    return _make_settings(_normalize_mask(mask), **_COUNTS | options | dict(others))


def _assign_masks(mask: object, per_layer: object, numbers: list[int]) -> dict[int, Any]:
    """Returns the checked mask of each layer; "own" for the model's own. numbers: of the layers. See ``use_sparse_flash``."""
    if per_layer is None and isinstance(mask, Sequence) and mask and all(isinstance(one, SharedSequence) for one in mask):
        mask, per_layer = None, mask
    if per_layer is not None:
        if mask is not None:
            raise ValueError("mask and per_layer were both given; pass one of them")
        if isinstance(per_layer, str) or not isinstance(per_layer, Sequence):
            raise TypeError(f"per_layer must be a list with a mask for each layer; got {type(per_layer).__name__}")
        if len(per_layer) != len(numbers):
            raise ValueError(f"per_layer must have {len(numbers)} masks, one for each attention layer; got {len(per_layer)}")
        given = dict(zip(numbers, per_layer, strict=True))
    elif isinstance(mask, Mapping):
        check_layers(mask, numbers, "mask")
        given = {number: mask.get(number) for number in numbers}
    elif isinstance(mask, Sequence) and not isinstance(mask, str):
        raise TypeError(
            f"mask must be one for all layers; got a {type(mask).__name__} of {len(mask)}, which layers and heads may both fit; "
            "say per_layer=[...] for a mask per layer, or mask=sparse_flash.per_head([...]) for a mask per head"
        )
    else:
        given = dict.fromkeys(numbers, mask)
    return {number: _normalize_mask(one) for number, one in given.items()}


def _normalize_mask(mask: object) -> object:
    if mask is None or (isinstance(mask, str) and mask == OWN):
        return OWN
    if isinstance(mask, (str, Pattern)):  # of wrong text it raises now
        return text_of(mask) or mask  # text, which compiled code accepts on every PyTorch
    if isinstance(mask, (BlockMask, SharedSequence)):
        return mask
    return convert_foreign_mask(mask)


def _check_plans(plans: Mapping[int, SharedSequence | None]) -> None:
    """Raises ValueError if some layers have a plan, and do not all share their tokens. plans: by layer, None for masks."""
    number, first = next(((number, plan) for number, plan in plans.items() if plan is not None), (0, None))
    shared = None if first is None else first.positions
    if wrong := [other for other, plan in plans.items() if getattr(plan, "positions", None) is not shared]:
        way_out = "make one plan for all layers: context_parallel([mask of each layer, ...], ...)"
        raise ValueError(f"layers {wrong} do not share their tokens with layer {number}; {way_out}")


def future_error(subject: str, mask: object) -> str:
    """Returns the error of a decoder's mask that looks ahead."""
    way_out = f"write 'causal & ({mask})'" if isinstance(mask, (str, Pattern)) else "make it of 'causal & ...'"
    return (
        f"{subject} must be within causal and say so, as a decoder's tokens may not see the tokens that they predict; got "
        f"{mask}; {way_out}, or say bidirectional=True if they are to see them"
    )


def _looks_ahead(mask: Any) -> bool:
    """Whether a mask may let a query see a later key: judged by a pattern's expression, which must say causal, or by a table."""
    if isinstance(mask, (BlockMask, SharedSequence)):
        return not (mask if isinstance(mask, BlockMask) else cast(Any, mask).mask).is_causal
    if isinstance(mask, str):
        return mask != OWN and _looks_ahead(parse(mask))
    if isinstance(mask, DerivedPattern):
        return _looks_ahead(mask.expand_expression())
    if isinstance(mask, And):
        return all(map(_looks_ahead, mask.operands))
    if isinstance(mask, (Or, PerEntry)):
        return any(map(_looks_ahead, mask.operands if isinstance(mask, Or) else mask.patterns))
    return not isinstance(mask, causal)


def _check_counts(**counts: object) -> dict[str, Any]:
    """Returns the numbers of tokens that are not None. Raises ValueError for others than integers from 0 on."""
    given = {name: value for name, value in counts.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be a number of tokens, 0 or more; got {value!r}")
    return given


def _make_settings(given: Any, dense_last: int, **options: Any) -> LayerSettings:
    """Returns the settings of layers with a mask. Raises ValueError for choosers that no model can serve."""
    options |= {"looks_ahead": _looks_ahead(given), "dense_last": dense_last}
    if given == OWN or isinstance(given, SharedSequence):
        return LayerSettings(given, None, False, plan=None if given == OWN else given, **options)
    if not has_choosers(given):
        return LayerSettings(given, given, depends_on_position(given), **options)
    choices = choices_of(given)
    if any(isinstance(chooser, Scored) for choice in choices for chooser in choice.choosers):
        raise ValueError(f"{given} must choose by itself, as no model passes scores; write a chooser, by register_chooser")

    def join_last_tokens(choice: HeadChoice) -> Pattern:  # under causal
        last = last_tokens(dense_last) if dense_last and choice.choosers and is_causal(choice.within) else None
        inner = Or.of(*(one for one in (*choice.choosers, choice.always, last) if one is not None))
        return inner if choice.within is None else And.of(choice.within, inner)

    kept, patterns = map_heads(given, join_last_tokens), without_choosers(given)
    needs_positions = any(depends_on_position(one) for choice in choices for one in (choice.within, choice.always))
    dense = LayerSettings(patterns, patterns, depends_on_position(patterns), **options)
    return LayerSettings(given, kept, needs_positions, dense=dense, **options)


def _check_format(record: Any) -> None:
    if record.get("format") != _FORMAT:
        said = f"config.{CONFIG_KEY} must be of format {_FORMAT}; got {record.get('format')!r}"
        raise ValueError(f"{said}; install the release of sparse_flash that saved it, or pass a mask")


def _read_layers(record: Any, numbers: list[int]) -> dict[int, str]:
    """Returns the masks of a config's record by layer. Raises ValueError if its layers are not these numbers."""
    _check_format(record)
    layers = {int(number): text if text == OWN else cast(str, parse(text).to_spec()) for number, text in record["layers"].items()}
    if set(layers) != set(numbers):
        said = f"config.{CONFIG_KEY} must have the layers of the model, {numbers[0]} to {numbers[-1]}; got {sorted(layers)}"
        raise ValueError(f"{said}; pass a mask")
    return layers


def keep_record(configs: Iterable[Any], record: dict[str, Any] | None) -> None:
    """Keeps the record of masks in the configs of a model and its layers, or none if all masks are the model's own."""
    for config in configs:
        if record is not None and set(record["layers"].values()) != {OWN}:
            setattr(config, CONFIG_KEY, record)
        elif CONFIG_KEY in vars(config):
            delattr(config, CONFIG_KEY)


def _record_of(masks: Mapping[int, Any], **settings: object) -> dict[str, Any] | None:
    """Returns the record of masks; None if one of them has no text."""
    layers = {str(number): mask if isinstance(mask, str) else None for number, mask in masks.items()}
    return None if None in layers.values() else {"format": _FORMAT, "layers": layers, **settings}
