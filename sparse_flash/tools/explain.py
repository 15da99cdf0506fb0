"""Computes what a mask costs and what it can see, as numbers from its lookup table, which may be of a million tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..choosers.choose import mask_by_scores
from ..dispatch.flops import forward_flops
from ..masks.block_mask import BlockMask
from ..masks.chooser import choices_of, has_choosers
from ..masks.fit import named_len
from ..masks.grid import BlockGrid
from ..masks.parsing import fill_layout, parse
from ..masks.pattern import Pattern
from ..masks.table import PartialBlocks
from ..masks.tiles import dense_batches
from ..selection.block_selection import BlockSelection
from ..variant.variant import check_counts
from .explanation import CallSpec, Explanation, explain_call, explain_selection, explain_video, unit_of
from .subject import resolve_mask

# Reachability multiplies boolean matrices of at most this many units per side; longer masks are reduced to coarser units.
MOST_UNITS = 1024
DEFAULT_LEN = 65536


@dataclass(frozen=True)
class Reach:
    """Across which share of the causal pairs information can flow, by depth.

    unit: tokens on a side of a unit; 1 is exact. A larger unit counts as connected if any of its pairs is kept, so the shares are
    upper bounds. shares: layers -> share of the pairs i >= j such that information can flow from token j to token i through that
    many layers under this mask, each with its residual connection, also through later tokens. The depths double, until nothing
    more is reached.
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


