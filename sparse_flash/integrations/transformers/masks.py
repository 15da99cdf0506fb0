"""A model's own mask, read from the functions with which Transformers creates masks.

Transformers requests one mask for all layers of a kind (those with a window, those without), and passes it to attention. Here it
gets a ``ModelMask``, which holds spec text instead of a tensor of pairs.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ...compat.pytorch import assert_in_graph
from ...masks.block_mask import BlockMask
from ...masks.build import from_heads
from ...masks.cache import as_block_mask, compile_cached
from ...masks.memory import cached_until_cleared
from ...masks.parsing import parse
from ...masks.pattern import And, Pattern, PerHead
from ...masks.rules import move_pattern
from ...patterns import block_diagonal, full

_BLOCK = 128
# Pairs of a mask that is not a pattern, over all batch entries: a byte each, scanned on the host.
_MOST_PAIRS = 1 << 28

_NO_TENSOR = (
    "the model computes with its attention mask, which is no tensor under sparse_flash; use another implementation, such as "
    "model.set_attn_implementation('sdpa')"
)


class ModelMask(FlexBlockMask):
    """A model's own mask of (q_length, kv_length) pairs, created once per forward pass for the layers of one kind.

    base: "causal" or "full". limits: further restrictions, as spec texts or Patterns on absolute positions; each a tuple of one, or
    of one per batch entry. dense: a further restriction as a bool tensor, broadcastable to (batch, heads, q_length, kv_length);
    None for none.
    kv_offset: the position of the first key. end: the number of keys up to the last query's, or None if only ``end_tensor``, 0-d,
    knows; that is None if no key comes after.
    starts, stops: (batch,) int32, which keys exist; None for all up to ``end``.
    first: (batch,) integers, the position of each sequence's first token in the padded batch; None if that is 0.
    sequences: (batch | 1, q_length) integers, the packed sequence of each token, ascending; None for one sequence. In compiled code
    None too, as values cannot be read: see ``starts_in_graph``.
    refusal: why attention cannot apply it, or None. arguments: Transformers' arguments for the mask.

    It subclasses FlexAttention's mask because ``generate()`` creates the masks of static caches before it calls the model, which
    accepts only tensors and that class as prebuilt masks. An ordinary class with ordinary fields, which torch.compile can create
    and read.
    """

    def __init__(
        self,
        q_length,
        kv_length,
        base="full",
        limits=(),
        dense=None,
        kv_offset=0,
        end=None,
        end_tensor=None,
        starts=None,
        stops=None,
        refusal=None,
        arguments=None,
    ):
        self.q_length, self.kv_length, self.kv_offset = q_length, kv_length, kv_offset
        self.base, self.limits, self.dense = base, limits, dense
        self.end, self.end_tensor = end, end_tensor
        self.starts, self.stops = starts, stops
        self.first = self.sequences = None
        self.refusal, self.arguments = refusal, arguments
        self._made = {}

    @property
    def shape(self):
        return (1, 1, self.q_length, self.kv_length)

    def contiguous(self) -> ModelMask:
        return self

    def to(self, device, **kwargs) -> ModelMask:
        moved = object.__new__(ModelMask)
        for name, value in vars(self).items():
            setattr(moved, name, value.to(device) if isinstance(value, torch.Tensor) else value)
        moved._made = {}
        return moved

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise ValueError(_NO_TENSOR)

    def __getitem__(self, index):
        raise ValueError(_NO_TENSOR)

    def __repr__(self):
        return f"ModelMask(base={self.base!r}, limits={self.limits}, q_length={self.q_length}, kv_length={self.kv_length})"

    def made_for(self, implementation: str):
        """The same mask in the form for another attention implementation of Transformers."""
        if implementation not in self._made:
            make = AttentionMaskInterface()[implementation]
            made = make(**self.arguments)
            if torch.compiler.is_compiling():
                return made
            self._made[implementation] = made
        return self._made[implementation]

    def with_end_read(self) -> ModelMask:
        """This mask, made in compiled code, for code outside of it, which can read ``end_tensor``."""
        one = copy(self)
        one._made, one.end = {}, int(self.end_tensor)
        return one

    def packed(self, sequences: torch.Tensor) -> ModelMask:
        """This mask for packed sequences: see ``sequences``."""
        if self.end != self.q_length or self.kv_offset:
            raise ValueError(
                "position_ids, or cu_seq_lens_q, must be of one sequence where a call goes on from a cache, which does not say "
                "whose keys it holds; got packed sequences; pass them in the first call, or each with a cache of its own"
            )
        one = copy(self)
        one._made, one.sequences = {}, sequences
        return one

    def split_by_positions(self, position_ids: torch.Tensor | None) -> ModelMask:
        """This mask for the sequences that a layer's position_ids tell apart, whatever the mask function knows of them.

        A 4-D attention_mask says itself who sees whom. Values are read once for all layers of a kind.
        """
        own_pairs = self.arguments is None and self.dense is not None
        if self.sequences is not None or position_ids is None or not self._is_per_query(position_ids) or own_pairs:
            return self
        known = self._made.get("packed")
        if known is None or known[0] is not position_ids:
            starts = self._find_starts(position_ids)
            known = self._made["packed"] = position_ids, self.packed(starts.cumsum(1)) if starts[:, 1:].any() else self
        return known[1]

    def bounds(self, batch: int) -> torch.Tensor:
        """``bounds_of`` the packed sequences, for code that is not compiled."""
        if "bounds" not in self._made:
            starts = torch.nn.functional.pad(self.sequences.diff() != 0, (1, 0), value=True)
            self._made["bounds"] = bounds_of(starts.expand(batch, -1))
        return self._made["bounds"]

    def _is_per_query(self, position_ids: torch.Tensor) -> bool:
        """Whether they are (q_length,) or (batch | 1, q_length), and more than one."""
        return position_ids.dim() < 3 and position_ids.shape[-1] == self.q_length > 1

    def _find_starts(self, position_ids: torch.Tensor) -> torch.Tensor:
        """(batch | 1, q_length) bool: whether a sequence starts with this token, as the first does, and any token whose position is
        not past that of the last existing token before it."""
        positions = position_ids.view(-1, self.q_length)
        earlier, padding = positions[:, :-1], (self.arguments or {}).get("attention_mask")
        before = later = torch.ones_like(earlier, dtype=torch.bool)
        if padding is not None:
            token = torch.arange(self.q_length, device=positions.device)
            exist = padding.bool()[:, (token + self.arguments["q_offset"]).clamp(max=padding.shape[1] - 1)]
            last = torch.where(exist, token, -1).cummax(1).values[:, :-1]
            before, later = last >= 0, exist[:, 1:]
            earlier = positions.expand(exist.shape[0], -1).gather(1, last.clamp(min=0))
        return torch.nn.functional.pad((positions[:, 1:] <= earlier) & before & later, (1, 0), value=True)

    def starts_in_graph(self, position_ids: torch.Tensor | None) -> torch.Tensor | None:
        """(batch | 1, q_length) bool, for compiled code: whether a sequence starts with this token, by the mask function or by
        position_ids; None if all tokens are known to be of one. It stores nothing, as layers may be checkpointed."""
        starts = None
        if position_ids is not None and self._is_per_query(position_ids):
            starts = self._find_starts(position_ids)
        if self.arguments is not None and self.arguments.get("attention_mask") is None and _may_be_packed(self.arguments):
            apart = torch.nn.functional.pad(~_sees_previous(self.arguments), (1, 0), value=True)
            starts = apart if starts is None else starts | apart
        return starts

    def separate_sequences(self, mask) -> tuple[ModelMask, Pattern | str | BlockMask | None]:
        """(this mask with packed sequences among its limits, ``mask``), for calls that are not ``attention_varlen``'s. Where a mask
        or a limit depends on positions, they count from the start of each sequence."""
        one = copy(self)
        one._made, one.sequences = {}, None
        restarts = depends_on_position(mask) and not isinstance(mask, BlockMask)
        moving = [limit for limit in self.limits if len(limit) > 1 or depends_on_position(limit[0])]
        # Chunks are moved to the first token, where sequences start anyway.
        inner = [*([mask] if restarts else []), *(getattr(limit[0], "pattern", limit[0]) for limit in moving)]
        own = And.of(*(parse(part) if isinstance(part, str) else part for part in inner)) if inner else None
        limits: list[Pattern | str] = []
        before = self.count_left_padding()
        rows = self.sequences.expand(max(len(before), self.sequences.shape[0]), -1).tolist()
        for row, first in zip(rows, before or [0] * len(rows), strict=True):
            starts = sorted({0, first, *(k for k in range(1, len(row)) if row[k] != row[k - 1])})
            apart = f"documents({[*starts, len(row)]})"
            limits.append(apart if own is None else And.of(parse(apart), own.map_leaves(partial(_Restarted, starts=tuple(starts)))))
        staying = tuple(limit for limit in self.limits if limit not in moving)
        one.limits = (*staying, tuple(limits) if len(set(limits)) > 1 else (limits[0],))
        return one, None if restarts else mask

    def count_left_padding(self) -> list[int]:
        """The tokens before each sequence's first one, read once for all layers of a kind; empty if there are none."""
        if "before" not in self._made:
            before = [] if self.first is None else self.first.tolist()
            self._made["before"] = before if any(before) else []
        return self._made["before"]

    def can_move_tokens(self) -> bool:
        """Whether moving each sequence's tokens to position 0 says the same: its own limits are windows, and no key was dropped."""
        windows = all(is_window(one) for limit in self.limits for one in limit)
        return windows and self.dense is None and not self.kv_offset

    def counted(self, mask) -> ModelMask:
        """This mask with ``mask`` among its limits, whose positions count from each sequence's first token."""
        key = "counted", mask
        if key not in self._made:
            if isinstance(mask, BlockMask):
                raise ValueError(
                    "a layer's BlockMask must be of one length; got a batch padded on the left, beside a cache, padding between "
                    "tokens or limits of the model's own; pass the pattern itself, which counts from each sequence's first token"
                )
            pattern = parse(mask) if isinstance(mask, str) else mask
            limits = tuple(move_pattern(pattern, before) for before in self.count_left_padding())
            one = self._made[key] = copy(self)
            one._made, one.first = {}, None
            one.limits = (*self.limits, limits[:1] if len(set(limits)) == 1 else limits)
        return self._made[key]

    def joined(self, mask, device: torch.device) -> Pattern | str | BlockMask | None:
        """The intersection of ``mask``, which replaces ``base``, and the model's other restrictions, for keys 0 .. end - 1.

        mask: a Pattern, spec text, a BlockMask of these lengths, or None for all pairs.
        """
        limits = [limit for limit in self.limits if len(limit) > 1 or not keeps_all(limit[0], self.kv_length)]
        if isinstance(mask, BlockMask) and self.end is not None and (mask.q_len, mask.kv_len) != (self.q_length, self.end):
            raise ValueError(
                f"a layer's BlockMask must fit its tokens; got one compiled for q_len={mask.q_len}, kv_len={mask.kv_len}; the "
                f"layer has {self.q_length} queries and {self.end} keys; pass the pattern itself, which is compiled for each length"
            )
        if isinstance(mask, BlockMask) and (limits or self.kv_offset):
            said = " & ".join(str(limit[0]) for limit in limits) or f"keys from position {self.kv_offset} on"
            windowed = ", or set the model's config.sliding_window to None" * said.startswith("local(")
            raise ValueError(f"the layer's own mask is {said}, and a BlockMask cannot be joined with it; pass a Pattern{windowed}")
        if self.dense is None and all(len(limit) == 1 for limit in limits):
            return joined(mask, tuple(limit[0] for limit in limits), self.kv_offset)
        key = mask, device
        if key not in self._made:
            self._made[key] = self._block_mask(mask, limits, device)
        return self._made[key]

    def _block_mask(self, mask, limits, device) -> BlockMask:
        each = tuple(
            joined(mask, tuple(limit[entry if len(limit) > 1 else 0] for limit in limits), self.kv_offset)
            for entry in range(max(map(len, limits), default=1))
        )
        if self.dense is None:
            return _compile_entries(each, self.q_length, self.end, device)
        if self.dense[..., :1, :1].numel() * self.q_length * self.end > _MOST_PAIRS:
            raise ValueError(
                f"the model's mask is not a pattern, and {self.q_length} x {self.end} pairs of each of "
                f"{self.dense.shape[0]} sequences are too many to keep one by one; use shorter sequences or smaller batches"
            )
        kept = self.dense[..., : self.end].to(device).expand(-1, -1, self.q_length, -1)
        if len(each) > 1:
            kept = kept & _compile_entries(each, self.q_length, self.end, device).to_dense()
        elif (pattern := each[0]) is not None:
            compiled = (
                pattern if isinstance(pattern, BlockMask) else compile_cached(pattern, self.q_length, self.end, _BLOCK, device)
            )
            kept = kept & compiled.to_dense()
        return BlockMask.from_dense(kept, _BLOCK)


