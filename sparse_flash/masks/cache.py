"""A BlockMask for anything that stands for one (a pattern, its spec text, a FlexAttention mask), made once and remembered."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..compat.captured import state_of
from ..compat.constants import constant_in_graphs
from ..compat.dynamo import position_in_graph
from ..compat.names import PACKAGE
from ..compat.pytorch import WeakIdKeyDictionary, fake_mode, is_recorded, plain_tensors
from . import from_flex
from .block_mask import BlockMask, Device, MaskLike
from .compiler import compile_mask
from .from_flex import FlexMask
from .grid import BlockGrid
from .memory import cached_until_cleared, register_clear
from .pattern import Pattern, is_made_in_graph, short_text

MADE = TypeVar("MADE")

# A FlexAttention mask -> (what it was made of, the state of data that its function reads, BlockMask), as long as the mask lives.
_flex_cache = WeakIdKeyDictionary()
register_clear(_flex_cache.clear)
# Masks and tables that captured CUDA graphs use, by id. Replays read them, so none is ever dropped.
_captured: dict[int, object] = {}

_ACCEPTS_ONLY_TEXT = torch.__version__ < "2.13"  # a TorchVersion, which compares versions as numbers


def as_block_mask(
    mask: MaskLike, q_len: int | None = None, kv_len: int | None = None, block_size: int = 128, device: Device | None = None
) -> BlockMask:
    """A BlockMask from anything that stands for one. A pattern and its text are compiled for these lengths."""
    if isinstance(mask, BlockMask):
        return mask
    if isinstance(mask, (Pattern, str)):
        if q_len is None:
            raise ValueError(f"q_len is needed to compile {mask}; pass q_len=... or a compiled mask")
        return compile_mask(mask, q_len, kv_len, block_size, device)
    return convert_foreign_mask(mask)


def _suggest_fix(mask: object) -> str:
    """How to make a mask of another type; empty if there is no advice."""
    if any(base.__module__.endswith((".masks.pattern", ".masks.block_mask")) for base in type(mask).__mro__):
        return f" of {type(mask).__module__}, another copy of the package than {PACKAGE}; pass spec text, or make the mask here"
    if type(mask).__name__ == "CausalBias":
        return "; use 'causal', which aligns the last query with the last key"
    if isinstance(mask, torch.Tensor):
        return "; use BlockMask.from_dense for a bool tensor of pairs, from_blocks for one of blocks"
    if type(mask).__name__ == "BlockSelection":  # its module imports this one
        return "; a selection by query goes to attention, or as select= to SparseAttention"
    if type(mask).__name__ == "PackedSelection":
        return "; a selection of packed documents goes to attention_varlen"
    if isinstance(mask, (list, tuple)):
        return "; use per_head for a pattern of each head, BlockMask.per_head for compiled masks, per_batch for each sequence"
    if isinstance(mask, type):
        return f" {mask.__name__} itself; call it for a pattern"
    if callable(mask):
        return "; use from_mask_fn for a function of positions (q, kv), BlockMask.from_mask_mod for one of (b, h, q_idx, kv_idx)"
    return "; use 'full' to keep every pair" if mask is None else ""


def from_flex_cached(mask: FlexMask) -> BlockMask:
    """``BlockMask.from_flex``, once per mask: again only if its function or tables were replaced, or its tables or data of its
    function changed. Where operations are recorded, a mask without a token rule is converted at each call, and by each replay."""
    if from_flex.keeps_listed_blocks(mask) and is_recorded(mask.kv_indices.device):
        return from_flex.from_flex(mask)
    if torch.compiler.is_compiling():
        raise TypeError(
            "torch.compile cannot look into a FlexAttention mask that has a mask_mod; make mask = BlockMask.from_flex(mask) "
            "outside of the compiled function and pass that"
        )
    made_of = mask.mask_mod, mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    state = state_of(made_of)
    old_parts, old_state, converted = _flex_cache.get(mask, ((), None, None))
    if converted is not None and old_state == state and all(map(operator.is_, old_parts, made_of)):
        keep_if_captured(converted, converted.device)
        return converted
    if is_recorded(mask.kv_indices.device):
        raise ValueError(
            "a FlexAttention mask is read on the host, which cannot be captured in a CUDA graph or traced; make mask = "
            "BlockMask.from_flex(mask) before, or call attention with it once before"
        )
    made = from_flex.from_flex(mask)
    _flex_cache[mask] = made_of, state, made
    return made


def convert_foreign_mask(mask: object) -> BlockMask:
    """A BlockMask from something that is neither one nor a pattern. Raises a TypeError that says what a mask must be."""
    if isinstance(mask, FlexMask):
        return from_flex_cached(mask)
    raise TypeError(f"a mask must be a Pattern, its spec text or a BlockMask; got {type(mask).__name__}{_suggest_fix(mask)}")


def keep_if_captured(tables: object, device: torch.device) -> None:
    """Keeps forever what a CUDA graph captures, as replays read it: a mask, or tables that others remember."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured[id(tables)] = tables


def to_traceable(pattern: Pattern | str) -> Pattern | str:
    """The pattern as torch.compile hands it over: the text of one that is made in the graph. Raises a TypeError, which ends a
    graph, for what PyTorch before 2.13 cannot hand over as a constant."""
    if _ACCEPTS_ONLY_TEXT and isinstance(pattern, Pattern):
        raise TypeError(f"torch.compile of PyTorch {torch.__version__} does not trace Pattern objects; pass pattern.to_spec()")
    pattern = pattern.to_spec() if isinstance(pattern, Pattern) and is_made_in_graph(pattern) else pattern
    _warn_of_another_graph(pattern)
    return pattern


