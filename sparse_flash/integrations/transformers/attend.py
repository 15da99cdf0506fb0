"""One layer's call: from Transformers' attention interface to ``sparse_flash.attention``."""

from __future__ import annotations

import inspect
from itertools import chain
from operator import sub
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface

from ...api.attention import attention
from ...api.decode import MAX_QUERIES, attention_decode, can_decode, is_decode_step
from ...api.shared import SharedSequence
from ...api.varlen import attention_varlen
from ...compat.names import NAMESPACE
from ...masks.block_mask import BlockMask
from ...masks.parsing import parse
from ...masks.pattern import And, Pattern, PerBatch, PerEntry
from ...packed.rows import lay_out_rows
from ...patterns import documents
from ...selection.block_selection import BlockSelection
from ...variant.definition import with_sinks
from .given_masks import CONFIG_KEY, OWN, PromptChoice, future_error, warn_of_lost_pairs
from .model_mask import ModelMask, assume_mask, convert_mask
from .sequences import find_sequences

# "block_sparse", or a name of a copy's own. If a name contains "flash", Transformers looks for a FlashAttention kernel.
NAME = NAMESPACE.replace("sparse_flash", "block_sparse").replace("flash", "")
# Attributes of attention modules, set by ``use_sparse_flash``: the LayerSettings of a switched one, and the name of the
# implementation that an unchanged one had, if Transformers switches it with the others.
SETTINGS = "_sparse_flash_settings"
PREVIOUS = "_sparse_flash_before"

# Keywords of transformers 5.23 that reach attention but do not change its result here: use_sparse_flash sets them (deterministic),
# or they serve other parts of a model, or other implementations.
_WITHOUT_EFFECT = {
    "cache_position", "deterministic", "kernel_options", "labels", "logits_to_keep", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "past_key_values", "return_dict", "seq_idx",
    "shift_labels", "use_cache",
}  # fmt: skip


_Mask: TypeAlias = Pattern | str | BlockMask | None


class LayerSettings(NamedTuple):
    """The settings of one layer, made by ``use_sparse_flash``.

    needs_positions: whether the mask depends on more than the distance of query and key. packed: whether compiled code expects
    packed sequences. refuses_causal: whether the mask looks ahead although ``bidirectional`` was not given, which a causal layer
    refuses. within_causal: whether the mask never looks ahead; False for the model's own. plan: replaces the mask if several ranks
    share the sequence. prompt_choice: for a mask with choosers. dense_settings: the settings of calls that do not choose.
    """

    mask: Pattern | str | BlockMask
    backend: str = "auto"
    deterministic: bool | None = None
    precision: str | None = None
    needs_positions: bool = False
    packed: bool = False
    refuses_causal: bool = False
    within_causal: bool = False
    plan: SharedSequence | None = None
    prompt_choice: PromptChoice | None = None
    dense_settings: LayerSettings | None = None


class LayerCall(NamedTuple):
    """One call of a layer. query, key, value: (batch, heads, tokens, head_dim). sinks: (heads,) sink logits."""

    settings: LayerSettings
    module: Any
    model_mask: ModelMask
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float | None
    dropout: float
    softcap: float | None
    sinks: torch.Tensor | None

    def options(self) -> dict[str, Any]:
        """Returns the keywords of ``sparse_flash.attention``, except lengths."""
        return {
            "scale": self.scale,
            "dropout_p": self.dropout,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "deterministic": self.settings.deterministic,
            "precision": self.settings.precision if self.query.shape[2] > MAX_QUERIES else None,
            "backend": self.settings.backend,
        }


