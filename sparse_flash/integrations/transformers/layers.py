"""Reads the code of a model's classes: finds the self-attention modules, and decides whether a plan may shard the model.

Each module except the switched attention must then act on each token by itself. PyTorch's layers are known by their classes. Of a
class in Transformers' own files the code is read: ``forward`` and the methods that it calls may call only what is listed here,
reduce along the last dimension only, and pick no tokens by index. Other classes are refused, unless the user vouches for them.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable
from functools import cache
from types import CodeType, FunctionType
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..models import library_of

_NOT_OF_MODELS = ("builtins", "transformers.modeling_utils")  # the latter's own methods also name the interface
_LAYERS = (
    nn.Dropout, nn.Embedding, nn.Identity, nn.LayerNorm, nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList,
    nn.RMSNorm, nn.Sequential,
)  # fmt: skip
_WRAPPERS = ("torch.distributed.", "torch._dynamo.", "peft.tuners.lora.")  # pass a module's inputs on
_MIXTURE = re.compile(r"(Mo[eE](Block|Layer|Statics)?|Experts|Router|Gate|Gating)$")  # classes of a mixture of experts
_FUNCTIONS = re.compile(r"\w*Output\w*|\w*Error|is_\w+|\w*rotary\w*|\w*cast\w*|apply_chunking_to_forward")
_ALONG_LAST = {"cat", "chunk", "max", "mean", "softmax", "split", "sum", "topk", "unbind", "var"}  # with an argument -1
_CALLS_IN = {
    "attention": "_upcast_and_reordered_attn clamp_ get_interface get_llama_4_attn_scale repeat transpose update",
    "scaled attention": "arange floor get_interface get_seq_length transpose update",
    "mixture": """@ add_ append bmm div gather greater index_add index_add_ is_grad_enabled item mm nonzero one_hot permute
        repeat scatter scatter_ sort sparsemixer t tolist transpose uniform_ where zeros""",
    "model": """DynamicCache EncoderDecoderCache _bidirectional_window_overlay arange copy create_bidirectional_mask
        create_causal_mask create_chunked_causal_mask create_sliding_window_causal_mask get_seq_length
        load_balancing_loss_func pop slice_logits_to_keep tensor""",
    "rotary": "@ polar transpose",
    "module": """add bool clamp contiguous copy_ cos dim dropout empty_like exp expand expand_as flatten float forward full_like
        gelu get get_text_config layer_norm linear log1p long masked_fill mul new_empty no_grad norm numel ones_like pow relu
        repeat_interleave reshape rsqrt sigmoid silu sin size softplus sqrt square squeeze tanh to type type_as unsqueeze view
        view_as zeros_like""",  # of all
}


def unwrap_model(model: object) -> PreTrainedModel:
    """Returns the one Transformers model in a module: itself, or what DataParallel, DDP, FSDP, torch.compile or PEFT wraps."""
    name, diffusers = type(model).__name__, None
    if library_of(model) == "diffusers":
        diffusers = "call use_sparse_flash(pipe.transformer, spec) of sparse_flash.integrations.diffusers for a model of diffusers"
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a loaded model; got {name}; {diffusers or 'load one by from_pretrained'}")
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    inner = {id(part) for one in models for part in one.modules() if part is not one}
    held = [one for one in models if id(one) not in inner]
    if len(held) == 1:
        return held[0]
    found = f"none; {diffusers or 'call sparse_flash.attention in its code instead'}"
    if held:
        found = f"{' and '.join(type(one).__name__ for one in held)}; pass the one that is meant"
    raise TypeError(f"model must be a PreTrainedModel, or hold one; got {name}, which holds {found}")


def find_tower(model: nn.Module) -> nn.Module:
    """Returns the part of a model whose self-attention is switched: its text decoder if it has several parts, otherwise all."""
    decoder: nn.Module = getattr(model, "get_decoder", lambda: model)()
    return decoder if any(map(takes_interface, decoder.modules())) else model


def find_self_attention(model: nn.Module) -> dict[int, nn.Module]:
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


def unsupported_error(module: nn.Module, what: str) -> ValueError:
    way_out = "use another implementation, such as model.set_attn_implementation('eager')"
    return ValueError(f"{type(module).__name__} {what}, which sparse_flash does not support; {way_out}")


def _is_cross_attention(name: str, module: nn.Module) -> bool:
    """Whether a module attends to another sequence, by its attribute, its class, or its name within its layer: encoder_attn,
    EncDecAttention, crossattention.self."""
    within_layer = re.split(r"(?:^|\.)\d+\.", name)[-1].lower()
    named = "cross" in within_layer or "cross" in type(module).__name__.lower() or within_layer.startswith("enc")
    return named or bool(getattr(module, "is_cross_attention", False))


def takes_interface(module: nn.Module) -> bool:
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


def check_acts_by_token(
    model: PreTrainedModel, switched: Iterable[nn.Module], q_len: int, tokenwise: Iterable[type[nn.Module]]
) -> None:
    """Raises ValueError if a module's result for a token may depend on other tokens, except in the attention of ``switched``.
    q_len: tokens of the sequence. tokenwise: the classes that the user vouches for."""
    attention, vouched = set(map(id, switched)), tuple(tokenwise)
    # A model is read after its parts, which say more.
    for name, module in sorted(model.named_modules(), key=lambda one: isinstance(one[1], PreTrainedModel)):
        reason = None if isinstance(module, vouched) else _find_mixing(module, id(module) in attention, q_len)
        if reason:
            kind = type(module).__name__
            raise ValueError(
                f"a plan needs a causal language model whose tokens meet in its attention only; got {type(model).__name__}, whose "
                f"{f'{kind} ({name})' if name else 'forward'} {reason}; pass masks instead of the plan, or tokenwise=[{kind}] if "
                "you know that it gives each token what it gives in the whole sequence"
            )


def _find_mixing(module: Any, switched: bool, q_len: int) -> str | None:
    """Returns why a module's result for a token may depend on other tokens, or None."""
    kind: type = type(module)
    forward: Any = inspect.unwrap(module.forward)
    forward = getattr(forward, "__func__", forward)
    origin = getattr(forward, "__module__", None) or "an unknown file"
    if kind.__module__.startswith(_WRAPPERS) or isinstance(module, (nn.Linear, Conv1D)) or origin == "transformers.activations":
        return None
    if origin.startswith("torch."):
        activation = origin == "torch.nn.modules.activation" and getattr(module, "dim", -1) == -1
        known = isinstance(module, _LAYERS) or (activation and not isinstance(module, (nn.MultiheadAttention, nn.PReLU)))
        return None if known or forward.__name__ == "_forward_unimplemented" else "may mix them"
    if takes_interface(module) != switched:
        return "attends too, and is not switched"
    role = "mixture" if _MIXTURE.search(kind.__name__) else "module"
    if switched:
        scaled = hasattr(module, "attn_temperature_tuning")
        if scaled and module.attn_temperature_tuning and not module.use_rope and q_len >= module.floor_scale:
            return "scales queries by their index among a rank's tokens, by config.attn_temperature_tuning"
        role = "scaled attention" if scaled else "attention"
    elif isinstance(module, PreTrainedModel):
        role = "model"
    elif any("inv_freq" in name for name in module._buffers) and next(module.parameters(), None) is None:
        role, changing = "rotary", re.search("dynamic|longrope", str(getattr(module, "rope_type", "")))
        lengths = re.findall(r"'original_max_position_embeddings': (\d+)", str(getattr(module.config, "rope_parameters", "")))
        if changing and q_len > min(map(int, lengths), default=module.original_max_seq_len):
            return f"has frequencies of type {changing[0]!r}, which depend on the last position among a rank's tokens"
    takes = inspect.signature(forward).parameters
    if "position_ids" not in takes and (role == "rotary" or (role == "model" and "input_ids" in takes)):
        return "takes no position_ids"
    return _read_method(kind, forward, role, frozenset(name for name, _ in module.named_modules()))


