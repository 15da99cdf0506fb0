"""A model's own mask: the answer to Transformers, which requests one mask for all layers of a kind (those with a window, those
without), and passes it to attention. A ``ModelMask`` holds spec text instead of a tensor of pairs."""

from __future__ import annotations

import inspect
from functools import cached_property

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
from ...masks.pattern import Pattern, PerBatch, PerHead
from ...masks.rules import move_pattern
from .limits import is_window, keeps_all, limits_of_entry, restrict_mask
from .read_mask import MaskParts, read_arguments, read_function

_BLOCK = 128
# Pairs of a mask that is not a pattern, over all batch entries: a byte each, scanned on the host.
_MOST_PAIRS = 1 << 28

_NO_TENSOR = (
    "the model computes with its attention mask, which is no tensor under sparse_flash; use another implementation, such as "
    "model.set_attn_implementation('sdpa')"
)
SLICED_AND_PACKED = (
    "packed sequences must keep all of their queries in each layer; the model keeps the last ones; leave logits_to_keep out"
)


class ModelMask(FlexBlockMask):
    """A model's own mask of (q_length, kv_length) pairs, created once per forward pass for the layers of one kind.

    base: "causal" or "full". limits: further restrictions, as spec texts or Patterns on absolute positions; each a tuple of one, or
    of one per batch entry. kept_pairs: a further restriction as a bool tensor, broadcastable to (batch, heads, q_length,
    kv_length); None for none.
    first_key_position: of the first key. A cache of a window drops earlier keys.
    key_count: the number of keys up to the last query's. A static cache holds further ones. None if only ``key_count_tensor``, 0-d,
    knows; that is None if no key comes after.
    key_starts, key_stops: (batch,) int32, which keys exist; None for all up to ``key_count``.
    first_token: (batch,) integers, the position of each sequence's first token in the padded batch; None if that is 0.
    sequence_starts: (batch | 1, q_length) bool, where packed sequences start by the mask function; None for one sequence, and in
    compiled code: see ``sequences``.
    refusal: why attention cannot apply it, or None. arguments: Transformers' arguments for the mask.

    It subclasses FlexAttention's mask because ``generate()`` creates the masks of static caches before it calls the model, which
    accepts only tensors and that class as prebuilt masks. An ordinary class with ordinary fields, which torch.compile can create
    and read.
    """

    def __init__(
        self, q_length, kv_length, base="full", limits=(), kept_pairs=None, first_key_position=0, key_count=None,
        key_count_tensor=None, key_starts=None, key_stops=None, first_token=None, sequence_starts=None, refusal=None, arguments=None
    ):  # fmt: skip
        self.q_length, self.kv_length, self.first_key_position = q_length, kv_length, first_key_position
        self.base, self.limits, self.kept_pairs = base, limits, kept_pairs
        self.key_count, self.key_count_tensor = key_count, key_count_tensor
        self.key_starts, self.key_stops, self.first_token = key_starts, key_stops, first_token
        self.sequence_starts, self.refusal, self.arguments = sequence_starts, refusal, arguments
        # Made once for all layers of a kind, by uncompiled code.
        self.found_sequences = None  # (position_ids, what ``find_sequences`` found)
        self._converted, self._moved, self._tables = {}, {}, {}

    def changed(self, **fields) -> ModelMask:
        """Returns this mask with other fields."""
        return ModelMask(**{name: getattr(self, name) for name in _FIELDS} | fields)

    # What models read of a mask, as of a tensor; ``__getattr__`` refuses the rest.
    dtype, ndim = torch.bool, 4

    @property
    def shape(self):
        return (1, 1, self.q_length, self.kv_length)

    def dim(self) -> int:
        return 4

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> ModelMask:
        return self

    def to(self, device, **kwargs) -> ModelMask:
        return self.changed(**{name: one.to(device) for name, one in vars(self).items() if isinstance(one, torch.Tensor)})

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise ValueError(_NO_TENSOR)

    def __getattr__(self, name):
        raise AttributeError(f"{name}: {_NO_TENSOR}")

    def __getitem__(self, index):
        """Returns the mask of the last queries, ``mask[:, :, first:]``, or all of it. Raises ValueError for other indices."""
        rows = index[2] if isinstance(index, tuple) and len(index) == 4 else None
        if not isinstance(rows, slice) or index != (slice(None), slice(None), slice(rows.start, None), slice(None)):
            raise ValueError(_NO_TENSOR)
        first = rows.start or 0
        first = max(first + self.q_length, 0) if first < 0 else first
        if not first:
            return self
        q_length, kept, arguments = self.q_length - first, self.kept_pairs, self.arguments
        arguments = arguments | {"q_length": q_length, "q_offset": arguments["q_offset"] + first}
        kept = kept[:, :, first:] if kept is not None and kept.shape[2] > 1 else kept
        packed = self.sequence_starts is not None or (self.found_sequences or (None, None))[1] is not None
        refusal = SLICED_AND_PACKED if packed else self.refusal
        return self.changed(q_length=q_length, kept_pairs=kept, refusal=refusal, arguments=arguments)

    def __repr__(self):
        return f"ModelMask(base={self.base!r}, limits={self.limits}, q_length={self.q_length}, kv_length={self.kv_length})"

    def convert_for(self, implementation: str):
        """Returns the same mask in the form for another attention implementation of Transformers."""
        if torch.compiler.is_compiling():
            return AttentionMaskInterface()[implementation](**self.arguments)
        if implementation not in self._converted:
            self._converted[implementation] = AttentionMaskInterface()[implementation](**self.arguments)
        return self._converted[implementation]

    @cached_property
    def left_padding(self) -> list[int]:
        """The tokens before each sequence's first one; empty if there are none."""
        counts = [] if self.first_token is None else self.first_token.tolist()
        return counts if any(counts) else []

    @cached_property
    def key_runs(self) -> list[list[int]]:
        """[first_token, key_start, key_stop] of each sequence."""
        return torch.stack([self.first_token, self.key_starts, self.key_stops], 1).tolist()

    @cached_property
    def ends_early(self) -> bool:
        """Whether some sequence has padding after its last token."""
        return bool((self.key_stops < self.key_count).any())

    @cached_property
    def sees_both_ways(self) -> bool:
        """Whether ``kept_pairs`` of a decoder let some query see a later key, as tokens of images and prefixes do."""
        if self.base == "causal" or "allow_is_bidirectional_skip" in (self.arguments or {}):
            return False
        pairs = self.kept_pairs[..., : self.key_count].expand(-1, -1, self.q_length, -1)
        return bool(pairs.triu(self.key_count - self.q_length + 1).any())

    def has_only_windows(self) -> bool:
        return all(is_window(one) for limit in self.limits for one in limit)

    def add_moved_limit(self, mask: Pattern | str | BlockMask) -> ModelMask:
        """Returns this mask with ``mask`` among its limits, whose positions count from each sequence's first token."""
        if mask not in self._moved:
            if isinstance(mask, BlockMask):
                raise ValueError(
                    "a layer's BlockMask must be of one length; got a batch padded on the left, beside a cache, padding between "
                    "tokens or limits of the model's own; pass the pattern itself, which counts from each sequence's first token"
                )
            pattern = parse(mask) if isinstance(mask, str) else mask
            limits = tuple(move_pattern(pattern, count) for count in self.left_padding)
            limits = limits[:1] if len(set(limits)) == 1 else limits
            self._moved[mask] = self.changed(first_token=None, limits=(*self.limits, limits))
        return self._moved[mask]

    def intersect(self, mask: Pattern | str | BlockMask | None, device: torch.device) -> Pattern | str | BlockMask | None:
        """Returns the intersection of ``mask``, which replaces ``base``, and the model's other restrictions, for keys up to
        ``key_count``.

        mask: a Pattern, spec text, a BlockMask of these lengths, or None for all pairs.
        """
        limits = tuple(
            limit for limit in self.limits if len(limit) > 1 or not keeps_all(limit[0], self.kv_length, self.first_key_position)
        )
        if isinstance(mask, BlockMask):
            self._check_block_mask(mask, limits)
        # Compiled code with masks of positions keeps all keys, so graphs do not depend on the position.
        position = 0 if torch.compiler.is_compiling() else self.first_key_position
        if self.kept_pairs is None and all(len(limit) == 1 for limit in limits):
            return restrict_mask(mask, tuple(limit[0] for limit in limits), position, position)
        if (mask, device) not in self._tables:
            entries = range(max(map(len, limits), default=1))
            masks = [restrict_mask(mask, limits_of_entry(limits, entry), position, position) for entry in entries]
            self._tables[mask, device] = self._build_table(tuple(masks), device)
        return self._tables[mask, device]

    def _check_block_mask(self, mask: BlockMask, limits: tuple) -> None:
        if self.key_count is not None and (mask.q_len, mask.kv_len) != (self.q_length, self.key_count):
            raise ValueError(
                f"a layer's BlockMask must fit its tokens; got one compiled for q_len={mask.q_len}, kv_len={mask.kv_len}; the "
                f"layer has {self.q_length} queries and {self.key_count} keys; pass the pattern itself, which is compiled for each "
                "length"
            )
        if limits or self.first_key_position:
            said = " & ".join(str(limit[0]) for limit in limits) or f"keys from position {self.first_key_position} on"
            windowed = ", or set the model's config.sliding_window to None" * said.startswith("local(")
            raise ValueError(f"the layer's own mask is {said}, and a BlockMask cannot be joined with it; pass a Pattern{windowed}")

    def _build_table(self, masks: tuple, device: torch.device) -> BlockMask:
        """Returns the table of masks, one for all batch entries or one for each, within ``kept_pairs``."""
        if self.kept_pairs is None:
            return _compile_entries(masks, self.q_length, self.key_count, device)
        if self.kept_pairs[..., :1, :1].numel() * self.q_length * self.key_count > _MOST_PAIRS:
            raise ValueError(
                f"the model's mask is not a pattern, and {self.q_length} x {self.key_count} pairs of each of "
                f"{self.kept_pairs.shape[0]} sequences are too many to keep one by one; use shorter sequences or smaller batches"
            )
        kept = self.kept_pairs[..., : self.key_count].to(device).expand(-1, -1, self.q_length, -1)
        if len(masks) > 1:
            kept = kept & _compile_entries(masks, self.q_length, self.key_count, device).to_dense()
        elif (one := masks[0]) is not None:
            table = one if isinstance(one, BlockMask) else compile_cached(one, self.q_length, self.key_count, _BLOCK, device)
            kept = kept & table.to_dense()
        return BlockMask.from_dense(kept, _BLOCK)


