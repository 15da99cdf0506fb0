"""Calls of a switched model: a rank's share of its inputs, and the attention of each layer, which Transformers' attention interface
requests and ``sparse_flash.attention`` computes."""

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ...api.attention import attention
from ...api.decode import attention_decode
from ...api.shared import SharedSequence
from ...api.varlen import attention_varlen
from ...compat.names import NAMESPACE
from ...compat.pytorch import assert_in_graph
from ...core.definition import with_sinks
from ...core.results import merge_results
from ...decoding.arguments import MAX_QUERIES
from ...decoding.masks import can_decode
from ...masks.block_mask import BlockMask
from ...masks.parsing import parse
from ...masks.pattern import PerBatch, PerEntry
from ...selection.block_selection import BlockSelection, check_selection_block, normalize_picks
from ...selection.packed_selection import PackedSelection
from .given_masks import CONFIG_KEY, LayerSettings, future_error, settings_by_name
from .indexers import choose_blocks
from .layers import unsupported_error
from .model_mask import ModelMask, find_sequences, read_model_mask

# "block_sparse", or a name of a copy's own. If a name contains "flash", Transformers looks for a FlashAttention kernel.
NAME = NAMESPACE.replace("sparse_flash", "block_sparse").replace("flash", "")
# Attributes of attention modules, set by ``use_sparse_flash``.
SETTINGS = "_sparse_flash_settings"  # the LayerSettings of a switched one
PREVIOUS = "_sparse_flash_before"  # the implementation that an unchanged one had, if Transformers switches it with the others

# Keywords of transformers 5.23 that reach attention but do not change its result here: use_sparse_flash sets them (deterministic),
# or they serve other parts of a model, or other implementations.
_WITHOUT_EFFECT = {
    "cache_position", "deterministic", "kernel_options", "labels", "logits_to_keep", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "past_key_values", "return_dict", "seq_idx",
    "shift_labels", "use_cache",
}  # fmt: skip

_IGNORED = -100  # a label that counts for nothing, in Transformers' losses
# Arguments of models under a plan: arguments that are sharded, and arguments that mean the same on each rank.
_OF_TOKENS = {"input_ids", "inputs_embeds", "token_type_ids"}
_SHARED = {"labels", "num_items_in_batch", "output_hidden_states", "position_ids", "return_dict", "shift_labels", "use_cache"}


class LayerCall(NamedTuple):
    """One call of a layer."""

    settings: LayerSettings  # of the layer, or of its dense calls
    kept: Any  # what ``attention`` takes for their mask
    module: Any
    model_mask: ModelMask
    query: torch.Tensor  # (batch, heads, tokens, head_dim), as key and value
    key: torch.Tensor
    value: torch.Tensor
    options: dict[str, Any]  # keywords of ``attention``, ``attention_varlen`` and plans
    dropout: float
    softcap: float | None
    sinks: torch.Tensor | None  # (heads,)

    def needs_positions(self) -> bool:
        """Whether the combined mask depends on more than the distance of query and key."""
        return self.settings.needs_positions or self.model_mask.is_chunked()


def attend_layer(module, query, key, value, attention_mask, settings=None, **options):
    """Attends for Transformers: query (batch, heads, tokens, head_dim). Returns (batch, tokens, heads, head_dim), None."""
    settings = settings or getattr(module, SETTINGS, None)
    if settings is None:
        return _attend_as_before(module, query, key, value, attention_mask, **options)
    if settings.why_dense(attention_mask, query, key):
        settings = settings.dense
    may_break = torch.compiler.is_compiling() and settings.plan is None
    outside = may_break and not _is_traceable(settings, attention_mask, query, key, **options)
    attend = _attend_outside_graphs if outside else _attend_switched
    return attend(settings, module, query, key, value, attention_mask, **options).transpose(1, 2).contiguous(), None


def flash_attn_forward(module, *tensors, **options):
    """Attends like ``attend_layer``. Transformers looks for this name in a kernel that it loads: attn_implementation="org/name"."""
    return attend_layer(module, *tensors, settings=settings_by_name(module), **options)


