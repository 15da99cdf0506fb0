"""Hugging Face Transformers: a model whose attention goes through Transformers' attention interface, under a mask.

    from sparse_flash.integrations.transformers import use_sparse_flash

    use_sparse_flash(model, "causal & (local(1024) | sinks(4))")

The model's projections, rotary positions, key-value cache and ``generate()`` stay its own. A sliding window of the model's
own is kept: its layers attend where both keep a pair. Padded batches are carried, padded on either side; distances in a pattern
are then those of the padded positions, and so are those of global tokens and sinks. Soft caps (Gemma 2) and sink logits (gpt-oss)
are carried. What this cannot carry is refused: packed sequences, caches of fixed length, position biases, and whatever keyword
a model passes to its attention that is neither carried nor in ``_WITHOUT_EFFECT``.

Source: https://huggingface.co/docs/transformers/attention_interface (transformers 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from ..attention import attention
from ..block_mask import BlockMask
from ..decode import attention_decode, decodes
from ..pattern import Pattern, parse
from ..patterns import local
from ..scores import with_sinks

NAME = "block_sparse"  # not "sparse_flash": where a name holds "flash", Transformers looks for a FlashAttention kernel
_SETTINGS = "_sparse_flash_settings"
# What a model's own mask may be made of: all of it is the causal triangle, nothing, or a window that the layer names itself.
_KNOWN = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "and_masks.<locals>.and_mask",
    "sliding_window_overlay.<locals>.inner_mask",
}
# Under torch.compile a model takes every batch for one of packed sequences, and says which in a tensor.
_PACKED = {"packed_sequence_mask_function.<locals>.inner_mask", "remap_positions_for_packed_sequence.<locals>.inner_mask"}

# Keywords that reach attention, of transformers 5.23, and change nothing that it returns here: what the mask says instead of
# them (is_causal, position_ids, whose packed sequences ``_no_mask`` refuses), what is said in use_sparse_flash (deterministic),
# and what other parts of a model read.
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
    "position_ids",
    "return_dict",
    "seq_idx",
    "use_cache",
}


@dataclass(frozen=True)
class _Settings:
    """What one attention layer uses: see ``use_sparse_flash``."""

    mask: Pattern | str | BlockMask | None
    backend: str = "auto"
    deterministic: bool | None = None


def use_sparse_flash(
    model: torch.nn.Module,
    mask: Pattern | str | BlockMask | Sequence | Mapping | None = "causal",
    *,
    backend: str = "auto",
    deterministic: bool | None = None,
) -> torch.nn.Module:
    """Switches a model's self-attention to ``sparse_flash.attention`` under ``mask``; returns the model.

    model: a ``PreTrainedModel`` that supports Transformers' attention interface.
    mask: a Pattern or its spec text, compiled for each length that comes and cached; a BlockMask, for one length; None for
    dense attention. A sequence gives each layer its own, and a mapping from layer numbers those of some layers: the others
    are causal, as before. A mask that shall not look ahead must say so: "causal & ...".
    backend, deterministic: as for ``sparse_flash.attention``.

    The choice lies on the model's layers and is not saved with it. Raises ValueError for a model that has no such layers, and
    for masks that do not fit them.
    """
    layers = {module.layer_idx: module for module in model.modules() if _is_self_attention(module)}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no self-attention layers of Transformers' attention interface (modules with layer_idx "
            "and is_causal); call sparse_flash.attention in its code instead"
        )
    masks = {number: _checked(one) for number, one in _by_layer(mask, sorted(layers)).items()}
    for number, layer in layers.items():
        setattr(layer, _SETTINGS, _Settings(masks[number], backend, deterministic))
    model.set_attn_implementation(NAME)
    return model


def _is_self_attention(module: torch.nn.Module) -> bool:
    numbered = getattr(module, "layer_idx", None) is not None and hasattr(module, "is_causal")
    return numbered and not getattr(module, "is_cross_attention", False)


def _by_layer(mask, numbers: list[int]) -> dict[int, object]:
    if isinstance(mask, Mapping):
        unknown = sorted(set(mask) - set(numbers))
        if unknown:
            raise ValueError(f"mask names layers {unknown}; the model has layers {numbers[0]} to {numbers[-1]}")
        return {number: mask.get(number, "causal") for number in numbers}
    if isinstance(mask, Sequence) and not isinstance(mask, str):
        if len(mask) != len(numbers):
            raise ValueError(f"mask has {len(mask)} entries; the model has {len(numbers)} attention layers")
        return dict(zip(numbers, mask, strict=True))
    return dict.fromkeys(numbers, mask)


def _checked(mask):
    if isinstance(mask, str):
        return parse(mask)  # says now what is wrong with it
    if mask is None or isinstance(mask, (Pattern, BlockMask)):
        return mask
    raise TypeError(f"a layer's mask must be a Pattern, its spec text, a BlockMask or None; got {type(mask).__name__}")


def _attention(
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
    **kwargs,
):
    """What Transformers calls: query (batch, heads, tokens, head_dim), s_aux (heads,) sink logits; returns (batch, tokens, heads,
    head_dim), None."""
    settings = getattr(module, _SETTINGS, None)
    if settings is None:
        raise ValueError(
            f"{type(module).__name__} was switched to {NAME!r} without a mask; call use_sparse_flash(model, mask) to switch it"
        )
    lengths = {}
    if attention_mask is not None and _is_padding(attention_mask):
        # The last query is at the last key.
        (starts, stops), earlier = attention_mask.unbind(1), key.shape[2] - query.shape[2]
        lengths = {"kv_starts": starts, "kv_lens": stops, "q_starts": starts - earlier, "q_lens": stops - earlier}
    elif attention_mask is not None:
        raise ValueError(
            f"the model passes an attention mask of shape {tuple(attention_mask.shape)}, which {NAME!r} cannot follow; say what it "
            "keeps as a pattern in use_sparse_flash(model, mask)"
        )
    # Off is None, or False where it is a switch.
    unknown = sorted(
        name for name, value in kwargs.items() if value is not None and value is not False and name not in _WITHOUT_EFFECT
    )
    if unknown:
        raise ValueError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which {NAME!r} does not carry; use another "
            "implementation, such as model.set_attn_implementation('eager')"
        )
    mask = settings.mask if sliding_window is None else _within(settings.mask, sliding_window, key.shape[2])
    if not dropout and not lengths and softcap is None and decodes(query, key, mask):
        out, lse = attention_decode(query, key, value, mask, scale=scaling, return_lse=True, backend=settings.backend)
        if s_aux is not None:
            out, _ = with_sinks(out, lse, s_aux, None)
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
            sinks=s_aux,
            deterministic=settings.deterministic,
            backend=settings.backend,
        )
    return out.transpose(1, 2).contiguous(), None


def _within(mask, window: int, kv_len: int):
    """The mask within a model's own sliding window of so many keys, the query's own among them."""
    if kv_len <= window:
        return mask
    if isinstance(mask, BlockMask):
        raise ValueError(
            f"the layer has a sliding window of {window} tokens and a BlockMask of its own; pass a Pattern, which can be joined "
            "with it, or set the model's config.sliding_window to None"
        )
    return _windowed(mask, window)


@lru_cache(maxsize=256)
def _windowed(mask: Pattern | None, window: int) -> Pattern:
    return local(window) if mask is None else mask & local(window)


@torch.compiler.disable  # it looks at values; a compiled model has one graph more for it
def _no_mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, **kwargs
) -> torch.Tensor | None:
    """In place of a mask of all pairs, none, or for a padded batch its tokens: see ``_tokens``. Refuses what such a mask would
    have said beyond that and the layers' patterns."""
    if isinstance(q_offset, torch.Tensor) or kv_offset or q_offset + q_length != kv_length:
        raise ValueError(
            f"the cache holds {kv_length} positions for {q_length} queries from {q_offset} on; {NAME!r} needs all keys up to the "
            "last query and no others: pass past_key_values=DynamicCache()"
        )
    parts = _parts(mask_function)
    known = _KNOWN if _is_packed(parts) else _KNOWN | _PACKED
    unknown = sorted({part.__qualname__ for part in parts} - known)
    if unknown:
        raise ValueError(
            f"the model masks by {', '.join(unknown)} (packed sequences, chunks or the like), which {NAME!r} cannot follow; say "
            "what is kept as a pattern, such as documents(...), and call the model without position_ids"
        )
    return None if attention_mask is None or attention_mask.all() else _tokens(attention_mask.bool(), kv_length)


