"""Finds the self-attention modules of a model, and what a plan certainly cannot shard."""

import inspect
import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..models import library_of

# Kinds of layers, as in config.layer_types, whose tokens meet in attention only.
_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}


def unwrap_model(model: object) -> PreTrainedModel:
    """Returns the one Transformers model in a module: itself, or what DataParallel, DDP, FSDP, torch.compile or PEFT wraps."""
    name, way_out = type(model).__name__, "load one by from_pretrained, or call sparse_flash.attention in the model's code"
    if library_of(model) == "diffusers":
        way_out = "call use_sparse_flash(pipe.transformer, spec) of sparse_flash.integrations.diffusers for a model of diffusers"
    models = [one for one in model.modules() if isinstance(one, PreTrainedModel)] if isinstance(model, nn.Module) else []
    inner = {id(part) for one in models for part in one.modules() if part is not one}
    held = [one for one in models if id(one) not in inner]
    if len(held) == 1:
        return held[0]
    if held:
        way_out = "pass the one that is meant"
    found = " and ".join(type(one).__name__ for one in held) or "none"
    raise TypeError(f"model must be a PreTrainedModel, or hold one; got {name}, which holds {found}; {way_out}")


def find_tower(model: nn.Module) -> nn.Module:
    """Returns the part of a model whose self-attention is switched: its text decoder if it has several parts, otherwise all."""
    decoder: nn.Module = getattr(model, "get_decoder", lambda: model)()
    return decoder if any(map(takes_interface, decoder.modules())) else model


def find_self_attention(model: nn.Module) -> dict[int, nn.Module]:
    """Returns a tower's self-attention modules by layer number. Raises ValueError if none can be switched."""
    named = model.named_modules()
    found = [module for name, module in named if takes_interface(module) and not _is_cross_attention(name, module)]
    # If some layers are causal, the others belong to an encoder, or attend to one.
    found = [module for module in found if getattr(module, "is_causal", False)] or found
    numbers = [number for module in found if (number := getattr(module, "layer_idx", None)) is not None]
    if len(numbers) < len(found):
        numbers = list(range(len(found)))
    if not found or len(set(numbers)) < len(numbers):
        what = f"{len(found)} attention modules in {len(set(numbers))} layers, and nothing says which of them to switch"
        what = what if found else "no self-attention layers that call Transformers' attention interface"
        raise ValueError(f"{type(model).__name__} has {what}; call sparse_flash.attention in its code instead")
    return dict(sorted(zip(numbers, found, strict=True)))


def unsupported_error(module: nn.Module, what: str) -> ValueError:
    way_out = "use another implementation, such as model.set_attn_implementation('eager')"
    return ValueError(f"{type(module).__name__} {what}, which sparse_flash does not support; {way_out}")


def is_decoder(layer: nn.Module) -> bool:
    """Whether a layer is a decoder's: under its own mask, its tokens see no later tokens."""
    return bool(getattr(layer, "is_causal", False) and getattr(getattr(layer, "config", None), "is_causal", True))


def _is_cross_attention(name: str, module: nn.Module) -> bool:
    """Whether a module attends to another sequence: encoder_attn, EncDecAttention, crossattention.self."""
    within_layer = re.split(r"(?:^|\.)\d+\.", name)[-1].lower()
    named = "cross" in within_layer or "cross" in type(module).__name__.lower() or within_layer.startswith("enc")
    return named or bool(getattr(module, "is_cross_attention", False))


def takes_interface(module: nn.Module) -> bool:
    """Whether a module, or a class that it derives from, calls attention through Transformers' attention interface."""
    functions = [inspect.unwrap(vars(cls)["forward"]) for cls in type(module).__mro__ if "forward" in vars(cls)]
    return any("ALL_ATTENTION_FUNCTIONS" in getattr(getattr(one, "__code__", None), "co_names", ()) for one in functions)


def check_acts_by_token(model: PreTrainedModel, switched: Iterable[nn.Module], q_len: int) -> None:
    """Raises ValueError for layers that mix tokens outside the attention of ``switched``, and for terms that depend on the length,
    q_len. The code of modules is not read."""
    config: Any = model.config.get_text_config()
    attention, found = set(map(id, switched)), sorted({*(getattr(config, "layer_types", None) or ())} - _KINDS)
    found += [type(one).__name__ for one in model.modules() if isinstance(one, (nn.Conv1d, nn.RNNBase))]
    found += [type(one).__name__ for one in model.modules() if takes_interface(one) and id(one) not in attention]
    kinds = str([getattr(one, "rope_type", None) for one in model.modules()])
    found += [f"rotary embeddings of type {kind!r}" for kind in ("dynamic", "longrope") if kind in kinds]
    if getattr(config, "attn_temperature_tuning", False) and q_len >= config.floor_scale:
        found.append("config.attn_temperature_tuning")
    if found:
        raise ValueError(
            f"a plan needs a causal language model whose tokens meet in its attention only; got {type(model).__name__} with "
            f"{found[0]}; pass masks instead of the plan"
        )