def _is_traceable(settings: LayerSettings, model_mask, query, key, dropout=0.0, softcap=None, **others) -> bool:
    """Whether the call reads no values, which compiled code cannot do."""
    in_rows = getattr(model_mask, "key_starts", None) is None and others.get("cu_seq_lens_q") is None
    if others.get("block_indices") is not None and not in_rows:
        return False
    if model_mask is None:
        return True
    if not isinstance(model_mask, ModelMask) or model_mask.kept_pairs is not None:
        return False
    if settings.dense is not None and (model_mask.key_starts is not None or model_mask.key_count is None):
        return False
    # Reading first_key_position specializes the graph on its value.
    needs_positions = settings.needs_positions or model_mask.is_chunked()
    if needs_positions and model_mask.first_key_position:
        return False
    one_run = model_mask.key_starts is None or (model_mask.q_length == 1 and not model_mask.is_chunked())
    decodes = model_mask.key_count_tensor is not None and one_run and not dropout and softcap is None and can_decode(query, key)
    moves = needs_positions and model_mask.first_token is not None and model_mask.q_length != model_mask.key_count
    return decodes or (not moves and (model_mask.key_count_tensor is None or model_mask.is_prompt()))


def _attend_switched(
    settings: LayerSettings, module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, s_aux=None,
    sliding_window=None, is_causal=None, position_ids=None, cu_seq_lens_q=None, cu_seq_lens_k=None, block_indices=None, **unknown
) -> torch.Tensor:  # fmt: skip
    """Returns (batch, heads, tokens, head_dim), as all functions below do. block_indices: see ``_attend_chosen_blocks``."""
    # An option that is off is None, or False for a switch.
    used = sorted(name for name, one in unknown.items() if one is not None and one is not False and name not in _WITHOUT_EFFECT)
    if used:
        raise unsupported_error(module, f"passes {', '.join(used)} to its attention")
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    model_mask = read_model_mask(attention_mask, query, key, causal, sliding_window)
    kept = "causal" if settings.kept is None and model_mask.base == "causal" else settings.kept
    options = {"scale": scaling, "deterministic": settings.deterministic, "backend": settings.backend}
    call = LayerCall(settings, kept, module, model_mask, query, key, value, options, dropout, softcap, s_aux)
    if settings.plan is not None:
        return _attend_by_plan(call, settings.plan, block_indices)
    cu_seqlens = None
    if not isinstance(attention_mask, torch.Tensor):  # of pairs, which says all
        cu_seqlens = find_sequences(model_mask, query, position_ids, cu_seq_lens_q, cu_seq_lens_k)
    elif kept is not None:
        raise ValueError(
            f"attention_mask must be 2-D, (batch, tokens), or None under {settings.given}: pairs do not say where sequences start; "
            f"got shape {tuple(attention_mask.shape)}; pass BlockMask.from_dense(pairs) as the mask, or 'own' for this layer"
        )
    _check_call(call, cu_seqlens is not None)
    if not model_mask.ends_in_graph() and model_mask.key_count != model_mask.kv_length:  # a static cache
        call = call._replace(key=key[:, :, : model_mask.key_count], value=value[:, :, : model_mask.key_count])
    if block_indices is not None:
        return _attend_chosen_blocks(call, block_indices, position_ids, cu_seqlens)
    return _attend_rows(call) if cu_seqlens is None else _attend_packed(call, cu_seqlens)


_attend_outside_graphs = torch.compiler.disable(_attend_switched)


def _check_call(call: LayerCall, packed: bool) -> None:
    """Raises ValueError for masks that the call cannot have. packed: whether a row has several sequences."""
    mask, model_mask, layer = call.settings, call.model_mask, type(call.module).__name__
    if model_mask.refusal is not None:
        raise ValueError(model_mask.refusal)
    lengths, of_mask = (call.query.shape[2], call.key.shape[2]), (model_mask.q_length, model_mask.kv_length)
    if lengths != of_mask:
        raise unsupported_error(call.module, f"attends with lengths {lengths} of queries and keys under a mask for {of_mask}")
    if mask.looks_ahead and not mask.bidirectional and model_mask.base == "causal":  # a causal layer that does not say so
        raise ValueError(future_error(f"the mask of {layer}", mask.given))
    if mask.dense is not None and packed:
        raise ValueError(
            "cu_seq_lens_q and position_ids must be of one sequence in each row if a layer's mask has a chooser, whose blocks lie "
            "within one sequence; got packed sequences; pad each sequence in a row of its own, or use a mask without choosers"
        )
    if mask.dense is not None and model_mask.kept_pairs is not None:
        raise ValueError(
            "attention_mask must have one run of ones in each row if a layer's mask has a chooser; got zeros between ones, or a "
            "model whose own mask is no pattern; pad at the ends of rows, or use a mask without choosers. generate() makes a mask "
            "of its own where tokens equal pad_token_id"
        )