def create_model_mask(**arguments) -> ModelMask:
    """The function that Transformers calls to create a mask."""
    q_length, kv_length, kv_offset = (arguments[name] for name in ("q_length", "kv_length", "kv_offset"))
    if isinstance(arguments["q_offset"], torch.Tensor):  # of a static cache, which adds to it before a layer attends
        arguments["q_offset"] = arguments["q_offset"].clone()
    mask = ModelMask(q_length, kv_length, kv_offset=kv_offset, arguments=arguments)
    _set_end(mask, arguments["q_offset"])
    if torch.compiler.is_compiling():
        mask.base, limit = _read_arguments(arguments)
        mask.limits = () if limit is None else ((limit,),)
        _check_extra_keys(mask)
        if arguments.get("attention_mask") is not None:
            _set_tokens(mask, arguments["attention_mask"].bool())
        return mask
    read = _MaskReader(arguments["batch_size"])
    read.function(arguments["mask_function"])
    mask.base, mask.limits, mask.sequences = read.base, tuple(read.limits), read.sequences
    if not read.unknown:
        _check_extra_keys(mask)
    padding = arguments.get("attention_mask")
    if read.unknown:
        mask.base, mask.limits, mask.sequences = "full", (), None
        mask.dense = sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        mask.first = None if padding is None else padding.bool().int().argmax(1)
    elif padding is not None:
        total = kv_offset + kv_length if mask.end is None else kv_offset + mask.end
        exist = padding[:, :total].bool()
        if exist.shape[1] < total:
            mask.refusal = (
                f"attention_mask must be of all {total} tokens so far, those in the cache too; got shape {tuple(padding.shape)}"
            )
        elif not exist.all():
            _set_tokens(mask, exist, check=True)
    return mask


