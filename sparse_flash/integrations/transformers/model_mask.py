"""A model's own mask, which Transformers requests once for all layers of a kind: numbers and text instead of a tensor of pairs.

``_read_function`` looks into Transformers' mask function. Compiled code cannot, and ``_read_arguments`` takes what is passed with
it. Both must say the same of a mask.
"""

import inspect
from functools import cached_property
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.functional import pad
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ...compat.constants import constant_in_graphs
from ...compat.pytorch import assert_in_graph
from ...decoding.arguments import MAX_QUERIES
from ...masks.block_mask import BlockMask, compile_cached
from ...masks.memory import cached_until_cleared
from ...masks.parsing import parse, text_of
from ...masks.pattern import And, Pattern
from ...masks.rules import move_pattern

_BLOCK = 128
_TABLES = "_sparse_flash_tables"  # of a tensor of pairs

_NO_TENSOR = (
    "the model computes with its attention mask, which is no tensor under sparse_flash; use another implementation, such as "
    "model.set_attn_implementation('sdpa')"
)
_SLICED_AND_PACKED = (
    "packed sequences must keep all of their queries in each layer; the model keeps the last ones; leave logits_to_keep out"
)
_PACKED_ERROR = (
    "position_ids are of packed sequences; in compiled code, pass cu_seq_lens_q and cu_seq_lens_k too "
    "(DataCollatorWithFlattening(return_flash_attn_kwargs=True))"
)


@constant_in_graphs
@cached_until_cleared(maxsize=1024)
def restrict_mask(mask: Any, limits: tuple[str, ...], position: int) -> Pattern | str:
    """Returns the mask, None for all pairs, within the limits, for keys from a position on; as text if it has one."""

    def move(leaf: Pattern) -> Pattern:
        counts_from_the_end = leaf.bind_length(0) != leaf
        return leaf if leaf.chooses or counts_from_the_end else move_pattern(leaf, -position)

    parts = [parse(limit) if isinstance(limit, str) else limit for limit in (*limits, mask) if limit is not None]
    restricted = And.of(*(part.map_leaves(move) for part in parts))
    return text_of(restricted) or restricted


