"""Computes what a mask costs and what it can see, as numbers from its lookup table.

Nothing here prints, times or uses a device other than the table's; tables of a million tokens are fine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..backends import E4M3, hopper, triton
from ..dispatch.flops import forward_flops
from ..kernels.common.config import padded_head_dim
from ..kernels.hopper.configs import backward_config
from ..masks.block_mask import BlockMask
from ..masks.chooser import has_choosers
from ..masks.costs import GPUS, Counts, pass_us
from ..masks.fit import named_len
from ..masks.grid import BlockGrid
from ..masks.parsing import parse
from ..masks.pattern import Pattern
from ..masks.table import FullBlocks, PartialBlocks
from ..masks.tiles import decode_tiles
from ..selection.block_selection import BlockSelection
from ..variant.variant import check_counts
from .explain_selection import SelectionExplanation, explain_selection
from .explain_video import VideoExplanation, explain_video
from .figures import explanation_text, flops_text, ratio_text, share_text, size_text
from .stand_in import draw_chosen_mask
from .subject import resolve_mask

# Reachability multiplies boolean matrices of at most this many units per side; longer masks are reduced to coarser units.
MOST_UNITS = 1024
# Below this gain dense attention is as fast. Measured on an H200 (docs/performance.md, 2026-11-21, 16 heads x 16,384 tokens): a
# block from a table takes 1.06 times as long as one of dense attention forward and 1.07 backward if rows keep 30 blocks, 1.13 and
# 1.39 if they keep 8; masks near this gain have long rows.
LEAST_GAIN = 1.1
DEFAULT_LEN = 65536
_CHUNK = 1 << 14  # partial blocks per batch


@dataclass(frozen=True)
class Load:
    """How the visited blocks spread over the rows (or columns) of blocks. mean, max: blocks per row. share: the heaviest row's
    share of all visited blocks."""

    mean: float
    max: int
    share: float

    @property
    def imbalance(self) -> float:
        """max / mean: 1 is even; 0 if nothing is kept."""
        return self.max / self.mean if self.mean else 0.0

    @classmethod
    def from_row_ptr(cls, ptr: np.ndarray) -> Load:
        counts, total = np.diff(ptr), int(ptr[-1] - ptr[0])
        return cls(total / len(counts), int(counts.max()), int(counts.max()) / total if total else 0.0)

    def __str__(self) -> str:
        spread = f"{self.mean:.1f} blocks on average, {self.max:,} at most: {self.imbalance:.2f}x"
        return f"{spread}; the heaviest has {self.share:.2%} of the work"


@dataclass(frozen=True)
class Reach:
    """Across which share of the causal pairs information can flow, by depth.

    unit: tokens on a side of a unit; 1 is exact. A larger unit counts as connected if any of its pairs is kept, so the shares are
    upper bounds.
    shares: layers -> share of the pairs i >= j such that information can flow from token j to token i through that many layers of
    attention under this mask, each with its residual connection (so a token always keeps its own). Paths may go through later
    tokens if the mask allows it. The depths double, until nothing more is reached.
    """

    unit: int
    shares: dict[int, float]

    @property
    def limit(self) -> float:
        """The share at any depth."""
        return next(reversed(self.shares.values()))

    def __str__(self) -> str:
        shares = ", ".join(f"{layers}: {share_text(share)}" for layers, share in self.shares.items())
        exact = "exact" if self.unit == 1 else f"seen in units of {self.unit} tokens, so at most"
        return f"after layers {shares} ({exact})"


@dataclass(frozen=True)
class Memory:
    """Bytes of one call and of its backward pass, over batch and heads.

    inputs: q, k and v. outputs: out, and lse in float32. table: of the mask (and, for small blocks, the coarser one that GPUs
    run), once for all calls that share it. gradients: of q, k and v. A call holds inputs, outputs and table; they stay until the
    backward pass, which also holds the gradient of out and the gradients.
    work: {back end: (forward, backward)}, what its kernels additionally hold while they run: sums in float32, and values per query.
    Back ends that do not run such calls are left out; torch holds chunks of scores of bounded size. Tensors that the kernels cannot
    address in place, such as those with a head_dim that is not a multiple of 8, are copied first. Not counted: rows of 192 queries
    (``BlockMask.tall``), which Hopper's kernels may make of a table, a third of its size, and keep with it; and blocks that start
    where documents start (``BlockMask.by_document``), as large as the table, which hold sums for up to 127 queries more a document.
    """

    inputs: int
    out: int
    lse: int
    table: int
    work: dict[str, tuple[int, int]]

    @property
    def outputs(self) -> int:
        return self.out + self.lse

    @property
    def gradients(self) -> int:
        return self.inputs

    @property
    def held(self) -> tuple[int, int]:
        """Returns the bytes of tensors and table during the call and during its backward pass, on any back end."""
        during_call = self.inputs + self.outputs + self.table
        return during_call, during_call + self.out + self.gradients

    def forward(self, backend: str) -> int:
        """The peak while the call runs."""
        return self.held[0] + self.work[backend][0]

    def backward(self, backend: str) -> int:
        """The peak while its backward pass runs."""
        return self.held[1] + self.work[backend][1]

    def lines(self) -> dict[str, str]:
        """The memory of a call and of its backward pass, as sentences."""
        parts = f"q, k and v {size_text(self.inputs)}, out and lse {size_text(self.outputs)}, the table"
        gradients = f"as above, and gradients of out {size_text(self.out)}, of q, k and v {size_text(self.gradients)}"
        passes = (self.forward, parts), (self.backward, gradients)
        lines = []
        for number, (peak, holds) in enumerate(passes):
            # Without an entry, no kernel of a GPU takes such head_dims or dtypes, such as float64.
            total = _sizes_text({name: peak(name) for name in self.work})
            total = total or f"{size_text(self.held[number])} and chunks of scores on torch"
            scratch = _sizes_text({name: work[number] for name, work in self.work.items() if work[number]})
            lines.append(f"{total}: {holds}" + (f", scratch {scratch}" if scratch else ""))
        return dict(zip(("memory of a call", "of its backward pass"), lines, strict=True))


@dataclass(frozen=True)
class RoughTime:
    """Rough microseconds of eager calls on an H100 or H200, forward and backward: of the call, and of the dense call in its place.
    docs/internals/masks.md says how rough they are. device: the GPU."""

    device: str
    forward_us: float
    backward_us: float
    dense_forward_us: float
    dense_backward_us: float

    def __str__(self) -> str:
        ours, dense = (
            f"{_time_text(forward)} forward and {_time_text(backward)} backward"
            for forward, backward in ((self.forward_us, self.backward_us), (self.dense_forward_us, self.dense_backward_us))
        )
        return f"about {ours} on {self.device}; dense {dense}"


def _time_text(us: float) -> str:
    return f"{us:.0f} us" if us < 1e3 else f"{us / 1e3:.1f} ms" if us < 1e4 else f"{us / 1e3:.0f} ms"


@dataclass(frozen=True)
class Explanation:
    """Figures of one mask; pairs and tokens are per head. See ``explain``. Prints as a table of sentences.

    pattern: its spec text, "" for a table. call: lengths, heads and dtype in words.
    causal: no query sees a later key. Then the dense call in the mask's place is causal attention, with half of the blocks; else it
    is attention of all pairs. rival_blocks: the blocks of that call.
    flops, dense_flops, visited_flops: of one forward pass over batch and heads, 2 x pairs x (head_dim + v_head_dim): for the pairs
    kept, the pairs of the dense call, and the pairs of the visited blocks.
    bytes_moved, dense_bytes_moved: keys and values read once per visited block, queries read and outputs and lse written once
    (arXiv:2205.14135, Prop. 4: N d + N^2 d^2 s / M, where a block of queries is what fits in fast memory).
    time: see ``RoughTime``; the reason where none is known; None without a GPU.
    memory: see ``Memory``. video: for a pattern over a VideoLayout, see ``VideoExplanation``; None for others and for tables.
    """

    pattern: str
    call: str
    q_len: int
    kv_len: int
    block_size: int
    heads: int
    head_dim: int
    blocks: int
    kept_blocks: int
    partial_blocks: int
    kept_pairs: int
    density: float
    causal_density: float | None
    block_density: float
    table_bytes: int
    rows: Load
    columns: Load
    empty_queries: int
    empty_keys: int
    reach: Reach | None
    causal: bool
    flops: int
    visited_flops: int
    dense_flops: int
    bytes_moved: int
    dense_bytes_moved: int
    rival_blocks: int
    memory: Memory
    video: VideoExplanation | None = None
    time: RoughTime | str | None = None

    @property
    def partial_share(self) -> float:
        """Partial blocks / kept blocks."""
        return self.partial_blocks / self.kept_blocks if self.kept_blocks else 0.0

    @property
    def wasted_share(self) -> float:
        """The share of the visited pairs that the mask then drops."""
        return 1 - self.flops / self.visited_flops if self.visited_flops else 0.0

    @property
    def speedup(self) -> float:
        """Predicted speed-up over the dense call: its blocks / visited blocks. Infinite if nothing is kept."""
        return self.rival_blocks / self.kept_blocks if self.kept_blocks else float("inf")

    @property
    def bytes_speedup(self) -> float:
        """The dense call's traffic / this mask's traffic: the speed-up if memory, not arithmetic, is the limit."""
        return self.dense_bytes_moved / self.bytes_moved

    @property
    def hints(self) -> list[str]:
        """Suggestions, as sentences."""
        hints = []
        if not self.kept_blocks:
            return ["This mask keeps nothing: every output is 0."]
        if self.speedup < LEAST_GAIN:
            hints.append(f"This mask visits {1 / self.speedup:.0%} of the blocks of {self._dense}, which is likely to be as fast.")
        if self.wasted_share > 0.5 and self.block_size > 16:
            hints.append(
                f"{self.wasted_share:.0%} of the visited pairs are dropped inside partial blocks; a smaller block size, or a "
                "pattern made of whole blocks (block=), visits less."
            )
        if self.rows.imbalance > 8:
            hints.append(f"The heaviest row of blocks has {self.rows.imbalance:.0f} times the mean: it may finish last.")
        if self.reach and self.reach.limit < 1:
            hints.append(f"At any depth, only {self.reach.limit:.1%} of the causal pairs are within reach.")
        if self.empty_queries:
            hints.append(f"{self.empty_queries:,} queries keep nothing: their outputs are 0.")
        return hints + (self.video.hints if self.video else [])

    @property
    def _dense(self) -> str:
        return "dense causal attention" if self.causal else "dense attention"

    def lines(self) -> dict[str, str]:
        """The numbers as sentences, by name."""
        of_causal = f", {self.causal_density:.3%} of the causal ones" if self.causal_density is not None else ""
        flops = f"{flops_text(self.flops)} kept, {flops_text(self.visited_flops)} visited, {flops_text(self.dense_flops)}"
        traffic = f"{size_text(self.bytes_moved)}, {size_text(self.dense_bytes_moved)} for {self._dense}"
        partial = f"{self.partial_blocks:,}, {self.partial_share:.1%} of the visited"
        lines = {
            "kept pairs": f"{self.kept_pairs:,}, {self.density:.3%} of all{of_causal}",
            "visited blocks": f"{self.kept_blocks:,} of {self.blocks:,}, {self.block_density:.3%}",
            "partial blocks": f"{partial}; {self.wasted_share:.1%} of visited pairs dropped",
            "table": size_text(self.table_bytes),
            "load over rows": f"{self.rows}; {self.empty_queries:,} queries keep nothing",
            "load over columns": f"{self.columns}; {self.empty_keys:,} keys are kept by nothing",
            "forward FLOPs": f"{flops} for {self._dense}",
            "forward traffic": f"{traffic} (arXiv:2205.14135, Prop. 4)",
            **self.memory.lines(),
        }
        if self.time is not None:
            lines["rough time"] = str(self.time)
        speedup, reach = "not defined, as no block is visited", "none, except each token's own by the residual connection"
        if self.kept_blocks:
            speedup = (
                f"{ratio_text(self.speedup)} over {self._dense} by visited blocks; {ratio_text(self.bytes_speedup)} by traffic"
            )
            reach = str(self.reach) if self.reach else "not defined where q_len and kv_len differ, as layers are stacked"
        lines |= {"predicted speed-up": speedup, "causal pairs in reach": reach}
        return (self.video.lines() if self.video else {}) | lines

    def __str__(self):
        head = [self.pattern, self.call] if self.pattern else [self.call]
        return explanation_text(head, self.lines(), self.hints)


def explain(
    mask: BlockMask | BlockSelection | Pattern | str,
    heads: int = 1,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    *,
    batch: int = 1,
    kv_heads: int | None = None,
    v_head_dim: int | None = None,
    deterministic: bool = False,
    q_len: int | None = None,
    kv_len: int | None = None,
    block_size: int | None = None,
    device: str | torch.device | None = None,
    density: float | None = None,
) -> Explanation | SelectionExplanation:
    """Returns what a mask costs, what it saves, and what it can see; ``print`` it, or read its fields.

    mask: a BlockMask of one mask (``mask.select(head)`` of several), a Pattern or its spec text. Or a BlockSelection, of any heads,
    which has other figures: how much is picked, and how alike neighbouring queries pick; heads is a multiple of its heads. Or an
    expression with one chooser: the figures are those of blocks drawn at random.
    q_len, kv_len, block_size: lengths for compiling a pattern, in tokens; as many as the pattern names or 65,536, q_len and 128 by
    default; a chooser has its own block. A BlockMask and a BlockSelection have their own.
    heads: query heads that share the mask. head_dim: elements. dtype: of q, k and v. kv_heads: heads of keys and values, None for
    as many as query heads. v_head_dim: of v and out, None for head_dim. deterministic: bitwise repeatable gradients, which take
    more memory on Hopper. device: the GPU of the rough time, "h100", "h200" or one of this machine; None for the current GPU, if
    there is one.
    density: with a chooser, the share of the blocks that are kept in all, in (0, 1]; None for that of its keep= or budget=.
    Up to 64 queries, dtype is that of the cache of ``attention_decode``, which may be torch.float8_e4m3fn.

    Raises ValueError for a mask or pattern that differs over batch or heads; for several choosers, or one whose rule says no
    density if there is none; and for block_size beside a chooser.
    """
    given = parse(mask) if isinstance(mask, str) else mask
    choice = None
    if isinstance(given, Pattern) and has_choosers(given):
        if block_size is not None:
            raise ValueError(f"block_size must be the chooser's block=; got {block_size} beside {given}; leave it out")
        mask, choice = draw_chosen_mask(given, named_len(given, DEFAULT_LEN) if q_len is None else q_len, kv_len, density)
        pattern = str(given)
    else:
        if density is not None:
            raise ValueError(f"density must come with an expression with a chooser; got {density} and another mask; leave it out")
        mask, pattern = resolve_mask(mask, q_len, kv_len, block_size, DEFAULT_LEN)
    kv_heads = heads if kv_heads is None else kv_heads
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    _check_call(mask, dtype, batch, heads, kv_heads, head_dim, v_head_dim)
    if isinstance(mask, BlockSelection):
        found = explain_selection(mask, heads, kv_heads, head_dim, v_head_dim, dtype)
        return replace(found, time=_time_unknown(device, "for blocks that queries pick"))
    grid, (full, partial) = mask.grid, mask.kept()
    blocks, kept_blocks = grid.q_blocks * grid.kv_blocks, full.blocks + len(partial.rows)
    # A block cut off by the end of the queries or keys has a tile, even if it keeps all its pairs.
    pairs, kept = grid.heights(partial.rows) * grid.widths(partial.cols), mask.pairs_of(partial.kinds, partial.tiles)
    in_full = full.blocks * grid.block_size**2
    kept_pairs = in_full + int(kept.sum())
    causal = is_causal(mask)
    causal_pairs = _causal_pairs(grid.q_len, grid.kv_len) if causal else 0
    rival_blocks = _causal_blocks(grid) if causal else blocks
    empty_queries, empty_keys = _empty_tokens(mask, full, partial)
    sizes = batch * heads, head_dim + v_head_dim, dtype.itemsize
    flops = batch * heads * forward_flops(head_dim, v_head_dim)  # of a pair
    unknown = "for blocks chosen by content" if choice else _why_unknown(mask, dtype)
    time = _time_unknown(device, unknown) or estimate_time(mask, causal, batch * heads, (head_dim, v_head_dim), _gpu_name(device))
    return Explanation(
        pattern=pattern,
        call=_describe_call(grid, dtype, batch, heads, kv_heads, head_dim, v_head_dim) + "; chosen blocks at random" * bool(choice),
        q_len=grid.q_len,
        kv_len=grid.kv_len,
        block_size=grid.block_size,
        heads=heads,
        head_dim=head_dim,
        blocks=blocks,
        kept_blocks=kept_blocks,
        partial_blocks=int((kept < pairs).sum()),
        kept_pairs=kept_pairs,
        density=kept_pairs / (grid.q_len * grid.kv_len),
        causal_density=kept_pairs / causal_pairs if causal_pairs else None,
        block_density=mask.block_density,
        table_bytes=mask.nbytes,
        rows=Load.from_row_ptr(mask.by_query.row_ptr[0].cpu().numpy()),
        columns=Load.from_row_ptr(mask.by_key.row_ptr[0].cpu().numpy()),
        empty_queries=empty_queries,
        empty_keys=empty_keys,
        reach=reachability(mask) if grid.q_len == grid.kv_len else None,
        causal=causal,
        flops=flops * kept_pairs,
        visited_flops=flops * (in_full + int(pairs.sum())),
        dense_flops=flops * (causal_pairs if causal else grid.q_len * grid.kv_len),
        bytes_moved=_traffic_bytes(mask, kept_blocks, *sizes),
        dense_bytes_moved=_traffic_bytes(mask, rival_blocks, *sizes),
        rival_blocks=rival_blocks,
        memory=memory(mask, batch, heads, kv_heads, head_dim, v_head_dim, dtype, deterministic),
        video=explain_video(given, mask) if isinstance(given, Pattern) else None,
        time=time,
    )


def _gpu_name(device: str | torch.device | None) -> str:
    """Returns the name of the GPU, or of another device; "" for the current GPU where there is none."""
    if device is None and not torch.cuda.is_available():
        return ""
    name = "cuda" if device is None else str(device)
    return torch.cuda.get_device_name(name) if name.startswith("cuda") and torch.cuda.is_available() else name


def _time_unknown(device: str | torch.device | None, reason: str | None) -> str | None:
    """Returns why the time on a device is not known: for the reason given, or for its name. None if it is, or without a GPU."""
    if not (name := _gpu_name(device)):
        return None
    if reason is None and not any(gpu in name.lower() for gpu in GPUS):
        reason = f"on {name}, only on {' and '.join(gpu.upper() for gpu in GPUS)}"
    return reason and f"not known {reason}"


def _why_unknown(mask: BlockMask, dtype: torch.dtype) -> str | None:
    if mask.q_len <= triton.FEW_QUERIES:
        return f"for up to {triton.FEW_QUERIES} queries"
    return None if dtype in hopper.DTYPES else f"for {str(dtype).removeprefix('torch.')}"


def estimate_time(mask: BlockMask, causal: bool, heads: int, head_dims: tuple[int, int], gpu: str) -> RoughTime | str | None:
    """Returns the rough time of attention under one mask and of the dense call in its place, or why it is not known; None without
    a GPU. heads: of all sequences. head_dims: of q and v."""
    if not gpu:
        return None
    table, (q_len, kv_len) = mask.kernel_table(True), (mask.q_len, mask.kv_len)
    in_place = {*head_dims} <= {*hopper.HEAD_DIMS}
    portable = not (in_place and (table and table.block_size) in hopper.BLOCK_SIZES)
    offset = kv_len - q_len if causal else None
    found = []
    for is_backward, sides in ((False, (q_len, kv_len, offset)), (True, (kv_len, q_len, 0 if causal else None))):
        dense = Counts.dense(*sides)
        no_kernel = is_backward and not hopper.has_backward(*head_dims)
        of_mask = dense if table is None else Counts.of_mask(table.to("cpu"), is_backward, split=not (portable or no_kernel))
        found.append(pass_us(of_mask, is_backward, portable or no_kernel, heads, head_dims))
        found.append(pass_us(dense, is_backward, not in_place or no_kernel, heads, head_dims))
    forward, dense_forward, backward, dense_backward = found
    if forward is None or dense_forward is None or backward is None or dense_backward is None:
        return f"not known for head_dim {max(head_dims)} with blocks of {mask.block_size}"
    return RoughTime(gpu, forward, backward, dense_forward, dense_backward)


def _check_call(
    mask: BlockMask | BlockSelection, dtype: object, batch: int, heads: int, kv_heads: int, head_dim: int, v_head_dim: int
) -> None:
    """Raises ValueError or TypeError for arguments of ``explain`` that no call has."""
    if isinstance(mask, BlockMask) and mask.masks != 1:
        raise ValueError(f"explain looks at one mask; got {mask.masks}; explain them one by one, as mask.select(head)")
    check_counts(batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, such as torch.bfloat16; got {dtype!r}")
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads; got {heads} and {kv_heads}")


def _describe_call(
    grid: BlockGrid, dtype: torch.dtype, batch: int, heads: int, kv_heads: int, head_dim: int, v_head_dim: int
) -> str:
    shared = "" if kv_heads == heads else f" on {kv_heads} of keys and values"
    dims = f"{head_dim}" if v_head_dim == head_dim else f"{head_dim}, v of {v_head_dim}"
    lengths = f"{grid.q_len:,} queries x {grid.kv_len:,} keys in blocks of {grid.block_size}"
    return f"{lengths}; batch {batch}, {heads} heads{shared} of {dims}, {str(dtype).removeprefix('torch.')}"


def memory(
    mask: BlockMask,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    deterministic: bool,
) -> Memory:
    """See ``Memory``; arguments as in ``explain``."""
    queries, keys = batch * heads * mask.q_len, batch * kv_heads * mask.kv_len
    exact = 8 if dtype == torch.float64 else 4
    given = mask.coarse or mask  # in the blocks that kernels run
    work = {}
    if dtype in (*triton.DTYPES, E4M3) and max(head_dim, v_head_dim) <= triton.MAX_HEAD_DIM:
        work["triton"] = 0, 4 * queries  # the backward pass: rowsum(dout x out) per query
    if (
        dtype in hopper.DTYPES
        and head_dim in hopper.HEAD_DIMS
        and v_head_dim in hopper.HEAD_DIMS
        and (mask.keeps_all or given.block_size in hopper.BLOCK_SIZES)
    ):
        dims = padded_head_dim(head_dim), padded_head_dim(v_head_dim)
        forward, backward = _hopper_work(given, batch, heads, kv_heads, *dims, deterministic)
        work["hopper"] = forward, backward if hopper.has_backward(head_dim, v_head_dim) else work["triton"][1]
    return Memory(
        inputs=(queries * head_dim + keys * (head_dim + v_head_dim)) * dtype.itemsize,
        out=queries * v_head_dim * dtype.itemsize,
        lse=exact * queries,
        table=0 if mask.keeps_all else mask.nbytes + (mask.coarse.nbytes if mask.coarse else 0),
        work=work,
    )


def _hopper_work(
    mask: BlockMask, batch: int, heads: int, kv_heads: int, dim: int, dim_v: int, deterministic: bool
) -> tuple[int, int]:
    """dim, dim_v: head_dim of q and k, and of v, as the kernels pad them."""
    dense = mask.keeps_all
    block = backward_config(dim, None).keys if dense else mask.block_size
    # The results and lse of the splits of heavy rows, and dK and dV of the splits of heavy columns.
    split_rows, split_columns = (t.splits.shape[1] * block if not dense and t.is_split else 0 for t in (mask.by_query, mask.by_key))
    forward = 4 * batch * heads * split_rows * (dim_v + 1)
    # dQ is summed in global memory; next to it are lse, delta and, if deterministic, the integer unit of each query.
    queries, keys = (-(-length // block) * block for length in (mask.q_len, mask.kv_len))
    backward = 4 * batch * heads * queries * (dim + (3 if deterministic else 2))
    # So are dK and dV, if query heads share them.
    shared = kv_heads != heads
    if deterministic:
        backward += 4 * 2 * batch * kv_heads
        rows = heads * keys if shared else 0
    else:
        rows = kv_heads * (keys if shared else split_columns)
    return forward, backward + 4 * batch * rows * (dim + dim_v)


def reachability(mask: BlockMask, most_units: int = MOST_UNITS) -> Reach:
    """See ``Reach``. The mask must have as many queries as keys. Repeated squaring is cubic in the units, so these are tokens if
    there are at most ``most_units``, otherwise blocks, then groups of blocks."""
    if mask.q_len != mask.kv_len:
        raise ValueError(f"reachability needs q_len == kv_len, as layers are stacked; got {mask.q_len} and {mask.kv_len}")
    if mask.q_len <= most_units:
        unit, connected = 1, mask.to_dense().cpu().numpy()
    else:
        group = -(-mask.grid.q_blocks // most_units)
        unit = group * mask.block_size
        full, partial = mask.kept()
        connected = full.count_by_square(group) > 0
        connected[partial.rows // group, partial.cols // group] = True
    connected = connected | np.eye(len(connected), dtype=bool)
    sizes = np.full(len(connected), unit, np.int64)
    sizes[-1] = mask.q_len - unit * (len(connected) - 1)
    pairs = np.tril(np.outer(sizes, sizes).astype(np.float64), -1)
    np.fill_diagonal(pairs, sizes * (sizes + 1) / 2)
    shares, layers = {}, 1
    while True:
        shares[layers] = float(pairs[connected].sum() / pairs.sum())
        # Products of 0 and 1 in float32 are exact up to 2^24 units, and BLAS is far faster than boolean products.
        further = (connected.astype(np.float32) @ connected.astype(np.float32)) > 0
        if shares[layers] == 1.0 or np.array_equal(further, connected):
            return Reach(unit, shares)
        connected, layers = further, layers * 2


def _traffic_bytes(mask: BlockMask, blocks: int, heads: int, dims: int, itemsize: int) -> int:
    """dims: head_dim + v_head_dim."""
    ends = mask.q_len * dims * itemsize + 4 * mask.q_len
    return heads * (ends + blocks * mask.block_size * dims * itemsize)


def _causal_pairs(q_len: int, kv_len: int) -> int:
    # Query i sees min(kv_len, i + 1 + kv_len - q_len) keys, if that is positive.
    seen = np.arange(q_len, dtype=np.int64) + 1 + kv_len - q_len
    return int(np.clip(seen, 0, kv_len).sum())


def _causal_blocks(grid: BlockGrid) -> int:
    last = np.minimum((np.arange(grid.q_blocks) + 1) * grid.block_size, grid.q_len) - 1 + grid.offset
    return int(np.clip(last // grid.block_size + 1, 0, grid.kv_blocks).sum())


def is_causal(mask: BlockMask) -> bool:
    """Whether no kept pair of any head has a key after its query: then the dense call in its place is causal attention."""
    grid, size = mask.grid, mask.block_size
    last, _ = _tile_ends(mask)
    # How far a key of each tile is after its query, at most, if the block's first key is at its first query.
    latest = np.where(last >= 0, last - np.arange(size), -size).max(1)
    for full, partial in map(mask.kept, range(mask.masks)):
        first_query, first_key = partial.rows.astype(np.int64) * size + grid.offset, partial.cols.astype(np.int64) * size
        later = latest[_tile_numbers(mask, partial)] > first_query - first_key
        # Only if a block's last key is after its first query may it hold such pairs: tiles go on past the last key.
        may_hold = np.minimum(first_key + size, grid.kv_len) - 1 > first_query
        if (full.stop * size - 1 > full.rows * size + grid.offset).any() or (later & may_hold).any():
            return False
    return True


def _empty_tokens(mask: BlockMask, full: FullBlocks, partial: PartialBlocks) -> tuple[int, int]:
    """How many queries keep no key, and how many keys no query keeps."""
    grid, size = mask.grid, mask.block_size
    queries, keys = np.zeros((grid.q_blocks, size), bool), np.zeros((grid.kv_blocks, size), bool)
    queries[full.rows] = True
    begun, ended = (np.bincount(bound, minlength=grid.kv_blocks + 1) for bound in (full.first, full.stop))
    keys[(begun - ended).cumsum()[:-1] > 0] = True
    last, kept_keys = _tile_ends(mask)
    tile = _tile_numbers(mask, partial)
    for part in (slice(low, low + _CHUNK) for low in range(0, len(tile), _CHUNK)):
        np.logical_or.at(queries, partial.rows[part], last[tile[part]] >= 0)
        np.logical_or.at(keys, partial.cols[part], kept_keys[tile[part]])
    return int(grid.q_len - queries.sum()), int(grid.kv_len - keys.sum())


def _tile_ends(mask: BlockMask) -> tuple[np.ndarray, np.ndarray]:
    """(the last key that each row of a tile keeps or -1, which keys some row keeps), (tiles, block) each, run tiles first."""
    found = []
    for kind, tiles in enumerate(mask.tiles, 1):
        for _, kept in decode_tiles(tiles.cpu().numpy(), kind, mask.block_size):
            last = np.where(kept.any(2), mask.block_size - 1 - kept[:, :, ::-1].argmax(2), -1)
            found.append((last, kept.any(1)))
    last, keys = map(np.concatenate, zip(*found, strict=True))
    return last, keys


def _tile_numbers(mask: BlockMask, partial: PartialBlocks) -> np.ndarray:
    """The rows of ``_tile_ends`` for these blocks."""
    return partial.tiles + (partial.kinds == 2) * len(mask.tile_runs)


def _sizes_text(counts: dict[str, int]) -> str:
    """Bytes per back end; joint if both read the same."""
    texts = {name: size_text(count) for name, count in counts.items()}
    together = len(set(texts.values())) == 1 < len(texts)
    return next(iter(texts.values())) if together else ", ".join(f"{text} on {name}" for name, text in texts.items())
