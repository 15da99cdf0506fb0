"""BlockMask: the lookup table that kernels iterate over, and its makers. Other modules of tables make its fields."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NoReturn, TypeAlias, cast
from weakref import WeakValueDictionary

import torch
from torch.nn.attention.flex_attention import BlockMask as FlexMask

from ..compat.captured import state_of
from ..compat.constants import constant_in_graphs
from ..compat.dynamo import mark_lengths_dynamic, outside_graphs, outside_inference, with_fixed_lengths
from ..compat.names import PACKAGE
from ..compat.pytorch import WeakIdKeyDictionary, fake_mode, is_recorded, plain_tensors
from . import build, from_flex
from .cache import fake_tensors_if_needed, keep_if_captured, run_in_thread, to_traceable
from .coarsen import KERNEL_BLOCK, is_coarse_faster
from .compiler import compile_tables
from .document_blocks import document_blocks
from .fine import fine_blocks
from .fit import check_fit
from .grid import BlockGrid
from .mask_tables import MaskTables
from .memory import cached_until_cleared, register_clear
from .parsing import parse
from .pattern import Pattern
from .select_blocks import by_head, dense_tensors, select_by_maps
from .table import MOST_DERIVED, KernelTables, Table, move_tables
from .tall import tall_rows

Device: TypeAlias = torch.device | str

# Masks made on the host, by the address of ``by_query.work``.
_host_masks: WeakValueDictionary[int, BlockMask] = WeakValueDictionary()
# A FlexAttention mask -> (what it was made of, the state of data that its function reads, BlockMask), as long as the mask lives.
_flex_cache = WeakIdKeyDictionary()
register_clear(_flex_cache.clear)
_MOST_KEPT_BLOCKS = 1 << 20  # of a remembered mask that keeps every block; some 60 bytes each


@dataclass(frozen=True, eq=False)
class BlockMask(MaskTables):
    """Which blocks of the attention matrix to visit, and which pairs to keep in partial blocks.

    Create one with ``compile_mask``, ``BlockMask.from_blocks`` or ``BlockMask.per_head``. Immutable.

    q_len, kv_len: tokens. block_size: tokens on a side of a block. keeps_all: every pair is kept; known without reading the device.
    mask_index: (batch | 1, heads | 1) int32, which stored mask each head uses.
    by_query: ``Table`` whose rows are query blocks, for the forward pass and dQ.
    by_key: ``Table`` whose rows are key blocks, for dK and dV.
    tile_runs: (run tiles, block) int32, ``first | stop << 16``: query row r of the tile keeps keys first .. stop - 1.
    tile_bits: (bit tiles, block, ceil(block / 32)) int32: row r keeps key c if bit c % 32 of word c // 32 is set.
    coarse: the same mask in blocks of 128, which ``attention`` passes to GPU kernels instead; None where they are faster on these
    blocks, and for masks made at run time.
    from_host: whether the table was made on the host, once, so that others may be derived from it.
    document_order: whether the rows of both tables are in order of documents (``groups_of``); known for tables made on the host.

    A full block lies entirely inside the lengths, so kernels need no bounds check there; a block cut off by the end of the queries
    or keys has a tile, even if it keeps all its pairs. Five lines decode the whole format::

        for r in range(q_blocks):
            begin, end = t.row_ptr[m, r], t.row_ptr[m, r + 1]
            runs, bits = t.row_split[m, r]                       # begin <= runs <= bits <= end
            for e in range(begin, end):                          # block (r, t.col_idx[e]):
                tile = None if e < runs else (tile_runs if e < bits else tile_bits)[t.tile_idx[e]]
    """

    coarse: BlockMask | None = None

    # The mask whose blocks these are a choice of, made on the device: launches are kept with that one.
    selected_from: ClassVar[BlockMask | None] = None
    starts: ClassVar[None] = None  # blocks start at multiples of their size, except in ``by_document``

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            return
        # Otherwise torch.compile would recompile for each table length and number of stored masks, and each mask has its own.
        for tensor in (*self.by_query[:5], *self.by_key[:5], *self.tiles):
            mark_lengths_dynamic(tensor, 0)
        for table in (self.by_query, self.by_key):
            mark_lengths_dynamic(table.work, 0, 1)
            mark_lengths_dynamic(table.splits, 0, 1)
        if self.from_host and type(self.by_query.work) is torch.Tensor and not self.by_query.work.is_meta:
            _host_masks.setdefault(self.by_query.work.data_ptr(), self)

    @classmethod
    def of_tables(cls, tables: MaskTables) -> BlockMask:
        """The mask of tables made on the host, plus its coarse form if kernels are predicted to be faster on that."""
        coarse = cls.of_tables(build.in_blocks_of(tables, KERNEL_BLOCK)) if is_coarse_faster(tables) else None
        return cls(**{field.name: getattr(tables, field.name) for field in fields(MaskTables)}, coarse=coarse)

    @staticmethod
    @outside_inference
    def from_blocks(
        blocks: torch.Tensor, block_size: int, q_len: int | None = None, kv_len: int | None = None, within: MaskLike | None = None
    ) -> BlockMask:
        """A mask from a block map computed at run time, on the map's device.

        blocks: (batch | 1, heads | 1, q_blocks, kv_blocks) or (q_blocks, kv_blocks) bool, True where a block is kept.
        block_size: tokens on a side of a block. q_len, kv_len: tokens; one of them is both if there are as many blocks of queries
        as of keys, and they default to whole blocks.
        within: which pairs of those blocks to keep, all by default: a Pattern or its spec text, or a BlockMask of one mask, with
        the same lengths and block size, on the map's device.

        No host synchronization, safe under CUDA graphs; a pattern is compiled and cached at its first use with these lengths, so
        use it once before capturing. The table has room for every block that ``within`` keeps.
        """
        blocks = by_head("blocks", blocks, "q_blocks, kv_blocks")
        q_blocks, kv_blocks = blocks.shape[2:]
        if q_blocks == kv_blocks:  # of self-attention: one length is both
            q_len, kv_len = (kv_len or None) if q_len is None else q_len, q_len if kv_len is None else kv_len
        q_len = q_blocks * block_size if q_len is None else q_len
        kv_len = kv_blocks * block_size if kv_len is None else kv_len
        grid = BlockGrid(q_len, kv_len, block_size)
        if grid.shape != (q_blocks, kv_blocks):
            raise ValueError(
                f"blocks is a map of {q_blocks} x {kv_blocks} blocks, but {grid.q_len} x {grid.kv_len} tokens in blocks of "
                f"{block_size} are {grid.q_blocks} x {grid.kv_blocks}"
            )
        return from_block_maps(blocks, resolve_within(within, grid, blocks.device))

    @staticmethod
    @outside_graphs
    def from_dense(kept: torch.Tensor, block_size: int = 128) -> BlockMask:
        """The mask of a bool tensor, True where a pair is kept, on its device.

        kept: (q_len, kv_len) or (batch | 1, heads | 1, q_len, kv_len) bool. Unlike ``compile_mask``, it scans all pairs.
        """
        return BlockMask.of_tables(build.from_dense(kept, block_size)).to(kept.device)

    @staticmethod
    @outside_inference
    def from_flex(mask: FlexMask) -> BlockMask:
        """Converts a FlexAttention mask, on its device: keeps exactly the pairs that ``flex_attention`` keeps.

        mask: ``torch.nn.attention.flex_attention.BlockMask`` with square blocks. Its token rule is evaluated once, on the blocks
        that it lists as partial, with queries counted from 0, whatever the lengths. A ``score_mod`` is not part of a mask.

        A mask without a token rule (``mask_mod`` is None or ``noop_mask``) is converted like the map of ``from_blocks``: without
        host synchronization, also in CUDA graphs and compiled code.
        """
        if from_flex.keeps_listed_blocks(mask):
            blocks, grid = from_flex.map_from_flex(mask)
            return from_block_maps(blocks, dense_mask(grid, blocks.device))
        return BlockMask.of_tables(from_flex.from_flex(mask)).to(mask.kv_indices.device)

    @staticmethod
    @outside_graphs
    def per_head(
        masks: Iterable[MaskLike],
        q_len: int | None = None,
        kv_len: int | None = None,
        block_size: int = 128,
        device: Device | None = None,
    ) -> BlockMask:
        """One mask per query head; equal ones are stored once.

        masks: a list of patterns, spec texts and BlockMasks of one mask each. Patterns are compiled for the given lengths and block
        size, or for the lengths and block size of the first BlockMask in the list. Raises ValueError where lengths differ.
        """
        if isinstance(masks, (str, BlockMask)) or not isinstance(masks, Iterable):
            raise TypeError(f"per_head needs a list of patterns or masks; got {type(masks).__name__}")
        masks = [from_flex_cached(mask) if isinstance(mask, FlexMask) else mask for mask in masks]
        if not masks:
            raise ValueError("per_head needs at least one pattern or mask; got an empty list")
        first = next((m for m in masks if isinstance(m, BlockMask)), None)
        if first is not None:
            for length, given, own in (("q_len", q_len, first.q_len), ("kv_len", kv_len, first.kv_len)):
                if given is not None and given != own:
                    raise ValueError(f"per_head got {length}={given} and a mask of {own}; leave {length} out, or compile for it")
            q_len, kv_len, block_size = first.q_len, first.kv_len, first.block_size
            device = device or first.device
        keys = [item if isinstance(item, (Pattern, str)) else id(item) for item in masks]
        distinct = dict(zip(keys, masks, strict=True))
        compiled = {key: as_block_mask(item, q_len, kv_len, block_size).to("cpu") for key, item in distinct.items()}
        return BlockMask.of_tables(build.from_heads([compiled[key] for key in keys], 1, len(keys))).to(device or "cpu")

    @outside_graphs
    def select(self, head: int = 0, batch: int = 0) -> BlockMask:
        """The mask of one head of one batch entry, on its device. Raises TypeError or IndexError for numbers that it has not."""
        return BlockMask.of_tables(build.select(self, self.stored_index(batch, head))).to(self.device)

    @outside_graphs
    def transpose(self) -> BlockMask:
        """The mask with queries and keys exchanged, and the same map of heads."""
        return BlockMask.of_tables(build.transpose(self)).to(self.device)

    @property
    def tall(self) -> KernelTables | None:
        """``by_query`` in rows of 192 queries, for forward kernels that are faster over these, or None: see ``_derive_once``."""
        return self._derive_once("_tall", tall_rows)

    @property
    def fine(self) -> KernelTables | None:
        """Both tables in blocks of 64, if a forward kernel is faster over these, or None: see ``_derive_once``."""
        return self._derive_once("_fine", fine_blocks)

    @property
    def by_document(self) -> KernelTables | None:
        """Both tables in blocks that start where documents do, if kernels are faster over these, or None: see ``_derive_once``."""
        return self._derive_once("_by_document", document_blocks) if self.q_len == self.kv_len else None

    def _derive_once(self, name: str, make: Callable[[MaskTables], KernelTables | None]) -> KernelTables | None:
        """make(mask), which reads the table, kept with the mask under this name. None for masks made at run time, several
        masks, blocks other than 128, and very many blocks. Masks of ``attention_varlen`` make these tables themselves."""
        if name not in self.__dict__:
            if not self.from_host or is_recorded(self.device):
                return None
            of_one_mask = self.block_size == KERNEL_BLOCK and self.masks == 1
            few = self.by_query.col_idx.numel() <= MOST_DERIVED
            made = run_in_thread(lambda: move_tables(make(self.to("cpu")), self.device)) if of_one_mask and few else None
            # If two threads made tables, the first stay: launches may have been remembered with them.
            self.__dict__.setdefault(name, made)
        return cast("KernelTables | None", self.__dict__[name])

    def constants(self) -> list[torch.Tensor]:
        """``tensors()`` as constants of a compiled graph: separate tensors, whose lengths are not dynamic."""
        return [with_fixed_lengths(t.detach()) for t in self.tensors()]

    @classmethod
    def from_tensors(
        cls, q_len: int, kv_len: int, block_size: int, tensors: list[torch.Tensor], keeps_all: bool = False
    ) -> BlockMask:
        """The reverse of ``tensors()``."""
        size = len(Table._fields)
        by_query, by_key = Table(*tensors[1 : 1 + size]), Table(*tensors[1 + size : 1 + 2 * size])
        tile_runs, tile_bits = tensors[1 + 2 * size :]
        return cls(q_len, kv_len, block_size, keeps_all, tensors[0], by_query, by_key, tile_runs, tile_bits)

    @classmethod
    def find_by_tensors(cls, q_len: int, kv_len: int, block_size: int, tensors: list[torch.Tensor]) -> BlockMask:
        """The mask made on the host that has these tensors, with all that is kept with it; ``from_tensors`` if there is none."""
        found = _host_masks.get(tensors[1 + Table._fields.index("work")].data_ptr())
        if found is not None and found.sizes == (q_len, kv_len, block_size):
            pairs = zip(found.tensors(), tensors, strict=True)
            if all(one.data_ptr() == other.data_ptr() and one.shape == other.shape for one, other in pairs):
                return found
        return cls.from_tensors(q_len, kv_len, block_size, tensors)

    @outside_inference
    def to(self, device: Device) -> BlockMask:
        """The same mask on another device (itself if already there). Returns the same copy as long as that is held anywhere."""
        device = torch.empty(0, device=device).device  # resolves "cuda" to the current GPU
        if device == self.device:
            return self
        if is_recorded(device):
            return self._copied_to(device)
        moved = self._copies.get(device)
        if moved is None:
            moved = self._copies[device] = self._copied_to(device)
        return moved

    @cached_property
    def _copies(self) -> WeakValueDictionary[torch.device, BlockMask]:
        return WeakValueDictionary()

    def _copied_to(self, device: torch.device) -> BlockMask:
        moved = BlockMask.from_tensors(*self.sizes, [t.to(device) for t in self.tensors()], self.keeps_all)
        coarse = self.coarse and self.coarse.to(device)
        return replace(moved, coarse=coarse, from_host=self.from_host, document_order=self.document_order)

    def kernel_table(self, on_gpu: bool) -> BlockMask | None:
        """Returns what a back end iterates over: on a GPU the coarse mask, if there is one; None if every pair is kept."""
        mask = self.coarse if on_gpu and self.coarse is not None else self
        return None if mask.keeps_all else mask

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _refuse_to_combine(self, *_: object) -> NoReturn:
        raise TypeError("compiled masks do not combine with & | ~; combine their patterns, and compile the result")

    __and__ = __rand__ = __or__ = __ror__ = __invert__ = _refuse_to_combine

    def __repr__(self) -> str:
        return (
            f"BlockMask(q_len={self.q_len}, kv_len={self.kv_len}, block_size={self.block_size}, masks={self.masks}, "
            f"batch_heads={tuple(self.mask_index.shape)}, nbytes={self.nbytes}, device={str(self.device)!r})"
        )


def check_batch_and_heads(entries: Sequence[int], batch: int, heads: int) -> None:
    """Raises ValueError unless a mask with so many entries, (batch, heads), has one of each for all, or as many as a call."""
    for name, size, wanted in (("batch", entries[0], batch), ("heads", entries[1], heads)):
        if size != 1 and size != wanted:  # Dynamo does not compare symbolic sizes with "in"
            for_all = ", or 1 for a mask of all" if wanted > 1 else ""
            raise ValueError(f"the mask's {name} must be q's, {wanted}{for_all}; got {size}; make it for {wanted}")


# Everything that is accepted as a mask.
MaskLike: TypeAlias = Pattern | str | BlockMask | FlexMask

# Lets torch.load read a saved mask without weights_only=False.
torch.serialization.add_safe_globals([BlockMask, Table])


@outside_graphs
def compile_mask(
    pattern: Pattern | str,
    q_len: int,
    kv_len: int | None = None,
    block_size: int = 128,
    device: Device | None = None,
    *,
    progress: bool | None = None,
) -> BlockMask:
    """Compiles a pattern into a lookup table.

    pattern: a Pattern or its spec text. q_len, kv_len: tokens; kv_len defaults to q_len, and where they differ the last query is
    aligned with the last key. block_size: a power of two in 16..256. device: where the table is stored.
    progress: whether to show a progress bar; None shows one if compiling evaluates more than 2^28 pairs. Needs rich.

    Never builds anything of size q_len x kv_len. Raises ValueError for lengths and block sizes out of range, and for a pattern that
    names another number of tokens than the sequence has. With fewer queries than keys, the last of them may be yet to come.
    """
    pattern = parse(pattern) if isinstance(pattern, str) else pattern
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern or its spec text; got {type(pattern).__name__}{_suggest_fix(pattern)}")
    grid = BlockGrid(q_len, q_len if kv_len is None else kv_len, block_size)
    check_fit(pattern, grid.q_len, grid.kv_len)
    return BlockMask.of_tables(compile_tables(pattern.bind_length(grid.kv_len), grid, progress)).to(device or "cpu")


def compile_up_to(pattern: Pattern | str, q_len: int, kv_len: int, block_size: int, device: Device) -> BlockMask:
    """``compile_mask`` for sequences of up to these lengths (a cache, documents): a pattern may name any number of tokens."""
    pattern = parse(pattern) if isinstance(pattern, str) else pattern
    return BlockMask.of_tables(compile_tables(pattern, BlockGrid(q_len, kv_len, block_size))).to(device)


def as_block_mask(mask: MaskLike, q_len: int | None = None, kv_len: int | None = None, block_size: int = 128) -> BlockMask:
    """A BlockMask from a pattern or its text, compiled for these lengths, or from another library's mask."""
    if isinstance(mask, BlockMask):
        return mask
    if isinstance(mask, (Pattern, str)):
        if q_len is None:
            raise ValueError(f"q_len is needed to compile {mask}; pass q_len=... or a compiled mask")
        return compile_mask(mask, q_len, kv_len, block_size)
    return convert_foreign_mask(mask)