def _set_end(mask: ModelMask, q_offset) -> None:
    """q_offset: the position of the first query, an int, or a tensor if the cache's length is one."""
    if isinstance(q_offset, torch.Tensor):
        mask.end_tensor = q_offset + (mask.q_length - mask.kv_offset)
        if not torch.compiler.is_compiling():
            mask.end = int(mask.end_tensor)
    else:
        mask.end = q_offset + mask.q_length - mask.kv_offset
        if mask.end != mask.kv_length:
            mask.end_tensor = torch.full((), mask.end, device=mask.arguments["device"])
    if mask.end is not None and not 0 < mask.end <= mask.kv_length:
        mask.refusal = (
            f"the cache must hold the key of the last query; got {mask.kv_length} keys from position {mask.kv_offset} on, which "
            "end before; make it longer"
        )


def _check_extra_keys(mask: ModelMask) -> None:
    """If every token sees every other, keys past the queries' are not the future but extra ones, as in prefix tuning."""
    if mask.base == "full" and mask.end is not None and mask.end < mask.kv_length:
        mask.refusal = (
            f"a model that sees both ways must have a query for each key; got {mask.q_length} queries and {mask.kv_length} keys, "
            "as in prefix tuning; use another implementation: model.set_attn_implementation('sdpa')"
        )


