"""Checks the masks that a user gives to a model, one for each layer, before the model is changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from ...api.arguments import callers_level
from ...api.shared import SharedSequence
from ...masks.block_mask import BlockMask
from ...masks.cache import convert_foreign_mask
from ...masks.parsing import parse, text_of
from ...masks.pattern import And, DerivedPattern, Or, Pattern, PerEntry, PerHead
from ...patterns import causal

OWN = "own"


def assign_masks(mask: object, per_layer: object, numbers: list[int]) -> dict[int, Any]:
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
        return assign_masks(None, mask, numbers)
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


def check_heads(masks: Mapping[int, object], layers: Mapping[int, torch.nn.Module], source: str = "") -> None:
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


def check_future(masks: Mapping[int, object], decoders: Iterable[int], bidirectional: bool) -> dict[int, bool]:
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
