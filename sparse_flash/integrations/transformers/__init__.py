"""Hugging Face Transformers: runs a model's attention under a mask, through Transformers' attention interface.

    from sparse_flash.integrations.transformers import use_sparse_flash

    use_sparse_flash(model, "causal & (local(1024) | sinks(4))")

The model keeps its projections, rotary positions, key-value cache and ``generate()``, as well as its cross-attention, its encoder
if it has a decoder, and its towers for images and sound. Soft caps (Gemma 2) and sink logits (gpt-oss) work.

A layer's mask replaces the causal triangle. The model's other restrictions stay: a sliding window (Mistral, ModernBERT), chunks
(Llama 4), packed sequences, padding. A pair is kept if both keep it. Packed sequences, given by cu_seq_lens_q, or by position_ids
that restart, attend as each would alone. Padding belongs at either end of a sequence; a pattern's positions count from each
sequence's first token. Restrictions that are not patterns (a 4-D attention_mask, padding between tokens, a model's own functions)
are kept pair by pair, which takes a scan of all pairs on the host. Position biases, attention weights, and keywords that are
neither supported nor in ``_WITHOUT_EFFECT`` are refused.

A mask with choosers, ``causal & (sampled(8, floor=0.01) | sinks(64))``, chooses blocks of keys for prompts: see ``by_content``.

Source: https://huggingface.co/docs/transformers/attention_interface (transformers 5).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import NamedTuple, cast

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from ...api.arguments import check_precision, resolve_deterministic
from ...api.attention import attention
from ...api.decode import MAX_QUERIES, attention_decode, can_decode, is_decode_step
from ...api.keywords import answers_unknown_keywords, chooser_keyword_error
from ...api.shared import SharedSequence
from ...api.varlen import attention_varlen
from ...backends import check_name
from ...compat.names import NAMESPACE
from ...compat.pytorch import assert_in_graph
from ...masks.block_mask import BlockMask
from ...masks.pattern import Pattern
from ...selection.block_selection import BlockSelection
from ...variant.definition import with_sinks
from .by_content import PromptChoice, split_choices
from .by_content import attend_by_content as attended_by_content
from .choice import OWN, assign_masks, check_future, check_heads, future_error, is_decoder
from .layers import find_other_attention, find_self_attention, find_tower, unwrap_model
from .masks import PACKED_ERROR, ModelMask, assume_mask, bounds_of, convert_mask, create_model_mask, depends_on_position, is_window
from .saved import CONFIG_KEY, find_saved_masks, keep_in_config
from .saved import write_masks as write_masks
from .sharing import attend_by_plan, find_plan, shard_arguments

if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 8):
    raise ImportError(f"transformers must be 5.8 or newer; got {transformers.__version__}: pip install 'transformers[torch]>=5.8'")

# "block_sparse", or a name of a copy's own. If a name contains "flash", Transformers looks for a FlashAttention kernel.
NAME = NAMESPACE.replace("sparse_flash", "block_sparse").replace("flash", "")
_SETTINGS = "_sparse_flash_settings"
_PREVIOUS = "_sparse_flash_before"
_WATCHED = "_sparse_flash_watched"
_PLAN = "_sparse_flash_plan"

# Keywords of transformers 5.23 that reach attention but do not change its result here: the mask replaces them (is_causal),
# use_sparse_flash sets them (deterministic), or other parts of a model read them.
_WITHOUT_EFFECT = {
    "cache_position",
    "deterministic",
    "is_causal",
    "kernel_options",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "return_dict",
    "seq_idx",
    "shift_labels",
    "use_cache",
}


class _Settings(NamedTuple):
    """Holds the settings of one attention layer: see ``use_sparse_flash``. moves: whether the mask depends on more than distances.
    ahead: whether it looks ahead and may not. plan: replaces the mask if several ranks share the sequence. choice: of a mask with
    choosers, and dense: the settings of its other calls."""

    mask: Pattern | str | BlockMask
    backend: str = "auto"
    deterministic: bool | None = None
    precision: str | None = None
    needs_positions: bool = False
    packed: bool = False
    ahead: bool = False
    plan: SharedSequence | None = None
    choice: PromptChoice | None = None
    dense: _Settings | None = None


@answers_unknown_keywords(chooser_keyword_error)
def use_sparse_flash(
    model: torch.nn.Module,
    mask: Pattern | str | PathLike[str] | BlockMask | SharedSequence | Sequence[SharedSequence] | Mapping | None = None,
    *,
    per_layer: Sequence | None = None,
    bidirectional: bool = False,
    backend: str = "auto",
    deterministic: bool | None = None,
    precision: str | None = None,
    packed: bool = False,
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
    some layers; the others keep the model's own. The name of a JSON file that ``sparse-flash fit`` or ``write_masks`` wrote gives
    the masks of all layers and their settings. None: the masks in the model's config if it holds some, as for a saved model,
    otherwise the model's own.
    Or a ``ContextPlan``, or ``ContextPlans`` with one for each layer: several ranks then share the sequence. Call the model on each
    with all tokens and labels, and without attention_mask. It runs on the rank's tokens, at their positions in the sequence, and
    returns their logits. Its loss is the sum over the rank's labels, divided by the valid labels of all ranks: the sum over ranks
    is the loss of the sequence. num_items_in_batch is passed on if it is given, as for a step of several batches.
    per_layer: a list with a mask for each layer; instead of mask.
    bidirectional: allows a decoder masks that look ahead. Without it, the mask of a decoder's layer must be within causal and say
    so, "causal & ...", because its tokens are trained to predict the later ones.
    backend, deterministic: as for ``sparse_flash.attention``.
    precision: "fp8" computes prompts in e4m3, without gradients: see ``sparse_flash.attention``. Prompts are calls of more than 64
    queries. Others run as they would without it. Padded and packed sequences, dropout and soft caps are refused then.

    dense_below, dense_layers, dense_last: for masks with a chooser, such as ``causal & (sampled(8, floor=0.01) | sinks(64))``.
    Prompts choose: calls of more than 64 queries. All other calls are dense: they keep all pairs of the pattern before the chooser,
    such as causal. Each sequence of a padded batch chooses for itself.
    dense_below: a prompt is dense if its length, or the layer's own window, is fewer keys than this. 4096 by default.
    dense_layers: the numbers of layers that keep the model's own mask; none by default.
    dense_last: so many queries at the end of a prompt, and of each chunk of one, see all keys; 64 by default. ``last_tokens`` is
    joined to the chooser for them. It does nothing in a spec that does not say causal.

    packed: tells compiled code to expect packed sequences, whose position_ids restart with each sequence. Compiled code cannot
    read them, and separating sequences costs time. Other code reads position_ids. Sequences given by cu_seq_lens_q are separated
    in both.

    The model may be compiled, before or after, also with fullgraph=True, for all lengths. Compiled code cannot read values, so it
    fails at run time (on a GPU as a device-side assertion) for zeros between ones in attention_mask, and without ``packed`` for
    position_ids of packed sequences. In layers with chunks, compiled code treats packed sequences as single ones.

    The masks are stored on the model's layers, where ``masks_of`` reads them. If all have spec text, ``model.config.sparse_flash``
    holds them too, ``save_pretrained`` saves them with the model, and ``use_sparse_flash(model)`` restores them after loading.
    Raises ValueError for a model without such layers, and for masks that do not fit them, TypeError for a list that does not say
    per_layer; the model is then unchanged.
    """
    resolve_deterministic(deterministic)
    check_precision(precision)
    check_name(backend)
    wrapped, model = model, unwrap_model(model)
    part = find_tower(model)
    layers = find_self_attention(part)
    saved = find_saved_masks(model, mask, sorted(layers)) if per_layer is None else None
    if saved is not None:
        mask, bidirectional = saved.layers, bidirectional or saved.bidirectional
        dense_below = saved.dense_below if dense_below is None else dense_below
        dense_last = saved.dense_last if dense_last is None else dense_last
    masks, choices = split_choices(assign_masks(mask, per_layer, sorted(layers)), dense_below, dense_layers, dense_last)
    check_heads(masks, layers, "" if saved is None else f" in {saved.name}")
    ahead = check_future(masks, [number for number, layer in layers.items() if is_decoder(layer)], bidirectional)
    plan = find_plan(masks, find_other_attention(model, layers.values()))
    if precision is not None and plan is not None:
        raise ValueError(f"precision={precision!r} must come with masks of one rank; got a ContextPlan; leave precision out")
    _switch(model, part, layers.values())
    for number, layer in layers.items():
        one = masks[number]
        if plan is not None:
            settings = _Settings(OWN, backend, deterministic, plan=cast(SharedSequence, one))
        else:
            moves = one != OWN and depends_on_position(one)
            settings = _Settings(one, backend, deterministic, precision, moves, packed, ahead[number] and not bidirectional)
            if (choice := choices.get(number)) is not None:
                dense = settings._replace(mask=choice.dense, needs_positions=depends_on_position(choice.dense))
                settings = settings._replace(needs_positions=choice.needs_positions, choice=choice, dense=dense)
        setattr(layer, _SETTINGS, settings)
        layer.extra_repr = partial(_describe_layer, layer)  # type: ignore[method-assign]  # print(model) shows it
    if not hasattr(part, _WATCHED):
        part.register_forward_pre_hook(_refuse_weights, with_kwargs=True)
        setattr(part, _WATCHED, True)
    if plan is not None and not hasattr(model, _PLAN):
        model.register_forward_pre_hook(_shard_inputs, with_kwargs=True)
    if plan is not None or hasattr(model, _PLAN):
        setattr(model, _PLAN, plan)
    keep_in_config(model.config, masks, choices, bidirectional)
    return wrapped