def from_block_maps(maps: torch.Tensor, within: BlockMask) -> BlockMask:
    """The blocks of ``within``, one mask, that each map keeps; see ``select_by_maps``."""
    mask = BlockMask.from_tensors(*within.sizes, select_by_maps(maps, within))
    vars(mask)["selected_from"] = within
    return mask


@outside_inference
def dense_mask(grid: BlockGrid, device: torch.device) -> BlockMask:
    """The mask that keeps every pair, remembered if it is small."""
    keep_it = grid.q_blocks * grid.kv_blocks <= _MOST_KEPT_BLOCKS and not is_recorded(device)
    return (_cached_dense_mask if keep_it else _build_dense_mask)(grid, device)


def _build_dense_mask(grid: BlockGrid, device: torch.device) -> BlockMask:
    return BlockMask.from_tensors(grid.q_len, grid.kv_len, grid.block_size, dense_tensors(grid, device), keeps_all=True)


_cached_dense_mask = cached_until_cleared(maxsize=16)(_build_dense_mask)


def resolve_within(within: MaskLike | None, grid: BlockGrid, device: torch.device) -> BlockMask:
    """The BlockMask of one mask; of all pairs for None."""
    return dense_mask(grid, device) if within is None else resolve_single_mask("within", within, grid, device)