def explain(
    mask: BlockMask | BlockSelection | Pattern | str,
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
    density: float | None = None,
    layout: Pattern | None = None,
) -> Explanation:
    """Returns what a mask costs, what it saves, and what it can see; ``print`` it, or read its figures.

    mask: a BlockMask of one mask (``mask.select(head)`` of several), a Pattern or its spec text. Or a BlockSelection, of any heads,
    which has other figures: how much is picked, and how alike neighbouring queries pick; heads is a multiple of its heads. Or an
    expression with one chooser: the figures are those of blocks drawn at random.
    q_len, kv_len, block_size: lengths for compiling a pattern, in tokens; as many as the pattern names or 65,536, q_len and 128 by
    default; a chooser has its own block. A BlockMask and a BlockSelection have their own.
    heads: query heads that share the mask. head_dim: elements. dtype: of q, k and v; for few queries, also of a cache in
    torch.float8_e4m3fn. kv_heads: heads of keys and values, None for as many as query heads. v_head_dim: of v and out, None for
    head_dim.
    layout: the ``VideoLayout`` that the word layout stands for in spec text, as for diffusers' ``use_sparse_flash``.
    density: with a chooser, the share of the blocks that are kept in all, in (0, 1]; None for that of its keep= or budget=.

    Raises ValueError for a mask or pattern that differs over batch or heads; for several choosers, or one whose rule says no
    density if there is none; and for block_size beside a chooser.
    """
    kv_heads, v_head_dim = heads if kv_heads is None else kv_heads, head_dim if v_head_dim is None else v_head_dim
    check_counts(batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, such as torch.bfloat16; got {dtype!r}")
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads; got {heads} and {kv_heads}")
    sizes = CallSpec(batch, heads, kv_heads, head_dim, v_head_dim, dtype)
    mask = fill_layout(mask, layout)
    given = mask = parse(mask) if isinstance(mask, str) else mask
    chosen = given if isinstance(given, Pattern) and has_choosers(given) else None
    if chosen is not None and block_size is not None:
        raise ValueError(f"block_size must be the chooser's block=; got {block_size} beside {given}; leave it out")
    if chosen is None and density is not None:
        raise ValueError(f"density must come with an expression with a chooser; got {density} and another mask; leave it out")
    if chosen is not None:
        mask, spec = _draw_mask(chosen, q_len or named_len(chosen, DEFAULT_LEN), kv_len, density), str(chosen)
    else:
        mask, spec = resolve_mask(mask, q_len, kv_len, block_size, DEFAULT_LEN)
    if isinstance(mask, BlockSelection):
        return explain_selection(mask, sizes)
    if mask.masks != 1:
        raise ValueError(f"explain looks at one mask; got {mask.masks}; explain them one by one, as mask.select(head, batch)")
    lengths = f"{mask.q_len:,} queries x {mask.kv_len:,} keys in blocks of {mask.block_size}"
    found = Explanation([spec] * bool(spec) + [f"{lengths}; {sizes}" + "; chosen blocks at random" * (chosen is not None)])
    if isinstance(given, Pattern):
        explain_video(found, given, mask)
    _explain_mask(found, mask, sizes)
    return found


def _explain_mask(found: Explanation, mask: BlockMask, sizes: CallSpec) -> None:
    """Adds the figures of one mask."""
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
    flops = sizes.batch * sizes.heads * forward_flops(sizes.head_dim, sizes.v_head_dim)
    kept_flops, visited_flops, dense_flops = (flops * count for count in (kept_pairs, visited_pairs, dense_pairs))
    said = f"{_flops_text(kept_flops)} kept, {_flops_text(visited_flops)} visited, {_flops_text(dense_flops)} for {dense}"
    found.add("forward FLOPs", said, flops=kept_flops, visited_flops=visited_flops, dense_flops=dense_flops)
    explain_call(found, mask, sizes)
    reach = reachability(mask) if grid.q_len == grid.kv_len else None
    said = str(reach) if reach else "not defined where q_len and kv_len differ, as layers are stacked"
    found.add("causal pairs in reach", said, reach=reach, q_len=grid.q_len, kv_len=grid.kv_len, block_size=size)
    if not kept_blocks:
        found.hints.append("This mask keeps nothing: every output is 0.")
    if share > 1 / 1.1:  # a block from a table takes 1.06 times as long as one of dense attention, in long rows
        found.hints.append(f"This mask visits {share:.0%} of the blocks of {dense}, which is likely to be as fast.")
    if wasted > 0.5 and size > 16:
        inside = f"{wasted:.0%} of the visited pairs are dropped inside partial blocks"
        way_out = (
            _advise_to_copy_keys(mask, partial) or "a smaller block size, or a pattern made of whole blocks (block=), visits less"
        )
        found.hints.append(f"{inside}; {way_out}.")
    if reach and reach.limit < 1:
        found.hints.append(f"At any depth, only {reach.limit:.1%} of the causal pairs are within reach.")


def _advise_to_copy_keys(mask: BlockMask, partial: PartialBlocks) -> str | None:
    """What to do about few keys that many queries see, if most visited blocks keep nothing but some of these; otherwise None."""
    if not len(partial.rows):
        return None
    (kinds, tiles), which = np.unique(np.stack([partial.kinds, partial.tiles]), axis=1, return_inverse=True)
    used = [mask.tile_pairs(kinds[part], tiles[part]).any(1) for part in dense_batches(len(kinds), mask.block_size)]
    few = (np.concatenate(used).sum(1) <= mask.block_size // 8)[which]
    cols, alike = np.unique(np.stack([partial.cols[few], which[few]]), axis=1)
    keys = np.zeros((mask.grid.kv_blocks, mask.block_size), bool)
    np.logical_or.at(keys, cols, np.concatenate(used)[alike])
    copied = mask.grid.q_blocks * -(-int(keys.sum()) // mask.block_size)  # blocks of the copies
    if few.sum() <= max(mask.by_query.row_ptr[0, -1].item() // 2, 2 * copied):
        return None
    return (
        f"{few.sum():,} blocks are visited for {keys.sum():,} keys: copy these to the front ('Few far keys' in the guide on masks)"
    )


def _draw_mask(spec: Pattern, q_len: int, kv_len: int | None, density: float | None) -> BlockMask:
    """Returns a mask of one head that keeps blocks drawn at random next to what an expression keeps in any case."""
    choice, *others = dict.fromkeys(choices_of(spec))
    if others or len(choice.choosers) != 1:
        raise ValueError(f"explain takes expressions with one chooser, the same for all heads; got {spec}; explain them one by one")
    rule, keep = choice.choosers[0].rule
    if not (rule in ("keep", "budget") if density is None else 0 < density <= 1):
        what = "density must be the share of the blocks that is kept, in (0, 1], and may be None only with keep= or budget="
        raise ValueError(f"{what}; got {density} with {rule}=; pass density=0.15, or what a mask of choose_blocks keeps")
    grid = BlockGrid(q_len, q_len if kv_len is None else kv_len, choice.choosers[0].block_size)
    scores = torch.rand((1, 1, *grid.shape), generator=torch.Generator("cpu").manual_seed(0))
    return mask_by_scores(scores, grid, choice.within, choice.always, keep if density is None else density)


def share_text(share: float) -> str:
    # 99.99 % must not display as all.
    return "100%" if share == 1 else f"{min(share, 0.999):.1%}"


def _flops_text(count: float) -> str:
    power = unit_of(count, 1000, 5)
    return f"{count / 1000**power:.3g} {('', 'K', 'M', 'G', 'T', 'P')[power]}FLOP"


def reachability(mask: BlockMask, most_units: int = MOST_UNITS) -> Reach:
    """See ``Reach``. The mask must have as many queries as keys. Repeated squaring is cubic in the units, so these are tokens if
    there are at most ``most_units``, otherwise blocks, then groups of blocks."""
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