def masks_of(model: torch.nn.Module) -> dict[int, Pattern | str | BlockMask | SharedSequence]:
    """See ``sparse_flash.masks_of``."""
    model = unwrap_model(model)
    part = find_tower(model)
    settings = {number: getattr(layer, _SETTINGS, None) for number, layer in find_self_attention(part).items()}
    if _implementation(part) != NAME:
        way_out = "), for the masks in its config" if hasattr(model.config, CONFIG_KEY) else ", mask)"
        raise ValueError(
            f"model must be one that use_sparse_flash switched; got {type(model).__name__}, which runs {_implementation(part)!r}; "
            f"call use_sparse_flash(model{way_out}"
        )
    return {number: one.plan or one.mask for number, one in settings.items() if one is not None}


def _describe_layer(layer) -> str:
    """Returns the text that print(model) shows of an attention layer, beside its modules."""
    own = type(layer).extra_repr(layer)
    if _implementation(layer) != NAME:
        return own
    settings = getattr(layer, _SETTINGS)
    dense = "" if settings.choice is None else f"; dense_below={settings.choice.below}, dense_last={settings.choice.last}"
    return "\n".join(filter(None, (own, f"sparse_flash mask: {settings.plan or settings.mask}{dense}")))


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
    if _implementation(part) == NAME and not any(hasattr(layer, _SETTINGS) for layer in layers):
        model.set_attn_implementation(None)  # all parts were loaded under the name in the config, where it stays for saving
        model.config.attn_implementation = NAME
    switched = part if hasattr(part, "set_attn_implementation") else model
    before = _implementation(switched)
    others = [(module, _implementation(module)) for module in find_other_attention(model, layers)]
    switched.set_attn_implementation(NAME)
    unswitched = next((layer for layer in layers if _implementation(layer) != NAME), None)
    left = [(module, was) for module, was in others if _implementation(module) == NAME != was]
    # The name in the config also selects FlashAttention's kernels.
    stuck = next((module for module, was in left if "flash" in (was or "flash")), None)
    if unswitched is not None or stuck is not None:
        switched.set_attn_implementation(before)
        if unswitched is not None:
            raise ValueError(
                f"{type(unswitched).__name__} of {type(model).__name__} cannot be switched to another attention implementation; "
                "call sparse_flash.attention in its code instead"
            )
        raise ValueError(
            f"{type(stuck).__name__} of {type(model).__name__} keeps {before!r}, which cannot run beside {NAME!r}; call "
            "model.set_attn_implementation('sdpa') first"
        )
    for module, was in left:
        setattr(module, _PREVIOUS, was)


