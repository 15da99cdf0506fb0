"""SparseAttention: self-attention as a layer of a model, also with a cache for decoding."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, Self, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import nn

from ..core import backends
from ..core.arguments import resolve_deterministic
from ..core.results import compute_dtype
from ..core.variant import check_counts, check_dropout, check_number
from ..decoding.arguments import MAX_QUERIES
from ..decoding.cache import KeyValueCache
from ..decoding.masks import can_decode
from ..masks.block_mask import BlockMask, convert_foreign_mask
from ..masks.chooser import has_choosers, without_choosers
from ..masks.parsing import parse, text_of
from ..masks.pattern import Pattern, short_text
from ..selection.block_selection import BlockSelection
from ..selection.query_choice import QueryChoice
from .attention import attention
from .decode import attention_decode
from .shared import SharedSequence

# (q, k), both (batch, heads or kv_heads, tokens, head_dim), rotated -> the blocks of keys that each query attends to
Select: TypeAlias = Callable[[torch.Tensor, torch.Tensor], BlockSelection]


class SparseAttention(nn.Module):
    """Multi-head self-attention under a mask: projections, rotary positions, grouped-query heads, ``attention``.

    dim: width of the model. heads: query heads. kv_heads: key and value heads, dividing heads; heads by default.
    head_dim: dim // heads by default; even if positions are rotary. v_head_dim: of the values; head_dim by default.
    mask: a Pattern or its spec text, compiled and cached for each length; a BlockMask for one length, which moves with the layer,
    and which with a cache must be square and cover the cache; None for dense attention. Causal by default; other patterns must
    include causality, as in "causal & local(1024)". ``layer.mask = ...`` changes it, also in compiled code. Or a ``ContextPlan``,
    for one sequence over several ranks: x then holds the rank's tokens, at the plan's positions.
    select: instead of a mask, the arguments of ``topk_blocks`` by which queries choose their blocks in each forward pass:
    ``{"keep": 16, "block_size": 64, "share_group": True}``. Or a function of (q, k), queries and keys by head, after rotation, that
    returns a BlockSelection. With a cache, new queries choose among all keys, each for itself: then tokens see the same blocks
    whether they come one by one or all at once. Each choice reads all keys; the attention of up to 64 tokens to a selection without
    ``always`` then reads only the picked blocks. With a ``ContextPlan`` as mask, of strategy "heads", each rank chooses in its
    heads.
    rotary_base: the base of rotary position embedding, which pairs elements half of head_dim apart; None for no positions.
    bias: of the four projections. dropout_p: as for ``attention``, in training mode only; not with select, a plan or a cache.
    backend, deterministic: as for ``attention``.

    Parameters: q_proj, k_proj, v_proj, out_proj, each an nn.Linear. Buffer: mask_spec, uint8, the mask's spec text, so that
    checkpoints hold the mask; "full" for dense attention; None with select, and for a mask without text: a function, a BlockMask, a
    plan. If a checkpoint has another mask, ``load_state_dict`` warns, and the layer's mask stays. Programs that write buffers
    directly, such as Transformers' ``from_pretrained``, check nothing.
    Sources: arXiv:1706.03762 (multi-head attention), arXiv:2305.13245 (grouped queries), arXiv:2104.09864 (rotary embedding).
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mask: Pattern | str | BlockMask | SharedSequence | None = "causal",
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        select: Select | Mapping[str, Any] | None = None,
        rotary_base: float | None = 10000.0,
        bias: bool = False,
        dropout_p: float = 0.0,
        backend: str = "auto",
        deterministic: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        check_counts(dim=dim, heads=heads, kv_heads=kv_heads)
        if heads % kv_heads:
            raise ValueError(f"kv_heads must divide heads; got {kv_heads} and {heads}")
        if head_dim is None and dim % heads:
            raise ValueError(f"heads must divide dim where head_dim is not given; got {heads} and {dim}")
        resolve_deterministic(deterministic)
        backends.check_name(backend)
        select = QueryChoice.from_arguments(select) if isinstance(select, Mapping) else select
        if select is not None and not callable(select):
            raise TypeError(
                "select must be a dict of topk_blocks' arguments, or a function of (q, k) that returns a BlockSelection; got "
                f"{type(select).__name__}"
            )
        if select is not None and not isinstance(mask, SharedSequence) and not (isinstance(mask, str) and mask == "causal"):
            raise ValueError("select takes the place of mask; leave mask out: a selection is causal, and topk_blocks takes always=")
        check_dropout(dropout_p)
        if select is not None and dropout_p:
            raise ValueError(f"select takes no dropout; got dropout_p={dropout_p}; leave it out, or use a mask")
        head_dim = dim // heads if head_dim is None else head_dim
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_counts(head_dim=head_dim, v_head_dim=v_head_dim)
        if rotary_base is not None:
            check_number("rotary_base", rotary_base)
            if head_dim % 2 or not 0 < rotary_base < math.inf:
                raise ValueError(
                    f"rotary positions need an even head_dim and a positive, finite base; got {head_dim} and {rotary_base!r}; "
                    "rotary_base=None turns them off"
                )
        self.dim, self.heads, self.kv_heads, self.head_dim, self.v_head_dim = dim, heads, kv_heads, head_dim, v_head_dim
        self.select: Select | None = select
        self.rotary_base, self.dropout_p = rotary_base, dropout_p
        self.backend, self.deterministic = backend, deterministic

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        self.q_proj = linear(dim, heads * head_dim)
        self.k_proj = linear(dim, kv_heads * head_dim)
        self.v_proj = linear(dim, kv_heads * v_head_dim)
        self.out_proj = linear(heads * v_head_dim, dim)
        self.mask = mask

    @property
    def mask(self) -> Pattern | BlockMask | SharedSequence | None:
        return self._mask if self._plan is None else self._plan

    @mask.setter
    def mask(self, mask: Pattern | str | BlockMask | SharedSequence | None) -> None:
        self._plan: SharedSequence | None = None
        if isinstance(mask, SharedSequence):
            self._plan, mask = mask, None
        mask = parse(mask) if isinstance(mask, str) else mask
        if not (mask is None or isinstance(mask, (Pattern, BlockMask))):
            mask = convert_foreign_mask(mask)
        # PyTorch before 2.13 takes spec text in graphs, but not Pattern objects.
        self._mask, self._traceable_mask = mask, text_of(mask) or mask if isinstance(mask, Pattern) else mask
        self.register_buffer("mask_spec", self._spec())

    @property
    def _text(self) -> str | None:
        """The spec text of the layer's mask; None if it has no text."""
        if self._plan is not None or self.select is not None or isinstance(self._mask, BlockMask):
            return None
        return "full" if self._mask is None else text_of(self._mask)

    def _spec(self, beside: Iterable[torch.Tensor] = ()) -> torch.Tensor | None:
        """The buffer mask_spec, on the device of ``beside`` or the parameters: loaders of sharded models need one device."""
        if (text := self._text) is None:
            return None
        device = next((t.device for t in chain(beside, self.parameters())), None)
        return torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(f"{prefix}mask_spec", None)  # the buffer's bytes may be lost, as after to_empty
        if (spec := self._spec()) is not None:
            destination[f"{prefix}mask_spec"] = spec

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *options: Any) -> None:
        name = f"{prefix}mask_spec"
        saved = state_dict.pop(name, None)
        if saved is not None and self._text is not None and not saved.is_meta:
            _warn_of_difference(self._text, bytes(saved.to(torch.uint8).tolist()).decode(errors="replace"))
        self.mask_spec = None  # neither missing nor unexpected
        super()._load_from_state_dict(state_dict, prefix, metadata, *options)
        # The projections load later, and may then be the tensors of the state dict.
        self.mask_spec = self._spec(state_dict.values() if metadata.get("assign_to_params_buffers") else ())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moves a BlockMask with the parameters. ``to``, ``cuda`` and ``half`` call this."""
        super()._apply(fn, recurse)
        if isinstance(self._mask, BlockMask):
            self.mask = _moved(self._mask, fn)
        if isinstance(self.select, QueryChoice) and isinstance(self.select.always, BlockMask):
            self.select = replace(self.select, always=_moved(self.select.always, fn))
        return self

    def forward(
        self, x: torch.Tensor, cache: KeyValueCache | None = None, *, mask: Pattern | str | BlockMask | None = None
    ) -> torch.Tensor:
        """x: (batch, tokens, dim); returns the same shape. With a cache, x holds the tokens after the cached ones; they attend to
        both and are appended, without gradients. If the mask has choosers, calls with up to 64 tokens and a cache attend under the
        pattern before the choosers.
        mask: of this call, instead of the layer's, such as the paragraphs of x; None for the layer's. Not saved with the layer.

        Raises ValueError for shapes that do not fit; for a cache with a plan, with dropout, or if keys or values require gradients;
        and for a mask with a plan or select. If it raises, the cache is as before.

        Within torch.compile and without gradients, up to 64 tokens at a time attend to the cache's full capacity, masked by the
        token count, so new tokens compile nothing after the first few."""
        dropout_p = self.dropout_p if self.training else 0.0
        self._check_inputs(x, cache, dropout_p)
        if mask is None:
            mask = self._traceable_mask if torch.compiler.is_compiling() else self._mask
        elif self._plan is not None or self.select is not None:
            rival = "plan" if self.select is None else "select"
            raise ValueError(f"mask must be None for a layer with a {rival}; got a {type(mask).__name__}; leave it out")
        elif not isinstance(mask, (Pattern, str, BlockMask)):
            mask = convert_foreign_mask(mask)
        q, k, v = self._project(x, cache)
        if cache is not None and torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "a layer with a cache gives no gradients, and its keys or values require some; call it under torch.no_grad(), or "
                "without a cache to train"
            )
        if self._plan is not None:
            out = self._plan.attention(q, k, v, select=self.select, deterministic=self.deterministic, backend=self.backend)
        elif self.select is not None and x.shape[1]:  # of no tokens none chooses
            out = self._attend_to_picks(cache, q, k, v)
        elif cache is None:
            out = self._attend(q, k, v, mask, dropout_p=dropout_p)
        else:
            out = self._attend_with_cache(cache, q, k, v, mask)
        if cache is not None:
            cache.tokens += x.shape[1]  # last, so that the cache is as before if something raises
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _check_inputs(self, x: object, cache: object, dropout_p: float) -> None:
        if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[2] != self.dim:
            got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"x must be a tensor of shape (batch, tokens, {self.dim}); got {got}")
        if not (cache is None or isinstance(cache, KeyValueCache)):
            raise TypeError(f"cache must be a KeyValueCache; got {type(cache).__name__}; layer.new_cache makes one")
        if self._plan is not None and (dropout_p or cache is not None):
            raise ValueError("a layer whose mask is a plan takes no dropout and no cache; set layer.mask to the pattern for these")
        if self._plan is not None and x.shape[1] != self._plan.tokens:
            raise ValueError(f"x must hold the {self._plan.tokens} tokens of this rank; got {x.shape[1]}; plan.shard gives them")
        if dropout_p and cache is not None:
            raise ValueError(f"a layer in training mode with dropout_p={dropout_p} takes no cache; call layer.eval() to decode")

    def _project(self, x: torch.Tensor, cache: KeyValueCache | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v by head, (batch, heads or kv_heads, tokens, head_dim or v_head_dim); q and k rotated."""
        q, k = (_split_heads(projection(x), self.head_dim) for projection in (self.q_proj, self.k_proj))
        v = _split_heads(self.v_proj(x), self.v_head_dim)
        if self.rotary_base is not None:
            first = cache.tokens if cache else 0
            exact = compute_dtype(x)
            later = torch.arange(first, first + x.shape[1], dtype=exact, device=x.device)
            rotation = _rotation(later if self._plan is None else self._plan.positions.to(exact), self.head_dim, self.rotary_base)
            q, k = _rotated(q, *rotation), _rotated(k, *rotation)
        return q, k, v

    def _attend_to_picks(self, cache: KeyValueCache | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        stop = 0
        if cache is not None:
            stop = cache._write(k, v)
            k = cache._read_tokens(stop, 0, k.dtype)
        selection = cast(Select, self.select)(q, k)
        if not isinstance(selection, BlockSelection):
            raise TypeError(f"select must return a BlockSelection; got {type(selection).__name__}; pass every=1 to topk_blocks")
        if cache is None:
            return self._attend(q, k, v, selection)
        if selection.always is None and can_decode(q, k) and self.backend in ("auto", "torch"):
            keys, values, scales = cache.held(stop)
            return cast(torch.Tensor, attention_decode(q, keys, values, selection, **scales, backend=self.backend))
        return self._attend(q, k, cache._read_tokens(stop, 1, v.dtype), selection)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **variant: Any) -> torch.Tensor:
        out = attention(q, k, v, mask, **variant, deterministic=self.deterministic, backend=self.backend)
        return cast(torch.Tensor, out)

    def _attend_with_cache(
        self, cache: KeyValueCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask | Pattern | str | None
    ) -> torch.Tensor:
        first, stop = cache.tokens, cache.tokens + q.shape[2]
        square = mask if isinstance(mask, BlockMask) and (mask.q_len, mask.kv_len) != (q.shape[2], stop) else None
        if square is not None and not square.q_len == square.kv_len >= cache.length:
            raise ValueError(
                f"a layer's BlockMask must be square and cover the cache's room of {cache.length} tokens; got "
                f"q_len={square.q_len}, kv_len={square.kv_len}; compile it for {cache.length}, or pass the pattern itself"
            )
        if isinstance(mask, (Pattern, str)) and has_choosers(mask) and q.shape[2] <= MAX_QUERIES:
            mask = without_choosers(mask)  # choosers need a whole block of queries
        cache._write(k, v)
        if can_decode(q, k) and (square is not None or not isinstance(mask, BlockMask)):
            compiling = torch.compiler.is_compiling()
            keys, values, options = cache.held(cache.length if compiling else stop)
            options |= {"kv_lens": _repeat_count(stop, q)} if compiling else {}
            return cast(torch.Tensor, attention_decode(q, keys, values, mask, **options, backend=self.backend))
        k, v = (cache._read_tokens(stop, which, k.dtype) for which in range(2))
        if square is None:
            return self._attend(q, k, v, mask)
        # Tokens are padded to their positions in the whole mask; blocks without tokens are skipped.
        beyond = square.q_len - stop
        lengths = {"q_starts": _repeat_count(first, q), "q_lens": _repeat_count(stop, q), "kv_lens": _repeat_count(stop, q)}
        q, k, v = F.pad(q, (0, 0, first, beyond)), F.pad(k, (0, 0, 0, beyond)), F.pad(v, (0, 0, 0, beyond))
        return self._attend(q, k, v, mask, **lengths)[:, :, first:stop]

    def new_cache(self, batch: int, length: int, dtype: torch.dtype | None = None) -> KeyValueCache:
        """Returns an empty cache for this layer, for ``length`` tokens in each of ``batch`` sequences. dtype: the layer's by
        default, or torch.float8_e4m3fn."""
        weight = self.k_proj.weight
        sizes = batch, self.kv_heads, length, self.head_dim
        return KeyValueCache(*sizes, v_head_dim=self.v_head_dim, dtype=dtype or weight.dtype, device=weight.device)

    def extra_repr(self) -> str:
        mask = f"blocks of {self._mask.block_size}" if isinstance(self._mask, BlockMask) else self.mask
        what = f"mask={mask}" if self.select is None else f"select={self.select}"
        of_values = f"v_head_dim={self.v_head_dim}, " if self.v_head_dim != self.head_dim else ""
        sizes = f"dim={self.dim}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"
        of_dropout = f", dropout_p={self.dropout_p}" if self.dropout_p else ""
        return f"{sizes}, {of_values}{what}{of_dropout}"


