"""Builds the record of an ``sf.attention`` call: its arguments checked, its mask made a table, its back end chosen."""

import warnings
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import torch

from ..choosers.choose import chosen_in_graph, chosen_mask
from ..compat.constants import constant_in_graphs
from ..compat.pytorch import is_plain_eager
from ..core import arguments, backends, operators
from ..core.call import AttentionCall, ChosenBlocks, prepare, repeat
from ..core.variant import Variant, build_variant, describe_variant
from ..kernels.common.layout import layouts
from ..masks.block_mask import BlockMask, as_block_mask, compile_cached, convert_foreign_mask
from ..masks.cache import run_in_thread, to_traceable
from ..masks.chooser import choices_of, has_choosers, is_causal, without_choosers
from ..masks.fit import check_known_end, named_len
from ..masks.memory import cached_until_cleared, register_clear
from ..masks.parsing import text_of
from ..masks.pattern import Pattern, short_text
from ..selection.block_selection import BlockSelection, check_selection
from .shared import SharedSequence

# While a model's masks are recorded, called with the mask, q and k of each call outside of graphs. The mask is a table, after
# choosers have chosen, or the pattern that the table is compiled from.
observers: list[Callable[[Any, torch.Tensor, torch.Tensor], None]] = []


def observe(mask: object, q: torch.Tensor, k: torch.Tensor) -> None:
    """Calls the observers. q, k: of a batch, or packed documents, (tokens, heads, head_dim)."""
    for observer in observers:
        observer(mask, *(operators.documents_as_batch(t) if t.dim() == 3 else t for t in (q, k)))


# By ``layouts`` that ``check_tensors`` or ``check_decoding_tensors`` accepted: an object that replaces them in keys, as it hashes
# faster. At _MOST entries, all are dropped.
fitting: dict[Hashable, object] = {}
_MOST = 4096
_TOKENS = 4096  # for which ``_warn_of_later_keys`` looks at a pattern that names no number of tokens
register_clear(fitting.clear)


def build_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask | BlockSelection | ChosenBlocks | Pattern | str | None,
    scale: float | None,
    deterministic: bool | None,
    backend: str,
    precision: str | None,
    variant_arguments: dict[str, Any],
) -> AttentionCall:
    """Returns the record of an ``sf.attention`` call. variant_arguments: the keywords of ``build_variant``, or {}.

    Raises ValueError for arguments that do not fit together, TypeError for wrong types. Layouts of earlier calls are not checked
    again.
    """
    of_inputs = _layouts_if_plain(q, k, v, variant_arguments)
    fits = fitting.get(of_inputs)
    if fits is None or arguments.autocast_applies(q.device):
        arguments.check_types(q, k, v)
        q, k, v = arguments.cast_for_autocast(q, k, v)
        of_inputs = of_inputs and layouts((q, k, v))
        fits = fitting.get(of_inputs)
    is_empty = fits is None and (0 in q.shape or 0 in k.shape)
    deterministic = arguments.resolve_deterministic(deterministic)
    backends.check_name(backend)
    if precision is not None:
        _check_precision(precision, q, k, v, mask, variant_arguments.get("sinks"))
    if isinstance(mask, BlockSelection):
        variant = _check_selection_call(q, k, v, mask, variant_arguments)
        return AttentionCall(q, k, v, mask, None, arguments.resolve_scale(scale, q.shape[3]), deterministic, backend, variant)
    spec: Pattern | str | None = None
    chooses = False
    if isinstance(mask, (Pattern, str)):
        spec = to_traceable(mask) if torch.compiler.is_compiling() else mask
        chooses = has_choosers(spec)  # raises SpecError for text that cannot be read
    elif not (mask is None or isinstance(mask, (BlockMask, ChosenBlocks))):
        if not torch.compiler.is_compiling() and isinstance(mask, SharedSequence):
            raise TypeError(f"a {type(mask).__name__} is no mask: it attends itself; call plan.attention(q, k, v) on every rank")
        mask = convert_foreign_mask(mask)

    if fits is None:
        arguments.check_tensors(q, k, v, may_be_empty=is_empty)
        if of_inputs is not None and not is_empty and not arguments.looks_transposed(q, k):  # each such call is warned of
            fits = remember_fitting(of_inputs)
    scale = arguments.resolve_scale(scale, q.shape[3])
    variant = build_variant(q, k, **variant_arguments) if is_empty or chooses else None
    if spec is not None:
        if chooses:
            without_choosers(spec)  # raises ValueError for an expression that mixes patterns and choosers wrongly
        if not (variant_arguments.get("kv_lens") is variant_arguments.get("q_lens") is None):
            check_known_end(spec)
    if is_empty:
        return AttentionCall(q, k, v, mask, None, scale, deterministic, operators.NOTHING, variant, precision)

    table: BlockMask | ChosenBlocks | str | None = None
    if isinstance(mask, (BlockMask, ChosenBlocks)):
        table = mask
    elif spec is not None and chooses:
        mask = table = _choose(spec, q, k, v, scale, variant)
    elif spec is not None:
        # If the operator is visible, the spec text. Not through as_block_mask, which torch.compile would trace into its dispatch.
        text = text_of(spec) if operators.needs_operator() else None
        table = text or compile_cached(spec, q.shape[2], k.shape[2], operators.DEFAULT_BLOCK_SIZE, q.device)
    holder = table if isinstance(table, BlockMask) else None
    kernel_table = table if holder is None else holder.kernel_table(q.is_cuda)
    call = AttentionCall(q, k, v, mask, kernel_table, scale, deterministic, backend, variant, precision)
    of_variant = None if fits is None else describe_variant(variant_arguments)
    key = None if of_variant is None else (fits, of_variant)
    if not chooses and key is not None and (earlier := repeat(call, key, holder, variant_arguments)) is not None:
        return earlier
    if variant_arguments and not chooses:
        call = call._replace(variant=build_variant(q, k, **variant_arguments))
    return prepare(call, key or (None if of_inputs is None else call.key), holder, arguments.check_mask)