def _implementation(module) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _attention(module, query, key, value, attention_mask, **kwargs):
    """Attends for Transformers, which calls it: query (batch, heads, tokens, head_dim). Returns (batch, tokens, heads, head_dim),
    None."""
    settings = getattr(module, _SETTINGS, None)
    if settings is None:
        return _attend_as_before(module, query, key, value, attention_mask, **kwargs)
    if settings.choice is not None and not settings.choice.applies_to(attention_mask, query, key):
        settings = settings.dense
    if torch.compiler.is_compiling() and not _traceable(settings, attention_mask, query, key, **kwargs):
        return _attend_outside_graphs(settings, module, query, key, value, attention_mask, **kwargs)
    return _attend_masked(settings, module, query, key, value, attention_mask, **kwargs)


def _traceable(settings, own, query, key, sliding_window=None, dropout=0.0, softcap=None, **_) -> bool:
    """Whether the call reads no values, which compiled code cannot do."""
    if own is None or settings.plan is not None:
        return True
    if not isinstance(own, ModelMask) or own.dense is not None or any(len(limit) > 1 for limit in own.limits):
        return False
    if settings.choice is not None and (own.starts is not None or own.end is None):
        return False
    # Reading kv_offset specializes the graph on its value.
    if _needs_positions(settings, own) and own.kv_offset:
        return False
    if settings.needs_positions and own.first is not None and own.q_length != own.end:
        return False
    decoded = own.starts is None and not dropout and softcap is None and can_decode(query, key)
    return own.end_tensor is None or decoded or _is_prompt(own)