def _moved(mask: BlockMask, fn: Callable[[torch.Tensor], torch.Tensor]) -> BlockMask:
    """Moves the mask to the device to which ``fn``, which may also cast, moves tensors."""
    return mask.to(fn(torch.empty(0, dtype=torch.int32, device=mask.device)).device)


def _split_heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    return torch.unflatten(x, 2, (-1, head_dim)).transpose(1, 2)


def _warn_of_difference(own: str, saved: str) -> None:
    """Warns if a saved mask differs from the layer's. Names no layer, so that layers of one mask warn once."""
    with suppress(ValueError):  # its patterns may not be registered here
        saved = text_of(saved) or saved
    if saved != own:
        warnings.warn(
            f"the checkpoint was saved under the mask {short_text(saved, 200)!r}, and the layer that loads it keeps its own, "
            f"{short_text(own, 200)!r}; set layer.mask to run the checkpoint's",
            stacklevel=2,
        )


def _repeat_count(tokens: int, q: torch.Tensor) -> torch.Tensor:
    """The same count for each batch entry, (batch,) int32."""
    return torch.full((q.shape[0],), tokens, dtype=torch.int32, device=q.device)


def _rotation(positions: torch.Tensor, head_dim: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, (tokens, head_dim / 2), of positions, (tokens,), in their dtype."""
    exponents = torch.arange(0, head_dim, 2, dtype=positions.dtype, device=positions.device) / head_dim
    angles = positions[:, None] / base**exponents
    return angles.cos(), angles.sin()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x rotated, in x's dtype; computed in the dtype of cos and sin, float32 or wider."""
    low, high = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)
