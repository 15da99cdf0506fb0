"""Computes what a mask costs and what it can see, as numbers from its lookup table, which may be of a million tokens."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core import hopper, triton
from ..core.caches import E4M3
from ..core.variant import check_counts
from ..kernels.common.config import padded_head_dim
from ..masks.block_mask import BlockMask
from ..masks.pattern import Pattern
from . import resolve_mask

# Reachability multiplies boolean matrices of at most this many units per side; longer masks are reduced to coarser units.
MOST_UNITS = 1024
DEFAULT_LEN = 65536


@dataclass(frozen=True)
class Reach:
    """Across which share of the causal pairs information can flow, by depth.

    unit: tokens on a side of a unit; 1 is exact, others give upper bounds. shares: layers -> share of the pairs i >= j such that
    information can flow from token j to token i through so many layers, also through later tokens. Depths double until nothing more
    is reached.
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


class Explanation:
    """Figures of a mask, of one head on average. See ``explain``. Prints as a table of sentences.

    head: the expression, if there is one, and lengths, heads and dtype in words. lines: sentences by name. hints: suggestions.
    figures: numbers by name, which are attributes as well.

    q_len, kv_len, block_size; kept_pairs, density, causal_density (None unless causal); kept_blocks, block_density,
    partial_blocks, most_in_row; causal: whether no query sees a later key, so that the dense call in the mask's place is causal
    attention; rival_blocks of that call, and share_of_blocks, kept_blocks / rival_blocks; reach, see ``Reach``; backend, which an
    H100 or H200 takes.
    flops, visited_flops, dense_flops: of a forward pass over batch and heads, 2 x pairs x (head_dim + v_head_dim): for kept pairs,
    pairs of visited blocks, and pairs of the dense call. memory: bytes by name.
    """

    def __init__(self, head: list[str]) -> None:
        self.head, self.lines, self.hints, self.figures = head, dict[str, str](), list[str](), dict[str, Any]()

    def add(self, name: str, sentence: str, **figures: Any) -> None:
        """Adds a line and figures."""
        self.figures |= figures
        self.lines[name] = sentence

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("figures", ()):  # a copy has none before its state is set
            return self.figures[name]
        raise AttributeError(f"an explanation has no figure {name!r}; it has {', '.join(vars(self).get('figures', ()))}")

    def __str__(self) -> str:
        width = max(map(len, self.lines))
        table = [f"{name:<{width}}  {line}" for name, line in self.lines.items()]
        return "\n".join([*self.head, "", *table, *(f"hint: {hint}" for hint in self.hints)])