def _is_prompt(own) -> bool:
    """Whether compiled code may specialize on the end of the queries in a static cache: it has one prompt, and then many tokens."""
    return own.end is not None and own.q_length > MAX_QUERIES


def _needs_positions(settings, own) -> bool:
    """Whether the combined mask depends on more than the distance of query and key."""
    return settings.needs_positions or not all(is_window(one) for limit in own.limits for one in limit)


def _attend_masked(
    settings,
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    is_causal=None,
    position_ids=None,
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    max_length_q=None,
    max_length_k=None,
    block_indices=None,
    **kwargs,
):
    """s_aux: (heads,) sink logits. cu_seq_lens_q, cu_seq_lens_k: (sequences + 1,) int32, where packed sequences start; if they are
    None, position_ids say so, (batch | 1, tokens). max_length_q and max_length_k are not needed. block_indices: (batch, kv_heads,
    tokens, n) int64, of layers that choose blocks of keys."""
    _refuse_unknown(module, kwargs)
    own = attention_mask
    if own is None:
        own = assume_mask(module, query, key, sliding_window, is_causal)
    elif not isinstance(own, ModelMask):
        own = convert_mask(own, query, key)
    elif own.end is None and not torch.compiler.is_compiling():
        own = own.with_end_read()
    if settings.plan is not None:
        unsupported = {"a soft cap": softcap, "a 4-D attention_mask": own.dense, "padding": own.starts}
        unsupported["a choice of blocks"] = block_indices
        options = {"scale": scaling, "dropout_p": dropout, "sinks": s_aux, "deterministic": settings.deterministic}
        return attend_by_plan(
            settings.plan, own, query, key, value, unsupported=unsupported, backend=settings.backend, **options
        ), None
    if own.refusal is not None:
        raise ValueError(own.refusal)
    if (own.q_length, own.kv_length) != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"{type(module).__name__} attends from {query.shape[2]} queries to {key.shape[2]} keys under a mask for {own.q_length} "
            f"and {own.kv_length}, which {NAME!r} does not support; use another implementation, such as "
            "model.set_attn_implementation('sdpa')"
        )
    own, cu_seqlens = _find_sequences(settings, own, query, position_ids, cu_seq_lens_q, cu_seq_lens_k)
    if block_indices is not None:
        return _attend_chosen_blocks(
            settings, module, own, query, key, value, block_indices, cu_seqlens, scaling, dropout, softcap, s_aux
        )
    mask: Pattern | str | BlockMask | None = settings.mask
    if settings.ahead and own.base == "causal":  # a causal layer that does not say so
        raise ValueError(future_error(f"the mask of {type(module).__name__}", mask))
    if settings.choice is not None:
        options = {"scale": scaling, "dropout_p": dropout, "softcap": softcap, "sinks": s_aux}
        options |= {"deterministic": settings.deterministic, "backend": settings.backend, "precision": settings.precision}
        packed = cu_seqlens is not None
        return attended_by_content(module, settings.choice, own, query, key, value, packed=packed, **options), None
    if isinstance(mask, str) and mask == OWN:
        mask = None if own.base == "full" else own.base
    if cu_seqlens is not None:
        if settings.precision is not None:
            raise ValueError(
                f"precision={settings.precision!r} does not take packed sequences; pad each sequence in a row of its own and call "
                "one row at a time, or leave precision out of use_sparse_flash"
            )
        reason = _why_not_varlen(own, mask, query, key, dropout, softcap)
        if reason is None:
            return _attend_sequences(settings, own, mask, query, key, value, cu_seqlens, scaling, s_aux), None
        if own.sequences is None:
            if torch.compiler.is_compiling():
                raise ValueError(f"packed sequences with {reason} are not supported in compiled code; call the model uncompiled")
            token = torch.arange(query.shape[0] * query.shape[2], device=query.device)
            own = own.packed(torch.searchsorted(cu_seqlens, token, right=True).view(query.shape[0], -1))
        own, mask = own.separate_sequences(mask)
    return _attend_batch(settings, own, mask, query, key, value, scaling, dropout, softcap, s_aux), None


