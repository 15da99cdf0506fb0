"""Shares a model's sequence among several ranks, by a plan: its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ...api.shared import SharedSequence
from ...compat.pytorch import assert_in_graph

_IGNORED = -100  # a label that counts for nothing, in Transformers' losses
# Arguments of models: those that are sharded, and others that mean the same on each rank.
_OF_TOKENS = {"input_ids", "inputs_embeds", "token_type_ids"}
_SHARED = {"labels", "num_items_in_batch", "output_hidden_states", "position_ids", "return_dict", "shift_labels", "use_cache"}


def find_plan(plans: Mapping[int, SharedSequence | None]) -> SharedSequence | None:
    """Returns the plan of one of a model's layers, as all layers share its tokens; None if the layers have masks.

    plans: by layer. Raises ValueError if layers do not share their tokens.
    """
    number, first = next(((number, plan) for number, plan in plans.items() if plan is not None), (0, None))
    if first is None:
        return None
    if wrong := sorted(other for other, plan in plans.items() if plan is None or plan.positions is not first.positions):
        raise ValueError(
            f"layers {wrong} do not share their tokens with layer {number}; make one plan for all layers: "
            "context_parallel([mask of each layer, ...], ...)"
        )
    return first


def shard_arguments(
    plan: SharedSequence, module: PreTrainedModel, args: tuple[object, ...], kwargs: dict[str, Any]
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
    _refuse_arguments(module, given)
    for name in _OF_TOKENS & given.keys():
        given[name] = plan.shard(given[name], 1)
    positions = given.get("position_ids")
    if positions is None:
        given["position_ids"] = plan.positions[None]
    else:
        # They restart only where a document of the plan starts. Compiled code cannot read values, and fails at run time.
        wrong = ((positions.diff() <= 0) & ~plan.document_starts[1:]).any()
        error = (
            "position_ids must restart only where a document of the plan's mask starts; put the documents in it, "
            "'causal & documents([0, ..., tokens])', or make it by ContextParallel"
        )
        if torch.compiler.is_compiling():
            assert_in_graph(~wrong, error)
        elif wrong:
            raise ValueError(error)
        given["position_ids"] = plan.shard(positions, positions.dim() - 1)
    labels, shifted = given.get("labels"), given.get("shift_labels")
    if labels is not None and shifted is None:
        shifted = torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:].contiguous()
    if shifted is not None:
        if not rest or module.loss_function is not ForCausalLMLoss:
            raise ValueError(
                f"labels cannot be used with a plan if a model's loss is not that of next tokens; got {type(module).__name__}; "
                "compute the loss from its logits and plan.shard(labels, 1, fill=-100), or use the ForCausalLM model"
            )
        given.setdefault("num_items_in_batch", (shifted != _IGNORED).sum())
        given["labels"] = given["shift_labels"] = plan.shard(shifted, 1, fill=_IGNORED)
    if "use_cache" in signature.parameters:
        given["use_cache"] = False
    return given


def _refuse_arguments(module: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments that are on, and mean something else to a rank's tokens than to all."""
    refused = [
        name for name, value in given.items() if name not in _OF_TOKENS | _SHARED and not (isinstance(value, int) and value == 0)
    ]
    if "output_router_logits" not in given and getattr(module.config, "output_router_logits", False):
        refused.append("config.output_router_logits")
    if refused:
        raise ValueError(
            f"{', '.join(refused)} cannot be used with a plan, as a rank has some of the tokens only; leave it out or set it to "
            "False, put documents in the plan's mask, or call use_sparse_flash with a mask for that"
        )
