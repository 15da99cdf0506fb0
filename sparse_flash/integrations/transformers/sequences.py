"""Finds the packed sequences of a call: by its cu_seq_lens_q, otherwise by the model's mask function, if that separates sequences,
and the layer's position_ids, where they do not rise.

Compiled code cannot read values. With ``use_sparse_flash(packed=True)`` it separates sequences wherever they start. Without, it
fails at run time if a row has more than one.
"""

from __future__ import annotations

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
    compiling, held = torch.compiler.is_compiling(), model_mask.found_sequences
    if held is not None and held[0] is position_ids and not compiling:
        return held[1]
    if compiling and packed and position_ids is not None and position_ids.shape[-1] != model_mask.q_length:
        raise ValueError(SLICED_AND_PACKED)
    by_function, by_positions = model_mask.sequence_starts, _starts_by_positions(model_mask, position_ids)
    starts = by_function if by_positions is None else by_positions if by_function is None else by_positions | by_function
    if not compiling:
        found = None if starts is None or not starts[:, 1:].any() else _bounds_of(starts.expand(batch, -1))
        model_mask.found_sequences = position_ids, found
        return found
    if starts is None:
        return None
    if packed and model_mask.key_starts is None and model_mask.q_length == model_mask.kv_length:
        return _bounds_of(starts.expand(batch, -1))
    assert_in_graph(~starts[:, 1:].any(), _PACKED_ERROR)
    return None


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