_FIELDS = tuple(inspect.signature(ModelMask.__init__).parameters)[1:]


@cached_until_cleared(maxsize=64)
def _compile_entries(patterns: tuple, q_length: int, kv_length: int, device) -> BlockMask:
    """Returns a mask with one pattern per batch entry, or one per head of each. patterns: they, their texts, or None."""
    read = [parse("full" if one is None else one) if isinstance(one, str | None) else one for one in patterns]
    if wrong := [one for one in read if isinstance(one, PerBatch) and len(one.patterns) not in (1, len(read))]:
        raise ValueError(f"per_batch must be for the batch's {len(read)} sequences; got {len(wrong[0].patterns)} patterns")
    read = [one.patterns[entry % len(one.patterns)] if isinstance(one, PerBatch) else one for entry, one in enumerate(read)]
    heads = max(len(one.patterns) if isinstance(one, PerHead) else 1 for one in read)
    by_head = [head for one in read for head in (one.patterns if isinstance(one, PerHead) else [one] * heads)]
    compiled = {one: as_block_mask(one, q_length, kv_length, _BLOCK) for one in dict.fromkeys(by_head)}
    return from_heads([compiled[one] for one in by_head], len(patterns), heads).to(device)


def create_model_mask(**arguments) -> ModelMask:
    """Creates a mask for Transformers, which calls this with its arguments."""
    if isinstance(arguments["q_offset"], torch.Tensor):  # of a static cache, which adds to it before a layer attends
        arguments["q_offset"] = arguments["q_offset"].clone()
    compiling, padding = torch.compiler.is_compiling(), arguments.get("attention_mask")
    parts: MaskParts = read_arguments(arguments) if compiling else read_function(arguments["mask_function"])
    q_length, kv_length, first_key_position = (arguments[name] for name in ("q_length", "kv_length", "kv_offset"))
    mask = ModelMask(q_length, kv_length, first_key_position=first_key_position, arguments=arguments)
    _set_key_count(mask, arguments["q_offset"])
    if not parts.is_known:
        mask.kept_pairs = sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        mask.first_token = None if padding is None else padding.bool().int().argmax(1)
        return mask
    mask.base, mask.limits, mask.sequence_starts = parts.base, parts.limits, parts.sequence_starts
    # If every token sees every other, keys past the queries' are not the future but extra ones.
    if mask.base == "full" and mask.key_count is not None and mask.key_count < kv_length:
        mask.refusal = (
            f"a model that sees both ways must have a query for each key; got {q_length} queries and {kv_length} keys, "
            "as in prefix tuning; use another implementation: model.set_attn_implementation('sdpa')"
        )
    if padding is not None:
        _set_padding(mask, padding.bool())
    return mask