def _attend_rows(call: LayerCall) -> torch.Tensor:
    """Attends a batch of one sequence in each row. The positions of masks and chunks, and blocks of a chooser, count from its first
    token. After padding, a prompt's tokens move to the front if that means the same; otherwise each sequence is attended by itself.
    """
    model_mask = call.model_mask
    if model_mask.ends_in_graph() or _can_decode_rows(call):
        return _decode(call)
    # Compiled code cannot read whether there is padding.
    compiling = torch.compiler.is_compiling()
    padded = model_mask.first_token is not None if compiling else any(first for first, *_ in model_mask.sequences)
    moves = padded and call.needs_positions()
    is_whole = model_mask.q_length == model_mask.key_count and not model_mask.first_key_position and model_mask.kept_pairs is None
    if (call.settings.dense is not None and model_mask.key_starts is not None) or (moves and not is_whole):
        return _attend_runs(call, _find_runs(call))
    if moves:
        first, count = model_mask.first_token, model_mask.key_stops - model_mask.key_starts
        query, key, value = (_roll_tokens(t, first) for t in (call.query, call.key, call.value))
        out = _attend(call._replace(query=query, key=key, value=value), q_lens=count, kv_lens=count)
        return _roll_tokens(out, -first)
    return _attend(call, **model_mask.lengths())


def _attend(call: LayerCall, **lengths: torch.Tensor) -> torch.Tensor:
    """Calls ``attention`` within the model's own restrictions. lengths: its keywords that say which tokens exist."""
    mask = call.model_mask.intersect(call.kept, call.query.device)
    options: dict[str, Any] = {"dropout_p": call.dropout, "softcap": call.softcap, "sinks": call.sinks, **call.options, **lengths}
    precision = call.settings.precision if call.query.shape[2] > MAX_QUERIES else None
    return cast(torch.Tensor, attention(call.query, call.key, call.value, mask, precision=precision, **options))


def _find_runs(call: LayerCall, cu_seqlens: Any = None, position_ids: Any = None) -> list[tuple[int, ...]]:
    """Returns the runs of ``_attend_runs`` that have queries: the sequence of each row, or its packed sequences. position_ids: of
    the queries, (batch, tokens), instead of positions that count from a sequence's first token."""
    model_mask, (batch, _, tokens, _), runs = call.model_mask, call.query.shape, list[tuple[int, ...]]()
    earlier = model_mask.key_count - tokens
    if cu_seqlens is not None and (earlier or model_mask.first_key_position):
        raise ValueError(
            "position_ids, or cu_seq_lens_q, must be of one sequence where a call goes on from a cache, which does not say "
            "whose keys it holds; got packed sequences; pass them in the first call, or each with a cache of its own"
        )
    bounds = [] if cu_seqlens is None else cu_seqlens.tolist()
    for row, (first, start, stop) in enumerate(model_mask.sequences or [[0, 0, tokens]] * batch):
        position = model_mask.first_key_position + start - first
        within = {bound - row * tokens for bound in bounds if start < bound - row * tokens < stop}
        for low, high in pairwise(sorted({start, stop, *within})):
            if high > earlier:
                runs.append((row, max(0, low - earlier), high - earlier, low, high, position))
    if position_ids is not None:
        rows, lows = torch.tensor([run[:2] for run in runs], dtype=torch.int64, device=position_ids.device).view(-1, 2).T
        positions = position_ids[rows, lows].tolist()
        runs = [(*run[:5], one - (run[1] + earlier - run[3])) for run, one in zip(runs, positions, strict=True)]
    return runs


