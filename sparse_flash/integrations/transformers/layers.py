"""Finds a model's self-attention modules, and whether they use Transformers' attention interface."""

from __future__ import annotations

import inspect
import re
from functools import cache
from types import CodeType

import torch
from transformers import PreTrainedModel

from ..models import ADVICE, library_of

_REFUSED_KEYWORDS = {"position_bias"}
_NOT_OF_MODELS = ("builtins", "transformers.modeling_utils")  # the latter's own methods also name the interface


def unwrap_model(model: object) -> PreTrainedModel:
    """Returns the one Transformers model in a module: itself, or what DataParallel, DDP, FSDP, torch.compile or PEFT wraps."""
    other = ADVICE["diffusers"] if library_of(model) == "diffusers" else None
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
    taking = [(name, module) for name, module in model.named_modules() if takes_interface(module)]
    others = [module for module in model.modules() if _is_attention(module) and not any(map(takes_interface, module.modules()))]
    if others:
        raise ValueError(
            f"{type(others[0]).__name__} of {type(model).__name__} does not call attention through Transformers' attention "
            "interface; call sparse_flash.attention in its code instead"
        )
    found = [module for name, module in taking if not _is_cross_attention(name, module)]
    # If some layers are causal, the others belong to an encoder, or attend to one.
    found = [module for module in found if getattr(module, "is_causal", False)] or found
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no self-attention layers that call Transformers' attention interface; call "
            "sparse_flash.attention in its code instead"
        )
    for module in found:
        kind: type = type(module)  # declared: mypy takes type[Module] for a Module, whose hash it does not know
        refused = sorted(_REFUSED_KEYWORDS & _names(kind))
        if refused:
            raise ValueError(
                f"{type(module).__name__} passes {', '.join(refused)} to its attention, which sparse_flash does not support; use "
                "another implementation, such as model.set_attn_implementation('sdpa')"
            )
    numbers = [number for module in found if (number := getattr(module, "layer_idx", None)) is not None]
    if len(numbers) < len(found):
        numbers = list(range(len(found)))
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"{type(model).__name__} has {len(found)} attention modules in {len(set(numbers))} layers, and nothing says which "
            "of them to switch; call sparse_flash.attention in its code instead"
        )
    return dict(sorted(zip(numbers, found, strict=True)))


def _is_attention(module: torch.nn.Module) -> bool:
    return hasattr(module, "is_causal") and getattr(module, "layer_idx", None) is not None


def _is_cross_attention(name: str, module: torch.nn.Module) -> bool:
    """Whether a module attends to another sequence, by its attribute, its class, or its name within its layer: encoder_attn,
    EncDecAttention, crossattention.self."""
    within_layer = re.split(r"(?:^|\.)\d+\.", name)[-1].lower()
    named = "cross" in within_layer or "cross" in type(module).__name__.lower() or within_layer.startswith("enc")
    return named or bool(getattr(module, "is_cross_attention", False))


def takes_interface(module: torch.nn.Module) -> bool:
    kind: type = type(module)  # declared: as above
    return "ALL_ATTENTION_FUNCTIONS" in _names(kind)


@cache
def _names(kind: type) -> frozenset[str]:
    """Returns the names that a class's methods use: globals, attributes, and keywords that they pass."""
    found: set[str] = set()
    for owner in kind.__mro__:
        if owner.__module__ in _NOT_OF_MODELS or owner.__module__.startswith("torch."):
            continue
        for value in vars(owner).values():
            code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
            if code is not None:
                _collect(code, found)
    return frozenset(found)


def _collect(code: CodeType, found: set[str]) -> None:
    found.update(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _collect(constant, found)
        elif isinstance(constant, tuple):
            found.update(name for name in constant if isinstance(name, str))