@cache
def _read_method(kind: type, function: FunctionType, role: str, parts: frozenset[str]) -> str | None:
    """Returns why a method of a class may mix tokens, or None. parts: the names of the modules within one of the class."""
    origin, allowed = function.__module__, {*_CALLS_IN["module"].split(), *_CALLS_IN[role].split()}
    if origin == "transformers.modeling_utils":
        return None
    if not origin.startswith("transformers.models.") and origin != "transformers.modeling_layers":
        return f"is of {origin}, which is not read"
    definition = cast(ast.FunctionDef, ast.parse(textwrap.dedent(inspect.getsource(function))).body[0])
    for node in (node for statement in definition.body for node in ast.walk(statement)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult) and "@" not in allowed:
            return "may mix them by @"
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and role != "mixture":
            first, second, *_ = *map(ast.unparse, node.slice.elts), ":"
            if first != "..." and second not in (":", "None", "...", "slice_indices"):
                return f"may mix them by {ast.unparse(node)}"
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if name in allowed or f"{owner}.{name}".removeprefix("self.") in parts:
                continue
            method: Any = getattr(kind, name, None) if owner == "self" else None
            if isinstance(method, FunctionType):
                if reason := _read_method(kind, cast(FunctionType, inspect.unwrap(method)), role, parts):
                    return reason
            elif owner != "self" and not _is_safe(owner, name, node, function, role):
                return f"may mix them by {name}"
    return None


def _is_safe(owner: str, name: str, call: ast.Call, function: FunctionType, role: str) -> bool:
    """Whether a call acts on each token by itself. owner: the expression before its name."""
    if not owner and (name not in function.__globals__ or _FUNCTIONS.fullmatch(name)):  # a local name, or Python's own
        return True
    values = [ast.unparse(value) for value in (*call.args, *(one.value for one in call.keywords))]
    if name in _ALONG_LAST and role != "mixture":
        # A layer's result has three dimensions, and nothing in attention more than four.
        third, fourth = re.fullmatch(r"self\.\w+\(\w*hidden_states\)", owner), "attention" in role
        return "-1" in values or bool(third and "2" in values) or (fourth and "3" in values)
    return name in _ALONG_LAST or (name == "pad" and re.fullmatch(r"\[0, [^,]+\]", values[1]) is not None)