class ModelMask(FlexBlockMask):
    """A model's own mask of (q_length, kv_length) pairs, created once per forward pass for the layers of one kind. It subclasses
    FlexAttention's because models accept only tensors and that class as the masks that ``generate()`` creates for static caches."""

    def __init__(
        self, q_length, kv_length, base="full", window=None, chunk=None, kept_pairs=None, first_key_position=0, key_count=None,
        key_count_tensor=None, key_starts=None, key_stops=None, first_token=None, sequence_starts=None, refusal=None, arguments=None
    ):  # fmt: skip
        self.q_length, self.kv_length = q_length, kv_length
        self.base = base  # "causal" or "full"
        self.window = window  # a query sees keys that are fewer tokens away
        self.chunk = chunk  # a query sees keys of its own chunk of so many tokens, counted from each sequence's first token
        self.kept_pairs = kept_pairs  # a further restriction, bool, broadcastable to (batch, heads, q_length, kv_length)
        self.first_key_position = first_key_position  # a cache of a window drops earlier keys
        self.key_count = key_count  # up to the last query's; a static cache holds more. None if only the tensor knows
        self.key_count_tensor = key_count_tensor  # 0-d; None if no key comes after
        self.key_starts, self.key_stops = key_starts, key_stops  # (batch,) int32, which keys exist; None for all up to key_count
        self.first_token = first_token  # (batch,), the position of each sequence's first token in the padded batch; None for 0
        self.sequence_starts = sequence_starts  # (batch | 1, q_length) bool, of packed sequences by the mask function
        self.refusal = refusal  # why attention cannot apply the mask
        self.arguments = arguments  # Transformers', for the mask
        # Made once for all layers of a kind, by uncompiled code.
        self.found_sequences = None  # (position_ids, what ``find_sequences`` found)
        self._converted, self._tables = {}, {}

    def changed(self, **fields) -> "ModelMask":
        """Returns this mask with other fields."""
        return ModelMask(**{name: getattr(self, name) for name in _FIELDS} | fields)

    # Models and ``generate()`` read these attributes of a tensor from a mask; ``__getattr__`` refuses all others.
    dtype, ndim = torch.bool, 4

    @property
    def shape(self):
        return (1, 1, self.q_length, self.kv_length)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> "ModelMask":
        return self

    def to(self, device, **kwargs) -> "ModelMask":
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
        q_length, kept = self.q_length - first, self.kept_pairs
        arguments = self.arguments | {"q_length": q_length, "q_offset": self.arguments["q_offset"] + first}
        kept = kept[:, :, first:] if kept is not None and kept.shape[2] > 1 else kept
        # Compiled code cannot read whether there are several sequences.
        starts = None if torch.compiler.is_compiling() else self.sequence_starts
        packed = starts is not None and bool(starts[:, 1:].any())
        packed = packed or (self.found_sequences or (None, None))[1] is not None
        refusal = _SLICED_AND_PACKED if packed else self.refusal
        return self.changed(q_length=q_length, kept_pairs=kept, sequence_starts=starts, refusal=refusal, arguments=arguments)

    def __repr__(self):
        return f"ModelMask(base={self.base!r}, limits={self.limits()}, q_length={self.q_length}, kv_length={self.kv_length})"

    def convert_for(self, implementation: str):
        """Returns the same mask in the form for another attention implementation of Transformers."""
        converted = {} if torch.compiler.is_compiling() else self._converted
        if implementation not in converted:
            converted[implementation] = AttentionMaskInterface()[implementation](**self.arguments)
        return converted[implementation]

    @cached_property
    def sequences(self) -> list[list[int]]:
        """[first_token, key_start, key_stop] of each sequence; empty without padding."""
        if self.first_token is None:
            return []
        starts = (self.first_token - self.first_key_position).clamp(min=0) if self.key_starts is None else self.key_starts
        stops = torch.full_like(starts, self.key_count) if self.key_stops is None else self.key_stops
        return torch.stack([self.first_token, starts, stops], 1).tolist()  # one wait for the GPU

    def is_chunked(self) -> bool:
        """Whether chunks leave pairs out."""
        return self.chunk is not None and self.chunk < self.first_key_position + self.kv_length

    def is_prompt(self) -> bool:
        """Whether compiled code may specialize on the end of the queries in a static cache: it has one prompt, then many tokens."""
        return self.key_count is not None and self.q_length > MAX_QUERIES

    def ends_in_graph(self) -> bool:
        """Whether compiled code reads the end of a static cache's keys from ``key_count_tensor``, and cannot cut off other keys."""
        return self.key_count_tensor is not None and torch.compiler.is_compiling() and not self.is_prompt()

    def lengths(self) -> dict[str, torch.Tensor]:
        """Returns the keywords of ``attention`` that say which tokens exist."""
        if self.key_starts is None:
            return {}
        earlier = self.key_count - self.q_length  # the last query aligns with the last key
        queries = {"q_starts": self.key_starts - earlier, "q_lens": (self.key_stops - earlier).clamp(min=0)}
        return {"kv_starts": self.key_starts, "kv_lens": self.key_stops, **queries}

    def limits(self) -> tuple[str, ...]:
        """Returns the spec texts of the window and the chunks, where they leave pairs out."""
        window = () if self.window is None or self.window >= self.kv_length else (f"local({self.window})",)
        return (*window, f"block_diagonal(block={self.chunk})") if self.is_chunked() else window

    def intersect(self, mask: Pattern | str | BlockMask | None, device: torch.device) -> Pattern | str | BlockMask | None:
        """Returns ``mask``, None for all pairs, within the restrictions other than ``base``, for keys up to ``key_count``."""
        limits = self.limits()
        if isinstance(mask, BlockMask):
            lengths = self.q_length, self.key_count or mask.kv_len
            if limits or self.first_key_position or (mask.q_len, mask.kv_len) != lengths:
                said = f"{lengths[0]} queries and {lengths[1]} keys from position {self.first_key_position} on"
                raise ValueError(
                    f"a layer's BlockMask must fit its tokens, without limits of the model's own; got one of {mask.q_len} queries "
                    f"and {mask.kv_len} keys for {' & '.join((said, *limits))}; pass the pattern itself, which fits each call"
                )
        # Compiled code with masks of positions keeps all keys, so graphs do not depend on the position.
        position = 0 if torch.compiler.is_compiling() else self.first_key_position
        mask = restrict_mask(mask, limits, position) if limits or (mask is not None and position) else mask
        if self.kept_pairs is None:
            return mask
        if (mask, self.key_count, device) in self._tables:
            return self._tables[mask, self.key_count, device]
        kept = self.kept_pairs[..., : self.key_count].to(device).expand(-1, -1, self.q_length, -1)
        if mask is not None:
            table = mask if isinstance(mask, BlockMask) else compile_cached(mask, self.q_length, self.key_count, _BLOCK, device)
            kept = kept & table.to_dense()
        return self._tables.setdefault((mask, self.key_count, device), BlockMask.from_dense(kept, _BLOCK))