def _set_tokens(mask: ModelMask, exist: torch.Tensor, check: bool = False) -> None:
    """Sets which keys exist, from (batch, tokens): as one run per sequence, otherwise key by key."""
    count = exist.sum(1, keepdim=True)
    first = exist.int().argmax(1, keepdim=True)
    mask.first = first.squeeze(1)
    token = torch.arange(exist.shape[1], device=exist.device)
    run = (token >= first) & (token < first + count)
    if torch.compiler.is_compiling():
        # Compiled code cannot read values, but can fail at run time.
        assert_in_graph((exist == run).all(), f"attention_mask has zeros between its ones; {_UNCOMPILED}")
    elif check and not torch.equal(exist, run):
        mask.dense = exist[:, None, None, mask.kv_offset :]
        return
    starts, stops = (t.squeeze(1) - mask.kv_offset for t in (first, first + count))
    stops = stops if mask.end is not None or mask.end_tensor is None else torch.minimum(stops, mask.end_tensor)
    mask.starts, mask.stops = (t.clamp(min=0).to(torch.int32) for t in (starts, stops))


_UNCOMPILED = "sparse_flash supports that only in a model that is not compiled"


PACKED_ERROR = (
    "position_ids are of packed sequences; in compiled code, pass cu_seq_lens_q and cu_seq_lens_k too "
    "(DataCollatorWithFlattening(return_flash_attn_kwargs=True)), or say use_sparse_flash(..., packed=True) and leave "
    "attention_mask and the cache out"
)