def attend_layer(module, query, key, value, attention_mask, **options):
    """Attends for Transformers, which calls it: query (batch, heads, tokens, head_dim). Returns (batch, tokens, heads, head_dim),
    None."""
    settings = getattr(module, SETTINGS, None)
    if settings is None:
        return _attend_as_before(module, query, key, value, attention_mask, **options)
    if settings.prompt_choice is not None and settings.prompt_choice.why_dense(attention_mask, query, key):
        settings = settings.dense_settings
    outside = torch.compiler.is_compiling() and not _is_traceable(settings, attention_mask, query, key, **options)
    attend = _attend_outside_graphs if outside else _attend_switched
    return attend(settings, module, query, key, value, attention_mask, **options).transpose(1, 2).contiguous(), None


def _is_traceable(settings: LayerSettings, model_mask, query, key, dropout=0.0, softcap=None, **_) -> bool:
    """Whether the call reads no values, which compiled code cannot do."""
    if model_mask is None or settings.plan is not None:
        return True
    if not isinstance(model_mask, ModelMask) or model_mask.kept_pairs is not None:
        return False
    if settings.prompt_choice is not None and (model_mask.key_starts is not None or model_mask.key_count is None):
        return False
    # Reading first_key_position specializes the graph on its value.
    if _needs_positions(settings, model_mask) and model_mask.first_key_position:
        return False
    one_run = model_mask.key_starts is None or (model_mask.q_length == 1 and not model_mask.is_chunked())
    decodes = model_mask.key_count_tensor is not None and one_run and not dropout and softcap is None and can_decode(query, key)
    whole = model_mask.q_length == model_mask.key_count
    moves = _needs_positions(settings, model_mask) and model_mask.first_token is not None and not whole
    return decodes or (not moves and (model_mask.key_count_tensor is None or _is_prompt(model_mask)))


def _needs_positions(settings: LayerSettings, model_mask: ModelMask) -> bool:
    """Whether the combined mask depends on more than the distance of query and key."""
    return settings.needs_positions or model_mask.is_chunked()


def _is_prompt(model_mask: ModelMask) -> bool:
    """Whether compiled code may specialize on the end of the queries in a static cache: it has one prompt, and then many tokens."""
    return model_mask.key_count is not None and model_mask.q_length > MAX_QUERIES


def _attend_switched(
    settings: LayerSettings, module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, s_aux=None,
    sliding_window=None, is_causal=None, position_ids=None, cu_seq_lens_q=None, cu_seq_lens_k=None, block_indices=None, **unknown
) -> torch.Tensor:  # fmt: skip
    """Attends by the first of these that the call needs: a plan, blocks that the layer chose, blocks that the mask chooses, packed
    sequences, rows. Returns (batch, heads, tokens, head_dim), as all functions below do.

    s_aux: (heads,) sink logits. cu_seq_lens_q, cu_seq_lens_k: (sequences + 1,) int32, where packed sequences start; if they are
    None, position_ids say so, (batch | 1, tokens). block_indices: (batch, kv_heads, tokens, n) int64, of layers that choose blocks
    of keys."""
    _refuse_unknown(module, unknown)
    if attention_mask is None:
        model_mask = assume_mask(module, query, key, sliding_window, is_causal)
    elif not isinstance(attention_mask, ModelMask):
        model_mask = convert_mask(attention_mask, query, key)
    elif attention_mask.key_count is None and not torch.compiler.is_compiling():
        model_mask = attention_mask.changed(key_count=int(attention_mask.key_count_tensor))  # made in compiled code
    else:
        model_mask = attention_mask
    call = LayerCall(settings, module, model_mask, query, key, value, scaling, dropout, softcap, s_aux)
    if settings.plan is not None:
        return _attend_by_plan(call, block_indices)
    _check_lengths(call)
    cu_seqlens = find_sequences(model_mask, query, position_ids, cu_seq_lens_q, cu_seq_lens_k, settings.packed)
    if block_indices is not None:
        return _attend_chosen_blocks(call, block_indices, cu_seqlens is not None)
    if settings.refuses_causal and model_mask.base == "causal":  # a causal layer that does not say so
        raise ValueError(future_error(f"the mask of {type(module).__name__}", settings.mask))
    if settings.within_causal and model_mask.kept_pairs is not None and model_mask.sees_both_ways:
        warn_of_lost_pairs(module, settings.mask)
    mask: _Mask = settings.mask
    if settings.prompt_choice is not None:
        _check_choice(call, cu_seqlens is not None)
        mask = settings.prompt_choice.spec
    elif isinstance(mask, str) and mask == OWN:
        mask = None if model_mask.base == "full" else model_mask.base
    return _attend_rows(call, mask) if cu_seqlens is None else _attend_packed(call, mask, cu_seqlens)