# Of each call in compiled code: the compiled function, how often it was compiled before, the patterns then; none after a warning.
_graphs: dict[object, tuple[int, int, set[str]]] = {}
register_clear(_graphs.clear)


@constant_in_graphs
def _warn_of_another_graph(pattern: Pattern | str) -> None:
    """Warns where a call is compiled again for another pattern; once for each call."""
    if (position := position_in_graph()) is None:
        return
    calls, function, times = position
    known = _graphs.get(calls)
    if known is None or known[0] != function or known[1] > times:  # the last after torch.compiler.reset
        _graphs[calls] = function, times, {str(pattern)}
    elif known[1] == times:
        known[2].add(str(pattern))
    elif known[2] and str(pattern) not in known[2]:
        skipped = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
        file, line = next((call for call in reversed(calls) if not call[0].startswith(skipped)), calls[0])
        message = (
            f"compiled again for the mask {short_text(pattern)}, after {short_text(min(known[2]))}: each pattern or text is a "
            "graph of its own, of which torch.compile keeps few; if masks change, pass compile_mask(...), whose tables are data"
        )
        warnings.warn_explicit(message, UserWarning, file, line or 0)
        known[2].clear()


def compile_cached(pattern: Pattern | str, q_len: int, kv_len: int, block_size: int, device: torch.device) -> BlockMask:
    """``as_block_mask`` of a pattern or its text, cached; in compiled code a constant, under a FakeTensorMode of fake tensors."""
    if not torch.compiler.is_compiling():
        mask = _cached_mask(pattern, q_len, kv_len, block_size, device)
        keep_if_captured(mask, device)
        return fake_mask_if_needed(mask)
    pattern = to_traceable(pattern)
    # operator.index turns symbolic lengths into plain numbers: a compiled graph holds one mask, and another length needs another.
    q_len, kv_len = operator.index(q_len), operator.index(kv_len)
    keeps_all, tensors = _constant_tables(pattern, q_len, kv_len, block_size, device)
    # Results of an operation keep their fixed lengths where they are indexed; with dynamic=True, constants would lose them. Without
    # Dynamo, torch.export fails with a constant that only an operation without users reads.
    if torch.compiler.is_dynamo_compiling():
        tensors = [t.detach() for t in tensors]
    return BlockMask.from_tensors(q_len, kv_len, block_size, tensors, keeps_all)


def fake_mask_if_needed(mask: BlockMask) -> BlockMask:
    """A remembered mask; under a FakeTensorMode one of fake tensors."""
    if fake_mode() is None:
        return mask
    return BlockMask.from_tensors(*mask.sizes, fake_tensors_if_needed(mask.tensors()), mask.keeps_all)


def fake_tensors_if_needed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Remembered tensors; under a FakeTensorMode, whose operations refuse real ones, fake tensors of the same shapes."""
    if torch.compiler.is_compiling() or (fake := fake_mode()) is None:  # in graphs they are constants
        return tensors
    return [fake.from_tensor(t) for t in tensors]


@constant_in_graphs
def _constant_tables(
    pattern: Pattern | str, q_len: int, kv_len: int, block_size: int, device: torch.device
) -> tuple[bool, list[torch.Tensor]]:
    """A mask's tables as constants of the compiled graph: torch.compile looks into lists, but not into a BlockMask."""
    mask = _cached_mask(pattern, q_len, kv_len, block_size, device)
    with plain_tensors():
        return mask.keeps_all, mask.constants()


@cached_until_cleared(maxsize=64)
def _cached_mask(pattern: Pattern | str, q_len: int, kv_len: int, block_size: int, device: torch.device) -> BlockMask:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the table of {pattern} for {q_len} queries and {kv_len} keys does not exist yet, and cannot be made while a CUDA "
            "graph is captured; make the call once before, or pass compile_mask(...)"
        )
    return run_in_thread(as_block_mask, pattern, q_len=q_len, kv_len=kv_len, block_size=block_size, device=device)


def run_in_thread(make: Callable[..., MADE], *args: Any, **options: Any) -> MADE:
    """make(*args, **options), in a separate thread: dispatch modes, inference mode, default devices and the memory pool of
    torch.compile's CUDA graphs are per thread, and a lasting table must not belong to any of them."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make, *args, **options).result()


def resolve_single_mask(name: str, mask: MaskLike, grid: BlockGrid, device: torch.device) -> BlockMask:
    """The BlockMask of one mask with these lengths and blocks on ``device``; patterns come from the cache. Raises ValueError if the
    mask does not fit. name: what the error calls it."""
    sizes = grid.q_len, grid.kv_len, grid.block_size
    if isinstance(mask, (Pattern, str)):
        mask = compile_cached(mask, *sizes, device)
    elif not isinstance(mask, BlockMask):
        mask = convert_foreign_mask(mask)
    if mask.masks != 1 or mask.mask_index.numel() != 1:
        raise ValueError(f"{name} must be one mask for all heads; got one with {tuple(mask.mask_index.shape)} (batch, heads)")
    if mask.sizes != sizes:
        raise ValueError(
            f"{name} must have the lengths and block size of the blocks, (q_len, kv_len, block_size) = {sizes}; got "
            f"{mask.sizes}; compile it for these, or pass the pattern itself"
        )
    if mask.device != device:
        raise ValueError(f"{name} is on {mask.device}, what it is to limit on {device}; use {name}.to({str(device)!r})")
    return mask