def _suggest_fix(mask: object) -> str:
    """How to make a mask of another type; empty if there is no advice."""
    if any(base.__module__.endswith((".masks.pattern", ".masks.block_mask")) for base in type(mask).__mro__):
        return f" of {type(mask).__module__}, another copy of the package than {PACKAGE}; pass spec text, or make the mask here"
    if type(mask).__name__ == "BlockSelection":  # its module imports this one
        return "; a selection by query goes to attention, or as select= to SparseAttention"
    if type(mask).__name__ == "PackedSelection":
        return "; a selection of packed documents goes to attention_varlen"
    if isinstance(mask, torch.Tensor):
        return "; use BlockMask.from_dense for a bool tensor of pairs, from_blocks for one of blocks"
    if isinstance(mask, (list, tuple)):
        return "; use per_head for a pattern of each head, BlockMask.per_head for compiled masks, per_batch for each sequence"
    if isinstance(mask, type):
        return f" {mask.__name__} itself; call it for a pattern"
    if callable(mask):
        return "; use from_mask_fn for a function of positions (q, kv), FlexAttention's create_block_mask for one of (b, h, q, kv)"
    return "; use 'full' to keep every pair" if mask is None else ""


def convert_foreign_mask(mask: object) -> BlockMask:
    """A BlockMask from something that is neither one nor a pattern. Raises a TypeError that says what a mask must be."""
    if isinstance(mask, FlexMask):
        return from_flex_cached(mask)
    raise TypeError(f"a mask must be a Pattern, its spec text or a BlockMask; got {type(mask).__name__}{_suggest_fix(mask)}")