_attend_outside_graphs = torch.compiler.disable(_attend_switched)


def _refuse_unknown(module, options: dict[str, Any]) -> None:
    """Raises ValueError for options of unknown effect that are on. One that is off is None, or False for a switch."""
    unknown = sorted(
        name for name, value in options.items() if value is not None and value is not False and name not in _WITHOUT_EFFECT
    )
    if unknown:
        raise ValueError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which {NAME!r} does not support; use another "
            "implementation, such as model.set_attn_implementation('eager')"
        )


def _check_lengths(call: LayerCall) -> None:
    model_mask, q_length, kv_length = call.model_mask, call.query.shape[2], call.key.shape[2]
    if model_mask.refusal is not None:
        raise ValueError(model_mask.refusal)
    if (model_mask.q_length, model_mask.kv_length) != (q_length, kv_length):
        raise ValueError(
            f"{type(call.module).__name__} attends from {q_length} queries to {kv_length} keys under a mask for "
            f"{model_mask.q_length} and {model_mask.kv_length}, which {NAME!r} does not support; use another implementation, such "
            "as model.set_attn_implementation('sdpa')"
        )


def _check_choice(call: LayerCall, packed: bool) -> None:
    """Raises ValueError for calls whose blocks cannot be chosen. packed: whether a row has several sequences."""
    if packed:
        raise ValueError(
            "cu_seq_lens_q and position_ids must be of one sequence in each row if a layer's mask has a chooser, whose blocks lie "
            "within one sequence; got packed sequences; pad each sequence in a row of its own, or use a mask without choosers"
        )
    if call.model_mask.kept_pairs is not None:
        raise ValueError(
            "attention_mask must be 2-D with one run of ones in each row if a layer's mask has a chooser; got one of pairs, or one "
            "with zeros between ones; pad at the ends of rows, or use a mask without choosers. generate() makes a mask of its "
            "own where tokens equal pad_token_id"
        )


def _attend_rows(call: LayerCall, mask: _Mask) -> torch.Tensor:
    """Attends a batch of one sequence in each row, padded or not.

    The positions of masks and chunks count from each sequence's first token, and so do the blocks of a chooser. If padding comes
    before it, decoding starts there, and the tokens of a prompt move to the front if that means the same; otherwise each sequence
    is attended by itself.
    """
    model_mask, (key, value, kv_lens) = call.model_mask, _cut_cache(call)
    if kv_lens is not None or _can_decode_rows(call, key, mask):
        return _decode(call, key, value, model_mask.intersect(mask, key.device), kv_lens)
    if call.settings.prompt_choice is not None and model_mask.key_starts is not None:
        return _attend_padded(call, mask)
    # Compiled code cannot read whether there is padding.
    padded = model_mask.first_token is not None if torch.compiler.is_compiling() else model_mask.left_padding
    if padded and _needs_positions(call.settings, model_mask):
        is_whole = model_mask.q_length == model_mask.key_count and not model_mask.first_key_position
        if not is_whole or model_mask.kept_pairs is not None:
            return _attend_padded(call, mask)
        first, count = model_mask.first_token, model_mask.key_stops - model_mask.key_starts
        query, key, value = (_roll_tokens(t, first) for t in (call.query, key, value))
        out = _attend(call, query, key, value, model_mask.intersect(mask, key.device), q_lens=count, kv_lens=count)
        return _roll_tokens(out, -first)
    return _attend(call, call.query, key, value, model_mask.intersect(mask, key.device), **_lengths_of(model_mask))