def _refuse_unknown(module, options: dict) -> None:
    """Raises ValueError for options of unknown effect that are on. One that is off is None, or False for a switch."""
    unknown = sorted(
        name for name, value in options.items() if value is not None and value is not False and name not in _WITHOUT_EFFECT
    )
    if unknown:
        raise ValueError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which {NAME!r} does not support; use another "
            "implementation, such as model.set_attn_implementation('eager')"
        )


def _attend_batch(settings, own, mask, query, key, value, scaling, dropout, softcap, sinks) -> torch.Tensor:
    """Attends a batch whose sequences are not packed, padded or not. Returns (batch, tokens, heads, head_dim)."""
    key, value, kv_lens = _cut_at_end(own, query, key, value)
    in_graph, shifts, lengths = torch.compiler.is_compiling(), None, {}
    if settings.needs_positions and mask is not None and (own.first is not None if in_graph else own.count_left_padding()):
        # Positions count from each sequence's first token. Its tokens move to the front if that means the same and compiles
        # nothing more; otherwise each sequence gets a mask that is moved.
        step = query.shape[2] == 1 and not dropout and softcap is None and is_decode_step(query, key, mask)
        if not (own.can_move_tokens() and (step or own.q_length == own.end)):
            own, mask = own.counted(mask), None
        else:
            shifts, key, value = own.first, _roll_tokens(key, own.first), _roll_tokens(value, own.first)
            if step:
                kv_lens = (own.end - shifts).to(torch.int32)
            else:
                query, lengths = _roll_tokens(query, shifts), dict.fromkeys(("kv_lens", "q_lens"), own.stops - own.starts)
    mask = own.joined(mask, query.device)
    if own.starts is not None and shifts is None:
        earlier = own.end - own.q_length  # the last query aligns with the last key
        lengths = {
            "kv_starts": own.starts,
            "kv_lens": own.stops,
            "q_starts": own.starts - earlier,
            "q_lens": own.stops - earlier,
        }
    aligned = not (own.kv_offset and _needs_positions(settings, own))
    if kv_lens is not None or (aligned and not dropout and not lengths and softcap is None and is_decode_step(query, key, mask)):
        out = _decode(settings, query, key, value, mask, kv_lens, scaling, sinks)
    else:
        out = attention(
            query,
            key,
            value,
            mask,
            scale=scaling,
            dropout_p=dropout,
            **lengths,
            softcap=softcap,
            sinks=sinks,
            deterministic=settings.deterministic,
            precision=settings.precision if query.shape[2] > MAX_QUERIES else None,
            backend=settings.backend,
        )
        out = out if shifts is None else _roll_tokens(out, -shifts)
    return out.transpose(1, 2).contiguous()