def _may_be_packed(arguments) -> bool:
    """Whether the mask function separates sequences by position_ids. The position_ids may still belong to one sequence."""
    q_length, size = arguments["q_length"], arguments.get("local_size")
    if arguments["mask_function"].__name__ != "and_mask" or q_length != arguments["kv_length"] or q_length < 2:
        return False
    # With chunks, the first token of one does not see the previous token either.
    return size is None or size != getattr(arguments.get("config"), "attention_chunk_size", None)


def _sees_previous(arguments) -> torch.Tensor:
    """(batch, q_length - 1) bool, by the model's own mask function, on the device."""
    device = arguments.get("device", "cpu")
    token = torch.arange(1, arguments["q_length"], device=device)
    batch = torch.arange(arguments["batch_size"], device=device)[:, None]
    seen = arguments["mask_function"](batch, torch.zeros_like(batch), token, token - 1)
    return seen.expand(arguments["batch_size"], -1)


def bounds_of(starts: torch.Tensor) -> torch.Tensor:
    """Returns the first token of each packed sequence among all tokens of the batch, then their end: (sequences + 1,) int32.

    starts: (batch, q_length) bool, whether a sequence starts with this token. In compiled code, which cannot read how many there
    are, (tokens + 1,): the sequences past the last are empty.
    """
    starts = starts.flatten()
    tokens = starts.shape[0]
    if not torch.compiler.is_compiling():
        return torch.nn.functional.pad(starts.nonzero().flatten(), (0, 1), value=tokens).to(torch.int32)
    # The first token of each sequence writes its place to the sequence's number; all others write past the end.
    number = torch.where(starts, starts.cumsum(0) - 1, tokens + 1)
    place = torch.arange(tokens, device=starts.device, dtype=torch.int32)
    return torch.full((tokens + 2,), tokens, dtype=torch.int32, device=starts.device).scatter(0, number, place)[:-1]


