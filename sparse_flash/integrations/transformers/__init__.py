"""Hugging Face Transformers: runs a model's attention under a mask, through Transformers' attention interface.

    from sparse_flash.integrations.transformers import use_sparse_flash

    use_sparse_flash(model, "causal & (local(1024) | sinks(4))")

A layer's mask replaces the causal triangle; everything else of the model stays, its other restrictions of pairs too: see
docs/guides/hugging-face.md.

Source: https://huggingface.co/docs/transformers/attention_interface (transformers 5).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import mul
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from ...api.shared import SharedSequence
from ...core.arguments import check_precision, resolve_deterministic
from ...core.backends import check_name
from ...masks.block_mask import BlockMask
from ...masks.pattern import Pattern
from ..models import MaskRecord, count_causal, describe_layer, record_layers, unswitched_error
from .attend import NAME, PREVIOUS, SETTINGS, attend_layer, flash_attn_forward, shard_arguments
from .given_masks import CONFIG_KEY, OWN, keep_record, read_masks
from .indexers import switch_indexer
from .layers import check_acts_by_token, find_self_attention, find_tower, is_decoder, takes_interface, unwrap_model
from .model_mask import create_model_mask

if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 8):
    raise ImportError(f"transformers must be 5.8 or newer; got {transformers.__version__}: pip install 'transformers[torch]>=5.8'")

# A switched model holds SETTINGS and PREVIOUS on its attention modules, see attend, _PLAN on the model once it has hooks, and
# NAME in its config, which all ask first. model.set_attn_implementation(name) switches it back: attributes stay, without effect.
_PLAN = "_sparse_flash_plan"


def use_sparse_flash(
    model: torch.nn.Module,
    mask: Pattern | str | BlockMask | SharedSequence | Sequence[SharedSequence] | Mapping | None = None,
    *,
    per_layer: Sequence | None = None,
    bidirectional: bool = False,
    backend: str = "auto",
    deterministic: bool | None = None,
    precision: str | None = None,
    dense_below: int | None = None,
    dense_layers: Iterable[int] | None = None,
    dense_last: int | None = None,
) -> torch.nn.Module:
    """Switches a model's self-attention to ``sparse_flash.attention`` under ``mask``; returns the model.

    model: a ``PreTrainedModel`` whose attention goes through Transformers' attention interface, or a module that holds one:
    DataParallel, DDP, FSDP, a compiled or a PEFT model. If it has several parts (encoder and decoder; text and images), only the
    self-attention of its text decoder is switched.
    mask: a Pattern or its spec text, compiled and cached for each new length; a BlockMask, for one length; "own" for the model's
    own mask: causal for a decoder, all pairs for an encoder, within its own windows. A mapping from layer numbers gives masks for
    some layers; the others keep the model's own. None: the masks that the model was saved with, otherwise the model's own.
    Or a ``ContextPlan``, or a list with the plan of each layer: several ranks then share the sequence. Call the model on each
    with all tokens and labels, and without attention_mask. It runs on the rank's tokens, and returns their logits. Its loss is the
    sum over the rank's labels, divided by num_items_in_batch or the valid labels of all ranks. Only attention may mix tokens:
    convolutions, recurrent and linear-attention layers are refused, other code is not read. position_ids may restart only where
    documents of the plan's mask start; arguments other than tokens and labels must be off.
    per_layer: a list with a mask for each layer; instead of mask.
    bidirectional: allows a decoder masks that look ahead. Without it, the mask of a decoder's layer must be within causal and say
    so, "causal & ...", because its tokens are trained to predict the later ones.
    backend, deterministic: as for ``sparse_flash.attention``.
    precision: "fp8" computes prompts in e4m3, without gradients: see ``sparse_flash.attention``. Other calls run as without it.
    Padded and packed sequences, dropout and soft caps are refused then.

    dense_layers: the numbers of layers that keep the model's own mask; none by default.
    dense_below, dense_last: of masks with a chooser, such as ``causal & (sampled(8, floor=0.01) | sinks(64))``; others are the same
    with and without them. Prompts choose: calls of more than 64 queries. All other calls are dense: they keep all pairs of the
    pattern before the chooser, such as causal. Each sequence of a padded batch chooses for itself.
    dense_below: a prompt is dense if its length, or the layer's own window, is fewer keys than this. 4096 by default.
    dense_last: so many queries at the end of a prompt, and of each chunk of one, see all keys; 64 by default. ``last_tokens`` is
    joined to the chooser for them. It does nothing in a spec that does not say causal.

    The model may be compiled, before or after, also with fullgraph=True. Compiled code cannot read values, so it fails at run time
    for zeros between ones in attention_mask, and for position_ids of packed sequences, which it separates by cu_seq_lens_q.

    ``masks_of`` reads the masks of the model's layers. If all have spec text, ``model.config.sparse_flash`` holds them too. They
    are saved with the model, and ``use_sparse_flash(model)`` restores them after loading.
    Raises ValueError for a model without such layers, and for masks that do not fit them, TypeError for a list that does not say
    per_layer; the model is then unchanged.
    """
    resolve_deterministic(deterministic)
    check_precision(precision)
    check_name(backend)
    wrapped, model = model, unwrap_model(model)
    part = find_tower(model)
    layers = find_self_attention(part)
    given = mask, per_layer, bidirectional, dense_below, dense_layers, dense_last
    options: dict[str, Any] = {"backend": backend, "deterministic": deterministic, "precision": precision}
    settings, record = read_masks(model, layers, *given, **options)
    plan = next(iter(settings.values())).plan  # all layers share its tokens
    if plan is not None:
        check_acts_by_token(model, layers.values(), plan.q_len)
        if precision is not None:
            raise ValueError(f"precision={precision!r} must come with masks of one rank; got a ContextPlan; leave precision out")
    _switch(model, part, layers.values())
    for number, layer in layers.items():
        setattr(layer, SETTINGS, settings[number])
        layer.extra_repr = partial(_describe_layer, layer)  # type: ignore[method-assign]  # print(model) shows it
        switch_indexer(getattr(layer, "indexer", None), NAME)
    if not hasattr(model, _PLAN):
        part.register_forward_pre_hook(_refuse_weights, with_kwargs=True)
        model.register_forward_pre_hook(_shard_inputs, with_kwargs=True)
    setattr(model, _PLAN, plan)
    keep_record((model.config, next(iter(layers.values())).config), record)
    return wrapped


def masks_of(model: torch.nn.Module) -> dict[int, Pattern | str | BlockMask | SharedSequence]:
    """See ``sparse_flash.masks_of``."""
    model = unwrap_model(model)
    part = find_tower(model)
    settings = {number: getattr(layer, SETTINGS, None) for number, layer in find_self_attention(part).items()}
    if _implementation(part) != NAME:
        way_out = "), for the masks that it was saved with" if hasattr(model.config, CONFIG_KEY) else ", mask)"
        got = f"{type(model).__name__}, which runs {_implementation(part)!r}"
        raise unswitched_error(got, f"use_sparse_flash(model{way_out}")
    return {number: one.given for number, one in settings.items() if one is not None}


@contextmanager
def record_masks(model: torch.nn.Module) -> Iterator[MaskRecord]:
    """See ``sparse_flash.record_masks``."""
    masks = masks_of(model)
    if any(isinstance(mask, SharedSequence) for mask in masks.values()):
        raise ValueError("model must have masks of one rank; got a ContextPlan; sparse_flash.explain says what its mask keeps")
    numbers = {id(layer): number for number, layer in find_self_attention(find_tower(unwrap_model(model))).items()}
    attend = AttentionInterface()[NAME]

    def attend_and_record(module, query, key, value, attention_mask, **options):
        number = numbers.get(id(module))
        if number is None:
            return attend(module, query, key, value, attention_mask, **options)
        mask = getattr(module, SETTINGS)
        why = "the model's own mask" if mask.given == OWN else mask.why_dense(attention_mask, query, key)
        with record.layer(number, why, count_causal if is_decoder(module) and not mask.looks_ahead else mul):
            return attend(module, query, key, value, attention_mask, **options)

    AttentionInterface.register(NAME, attend_and_record)
    try:
        with record_layers(masks) as record:
            yield record
    finally:
        AttentionInterface.register(NAME, attend)


def _describe_layer(layer) -> str:
    mask = getattr(layer, SETTINGS)
    dense = "" if mask.dense is None else f"; dense_below={mask.dense_below}, dense_last={mask.dense_last}"
    return describe_layer(layer, f"{mask.given}{dense}" if _implementation(layer) == NAME else None)


def _shard_inputs(module, args, kwargs) -> tuple[tuple[()], dict[str, object]] | None:
    plan = getattr(module, _PLAN)
    return None if plan is None or _implementation(module) != NAME else ((), shard_arguments(plan, module, args, kwargs))


def _refuse_weights(module, args, kwargs) -> None:
    """Raises ValueError if weights are requested. Not all models tell attention, and would silently return none."""
    wanted = kwargs.get("output_attentions")
    wanted = getattr(module.config, "output_attentions", False) if wanted is None else wanted
    if wanted and _implementation(module) == NAME:
        raise ValueError(
            f"output_attentions: {NAME!r} computes no matrix of weights; call the model with "
            "model.set_attn_implementation('eager') for them, or look at the mask with sparse_flash.draw"
        )


def _switch(model, part, layers) -> None:
    """Makes the modules read the implementation's name from their configs, and leaves all other modules unchanged."""
    switched = part if hasattr(part, "set_attn_implementation") else model
    before = _implementation(switched)
    chosen = set(map(id, layers))
    others = [(one, _implementation(one)) for one in model.modules() if takes_interface(one) and id(one) not in chosen]
    switched.set_attn_implementation(NAME)
    left = [(module, was) for module, was in others if _implementation(module) == NAME != was]
    way_out = "cannot be switched to another attention implementation; call sparse_flash.attention in its code instead"
    wrong = [(layer, way_out) for layer in layers if _implementation(layer) != NAME]
    # The name in the config also selects FlashAttention's kernels.
    way_out = f"keeps {before!r}, which cannot run with {NAME!r}; call model.set_attn_implementation('sdpa') first"
    wrong += [(module, way_out) for module, was in left if "flash" in (was or "flash")]
    if wrong:
        switched.set_attn_implementation(before)
        raise ValueError(f"{type(wrong[0][0]).__name__} of {type(model).__name__} {wrong[0][1]}")
    for module, was in left:
        setattr(module, PREVIOUS, was)


def _implementation(module) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def register_masks() -> None:
    """Replaces SDPA's masks, tensors of all pairs, under the names that Transformers registered ``flash_attn_forward`` by."""
    for name, function in AttentionInterface().items():
        if function is flash_attn_forward:
            AttentionMaskInterface.register(name, create_model_mask)


AttentionInterface.register(NAME, attend_layer)
AttentionMaskInterface.register(NAME, create_model_mask)
