"""Decides whether a plan may shard a model: each module except the switched attention must act on each token by itself.

PyTorch's layers are known by their classes. Of a class in Transformers' own files the code is read: ``forward`` and the methods
that it calls may call only what is listed here, reduce along the last dimension only, and pick no tokens by their index. Other
classes are refused, unless the user vouches for them.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable
from functools import cache
from types import FunctionType
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .layers import takes_interface

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