def _read_arguments(arguments) -> tuple[str, str | None]:
    """(base, limit) of a mask within torch.compile, which cannot inspect functions: from the arguments that Transformers passes
    along.

    Packed sequences cannot be distinguished from single ones there: see ``ModelMask.starts_in_graph``.
    """
    bidirectional = "allow_is_bidirectional_skip" in arguments
    size, config = arguments.get("local_size"), arguments.get("config")
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    unclear = size is not None and (size == window) == (size == chunk)
    if arguments.get("use_vmap") or unclear or arguments["mask_function"].__name__ == "or_mask":
        raise ValueError(
            "the model masks by functions of its own, which torch.compile cannot read; compile it with another attention "
            "implementation, or call it uncompiled"
        )
    base = "full" if bidirectional else "causal"
    if size is None:
        return base, None
    if size == chunk:
        if arguments.get("attention_mask") is not None:
            raise ValueError(
                "the model's chunks start with its sequences, and where those start torch.compile cannot read from attention_mask; "
                "leave attention_mask out, or call the model uncompiled"
            )
        return base, f"block_diagonal(block={size})"
    return base, f"local({size + 1 if bidirectional else size})"


def _is_counted_from_starts(positions: torch.Tensor) -> bool:
    """Whether positions, (batch, tokens), begin at 0, and again with each packed sequence: wherever they do not go on by one."""
    first = torch.cat([torch.ones_like(positions[:, :1], dtype=torch.bool), positions.diff() != 1], 1)
    return bool((positions[first] == 0).all())


class _MaskReader:
    """The parts of a mask function."""

    def __init__(self, batch: int):
        self.batch, self.base, self.unknown = batch, "full", False
        self.limits: list[tuple[Pattern | str, ...]] = []
        self.sequences: torch.Tensor | None = None

    def function(self, function) -> None:
        code = getattr(function, "__code__", None)
        if code is None:  # such as a partial
            self.unknown = True
            return
        name = function.__qualname__.removesuffix(".<locals>.inner_mask")
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        held = {variable: cell.cell_contents for variable, cell in cells}
        if name == "causal_mask_function":
            self.base = "causal"
        elif name == "bidirectional_mask_function":
            pass
        elif name == "and_masks.<locals>.and_mask":
            for part in held["mask_functions"]:
                self.function(part)
        elif name == "sliding_window_overlay":
            self.limits.append((f"local({held['sliding_window']})",))
        elif name == "sliding_window_bidirectional_overlay":
            self.limits.append((f"local({held['sliding_window'] + 1})",))
        elif name == "chunked_overlay":
            self.chunks(held["chunk_size"], held["left_padding"].tolist())
        elif name == "packed_sequence_mask_function":
            numbers = held["packed_sequence_mask"]
            self.sequences = None if bool((numbers == numbers[:, :1]).all()) else numbers
        elif name == "remap_positions_for_packed_sequence":
            # The distance of two tokens of one sequence does not change; another restriction separates sequences. What depends on
            # positions counts from the start of each, as long as these positions do.
            before = len(self.limits)
            self.function(held["mask_function"])
            if any(len(limit) > 1 or depends_on_position(limit[0]) for limit in self.limits[before:]):
                self.unknown |= not _is_counted_from_starts(held["position_ids"])
        else:
            self.unknown = True

    def chunks(self, size: int, left_padding: list[int]) -> None:
        """Chunks are counted from the first token of each sequence."""
        limits = tuple(
            str(block_diagonal(size)) if left % size == 0 else move_pattern(block_diagonal(size), left) for left in left_padding
        )
        self.limits.append(limits[:1] if len(set(limits)) == 1 else limits)


def assume_mask(module, query, key, sliding_window, is_causal) -> ModelMask:
    """The mask of a layer that receives none: causal if the layer is, with the last query aligned to the last key."""
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    q_length, kv_length = query.shape[2], key.shape[2]
    limits = () if sliding_window is None else ((f"local({sliding_window})",),)
    return ModelMask(q_length, kv_length, base="causal" if causal else "full", limits=limits, end=kv_length)