def _attend_runs(call: LayerCall, runs: Sequence[tuple[int, ...]], chosen: torch.Tensor | None = None) -> torch.Tensor:
    """Attends runs of tokens one by one, so their positions and blocks start with their sequences. Other tokens get 0. runs: in
    order, (row, first query, end of queries, first key, end of keys, position of the first key in its sequence). chosen: blocks of
    positions that the queries chose, (batch, kv_heads, tokens, n)."""
    if isinstance(call.kept, BlockMask):
        raise ValueError(
            "a layer's BlockMask must be of one length; got packed sequences, or a batch padded on the left, with a cache, padding "
            "between tokens or limits of the model's own; pass the pattern itself, which counts from each sequence's first token"
        )
    (batch, heads, tokens, _), settings, whole = call.query.shape, call.settings, call.model_mask.kept_pairs
    pattern = parse(call.kept) if isinstance(call.kept, str) else call.kept
    of_rows = pattern.patterns if isinstance(pattern, PerBatch) else (call.kept,)
    if len(of_rows) not in (1, batch):
        raise ValueError(f"per_batch must be for the batch's {batch} sequences; got {len(of_rows)} patterns")
    pieces, done = [call.value.new_empty(1, heads, 0, call.value.shape[3])], 0
    for row, low, high, start, stop, position in runs:
        fields: dict[str, Any] = {"q_length": high - low, "kv_length": stop - start, "key_count": stop - start}
        fields |= {"first_key_position": position, **dict.fromkeys(("key_count_tensor", "key_starts", "key_stops", "first_token"))}
        if whole is not None:
            fields["kept_pairs"] = whole.expand(batch, -1, tokens, -1)[row, None, :, low:high, start:stop]
        query, key, value = call.query[row, None, :, low:high], *(t[row, None, :, start:stop] for t in (call.key, call.value))
        model_mask = call.model_mask.changed(**fields)
        kept = settings.dense.kept if settings.dense and settings.why_dense(model_mask, query, key) else of_rows[row % len(of_rows)]
        one = call._replace(kept=kept, model_mask=model_mask, query=query, key=key, value=value)
        out = _attend_rows(one) if chosen is None else _attend_chosen_run(one, chosen[row, None, :, low:high])
        pieces.append(pad(out, (0, 0, row * tokens + low - done, 0)))
        done = row * tokens + high
    out = pad(torch.cat(pieces, 2), (0, 0, 0, batch * tokens - done))
    return torch.unflatten(out[0], 1, (batch, tokens)).transpose(0, 1)


def _can_decode_rows(call: LayerCall) -> bool:
    """Whether ``attention_decode`` supports the call, whose sequences may have padding before them."""
    model_mask = call.model_mask
    if call.dropout or call.softcap is not None or model_mask.kept_pairs is not None or isinstance(call.kept, BlockMask):
        return False
    if torch.compiler.is_compiling() or not can_decode(call.query, call.key):
        return False
    if model_mask.first_key_position and call.needs_positions():
        return False
    if model_mask.key_starts is None:
        return True
    at_end = model_mask.q_length == 1 or all(stop == model_mask.key_count for *_, stop in model_mask.sequences)
    return at_end and not model_mask.is_chunked()


def _decode(call: LayerCall) -> torch.Tensor:
    """Attends the newest tokens to a cache."""
    model_mask, mask = call.model_mask, call.model_mask.intersect(call.kept, call.query.device)
    starts, stops = model_mask.key_starts, model_mask.key_stops
    if stops is None and model_mask.ends_in_graph():
        stops = model_mask.key_count_tensor.to(torch.int32).expand(call.query.shape[0])
    options: dict[str, Any] = {name: call.options[name] for name in ("scale", "backend")}
    options |= {"kv_lens": stops, "kv_starts": starts, "return_lse": True}
    out, lse = attention_decode(call.query, call.key, call.value, mask, **options)
    return out if call.sinks is None else with_sinks(out, lse, call.sinks, None)[0]


