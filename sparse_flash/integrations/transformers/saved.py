"""The masks of a model as a plain record: in its config, which is saved with it, and in JSON files."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...api.arguments import callers_level
from ...masks.parsing import parse, text_of
from ...masks.pattern import Pattern, short_text
from .by_content import PromptChoice, check_counts
from .check_masks import OWN
from .layers import unwrap_model

CONFIG_KEY = "sparse_flash"  # in a model's config
_IMPLEMENTATION = "attn_implementation"  # beside it, if a user set it: Transformers then loads the model under that name
_FORMAT = 1


class SavedMasks(NamedTuple):
    """The masks of a record and their settings: see ``use_sparse_flash``. name: of the file, or of the config."""

    name: str
    layers: dict[int, str]
    dense_below: int | None
    dense_last: int | None
    bidirectional: bool


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
    entry that PEFT leaves as it is beside a task_type. replaces: whether in place of an earlier one. Returns the name of an adapter
    that cannot hold it, if there is one."""
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


def find_saved_masks(model: Any, mask: object, numbers: list[int]) -> SavedMasks | None:
    """Returns what a call without a mask or with a file's name asks for; None for any other mask. numbers: of the layers."""
    if mask is None and (found := saved_records(model)):
        (name, record), *others = found.items()
        if unlike := [other for other, one in others if one != record]:
            raise ValueError(f"adapters must have been saved with the same masks; {name} and {unlike[0]} were not; pass a mask")
        return _parse_record(record, name, numbers)
    if not (isinstance(mask, PathLike) or (isinstance(mask, str) and mask.endswith(".json"))):
        return None
    try:
        record = json.loads(Path(mask).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"mask must be a spec or a JSON file of masks; got {mask}, which does not exist; call write_masks to make it"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{mask} must be a JSON file of masks, as write_masks makes them; got other text, or a part of one: {error}"
        ) from None
    return _parse_record(record, str(mask), numbers)


def _parse_record(record: object, name: str, numbers: list[int]) -> SavedMasks:
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
    return SavedMasks(name, layers, record.get("dense_below"), record.get("dense_last"), bool(record.get("bidirectional")))


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


def keep_in_config(config: Any, masks: Mapping[int, Any], choices: Mapping[int, PromptChoice], bidirectional: bool) -> None:
    """Keeps the masks in a model's config, or nothing if they have no text, or are all the model's own."""
    one = next(iter(choices.values()), None)
    settings = {} if one is None else {"dense_below": one.dense_below, "dense_last": one.dense_last}
    record = _record_of(masks, {**settings, "bidirectional": bidirectional or None})
    if record is not None and set(record["layers"].values()) != {OWN}:
        setattr(config, CONFIG_KEY, record)
    else:
        for name in {CONFIG_KEY, _IMPLEMENTATION} & set(vars(config)):
            delattr(config, name)


def _record_of(masks: Mapping[int, Any], settings: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the record of masks; None if one of them has no text."""
    given = {str(number): OWN if mask is None else mask for number, mask in masks.items()}
    if not all(isinstance(mask, (str, Pattern)) for mask in given.values()):
        return None
    layers = {number: mask if mask == OWN else text_of(mask) for number, mask in given.items()}
    if None in layers.values():
        return None
    return {"format": _FORMAT, "layers": layers, **{name: value for name, value in settings.items() if value is not None}}