def from_flex_cached(mask: FlexMask) -> BlockMask:
    """``BlockMask.from_flex``, once per mask: again only if its tables, its function or what that reads changed."""
    if from_flex.keeps_listed_blocks(mask) and is_recorded(mask.kv_indices.device):
        return BlockMask.from_flex(mask)
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
    made = BlockMask.from_flex(mask)
    _flex_cache[mask] = made_of, state, made
    return made


def compile_cached(pattern: Pattern | str, q_len: int, kv_len: int, block_size: int, device: torch.device) -> BlockMask:
    """``as_block_mask`` of a pattern or its text, cached; in compiled code a constant, under a FakeTensorMode of fake tensors."""
    if not torch.compiler.is_compiling():
        mask = _cached_mask(pattern, q_len, kv_len, block_size, device)
        keep_if_captured(mask, device)
        return fake_mask_if_needed(mask)
    pattern = to_traceable(pattern)
    q_len, kv_len = operator.index(q_len), operator.index(kv_len)  # symbolic lengths as plain numbers: a graph holds one mask
    keeps_all, tensors = _constant_tables(pattern, q_len, kv_len, block_size, device)
    # With dynamic=True, constants would lose their fixed lengths, and results of an operation keep them. Without Dynamo,
    # torch.export fails with a constant that only an operation without users reads.
    if torch.compiler.is_dynamo_compiling():
        tensors = [t.detach() for t in tensors]
    return BlockMask.from_tensors(q_len, kv_len, block_size, tensors, keeps_all)


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
    return run_in_thread(compile_mask, pattern, q_len=q_len, kv_len=kv_len, block_size=block_size, device=device)


def fake_mask_if_needed(mask: BlockMask) -> BlockMask:
    """A remembered mask; under a FakeTensorMode one of fake tensors."""
    if fake_mode() is None:
        return mask
    return BlockMask.from_tensors(*mask.sizes, fake_tensors_if_needed(mask.tensors()), mask.keeps_all)


def resolve_single_mask(name: str, mask: MaskLike, grid: BlockGrid, device: torch.device) -> BlockMask:
    """The BlockMask of one mask with these lengths and blocks on ``device``. Raises ValueError, which calls it ``name``."""
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