_FIELDS = tuple(inspect.signature(ModelMask.__init__).parameters)[1:]


def _read_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a mask. Raises ValueError for masks that are not clear from the arguments."""
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
    if size is not None and size == chunk:  # the first token of a chunk does not see the previous one either
        return {"base": base, "chunk": size}
    window = size if size is None or not bidirectional else size + 1
    return {"base": base, "window": window, "sequence_starts": _find_starts(**arguments)}


def _find_starts(batch_size, q_length, kv_length, mask_function, device, attention_mask=None, **_) -> torch.Tensor | None:
    """Returns which tokens a mask function separates from the one before, (batch, q_length) bool; None if it separates none."""
    if attention_mask is not None or mask_function.__name__ != "and_mask" or not q_length == kv_length > 1:
        return None
    token, entry = torch.arange(1, q_length, device=device), torch.arange(batch_size, device=device)[:, None]
    sees_previous = mask_function(entry, torch.zeros_like(entry), token, token - 1).expand(batch_size, -1)
    return pad(~sees_previous, (1, 0), value=True)


def _read_function(function: Any) -> dict[str, Any] | None:
    """Returns the fields of a mask by the names of its function's parts, and by what their closures hold. None for other parts."""
    base, windows, chunks, starts, positions = "full", set[int](), set[int](), None, None
    parts = [function]
    while parts:
        part = parts.pop()
        held = inspect.getclosurevars(part).nonlocals if inspect.isfunction(part) else {}
        match getattr(part, "__qualname__", "").removesuffix(".<locals>.inner_mask"):
            case "causal_mask_function":
                base = "causal"
            case "bidirectional_mask_function":
                pass
            case "and_masks.<locals>.and_mask":
                parts.extend(held["mask_functions"])
            case "sliding_window_overlay":
                windows.add(held["sliding_window"])
            case "sliding_window_bidirectional_overlay":
                windows.add(held["sliding_window"] + 1)
            case "chunked_overlay":  # its left_padding is first_token
                chunks.add(held["chunk_size"])
            case "packed_sequence_mask_function":
                found = pad(held["packed_sequence_mask"].diff() != 0, (1, 0), value=True)
                starts = found if found[:, 1:].any() else None
            case "remap_positions_for_packed_sequence":
                # The distance of two tokens of one sequence does not change; another part separates sequences.
                positions = held["position_ids"]
                parts.append(held["mask_function"])
            case _:
                return None
    chunk = min(chunks, default=None)
    if chunk is not None and positions is not None and int(positions.max()) >= chunk:
        # Chunks count from the start of each sequence if its positions do: they are 0 wherever they do not go on by one.
        first = pad(positions.diff() != 1, (1, 0), value=True)
        if (positions[first] != 0).any():
            return None
    fields = {"base": base, "window": min(windows, default=None), "chunk": chunk, "sequence_starts": starts}
    return fields if len(chunks) < 2 else None