def convert_mask(mask: torch.Tensor, query, key) -> ModelMask:
    """The mask of a tensor of pairs passed to the model, True or 0 where a pair is kept; converted once per tensor, but in each
    layer for one made in inference mode, which does not count the writes to it."""
    known = None if mask.is_inference() else getattr(mask, "_sparse_flash", None)
    if known is not None and known[0] == mask._version:
        return known[1]
    q_length, kv_length = query.shape[2], key.shape[2]
    shape = tuple(mask.shape)
    fits = mask.dim() == 4 and shape[2] in (1, q_length) and shape[3] == kv_length
    if not fits or shape[0] not in (1, query.shape[0]) or shape[1] not in (1, query.shape[1]):
        raise ValueError(
            f"the model passes an attention mask of shape {shape} for {q_length} queries and {kv_length} keys; sparse_flash takes "
            f"(batch | 1, heads | 1, {q_length}, {kv_length})"
        )
    kept = mask.detach() if mask.dtype == torch.bool else mask == 0  # another tensor object, as the mask will hold this one
    if mask.is_floating_point():
        if not (kept | (mask <= torch.finfo(mask.dtype).min / 2)).all():
            raise ValueError(
                "the model passes an attention mask that adds numbers other than 0 and -inf to scores, which a mask of pairs "
                "cannot express; use another implementation, such as model.set_attn_implementation('eager')"
            )
    elif mask.dtype != torch.bool:
        raise ValueError(f"an attention mask of pairs must be bool, or 0 and -inf in a floating-point type; got {mask.dtype}")
    own = ModelMask(q_length, kv_length, dense=kept, end=kv_length)
    if not mask.is_inference():
        mask._sparse_flash = mask._version, own  # type: ignore[attr-defined]  # cached on the tensor
    return own


def depends_on_position(mask) -> bool:
    """Whether a mask depends on more than the distance of query and key."""
    mask = parse(mask) if isinstance(mask, str) else mask
    return mask is not None and (isinstance(mask, BlockMask) or move_pattern(mask, 1) != mask)


def is_window(limit: str | Pattern) -> bool:
    return isinstance(limit, str) and limit.startswith("local(")


def keeps_all(limit: str | Pattern, kv_length: int) -> bool:
    """Whether the limit is a window that covers all keys."""
    return is_window(limit) and int(str(limit)[6:-1]) >= kv_length


def joined(mask, limits: tuple, offset: int = 0):
    """The intersection of a mask and its restrictions, whose positions count from offset; text if all of them are text."""
    if torch.compiler.is_compiling() or not offset:
        if not limits:
            return mask
        if isinstance(mask, str | None) and all(isinstance(limit, str) for limit in limits):
            return " & ".join(f"({one})" for one in (mask, *limits) if one is not None)
    return mask if mask is None and not limits else _joined_patterns(mask, limits, offset)


@cached_until_cleared(maxsize=1024)
def _joined_patterns(mask, limits, offset) -> Pattern:
    patterns = [parse(one) if isinstance(one, str) else one for one in (mask, *limits) if one is not None]
    return move_pattern(And.of(*patterns), -offset)


@dataclass(frozen=True)
class _Restarted(Pattern):
    """A pattern whose positions count from the start of each packed sequence. starts: ascending, from 0."""

    pattern: Pattern
    starts: tuple[int, ...]

    def token_rule(self, q, kv):
        starts = np.asarray(self.starts)
        first = starts[np.searchsorted(starts, q, side="right") - 1]
        return self.pattern.token_rule(q - first, kv - first)


@cached_until_cleared(maxsize=64)
def _compile_entries(patterns: tuple, q_length: int, kv_length: int, device) -> BlockMask:
    """A mask with one pattern per batch entry, or one per head of each."""
    heads = max(len(pattern.patterns) if isinstance(pattern, PerHead) else 1 for pattern in patterns)
    every = [one for p in patterns for one in (p.patterns if isinstance(p, PerHead) else [full() if p is None else p] * heads)]
    compiled = {p: as_block_mask(p, q_length, kv_length, _BLOCK) for p in dict.fromkeys(every)}
    return from_heads([compiled[p] for p in every], len(patterns), heads).to(device)
