"""Finds the packed sequences of a call.

Sequences come from the first of these that the call has:

| source | uncompiled code | compiled code |
|---|---|---|
| cu_seq_lens_q | taken | taken |
| the model's mask function, if it separates sequences | read once | called for each token and the one before |
| position_ids of the layer: a sequence starts where they do not rise | read once | compared, beside the mask function |

Compiled code cannot read values. With ``use_sparse_flash(packed=True)`` it separates sequences wherever they start. Without, it
fails at run time if a row has more than one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from ...compat.pytorch import assert_in_graph
from .model_mask import SLICED_AND_PACKED, ModelMask

_PACKED_ERROR = (
    "position_ids are of packed sequences; in compiled code, pass cu_seq_lens_q and cu_seq_lens_k too "
    "(DataCollatorWithFlattening(return_flash_attn_kwargs=True)), or say use_sparse_flash(..., packed=True) and leave "
    "attention_mask and the cache out"
)


def find_sequences(
    model_mask: ModelMask,
    query: torch.Tensor,
    position_ids: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None,
    cu_seq_lens_k: torch.Tensor | None,
    packed: bool,
) -> torch.Tensor | None:
    """Returns the first token of each packed sequence among all tokens of the batch, then their end, (sequences + 1,) int32; None
    if each row is one sequence. packed: whether compiled code expects packed sequences.

    It reads position_ids once for all layers of a kind. In compiled code it stores nothing, as layers may be checkpointed.
    """
    batch = query.shape[0]
    if cu_seq_lens_q is not None:
        if cu_seq_lens_k is not None and cu_seq_lens_k is not cu_seq_lens_q:
            # Reading values on a GPU takes a synchronization in each layer.
            read = query.device.type == "cpu" and not torch.compiler.is_compiling()
            if cu_seq_lens_k.shape != cu_seq_lens_q.shape or (read and (cu_seq_lens_k != cu_seq_lens_q).any()):
                raise ValueError("cu_seq_lens_k must be equal to cu_seq_lens_q, as self-attention has one list; leave it out")
        return cu_seq_lens_q.to(query.device)
    if torch.compiler.is_compiling():
        if packed and position_ids is not None and position_ids.shape[-1] != model_mask.q_length:
            raise ValueError(SLICED_AND_PACKED)
        by_function, by_positions = _starts_by_function(model_mask.arguments), _starts_by_positions(model_mask, position_ids)
        starts = by_function if by_positions is None else by_positions if by_function is None else by_positions | by_function
        if starts is None:
            return None
        if packed and model_mask.key_starts is None and model_mask.q_length == model_mask.kv_length:
            return _bounds_of(starts.expand(batch, -1))
        assert_in_graph(~starts[:, 1:].any(), _PACKED_ERROR)
        return None
    if model_mask.found_sequences is None or model_mask.found_sequences[0] is not position_ids:
        starts = model_mask.sequence_starts
        starts = _starts_by_positions(model_mask, position_ids) if starts is None else starts
        found = None if starts is None or not starts[:, 1:].any() else _bounds_of(starts.expand(batch, -1))
        model_mask.found_sequences = position_ids, found
    return model_mask.found_sequences[1]


def _starts_by_positions(model_mask: ModelMask, position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """Returns whether a sequence starts with a token, (batch | 1, q_length) bool: with the first, and with any whose position is
    not past that of the last existing token before it. None if position_ids are not one for each query, or if the user gave a
    mask of pairs, which says itself who sees whom."""
    q_length, arguments = model_mask.q_length, model_mask.arguments or {}
    if position_ids is None or position_ids.dim() > 2 or not position_ids.shape[-1] == q_length > 1:
        return None
    if not arguments and model_mask.kept_pairs is not None:
        return None
    positions, padding = position_ids.view(-1, q_length), arguments.get("attention_mask")
    earlier = positions[:, :-1]
    before = later = torch.ones_like(earlier, dtype=torch.bool)
    if padding is not None:
        token = torch.arange(q_length, device=positions.device)
        exist = padding.bool()[:, (token + arguments["q_offset"]).clamp(max=padding.shape[1] - 1)]
        last = torch.where(exist, token, -1).cummax(1).values[:, :-1]
        before, later = last >= 0, exist[:, 1:]
        earlier = positions.expand(exist.shape[0], -1).gather(1, last.clamp(min=0))
    return pad((positions[:, 1:] <= earlier) & before & later, (1, 0), value=True)


def _starts_by_function(arguments: dict[str, Any] | None) -> torch.Tensor | None:
    """Returns whether a sequence starts with a token, (batch, q_length) bool, as the model's mask function separates it from the
    token before; None if the function separates no sequences. arguments: Transformers' for the mask."""
    if arguments is None or arguments.get("attention_mask") is not None or arguments["mask_function"].__name__ != "and_mask":
        return None
    q_length, size, batch = arguments["q_length"], arguments.get("local_size"), arguments["batch_size"]
    # With chunks, the first token of one does not see the previous token either.
    in_chunks = size is not None and size == getattr(arguments.get("config"), "attention_chunk_size", None)
    if in_chunks or not q_length == arguments["kv_length"] > 1:
        return None
    device = arguments.get("device", "cpu")
    token, entry = torch.arange(1, q_length, device=device), torch.arange(batch, device=device)[:, None]
    sees_previous = arguments["mask_function"](entry, torch.zeros_like(entry), token, token - 1).expand(batch, -1)
    return pad(~sees_previous, (1, 0), value=True)


def _bounds_of(starts: torch.Tensor) -> torch.Tensor:
    """Returns ``find_sequences`` of starts, (batch, q_length) bool. In compiled code, which cannot read how many sequences there
    are, (tokens + 1,): the sequences past the last are empty."""
    starts = starts.flatten()
    tokens = starts.shape[0]
    if not torch.compiler.is_compiling():
        return pad(starts.nonzero().flatten(), (0, 1), value=tokens).to(torch.int32)
    # The first token of each sequence writes its position to the sequence's number; all others write past the end.
    number = torch.where(starts, starts.cumsum(0) - 1, tokens + 1)
    token = torch.arange(tokens, device=starts.device, dtype=torch.int32)
    return torch.full((tokens + 2,), tokens, dtype=torch.int32, device=starts.device).scatter(0, number, token)[:-1]