def _roll_tokens(tensor: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Rolls (batch, heads, tokens, head_dim): token ``by[b]`` of entry b comes first, and the tokens before it come last."""
    tokens = tensor.shape[2]
    token = (torch.arange(tokens, device=tensor.device) + by[:, None]) % tokens
    return tensor.gather(2, token[:, None, :, None].expand_as(tensor))  # take_along_dim fixes the length of a graph to one number


def _attend_chosen_blocks(call: LayerCall, chosen: Any, position_ids: torch.Tensor | None, cu_seqlens: Any) -> torch.Tensor:
    """Attends each query to the blocks that it chose, which include the query's block, up to the query. As in the model, a block
    is of ``index_block_size`` positions from a multiple of it on; without position_ids, of so many keys of a row. chosen: (batch,
    kv_heads, tokens, n), or the indexer's queries and keys."""
    settings, model_mask = call.settings, call.model_mask
    unsupported = {
        "a mask of its own (leave it out, or pass 'own' for this layer)": settings.kept is not None,
        "a window": bool(model_mask.limits()) or model_mask.base != "causal" or bool(model_mask.first_key_position),
        "dropout": bool(call.dropout),
        "a soft cap": bool(call.softcap),
        "sinks": call.sinks is not None,
        "a 4-D attention_mask, or padding between tokens": model_mask.kept_pairs is not None,
        f"precision={settings.precision!r}": settings.precision,
    }
    if used := [name for name, used in unsupported.items() if used]:
        raise unsupported_error(call.module, f"chooses blocks of keys and has {used[0]}")
    (batch, _, tokens, _), keys, size = call.query.shape, call.key.shape[2], check_selection_block(call.module.indexer.block_size)
    runs = None
    if cu_seqlens is not None or (model_mask.key_starts is not None and any(first for first, *_ in model_mask.sequences)):
        position_ids = torch.arange(keys - tokens, keys)[None] if position_ids is None else position_ids
        runs = _find_runs(call, cu_seqlens, position_ids.expand(batch, -1))
    if isinstance(chosen, tuple):
        picks = choose_blocks(call.module.indexer, chosen[0], chosen[1][:, :, :keys], runs)
    else:
        # The model takes a key's index for its position. Elsewhere its scores are of other keys, unless queries choose all blocks.
        most = chosen.shape[3] * size
        for *_, start, stop, first in runs or ():
            if start != first and first + stop - start > most:
                raise ValueError(
                    f"position_ids must be indices in the row for a sequence of more than {most} tokens, as the model, which "
                    f"chooses, scores keys by index; got position {first} at index {start} of one of {stop - start} tokens; call "
                    "use_sparse_flash(model), uncompiled, to score by position, or give each sequence a row, padded on the right"
                )
        picks = normalize_picks(chosen, size, keys, False)
    if runs is None:  # padding comes after the tokens that exist
        whole = model_mask.changed(key_starts=None, key_stops=None, first_token=None)
        out = _attend_rows(call._replace(kept=BlockSelection(picks, tokens, keys, size), model_mask=whole))
        if model_mask.key_stops is None:
            return out
        exists = torch.arange(keys - tokens, keys, device=out.device) < model_mask.key_stops[:, None]
        return torch.where(exists[:, None, :, None], out, 0.0)
    of_rows = cu_seqlens is None or model_mask.key_starts is not None or model_mask.key_count_tensor is not None
    if of_rows or any(first for *_, first in runs):
        return _attend_runs(call, runs, picks)
    packed = PackedSelection(picks.transpose(0, 1).flatten(1, 2), cu_seqlens, batch * tokens, size)
    return _attend_packed(call._replace(kept=packed), cu_seqlens)


def _attend_chosen_run(call: LayerCall, picks: torch.Tensor) -> torch.Tensor:
    """Attends a sequence to blocks of positions. Keys of a block that begins before the first key are attended to apart."""
    size, first, keys = call.module.indexer.block_size, call.model_mask.first_key_position, call.key.shape[2]
    begun = -(-first // size)  # so many blocks begin before the first key
    apart = begun * size - first
    later = torch.where(picks < begun, -1, picks - begun)
    selection = BlockSelection.from_picks(later, size, kv_len=keys - apart, own=False) if apart < keys else None
    if not apart:
        return _attend_rows(call._replace(kept=selection, model_mask=call.model_mask.changed(first_key_position=0)))
    options = {**call.options, "return_lse": True}
    out, lse = attention(call.query, call.key, call.value, f"causal & sinks({apart})", **options)
    without = ~(picks == begun - 1).any(3).repeat_interleave(call.query.shape[1] // picks.shape[1], 1)
    if selection is None:
        return out.masked_fill(without[..., None], 0.0)
    more, log = attention(call.query, call.key[:, :, apart:], call.value[:, :, apart:], selection, **options)
    return merge_results(out, lse.masked_fill(without, float("-inf")), more, log)[0].to(out.dtype)


def _attend_packed(call: LayerCall, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Attends each packed sequence by itself, under the model's window too."""
    settings, (batch, _, tokens, _) = call.settings, call.query.shape
    if settings.precision is not None:
        raise ValueError(
            f"precision={settings.precision!r} does not take packed sequences; pad each sequence in a row of its own and call "
            "one row at a time, or leave precision out of use_sparse_flash"
        )
    kept, model_mask = call.kept, call.model_mask
    by_entry = isinstance(kept, PerEntry) or (isinstance(kept, str) and kept.startswith(("per_head(", "per_batch(")))
    of_varlen = {
        "dropout": call.dropout,
        "a soft cap": call.softcap,
        "padding": model_mask.key_starts is not None,
        "a mask of pairs": model_mask.kept_pairs is not None,
        "a BlockMask, which is of one length,": isinstance(kept, BlockMask),
        "a pattern for each head or sequence": by_entry,
        "a cache": tokens != call.key.shape[2] or model_mask.first_key_position or model_mask.key_count_tensor is not None,
    }
    if unsupported := [name for name, used in of_varlen.items() if used]:
        if torch.compiler.is_compiling():
            raise ValueError(f"packed sequences with {unsupported[0]} are not supported in compiled code; call it uncompiled")
        return _attend_runs(call, _find_runs(call, cu_seqlens))
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (call.query, call.key, call.value))  # (all tokens, heads, head_dim)
    mask: Any = model_mask.intersect(kept, q.device)
    out, lse = attention_varlen(q, k, v, cu_seqlens, mask=mask, return_lse=True, **call.options)
    if call.sinks is not None:
        out = with_sinks(out.transpose(0, 1)[None], lse[None], call.sinks, None)[0][0].transpose(0, 1)
    return torch.unflatten(out, 0, (batch, tokens)).transpose(1, 2)


def _attend_by_plan(call: LayerCall, plan: SharedSequence, block_indices: torch.Tensor | None) -> torch.Tensor:
    """Attends by a plan, under its own mask. Raises ValueError for what it does not support, and for restrictions of the model."""
    model_mask = call.model_mask
    unsupported = {
        "a soft cap": bool(call.softcap),
        "dropout, which config.attention_dropout or attn_pdrop sets,": bool(call.dropout),
        "a mask of pairs, or a config.attention_chunk_size shorter than the sequence": model_mask.kept_pairs is not None,
        "padding": model_mask.key_starts is not None,
        "a choice of blocks": block_indices is not None,
    }
    if used := [name for name, used in unsupported.items() if used]:
        raise ValueError(f"{', '.join(used)} cannot be used with a plan; call use_sparse_flash with a mask for that")
    if limits := model_mask.changed(kv_length=plan.q_len).limits():
        raise ValueError(
            f"the layer's own mask is {' & '.join(limits)}, and a plan cannot be joined with it; make it part of the layer's mask "
            "in the plan, and raise the model's config.sliding_window or attention_chunk_size to the sequence's length"
        )
    return plan.attention(call.query, call.key, call.value, sinks=call.sinks, **call.options)


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


def shard_arguments(
    plan: SharedSequence, module: PreTrainedModel, args: tuple[object, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns the keywords with which a model's ``forward`` gets this rank's tokens, positions and labels, which are shifted first.
    num_items_in_batch counts the labels of all ranks. Raises ValueError for arguments that cannot be shared."""
    signature = inspect.signature(module.forward)
    bound = signature.bind(*args, **kwargs).arguments
    rest = next((name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD), "")
    others = bound.pop(rest, {})
    given = {name: value for name, value in {**bound, **others}.items() if value is not None}
    padding = given.pop("attention_mask", None)
    if padding is not None and (padding.dim() != 2 or torch.compiler.is_compiling() or not padding.bool().all()):
        raise ValueError("a plan has no padding of its own; leave attention_mask out, and give padding the label -100")
    refused = [
        name for name, value in given.items() if name not in _OF_TOKENS | _SHARED and not (isinstance(value, int) and value == 0)
    ]
    if "output_router_logits" not in given and getattr(module.config, "output_router_logits", False):
        refused.append("config.output_router_logits")
    if refused:  # as they are on, and mean something else to a rank's tokens than to all
        raise ValueError(
            f"{', '.join(refused)} cannot be used with a plan, as a rank has some of the tokens only; leave it out or set it to "
            "False, put documents in the plan's mask, or call use_sparse_flash with a mask for that"
        )
    for name in _OF_TOKENS & given.keys():
        given[name] = plan.shard(given[name], 1)
    positions = given.get("position_ids")
    if positions is None:
        given["position_ids"] = plan.positions[None]
    else:
        # They restart only where a document of the plan starts. Compiled code cannot read values, and fails at run time.
        wrong = ((positions.diff() <= 0) & ~plan.document_starts[1:]).any()
        error = (
            "position_ids must restart only where a document of the plan's mask starts; put the documents in it: "
            "'causal & documents([0, ..., tokens])'"
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