def create_model_mask(**arguments) -> ModelMask:
    """Creates a mask for Transformers, which calls this with its arguments."""
    if isinstance(arguments["q_offset"], torch.Tensor):  # of a static cache, which adds to it before a layer attends
        arguments["q_offset"] = arguments["q_offset"].clone()
    compiling, padding = torch.compiler.is_compiling(), arguments.get("attention_mask")
    fields = _read_arguments(arguments) if compiling else _read_function(arguments["mask_function"])
    q_length, kv_length, first_key_position = (arguments[name] for name in ("q_length", "kv_length", "kv_offset"))
    count: Any = arguments["q_offset"] + (q_length - first_key_position)
    keys = {"first_key_position": first_key_position, "key_count": count}
    if isinstance(count, torch.Tensor):
        keys |= {"key_count": None if compiling else int(count), "key_count_tensor": count}
    elif count != kv_length:
        keys["key_count_tensor"] = torch.full((), count, device=arguments["device"])
    mask = ModelMask(q_length, kv_length, arguments=arguments, **keys, **fields or {})
    count = mask.key_count
    if fields is None:
        mask.kept_pairs = sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        mask.first_token = None if padding is None else padding.bool().int().argmax(1)
        return mask
    # If every token sees every other, keys past the queries' are not the future but extra ones.
    if mask.base == "full" and count is not None and count < kv_length:
        mask.refusal = (
            f"a model that sees both ways must have a query for each key; got {q_length} queries and {kv_length} keys, "
            "as in prefix tuning; use another implementation: model.set_attn_implementation('sdpa')"
        )
    if padding is not None:
        _set_padding(mask, padding.bool())
    return mask


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


def read_model_mask(mask: Any, query: torch.Tensor, key: torch.Tensor, causal: bool, window: int | None) -> ModelMask:
    """Returns the model's own mask of a call. mask: from ``create_model_mask``; None for a causal or full one within the window."""
    if mask is None:
        return ModelMask(query.shape[2], key.shape[2], "causal" if causal else "full", window, key_count=key.shape[2])
    if not isinstance(mask, ModelMask):
        if mask.dtype != torch.bool or mask.dim() != 4:
            raise ValueError(
                "attention_mask must be 2-D, (batch, tokens), None, or bool of (batch, heads | 1, queries, keys), True for pairs "
                f"that attend; got {mask.dtype} of {tuple(mask.shape)}; numbers cannot be added to scores"
            )
        model_mask = ModelMask(query.shape[2], key.shape[2], kept_pairs=mask, key_count=key.shape[2])
        model_mask._tables = _tables_of(mask)
        return model_mask
    made_in_graph = mask.key_count is None and not torch.compiler.is_compiling()
    return mask.changed(key_count=int(mask.key_count_tensor)) if made_in_graph else mask


def _tables_of(pairs: torch.Tensor) -> dict:
    """Returns the tables that earlier layers made of the pairs, which hold them as long as they do not change."""
    version = None if pairs.is_inference() else pairs._version
    of_version, tables = getattr(pairs, _TABLES, (None, {}))
    if version is None or of_version != version:
        tables = {}
        setattr(pairs, _TABLES, (version, tables))
    return tables


def find_sequences(model_mask: ModelMask, query, position_ids, cu_seq_lens_q, cu_seq_lens_k) -> torch.Tensor | None:
    """Returns the first token of each packed sequence among all tokens of the batch, then their end, (sequences + 1,) int32: by
    cu_seq_lens_q of that form, otherwise by the mask function and by position_ids, where they do not rise. None if each row is one
    sequence. Compiled code fails at run time where position_ids do not rise. Otherwise layers of a kind share what it found."""
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
    by_function, by_positions = model_mask.sequence_starts, _starts_by_positions(model_mask, position_ids)
    starts = by_function if by_positions is None else by_positions if by_function is None else by_positions | by_function
    if compiling:
        if starts is not None:
            assert_in_graph(~starts[:, 1:].any(), _PACKED_ERROR)
        return None
    found = None
    if starts is not None and starts[:, 1:].any():
        starts = starts.expand(query.shape[0], -1).flatten()
        found = pad(starts.nonzero().flatten(), (0, 1), value=len(starts)).to(torch.int32)
    model_mask.found_sequences = position_ids, found
    return found


def _starts_by_positions(model_mask: ModelMask, position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """Returns whether a sequence starts with a token, (batch | 1, q_length) bool: with the first, and with any whose position is
    not past that of the last existing token before it. None if position_ids are not one for each query."""
    q_length, arguments = model_mask.q_length, model_mask.arguments or {}
    if position_ids is None or position_ids.dim() > 2 or not position_ids.shape[-1] == q_length > 1:
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