def _decode(settings, query, key, value, mask, kv_lens, scaling, sinks):
    """Attends the newest tokens to a cache. Returns (batch, heads, tokens, head_dim)."""
    options = {"kv_lens": kv_lens, "scale": scaling, "backend": settings.backend}
    out, lse = attention_decode(query, key, value, mask, return_lse=True, **options)
    return out if sinks is None else with_sinks(out, lse, sinks, None)[0]


def _cut_at_end(own, query, key, value):
    """Returns (key, value, kv_lens) without what lies past the end of a static cache. kv_lens: (batch,) int32 in compiled code,
    which cannot cut key and value; otherwise None."""
    if own.end_tensor is not None and torch.compiler.is_compiling() and not _is_prompt(own):
        return key, value, own.end_tensor.to(torch.int32).expand(query.shape[0])
    if own.end != own.kv_length:
        key, value = key[:, :, : own.end], value[:, :, : own.end]
    return key, value, None


def _roll_tokens(tensor, by) -> torch.Tensor:
    """Rolls (batch, heads, tokens, head_dim): token ``by[b]`` of entry b comes first, and the tokens before it come last."""
    tokens = tensor.shape[2]
    return tensor.take_along_dim(((torch.arange(tokens, device=tensor.device) + by[:, None]) % tokens)[:, None, :, None], 2)


def _attend_chosen_blocks(
    settings, module, own, query, key, value, block_indices, cu_seqlens, scaling, dropout, softcap, s_aux
):  # fmt: skip
    """Attends each query to the blocks that it chose, its own among them, up to the query."""
    unsupported = {
        "a mask of its own: leave it out, or pass 'own' for this layer": settings.mask != OWN,
        "padding": own.starts is not None,
        "packed sequences": cu_seqlens is not None,
        "a 4-D attention_mask": own.dense is not None,
        "a window": bool(own.limits) or own.base != "causal" or bool(own.kv_offset),
        "dropout": dropout,
        "a soft cap": softcap,
        f"precision={settings.precision!r}": settings.precision,
    }
    if any(unsupported.values()):
        raise ValueError(
            f"{type(module).__name__} chooses blocks of keys, beside which {NAME!r} does not support "
            f"{next(name for name, given in unsupported.items() if given)}; or use another implementation, such as "
            "model.set_attn_implementation('eager')"
        )
    key, value, kv_lens = _cut_at_end(own, query, key, value)
    size = module.config.index_block_size
    options = {"q_len": query.shape[2], "kv_len": key.shape[2], "own": False, "check": False}
    selection = BlockSelection.from_picks(block_indices, size, **options)
    if kv_lens is not None or (can_decode(query, key) and not torch.compiler.is_compiling()):
        out = _decode(settings, query, key, value, selection, kv_lens, scaling, s_aux)
    else:
        call = {"scale": scaling, "deterministic": settings.deterministic, "backend": settings.backend}
        out = attention(query, key, value, selection, sinks=s_aux, **call)
    return out.transpose(1, 2).contiguous(), None