class _TokenRun(NamedTuple):
    """Tokens of one sequence in a row of a batch: queries low to high, keys start to stop. position: the first key's, counted from
    the sequence's first token."""

    row: int
    low: int
    high: int
    start: int
    stop: int
    position: int


def _attend_padded(call: LayerCall, mask: _Mask) -> torch.Tensor:
    """Attends each sequence of a padded batch by itself."""
    if isinstance(mask, BlockMask):
        raise ValueError(
            "a layer's BlockMask must be of one length; got a batch padded on the left, with a cache, padding between tokens or "
            "limits of the model's own; pass the pattern itself, which counts from each sequence's first token"
        )
    model_mask = call.model_mask
    earlier = model_mask.key_count - model_mask.q_length
    runs = []
    for row, (first, start, stop) in enumerate(model_mask.sequences):
        low, high = max(0, start - earlier), max(0, start - earlier, stop - earlier)
        runs.append(_TokenRun(row, low, high, start, stop, model_mask.first_key_position + start - first))
    return _attend_runs(call, mask, runs)


def _attend_runs(call: LayerCall, mask: _Mask, runs: list[_TokenRun]) -> torch.Tensor:
    """Attends runs of tokens one by one, so their positions and blocks start with their sequences. Other tokens get 0."""
    (batch, _, tokens, _), kept, choice = call.query.shape, call.model_mask.kept_pairs, call.settings.prompt_choice
    pieces, done = [], 0
    for row, low, high, start, stop, position in runs:
        fields: dict[str, Any] = {"q_length": high - low, "kv_length": stop - start, "key_count": stop - start}
        fields |= {"first_key_position": position, **dict.fromkeys(("key_count_tensor", "key_starts", "key_stops", "first_token"))}
        if kept is not None:
            fields["kept_pairs"] = kept.expand(batch, -1, tokens, -1)[row, None, :, low:high, start:stop]
        query, key, value = call.query[row, None, :, low:high], *(t[row, None, :, start:stop] for t in (call.key, call.value))
        one = call._replace(query=query, key=key, value=value, model_mask=call.model_mask.changed(**fields))
        is_dense = choice is not None and choice.why_dense(one.model_mask, query, key)
        out = _attend_rows(one, choice.dense if choice is not None and is_dense else _mask_of_rows(mask, [row], batch))
        pieces.append(pad(out, (0, 0, row * tokens + low - done, 0)))
        done = row * tokens + high
    out = pad(torch.cat(pieces, 2), (0, 0, 0, batch * tokens - done))
    return torch.unflatten(out[0], 1, (batch, tokens)).transpose(0, 1)


def _mask_of_rows(mask: Any, rows: list[int], batch: int) -> _Mask:
    """Returns the mask of sequences that are in these rows of the batch: of one that differs between rows, one for each."""
    pattern = parse(mask) if isinstance(mask, str) else mask
    if not isinstance(pattern, PerBatch):
        return mask
    if len(pattern.patterns) not in (1, batch):
        raise ValueError(f"per_batch must be for the batch's {batch} sequences; got {len(pattern.patterns)} patterns")
    return PerBatch(tuple(pattern.patterns[row % len(pattern.patterns)] for row in rows))


def _attend(call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **lengths) -> torch.Tensor:
    return cast(torch.Tensor, attention(query, key, value, mask, **lengths, **call.options()))


def _lengths_of(model_mask: ModelMask) -> dict[str, torch.Tensor]:
    """Returns the keywords of ``attention`` that say which tokens exist."""
    starts, stops = model_mask.key_starts, model_mask.key_stops
    if starts is None:
        return {}
    earlier = model_mask.key_count - model_mask.q_length  # the last query aligns with the last key
    return {"kv_starts": starts, "kv_lens": stops, "q_starts": starts - earlier, "q_lens": (stops - earlier).clamp(min=0)}