def _set_key_count(mask: ModelMask, q_offset: int | torch.Tensor) -> None:
    """q_offset: the position of the first query, a tensor if the cache's length is one."""
    if isinstance(q_offset, torch.Tensor):
        mask.key_count_tensor = q_offset + (mask.q_length - mask.first_key_position)
        if not torch.compiler.is_compiling():
            mask.key_count = int(mask.key_count_tensor)
    else:
        mask.key_count = q_offset + mask.q_length - mask.first_key_position
        if mask.key_count != mask.kv_length:
            mask.key_count_tensor = torch.full((), mask.key_count, device=mask.arguments["device"])
    if mask.key_count is not None and not 0 < mask.key_count <= mask.kv_length:
        mask.refusal = (
            f"the cache must hold the key of the last query; got {mask.kv_length} keys from position {mask.first_key_position} on, "
            "which end before; make it longer"
        )


def _set_padding(mask: ModelMask, exist: torch.Tensor) -> None:
    """Sets which keys exist, from (batch, tokens) bool: as one run per sequence, otherwise key by key."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        total = mask.first_key_position + mask.key_count
        exist = exist[:, :total]
        if exist.shape[1] < total:
            shape = tuple(mask.arguments["attention_mask"].shape)
            mask.refusal = f"attention_mask must be of all {total} tokens so far, those in the cache too; got shape {shape}"
            return
        if exist.all():
            return
    count = exist.sum(1, keepdim=True)
    first = exist.int().argmax(1, keepdim=True)
    mask.first_token = first.squeeze(1)
    token = torch.arange(exist.shape[1], device=exist.device)
    run = (token >= first) & (token < first + count)
    if compiling:  # it cannot read values, but can fail at run time
        unsupported = "sparse_flash supports that only in a model that is not compiled"
        assert_in_graph((exist == run).all(), f"attention_mask has zeros between its ones; {unsupported}")
    elif not torch.equal(exist, run):
        mask.kept_pairs = exist[:, None, None, mask.first_key_position :]
        return
    starts, stops = (t.squeeze(1) - mask.first_key_position for t in (first, first + count))
    if mask.key_count is None and mask.key_count_tensor is not None:
        stops = torch.minimum(stops, mask.key_count_tensor)
    mask.key_starts, mask.key_stops = (t.clamp(min=0).to(torch.int32) for t in (starts, stops))


def assume_mask(module, query, key, sliding_window, is_causal) -> ModelMask:
    """Returns the mask of a layer that receives none: causal if the layer is, with the last query aligned to the last key."""
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    limits = () if sliding_window is None else ((f"local({sliding_window})",),)
    return ModelMask(query.shape[2], key.shape[2], "causal" if causal else "full", limits, key_count=key.shape[2])


def convert_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> ModelMask:
    """Returns the mask of a tensor of pairs passed to the model, True or 0 where a pair is kept; converted once per tensor, but in
    each layer for one made in inference mode, which does not count the writes to it."""
    cached = None if mask.is_inference() else getattr(mask, "_sparse_flash", None)
    if cached is not None and cached[0] == mask._version:
        return cached[1]
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
    model_mask = ModelMask(q_length, kv_length, kept_pairs=kept, key_count=kv_length)
    if not mask.is_inference():
        mask._sparse_flash = mask._version, model_mask  # type: ignore[attr-defined]  # cached on the tensor
    return model_mask
