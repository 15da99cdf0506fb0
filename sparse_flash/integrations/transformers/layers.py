"""Finds a model's self-attention modules, and whether they use Transformers' attention interface."""

from __future__ import annotations

import inspect
import re
from functools import cache
from types import CodeType

import torch
from transformers import PreTrainedModel

from ..models import library_of

_NOT_OF_MODELS = ("builtins", "transformers.modeling_utils")  # the latter's own methods also name the interface


def unwrap_model(model: object) -> PreTrainedModel:
    """Returns the one Transformers model in a module: itself, or what DataParallel, DDP, FSDP, torch.compile or PEFT wraps."""
    other = None
    if library_of(model) == "diffusers":
        other = "call use_sparse_flash(pipe.transformer, spec) of sparse_flash.integrations.diffusers for a model of diffusers"
    if not isinstance(model, torch.nn.Module):
        way_out = other or "load one by from_pretrained"
        raise TypeError(f"model must be a loaded model; got {type(model).__name__}; {way_out}")
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    inner = {id(part) for one in models for part in one.modules() if part is not one}
    held = [one for one in models if id(one) not in inner]
    if len(held) != 1:
        names = " and ".join(type(one).__name__ for one in held)
        none = f"none; {other or 'call sparse_flash.attention in its code instead'}"
        way_out = f"{names}; pass the one that is meant" if held else none
        raise TypeError(f"model must be a PreTrainedModel, or hold one; got {type(model).__name__}, which holds {way_out}")
    return held[0]


def find_tower(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the part of a model whose self-attention is switched: its text decoder if it has several parts, otherwise all."""
    decoder: torch.nn.Module = getattr(model, "get_decoder", lambda: model)()
    return decoder if any(map(takes_interface, decoder.modules())) else model


def find_self_attention(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Returns a tower's self-attention modules by layer number. Raises ValueError if some cannot be switched."""
    attention = [one for one in model.modules() if hasattr(one, "is_causal") and getattr(one, "layer_idx", None) is not None]
    if others := [module for module in attention if not any(map(takes_interface, module.modules()))]:
        raise ValueError(
            f"{type(others[0]).__name__} of {type(model).__name__} does not call attention through Transformers' attention "
            "interface; call sparse_flash.attention in its code instead"
        )
    named = model.named_modules()
    found = [module for name, module in named if takes_interface(module) and not _is_cross_attention(name, module)]
    # If some layers are causal, the others belong to an encoder, or attend to one.
    found = [module for module in found if getattr(module, "is_causal", False)] or found
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no self-attention layers that call Transformers' attention interface; call "
            "sparse_flash.attention in its code instead"
        )
    if biased := [module for module in found if "position_bias" in _names(type(module).__mro__)]:
        raise unsupported_error(biased[0], "passes position_bias to its attention")
    numbers = [number for module in found if (number := getattr(module, "layer_idx", None)) is not None]
    if len(numbers) < len(found):
        numbers = list(range(len(found)))
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"{type(model).__name__} has {len(found)} attention modules in {len(set(numbers))} layers, and nothing says which "
            "of them to switch; call sparse_flash.attention in its code instead"
        )
    return dict(sorted(zip(numbers, found, strict=True)))


def unsupported_error(module: torch.nn.Module, what: str) -> ValueError:
    way_out = "use another implementation, such as model.set_attn_implementation('eager')"
    return ValueError(f"{type(module).__name__} {what}, which sparse_flash does not support; {way_out}")


def _is_cross_attention(name: str, module: torch.nn.Module) -> bool:
    """Whether a module attends to another sequence, by its attribute, its class, or its name within its layer: encoder_attn,
    EncDecAttention, crossattention.self."""
    within_layer = re.split(r"(?:^|\.)\d+\.", name)[-1].lower()
    named = "cross" in within_layer or "cross" in type(module).__name__.lower() or within_layer.startswith("enc")
    return named or bool(getattr(module, "is_cross_attention", False))


def takes_interface(module: torch.nn.Module) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in _names(type(module).__mro__)


@cache
def _names(kinds: tuple[type, ...]) -> frozenset[str]:
    """Returns the names that a class's methods use: globals, attributes, and keywords that they pass. kinds: it and its bases."""
    owners = [one for one in kinds if one.__module__ not in _NOT_OF_MODELS and not one.__module__.startswith("torch.")]
    values = [value for one in owners for value in vars(one).values() if callable(value)]
    codes, found = [getattr(inspect.unwrap(value), "__code__", None) for value in values], set[str]()
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            found.update(code.co_names)
            codes.extend(code.co_consts)
        elif isinstance(code, tuple):  # names of keywords
            found.update(name for name in code if isinstance(name, str))
    return frozenset(found)
