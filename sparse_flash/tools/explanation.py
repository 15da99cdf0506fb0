"""What ``explain`` returns, and the figures that it puts together: of calls, of selections, and of masks over a VideoLayout."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ..backends import E4M3, hopper, triton
from ..dispatch.flops import forward_flops
from ..kernels.common.config import padded_head_dim
from ..masks.block_mask import BlockMask
from ..masks.pattern import Pattern, layout_of
from ..masks.tiles import unique_rows
from ..selection.block_selection import BlockSelection, count_selected_pairs


class Explanation:
    """Figures of a mask or of a selection, of one head on average. See ``explain``. Prints as a table of sentences.

    head: the expression, if there is one, and lengths, heads and dtype in words. lines: sentences by name. hints: suggestions.
    figures: numbers by name, which are attributes as well.

    Of masks: q_len, kv_len, block_size; kept_pairs, density, causal_density (None unless causal); kept_blocks, block_density,
    partial_blocks, most_in_row; causal: whether no query sees a later key, so that the dense call in the mask's place is causal
    attention; rival_blocks of that call, and share_of_blocks, kept_blocks / rival_blocks; reach, see ``Reach``; backend, which an
    H100 or H200 takes. Over a VideoLayout also layout, padding, and the shares video_kept and video_visited of all pairs of the
    video's tokens; padding counts as visited. Of selections: density, causal_density; picks of a choice, and alike, the share of
    them that the choice before picked too; table_bytes, of the picks and of the table of ``always``.
    flops, visited_flops, dense_flops: of a forward pass over batch and heads, 2 x pairs x (head_dim + v_head_dim): for kept pairs,
    pairs of visited blocks, and pairs of the dense call. memory: bytes by name.
    """

    def __init__(self, head: list[str]) -> None:
        self.head, self.lines, self.hints, self.figures = head, dict[str, str](), list[str](), dict[str, Any]()

    def add(self, name: str, sentence: str | None, **figures: Any) -> None:
        """Adds a line, unless the sentence is None, and figures."""
        self.figures |= figures
        if sentence is not None:
            self.lines[name] = sentence

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("figures", ()):  # a copy has none before its state is set
            return self.figures[name]
        raise AttributeError(f"an explanation has no figure {name!r}; it has {', '.join(vars(self).get('figures', ()))}")

    def __str__(self) -> str:
        width = max(map(len, self.lines))
        table = [f"{name:<{width}}  {line}" for name, line in self.lines.items()]
        return "\n".join([*self.head, "", *table, *(f"hint: {hint}" for hint in self.hints)])


class CallSpec(NamedTuple):
    """The sizes of a call besides its mask's. kv_heads: of keys and values. v_head_dim: of v and the result."""

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


def _choose_backend(table: BlockMask | None, sizes: CallSpec) -> tuple[str, str]:
    """Returns (the back end that an H100 or H200 takes, why not ``hopper``). table: that GPUs iterate over, None if dense."""
    of_dtype = "" if sizes.dtype in hopper.DTYPES else f"it runs float16 and bfloat16; got {sizes.dtype}"
    refusal = of_dtype or hopper.shape_refusal(sizes.head_dim, sizes.v_head_dim, table.block_size if table else None)
    if refusal is None:
        return "hopper", ""
    portable = sizes.dtype in (*triton.DTYPES, E4M3) and max(sizes.head_dim, sizes.v_head_dim) <= triton.MAX_HEAD_DIM
    return "triton" if portable else "torch", refusal


def _count_memory(mask: BlockMask, sizes: CallSpec, backend: str) -> dict[str, int]:
    """Returns bytes over batch and heads: of inputs (q, k, v), outputs (out, and lse in float32), table (once for all calls that
    share it), gradients, sums (of a backward pass, in float32; not of split rows); forward, what a call holds until its backward
    pass; backward, the peak of that."""
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


def explain_call(found: Explanation, mask: BlockMask, sizes: CallSpec) -> None:
    """Adds a call's memory and back end."""
    backend, refusal = _choose_backend(mask.kernel_table(True), sizes)
    memory = _count_memory(mask, sizes, backend)
    texts = {name: _size_text(count) for name, count in memory.items()}
    said = "{forward}: q, k and v {inputs}, out and lse {outputs}, table {table}".format(**texts)
    found.add("memory of a call", said, memory=memory)
    found.add("of its backward pass", "{backward}: as above, gradients {gradients}, sums {sums}".format(**texts))
    found.add("back end", f"{backend} on an H100 or H200" + (f"; hopper: {refusal}" if refusal else ""), backend=backend)