class _CallSizes(NamedTuple):
    """The sizes of a call besides its mask's."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        shared = "" if self.kv_heads == self.heads else f" on {self.kv_heads} of keys and values"
        dims = f"{self.head_dim}" if self.v_head_dim == self.head_dim else f"{self.head_dim}, v of {self.v_head_dim}"
        return f"batch {self.batch}, {self.heads} heads{shared} of {dims}, {str(self.dtype).removeprefix('torch.')}"


def explain(
    mask: BlockMask | Pattern | str,
    heads: int = 1,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    *,
    batch: int = 1,
    kv_heads: int | None = None,
    v_head_dim: int | None = None,
    q_len: int | None = None,
    kv_len: int | None = None,
    block_size: int | None = None,
) -> Explanation:
    """Returns what a mask costs, what it saves, and what it can see; ``print`` it, or read its figures.

    mask: a BlockMask of one mask (``mask.select(head)`` of several), a Pattern or its spec text.
    q_len, kv_len, block_size: lengths for compiling a pattern, in tokens; as many as the pattern names or 65,536, q_len and 128 by
    default. A BlockMask has its own.
    heads: query heads that share the mask. head_dim: elements. dtype: of q, k and v; for few queries, also of a cache in
    torch.float8_e4m3fn. kv_heads: heads of keys and values, None for as many as query heads. v_head_dim: of v and out, None for
    head_dim.

    Raises ValueError for a mask or pattern that differs over batch or heads, and for choosers, whose blocks depend on q and k.
    """
    kv_heads, v_head_dim = heads if kv_heads is None else kv_heads, head_dim if v_head_dim is None else v_head_dim
    check_counts(batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, such as torch.bfloat16; got {dtype!r}")
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads; got {heads} and {kv_heads}")
    sizes = _CallSizes(batch, heads, kv_heads, head_dim, v_head_dim, dtype)
    mask, spec = resolve_mask(mask, q_len, kv_len, block_size, DEFAULT_LEN)
    lengths = f"{mask.q_len:,} queries x {mask.kv_len:,} keys in blocks of {mask.block_size}"
    found = Explanation([spec] * bool(spec) + [f"{lengths}; {sizes}"])
    grid, size, (full, partial), causal = mask.grid, mask.block_size, mask.kept(), mask.is_causal
    # A block cut off by the end of the queries or keys has a tile, even if it keeps all its pairs.
    pairs, kept = grid.heights(partial.rows) * grid.widths(partial.cols), mask.pairs_of(partial.kinds, partial.tiles)
    whole, kept_blocks, blocks = full.blocks * size**2, full.blocks + len(partial.rows), grid.q_blocks * grid.kv_blocks
    kept_pairs, visited_pairs, all_pairs = whole + int(kept.sum()), whole + int(pairs.sum()), grid.q_len * grid.kv_len
    partial_blocks, wasted = int((kept < pairs).sum()), 1 - kept_pairs / max(1, visited_pairs)
    seen = np.clip(np.arange(grid.q_len) + 1 + grid.offset, 0, grid.kv_len)  # by causal attention
    causal_pairs, ends = int(seen.sum()), np.minimum(np.arange(1, grid.q_blocks + 1) * size, grid.q_len)
    rival_blocks, dense_pairs = (int((-(-seen[ends - 1] // size)).sum()), causal_pairs) if causal else (blocks, all_pairs)
    causal_density = kept_pairs / causal_pairs if causal else None
    of_causal = f", {causal_density:.3%} of the causal ones" if causal_density is not None else ""
    said = f"{kept_pairs:,}, {kept_pairs / all_pairs:.3%} of all{of_causal}"
    found.add("kept pairs", said, kept_pairs=kept_pairs, density=kept_pairs / all_pairs, causal_density=causal_density)
    said = f"{kept_blocks:,} of {blocks:,}, {mask.block_density:.3%}"
    found.add("visited blocks", said, kept_blocks=kept_blocks, block_density=mask.block_density)
    share, dense = kept_blocks / rival_blocks, "dense causal attention" if causal else "dense attention"
    said = f"{share:.3%} of the {rival_blocks:,} of {dense}"
    found.add("share of blocks", said, share_of_blocks=share, causal=causal, rival_blocks=rival_blocks)
    found.add("partial blocks", f"{partial_blocks:,}; {wasted:.1%} of visited pairs dropped", partial_blocks=partial_blocks)
    most = int(mask.by_query.row_ptr.diff().max())
    found.add("heaviest row", f"{most:,} blocks, {most * grid.q_blocks / max(1, kept_blocks):.2f}x the mean", most_in_row=most)
    flops = batch * heads * forward_flops(head_dim, v_head_dim)
    kept_flops, visited_flops, dense_flops = (flops * count for count in (kept_pairs, visited_pairs, dense_pairs))
    of_flops = (_scaled(count, 1000, ("", "K", "M", "G", "T", "P")) for count in (kept_flops, visited_flops, dense_flops))
    said = "{} kept, {} visited, {} for ".format(*(f"{number:.3g} {unit}FLOP" for number, unit in of_flops))
    found.add("forward FLOPs", said + dense, flops=kept_flops, visited_flops=visited_flops, dense_flops=dense_flops)
    _explain_call(found, mask, sizes)
    reach = reachability(mask) if grid.q_len == grid.kv_len else None
    said = str(reach) if reach else "not defined where q_len and kv_len differ, as layers are stacked"
    found.add("causal pairs in reach", said, reach=reach, q_len=grid.q_len, kv_len=grid.kv_len, block_size=size)
    if not kept_blocks:
        found.hints.append("This mask keeps nothing: every output is 0.")
    # A block from a table takes 1.06 times as long as one of dense attention, in long rows.
    if share > 1 / 1.1:
        found.hints.append(f"This mask visits {share:.0%} of the blocks of {dense}, which is likely to be as fast.")
    if wasted > 0.5 and size > 16:
        way_out = "a smaller block size, or a pattern made of whole blocks (block=), visits less"
        found.hints.append(f"{wasted:.0%} of the visited pairs are dropped inside partial blocks; {way_out}.")
    if reach and reach.limit < 1:
        found.hints.append(f"At any depth, only {reach.limit:.1%} of the causal pairs are within reach.")
    return found


def _explain_call(found: Explanation, mask: BlockMask, sizes: _CallSizes) -> None:
    """Adds the memory of a call and the back end that an H100 or H200 takes."""
    table = mask.kernel_table(True)
    of_dtype = "" if sizes.dtype in hopper.DTYPES else f"it runs float16 and bfloat16; got {sizes.dtype}"
    refusal = of_dtype or hopper.shape_refusal(sizes.head_dim, sizes.v_head_dim, table.block_size if table else None)
    portable = sizes.dtype in (*triton.DTYPES, E4M3) and max(sizes.head_dim, sizes.v_head_dim) <= triton.MAX_HEAD_DIM
    backend = "hopper" if refusal is None else "triton" if portable else "torch"
    memory = _count_memory(mask, sizes, backend)
    sizes_of = {name: _scaled(count, 1024, ("B", "KiB", "MiB", "GiB")) for name, count in memory.items()}
    texts = {name: f"{number:.{int(unit != 'B')}f} {unit}" for name, (number, unit) in sizes_of.items()}
    said = "{forward}: q, k and v {inputs}, out and lse {outputs}, table {table}".format(**texts)
    found.add("memory of a call", said, memory=memory)
    found.add("of its backward pass", "{backward}: as above, gradients {gradients}, sums {sums}".format(**texts))
    found.add("back end", f"{backend} on an H100 or H200" + (f"; hopper: {refusal}" if refusal else ""), backend=backend)


def _count_memory(mask: BlockMask, sizes: _CallSizes, backend: str) -> dict[str, int]:
    """Returns bytes over batch and heads by name; forward: held by a call until its backward pass; backward: the peak of that."""
    queries, keys = sizes.batch * sizes.heads * mask.q_len, sizes.batch * sizes.kv_heads * mask.kv_len
    inputs = (queries * sizes.head_dim + keys * (sizes.head_dim + sizes.v_head_dim)) * sizes.dtype.itemsize
    out, lse = queries * sizes.v_head_dim * sizes.dtype.itemsize, queries * (8 if sizes.dtype == torch.float64 else 4)
    table = 0 if mask.keeps_all else mask.nbytes + (mask.coarse.nbytes if mask.coarse else 0)
    sums = 4 * queries  # out * dout of each query
    if backend == "hopper" and hopper.has_backward(sizes.head_dim, sizes.v_head_dim):
        dim, dim_v = padded_head_dim(sizes.head_dim), padded_head_dim(sizes.v_head_dim)
        # Those of dQ, with lse; and of dK and dV, if query heads share them.
        sums = 4 * (queries * (dim + 2) + keys * (dim + dim_v) * (sizes.heads > sizes.kv_heads))
    sizes_of = {"inputs": inputs, "outputs": out + lse, "table": table, "gradients": out + inputs, "sums": sums}
    return sizes_of | {"forward": inputs + out + lse + table, "backward": sum(sizes_of.values())}


def forward_flops(head_dim: int, v_head_dim: int) -> int:
    """Counts the floating-point operations of a kept pair's score and of its term of out."""
    return 2 * (head_dim + v_head_dim)


def share_text(share: float) -> str:
    # 99.99 % must not display as all.
    return "100%" if share == 1 else f"{min(share, 0.999):.1%}"


def _scaled(count: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    """Returns the count in the largest unit that is not above it, and that unit."""
    power = next((power for power in range(len(units) - 1, 0, -1) if count >= base**power), 0)
    return count / base**power, units[power]


def reachability(mask: BlockMask, most_units: int = MOST_UNITS) -> Reach:
    """See ``Reach``, of a square mask. Units are tokens if at most ``most_units``, otherwise blocks or groups of blocks."""
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