def _tokens(exist: torch.Tensor, kv_length: int) -> torch.Tensor:
    """(batch, 2) int32: the first token of each batch entry, and where its tokens end. Raises ValueError where they are not
    successive."""
    count = exist.sum(1, keepdim=True)
    first = exist.int().argmax(1, keepdim=True)
    token = torch.arange(exist.shape[1], device=exist.device)
    if exist.shape[1] != kv_length or not torch.equal(exist, (token >= first) & (token < first + count)):
        raise ValueError(
            f"attention_mask, of shape {tuple(exist.shape)} for {kv_length} keys, has zeros between its ones, or another length; "
            f"{NAME!r} carries padding before and after a sequence; pad on the left to generate from a batch"
        )
    return torch.cat([first, first + count], 1).to(torch.int32)


def _is_padding(attention_mask: torch.Tensor) -> bool:
    """Whether it is what ``_tokens`` makes, and no mask of pairs."""
    return attention_mask.dim() == 2 and attention_mask.shape[1] == 2 and attention_mask.dtype == torch.int32


def _parts(function) -> list:
    """A mask function and those that it is made of."""
    if function is None:
        return []
    found = [function]
    for held in (cell.cell_contents for cell in function.__closure__ or ()):
        for part in held if isinstance(held, tuple) else (held,):
            found += _parts(part) if hasattr(part, "__qualname__") else []
    return found


def _is_packed(parts: list) -> bool:
    """Whether some batch entry holds more than one sequence; they are numbered from 0."""
    held = (zip(part.__code__.co_freevars, part.__closure__ or (), strict=True) for part in parts)
    return any(bool(cell.cell_contents.any()) for cells in held for name, cell in cells if name == "packed_sequence_mask")


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)