def explain_selection(selection: BlockSelection, sizes: CallSpec) -> Explanation:
    """See ``explain``. Equal numbers of query heads share the picks of a head."""
    batch, picking, groups, _ = selection.picks.shape
    if sizes.heads % picking:
        raise ValueError(f"heads must be a multiple of the {picking} heads that pick; got {sizes.heads}; pass all query heads")
    picks = selection.picks.cpu()
    valid = picks >= 0
    before = (picks[..., 1:, :, None] == picks[..., :-1, None, :]).any(-1) & valid[..., 1:, :]
    of_choice = float(valid.sum() / max(1, batch * picking * groups))
    alike = float(before.sum() / valid[..., 1:, :].sum().clamp(min=1))
    causal = int((torch.arange(selection.q_len, device="cpu") + selection.offset + 1).clamp(min=0).sum())
    density, pair_flops = selection.density, forward_flops(sizes.head_dim, sizes.v_head_dim)
    of_causal = density * selection.q_len * selection.kv_len / causal if causal else 0.0
    flops, dense_flops = pair_flops * count_selected_pairs(selection, sizes.heads), pair_flops * batch * sizes.heads * causal
    picked = f"blocks of {selection.block_size} picked for {selection.every} queries at a time"
    lengths = f"{selection.q_len:,} queries x {selection.kv_len:,} keys, {picked}"
    found = Explanation([f"{lengths}; {sizes}, {picking} pick"])
    said = f"{density:.3%} of all, {of_causal:.3%} of the causal ones"
    found.add("kept pairs", said, density=density, causal_density=of_causal, flops=flops, dense_flops=dense_flops)
    said = f"{of_choice:.1f} blocks of a choice on average; {alike:.1%} were picked by the choice before as well"
    found.add("picks", said, picks=of_choice, alike=alike)
    found.add("table", _size_text(selection.nbytes), table_bytes=selection.nbytes)
    if selection.every == 1 and alike >= 0.95:
        found.hints.append(f"{alike:.0%} of picks are those of the query before: a choice for several queries (every=) is faster.")
    return found


def explain_video(found: Explanation, pattern: Pattern, mask: BlockMask) -> None:
    """Adds the figures of a pattern's mask, if the pattern has one layout and the mask has its length."""
    layout = layout_of(pattern)
    if layout is None or not mask.q_len == mask.kv_len == layout.length:
        return
    size, least, (full, partial) = mask.block_size, layout.block_size, mask.kept()
    windows = filter(None, (getattr(leaf, "window_in_tiles", None) for leaf in pattern.leaves()))
    inside = [[min(n * side, most) for n, side, most in zip(window, layout.tile, layout.grid)] for window in windows]
    grid, tile_grid, tile, *shown = (" x ".join(map(str, n)) for n in (layout.grid, layout.tile_grid, layout.tile, *inside))
    tokens = np.clip(layout.tiled - np.arange(mask.grid.q_blocks) * size, 0, size)  # of the video, in each block
    until, video, padding = np.append(0, tokens.cumsum()), int(np.prod(layout.grid)), layout.length - layout.tokens
    in_full = until[full.stop] - until[full.first]
    visited = tokens[full.rows] @ in_full + tokens[partial.rows] @ tokens[partial.cols]
    there = np.pad(layout.exists(np.arange(layout.tiled)), (0, mask.grid.q_blocks * size - layout.tiled)).reshape(-1, size)
    first, alike = unique_rows(there)  # queries that are padding keep what their token keeps, and no key is padding
    blocks = np.stack([partial.kinds, partial.tiles, alike[partial.rows], tokens[partial.cols]])
    (kinds, tiles, rows, width), times = np.unique(blocks, axis=1, return_counts=True)
    pairs = mask.tile_pairs(kinds, tiles) & there[first[rows], :, None] & (np.arange(size) < width[:, None, None])
    kept = there.sum(1)[full.rows] @ in_full + pairs.sum((1, 2)) @ times
    around = f"; prefix {layout.prefix:,}, suffix {layout.suffix:,}" if layout.prefix + layout.suffix else ""
    found.add("video", f"{grid} tokens in {tile_grid} tiles of {tile}{around}", layout=layout)
    said = f"{padding:,} of {layout.length:,} positions in tile order, {padding / video:.1%} of the video's tokens"
    found.add("padding", said, padding=padding)
    shares = int(kept) / video**2, int(visited) / video**2
    said = "{:.3%} kept, {:.3%} visited".format(*shares)
    found.add("pairs of the video", said, video_kept=shares[0], video_visited=shares[1])
    if shown:
        found.add("window", f"{', '.join(dict.fromkeys(shown))} tokens (frames x rows x columns)")
    if size > least >= 64:
        found.hints.append(f"A block of {size} tokens holds {size // least} tiles; block_size={least} visits less.")


def _size_text(count: float) -> str:
    """Bytes in the most readable unit."""
    power = unit_of(count, 1024, 3)
    return f"{count / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def unit_of(count: float, base: int, most: int) -> int:
    """Returns the largest power of the base, ``most`` at most, that is not above the count; 0 for less than the base."""
    return next((power for power in range(most, 0, -1) if count >= base**power), 0)