def _can_decode_rows(call: LayerCall, key: torch.Tensor, mask: object) -> bool:
    """Whether ``attention_decode`` supports the call, whose sequences may have padding before them."""
    model_mask = call.model_mask
    if call.dropout or call.softcap is not None or model_mask.kept_pairs is not None:
        return False
    if not is_decode_step(call.query, key, mask):
        return False
    if model_mask.first_key_position and _needs_positions(call.settings, model_mask):
        return False
    return model_mask.key_starts is None or (
        not model_mask.is_chunked() and (call.query.shape[2] == 1 or not model_mask.ends_early)
    )


def _decode(call: LayerCall, key: torch.Tensor, value: torch.Tensor, mask, kv_lens: torch.Tensor | None) -> torch.Tensor:
    """Attends the newest tokens to a cache. kv_lens: if compiled code could not cut it; see ``_cut_cache``."""
    starts, stops = (None, None) if isinstance(mask, BlockSelection) else (call.model_mask.key_starts, call.model_mask.key_stops)
    options: dict[str, Any] = {"kv_lens": kv_lens if stops is None else stops, "kv_starts": starts}
    options |= {"scale": call.scale, "backend": call.settings.backend}
    out, lse = attention_decode(call.query, key, value, mask, return_lse=True, **options)
    return out if call.sinks is None else with_sinks(out, lse, call.sinks, None)[0]