def _layouts_if_plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant_arguments: dict[str, Any]
) -> tuple[object, ...] | None:
    """``layouts`` of q, k and v; None if a compiler, a mode or a transform has to see the operator, or if one is not plain."""
    more = [value for value in variant_arguments.values() if isinstance(value, torch.Tensor)]
    params = variant_arguments.get("score_params")
    if isinstance(params, tuple):
        more += [value for value in params if isinstance(value, torch.Tensor)]
    if not is_plain_eager(q, k, v, *more):
        return None
    try:
        return layouts((q, k, v))
    except RuntimeError:  # of nested tensors
        return None


def remember_fitting(of_inputs: Hashable) -> object:
    if len(fitting) >= _MOST:
        fitting.clear()
    return fitting.setdefault(of_inputs, object())


def _check_selection_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, selection: BlockSelection, variant_arguments: dict[str, Any]
) -> Variant | None:
    """Checks a call with a selection, and returns its variant, which has at most sinks."""
    nothing = int, float, tuple, list  # 0 and () change nothing
    sinks = variant_arguments.get("sinks")
    changes = {name: value for name, value in variant_arguments.items() if name != "sinks"}
    given = [name for name, value in changes.items() if value is not None and (not isinstance(value, nothing) or value)]
    if given:
        raise ValueError(f"a BlockSelection does not take {' and '.join(given)}; leave it out, or pass a BlockMask")
    arguments.check_tensors(*arguments.stand_in_for_empty_batch(q, k, v))
    check_selection(selection, q, k)
    return build_variant(q, k, sinks=sinks)


def _choose(
    spec: Pattern | str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, variant: Variant | None
) -> BlockMask | ChosenBlocks:
    """Chooses blocks from q and k. Warns if training would thus see later tokens."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        _warn_of_later_keys(spec)
    choose = chosen_in_graph if torch.compiler.is_compiling() else chosen_mask
    return choose(spec, q, k, scale, None, variant)


def _check_precision(precision: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, sinks: object) -> None:
    """Raises ValueError for an unknown precision, or one that does not apply to these arguments."""
    arguments.check_precision(precision)
    if isinstance(mask, BlockSelection):
        raise ValueError(
            f"precision={precision!r} does not take a BlockSelection as mask; pass a BlockMask, or leave precision out"
        )
    for name, t in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if isinstance(t, torch.Tensor) and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"precision={precision!r} gives no gradients, and {name} requires one; leave precision out, or call it under "
                "torch.no_grad()"
            )
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"with precision={precision!r}, q, k and v must be float16 or bfloat16; got {q.dtype}; cast them")


@constant_in_graphs
@cached_until_cleared(256)
def _warn_of_later_keys(spec: Pattern | str) -> None:
    within = choices_of(spec)[0].within
    if within is None or is_causal(within):
        return
    ends_at_query = False
    with suppress(Exception):  # of a user's own rule: it need not take other lengths than the call's
        ends_at_query = run_in_thread(lambda: as_block_mask(within, named_len(within, _TOKENS)).is_causal)
    if ends_at_query:
        warnings.warn(
            f"no query sees a later key under {short_text(within)}, but later keys change what the choosers in the expression keep"
            f", so training sees the future; write causal & {short_text(within)} & (...) (said once of each mask)",
            stacklevel=arguments.callers_level(),
        )
