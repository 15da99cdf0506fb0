"""Shares a model's sequence among several ranks, by a plan: its inputs and its attention."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from ...api.shared import SharedSequence
from .limits import keeps_all

if TYPE_CHECKING:
    from .attend import LayerCall

_IGNORED = -100  # a label that counts for nothing, in Transformers' losses


def find_plan(masks: Mapping[int, object], others: list[torch.nn.Module]) -> SharedSequence | None:
    """Returns the plan of one of a model's layers, as all layers share its tokens; None if the layers have masks.

    masks: by layer. others: modules that attend and are not switched. Raises ValueError if a model cannot be shared.
    """
    plans = {number: mask for number, mask in masks.items() if isinstance(mask, SharedSequence)}
    if not plans:
        return None
    first = next(iter(plans.values()))
    wrong = sorted(number for number in masks if number not in plans or plans[number].positions is not first.positions)
    if wrong:
        raise ValueError(
            f"layers {wrong} do not share their tokens with layer {next(iter(plans))}; make one plan for all layers: "
            "context_parallel([mask of each layer, ...], ...)"
        )
    if others:
        raise ValueError(
            f"the model also attends in {type(others[0]).__name__}, whose tokens a plan does not share; pass a model with one text "
            "decoder, or masks instead of the plan"
        )
    return first


def shard_arguments(
    plan: SharedSequence, module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns the keywords with which a model's ``forward`` gets this rank's tokens, from the arguments of all tokens.

    Tokens and positions are sharded. Labels are shifted first; num_items_in_batch counts the labels of all ranks. Raises
    ValueError for arguments that cannot be shared.
    """
    signature = inspect.signature(module.forward)
    bound = signature.bind(*args, **kwargs).arguments
    rest = next((name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD), "")
    others = bound.pop(rest, {})
    given = {name: value for name, value in {**bound, **others}.items() if value is not None}
    padding = given.pop("attention_mask", None)
    if padding is not None and (padding.dim() != 2 or torch.compiler.is_compiling() or not padding.bool().all()):
        raise ValueError("a plan has no padding of its own; leave attention_mask out, and give padding the label -100")
    if refused := [name for name in ("past_key_values", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k") if name in given]:
        raise ValueError(f"{', '.join(refused)} cannot be used with a plan; call use_sparse_flash with a mask for that")
    for name in ("input_ids", "inputs_embeds"):
        if name in given:
            given[name] = plan.shard(given[name], 1)
    positions = given.get("position_ids")
    given["position_ids"] = plan.positions[None] if positions is None else plan.shard(positions, positions.dim() - 1)
    labels, shifted = given.get("labels"), given.get("shift_labels")
    if labels is not None and shifted is None:
        shifted = torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:].contiguous()
    if shifted is not None:
        if not rest:
            raise ValueError(f"{type(module).__name__} does not take shift_labels; compute the loss from its logits")
        given.setdefault("num_items_in_batch", (shifted != _IGNORED).sum())
        given["labels"] = given["shift_labels"] = plan.shard(shifted, 1, fill=_IGNORED)
    if "use_cache" in signature.parameters:
        given["use_cache"] = False
    return given


def attend_by_plan(call: LayerCall, block_indices: torch.Tensor | None) -> torch.Tensor:
    """Calls ``plan.attention`` for a layer, whose mask was made for the tokens of this rank. Returns (batch, heads, tokens,
    head_dim). block_indices: the choice of a layer that chooses blocks, None for others. Raises ValueError for what a plan does not
    support, and for restrictions of the model that it cannot know."""
    plan, settings, model_mask = cast(SharedSequence, call.settings.plan), call.settings, call.model_mask
    unsupported = {
        "a soft cap": bool(call.softcap),
        "a 4-D attention_mask": model_mask.kept_pairs is not None,
        "padding": model_mask.key_starts is not None,
        "a choice of blocks": block_indices is not None,
    }
    if any(unsupported.values()):
        names = ", ".join(name for name, used in unsupported.items() if used)
        raise ValueError(f"{names} cannot be used with a plan; call use_sparse_flash with a mask for that")
    limits = [str(limit[0]) for limit in model_mask.limits if not keeps_all(limit[0], plan.q_len)]
    if limits:
        raise ValueError(
            f"the layer's own mask is {' & '.join(limits)}, and a plan cannot be joined with it; make it part of the layer's mask "
            "in the plan, and set the model's config.sliding_window to None"
        )
    options: dict[str, Any] = {"scale": call.scale, "dropout_p": call.dropout, "sinks": call.sinks}
    options |= {"deterministic": settings.deterministic, "backend": settings.backend}
    return plan.attention(call.query, call.key, call.value, **options)