def _cut_cache(call: LayerCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns (key, value, kv_lens) without what lies past the end of a static cache. kv_lens: (batch,) int32 in compiled code,
    which cannot cut key and value; otherwise None."""
    model_mask, key, value = call.model_mask, call.key, call.value
    if model_mask.key_count_tensor is not None and torch.compiler.is_compiling() and not _is_prompt(model_mask):
        return key, value, model_mask.key_count_tensor.to(torch.int32).expand(call.query.shape[0])
    if model_mask.key_count != model_mask.kv_length:
        key, value = key[:, :, : model_mask.key_count], value[:, :, : model_mask.key_count]
    return key, value, None


def _roll_tokens(tensor: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Rolls (batch, heads, tokens, head_dim): token ``by[b]`` of entry b comes first, and the tokens before it come last."""
    tokens = tensor.shape[2]
    token = (torch.arange(tokens, device=tensor.device) + by[:, None]) % tokens
    return tensor.gather(2, token[:, None, :, None].expand_as(tensor))  # take_along_dim fixes the length of a graph to one number


def _attend_chosen_blocks(call: LayerCall, block_indices: torch.Tensor, packed: bool) -> torch.Tensor:
    """Attends each query to the blocks that it chose, its own among them, up to the query."""
    settings, model_mask = call.settings, call.model_mask
    unsupported = {
        "a mask of its own: leave it out, or pass 'own' for this layer": settings.mask != OWN,
        "padding": model_mask.key_starts is not None,
        "packed sequences": packed,
        "a 4-D attention_mask": model_mask.kept_pairs is not None,
        "a window": bool(model_mask.limits()) or model_mask.base != "causal" or bool(model_mask.first_key_position),
        "dropout": call.dropout,
        "a soft cap": call.softcap,
        f"precision={settings.precision!r}": settings.precision,
    }
    if any(unsupported.values()):
        raise ValueError(
            f"{type(call.module).__name__} chooses blocks of keys, beside which {NAME!r} does not support "
            f"{next(name for name, used in unsupported.items() if used)}; or use another implementation, such as "
            "model.set_attn_implementation('eager')"
        )
    options: dict[str, Any] = {"q_len": call.query.shape[2], "kv_len": _cut_cache(call)[0].shape[2], "own": False, "check": False}
    selection: Any = BlockSelection.from_picks(block_indices, call.module.config.index_block_size, **options)
    return _attend_rows(call, selection)


def _attend_packed(call: LayerCall, mask: _Mask, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Attends each packed sequence as if it were alone, under the model's window too."""
    settings, batch = call.settings, call.query.shape[0]
    if settings.precision is not None:
        raise ValueError(
            f"precision={settings.precision!r} does not take packed sequences; pad each sequence in a row of its own and call "
            "one row at a time, or leave precision out of use_sparse_flash"
        )
    reason = _why_not_varlen(call, mask)
    if reason is not None:
        if torch.compiler.is_compiling():
            raise ValueError(f"packed sequences with {reason} are not supported in compiled code; call the model uncompiled")
        return _attend_documents(call, mask, cu_seqlens)
    q, k, v = (_pack(t) for t in (call.query, call.key, call.value))
    options: dict[str, Any] = {"scale": call.scale, "deterministic": settings.deterministic, "backend": settings.backend}
    options |= {"mask": call.model_mask.intersect(mask, q.device), "return_lse": True}
    out, lse = attention_varlen(q, k, v, cu_seqlens, **options)
    if call.sinks is not None:
        out = with_sinks(out.transpose(0, 1)[None], lse[None], call.sinks, None)[0][0].transpose(0, 1)
    return _unpack(out, batch)


def _pack(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, heads, tokens, head_dim) -> (all tokens, heads, head_dim)."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _unpack(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    return torch.unflatten(tensor, 0, (batch, -1)).transpose(1, 2)


def _attend_documents(call: LayerCall, mask: _Mask, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Attends packed sequences that ``attention_varlen`` does not take: as documents of a mask, or in rows of their own."""
    model_mask, batch, tokens = call.model_mask, len(call.query), call.query.shape[2]
    if model_mask.key_count != tokens or model_mask.first_key_position:
        raise ValueError(
            "position_ids, or cu_seq_lens_q, must be of one sequence where a call goes on from a cache, which does not say "
            "whose keys it holds; got packed sequences; pass them in the first call, or each with a cache of its own"
        )
    if isinstance(mask, BlockMask):
        raise ValueError("the layer's own mask is of packed sequences, and a BlockMask cannot be joined with it; pass a Pattern")
    # Sequences also end with their row, and padding before and after a row's tokens counts as sequences of no tokens.
    sequences = [[0, 0, tokens]] * batch if model_mask.first_token is None else model_mask.sequences
    exist = [(row * tokens + start, row * tokens + stop) for row, (_, start, stop) in enumerate(sequences)]
    bounds = sorted({*cu_seqlens.tolist(), *range(0, (batch + 1) * tokens, tokens), *chain.from_iterable(exist)})
    rows, lengths = [bound // tokens for bound in bounds[:-1]], list(map(sub, bounds[1:], bounds))
    counts = [n * (exist[row][0] <= bound < exist[row][1]) for row, bound, n in zip(rows, bounds, lengths, strict=False)]
    pattern = parse(mask) if isinstance(mask, str) else mask
    if model_mask.kept_pairs is None and not _needs_positions(call.settings, model_mask) and not isinstance(pattern, PerEntry):
        # Distances are the same on the whole axis, so documents are one more limit, in memory for the tokens alone.
        inner = [[bound - row * tokens for bound in bounds if row * tokens <= bound <= (row + 1) * tokens] for row in range(batch)]
        separate = PerBatch(tuple(documents(tuple(row)) for row in inner))
        mask = model_mask.intersect(separate if pattern is None else And.of(separate, pattern), call.query.device)
        return _attend(call, call.query, *_cut_cache(call)[:2], mask, **_lengths_of(model_mask))
    if model_mask.kept_pairs is not None:
        places = [(row, bound % tokens, bound % tokens + n) for row, bound, n in zip(rows, bounds, counts, strict=False) if n]
        return _attend_runs(call, mask, [_TokenRun(row, low, high, low, high, 0) for row, low, high in places])
    longest, device = max(lengths), call.query.device
    axis = lay_out_rows(torch.tensor(bounds, device=device), batch * tokens, longest, at_end=False)
    query, key, value = (axis.take(_pack(t[:, :, :tokens])) for t in (call.query, call.key, call.value))
    model_mask = model_mask.changed(q_length=longest, kv_length=longest, key_count=longest)
    count = torch.tensor(counts, dtype=torch.int32, device=device)
    mask = model_mask.intersect(_mask_of_rows(mask, rows, batch), device)
    return _unpack(axis.put_back(_attend(call, query, key, value, mask, q_lens=count, kv_lens=count), 0.0), batch)


def _why_not_varlen(call: LayerCall, mask: _Mask) -> str | None:
    """Names what ``attention_varlen`` does not support of a call; None if it supports all."""
    model_mask, by_entry = call.model_mask, isinstance(mask, PerEntry)
    unsupported = {
        "dropout": call.dropout,
        "a soft cap": call.softcap,
        "padding": model_mask.key_starts is not None,
        "a BlockMask, which is of one length,": isinstance(mask, BlockMask),
        "a pattern for each head or sequence": by_entry or (isinstance(mask, str) and mask.startswith(("per_head(", "per_batch("))),
        "a 4-D attention_mask": model_mask.kept_pairs is not None,
        "a cache": call.query.shape[2] != call.key.shape[2]
        or model_mask.first_key_position
        or model_mask.key_count_tensor is not None,
    }
    return next((name for name, used in unsupported.items() if used), None)


def _attend_by_plan(call: LayerCall, block_indices: torch.Tensor | None) -> torch.Tensor:
    """Calls ``plan.attention`` for a layer, whose mask was made for the tokens of this rank. Returns (batch, heads, tokens,
    head_dim). block_indices: the choice of a layer that chooses blocks, None for others. Raises ValueError for what a plan does not
    support, and for restrictions of the model that it cannot know."""
    plan, settings, model_mask = cast(SharedSequence, call.settings.plan), call.settings, call.model_mask
    unsupported = {
        "a soft cap": bool(call.softcap),
        "a 4-D attention_mask, or a config.attention_chunk_size shorter than the sequence": model_mask.kept_pairs is not None,
        "padding": model_mask.key_starts is not None,
        "a choice of blocks": block_indices is not None,
    }
    if any(unsupported.values()):
        names = ", ".join(name for name, used in unsupported.items() if used)
        raise ValueError(f"{names} cannot be used with a plan; call use_sparse_flash with a mask for that")
    limits = model_mask.limits(plan.q_len)
    if limits:
        setting = "sliding_window to None" if limits[0].startswith("local(") else f"attention_chunk_size to {plan.q_len}"
        raise ValueError(
            f"the layer's own mask is {' & '.join(limits)}, and a plan cannot be joined with it; make it part of the layer's mask "
            f"in the plan, and set the model's config.{setting}"
        )
    options: dict[str, Any] = {"scale": call.scale, "dropout_p": call.dropout, "sinks": call.sinks}
    options |= {"deterministic": settings.deterministic, "backend": settings.backend}
    return plan.attention(call.query, call.key, call.value, **options)


def _attend_as_before(module, query, key, value, attention_mask, **options):
    """Attends as before, for a module that was left unchanged."""
    before = getattr(module, PREVIOUS, None)
    if before is None:
        mask = "model" if hasattr(module.config, CONFIG_KEY) else "model, mask"
        raise ValueError(
            f"{type(module).__name__} was switched to {NAME!r} without a mask; call use_sparse_flash({mask}) to switch it. If "
            "another model was switched, the two were made of one config, where the choice is kept: copy.deepcopy(config) for each"
        )
    if isinstance(attention_mask, ModelMask):
        attention_mask = attention_mask.convert_for(before)
    functions = inspect.unwrap(type(module).forward).__globals__
    attend = functions["eager_attention_forward"] if before == "eager" else AttentionInterface()[before]
    return attend(module, query, key, value, attention_mask, **options)