def _find_sequences(settings, own, query, position_ids, cu_seq_lens_q, cu_seq_lens_k):
    """Returns (own, with its packed sequences; where they start in all tokens of the batch, None if there is one sequence)."""
    batch = query.shape[0]
    if cu_seq_lens_q is not None:
        if cu_seq_lens_k is not None and cu_seq_lens_k is not cu_seq_lens_q:
            # Reading values on a GPU takes a synchronization in each layer.
            read = query.device.type == "cpu" and not torch.compiler.is_compiling()
            if cu_seq_lens_k.shape != cu_seq_lens_q.shape or (read and (cu_seq_lens_k != cu_seq_lens_q).any()):
                raise ValueError("cu_seq_lens_k must be equal to cu_seq_lens_q, as self-attention has one list; leave it out")
        return own, cu_seq_lens_q.to(query.device)
    if not torch.compiler.is_compiling():
        own = own.split_by_positions(position_ids)
        return own, None if own.sequences is None else own.bounds(batch)
    starts = own.starts_in_graph(position_ids)
    if starts is None:
        return own, None
    if settings.packed and own.starts is None and own.q_length == own.kv_length:
        return own, bounds_of(starts.expand(batch, -1))
    assert_in_graph(~starts[:, 1:].any(), PACKED_ERROR)
    return own, None


def _why_not_varlen(own, mask, query, key, dropout, softcap) -> str | None:
    """Names what ``attention_varlen`` does not support of a call; None if it supports all."""
    named = {"dropout": dropout, "a soft cap": softcap, "padding": own.starts is not None}
    named["a BlockMask, which is of one length,"] = isinstance(mask, BlockMask)
    by_head = mask.startswith("per_head(") if isinstance(mask, str) else isinstance(mask, Pattern) and mask.name == "per_head"
    named["a pattern for each head"] = by_head
    named["a 4-D attention_mask"] = own.dense is not None
    named["a restriction of its own for each batch entry"] = any(len(limit) > 1 for limit in own.limits)
    named["a cache"] = query.shape[2] != key.shape[2] or own.kv_offset or own.end_tensor is not None
    return next((name for name, used in named.items() if used), None)


def _attend_sequences(settings, own, mask, query, key, value, cu_seqlens, scaling, sinks) -> torch.Tensor:
    """Attends each packed sequence as if it were alone, under the model's window too. Returns (batch, tokens, heads, head_dim)."""
    mask = own.joined(mask, query.device)
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    options = {"scale": scaling, "deterministic": settings.deterministic, "backend": settings.backend}
    out, lse = attention_varlen(q, k, v, cu_seqlens, mask=mask, return_lse=True, **options)
    if sinks is not None:
        out = with_sinks(out.transpose(0, 1)[None], lse[None], sinks, None)[0][0].transpose(0, 1)
    return out.unflatten(0, (query.shape[0], query.shape[2])).contiguous()


_attend_outside_graphs = torch.compiler.disable(_attend_masked)


def _attend_as_before(module, query, key, value, attention_mask, **kwargs):
    """Attends as before, for a module that was left unchanged."""
    before = getattr(module, _PREVIOUS, None)
    if before is None:
        mask = "model" if hasattr(module.config, CONFIG_KEY) else "model, mask"
        raise ValueError(
            f"{type(module).__name__} was switched to {NAME!r} without a mask; call use_sparse_flash({mask}) to switch it. If "
            "another model was switched, the two were made of one config, where the choice is kept: copy.deepcopy(config) for each"
        )
    if isinstance(attention_mask, ModelMask):
        attention_mask = attention_mask.made_for(before)
    functions = inspect.unwrap(type(module).forward).__globals__
    attend = functions["eager_attention_forward"] if before == "eager" else AttentionInterface()[before]
    return attend(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, create_model_mask)
