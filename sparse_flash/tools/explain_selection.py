"""Computes what a selection costs and how alike its queries choose, as numbers from its picks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..dispatch.flops import forward_flops
from ..selection.block_selection import BlockSelection, count_selected_pairs
from .figures import explanation_text, flops_text, ratio_text, size_text

TILES = (4, 16, 64)  # queries
ALIKE_SHARE = 0.95  # of picks that are alike


@dataclass(frozen=True)
class SelectionExplanation:
    """Figures of one selection; pairs are per head that picks, averaged. Prints as a table of sentences. See ``explain``.

    call: lengths, heads and dtype in words. every: queries of a group. density, causal_density: kept pairs / all pairs, or / causal
    ones.
    picks: blocks of a group of queries, on average.
    alike: the share of a group's picks that the group before picked too.
    unions: queries of a tile -> how many different blocks they picked, on average over tiles. A tile that visits its union does
    union / picks times the kept work.
    most_picked, mean_picked: how many groups of one head picked the most picked block, and a block on average.
    flops, dense_flops: of one forward pass over batch and heads, 2 x pairs x (head_dim + v_head_dim), for the kept pairs and for
    causal attention. table_bytes: of the picks and of the table of ``always``.
    time: why none is known; None without a GPU.
    """

    call: str
    every: int
    density: float
    causal_density: float
    picks: float
    alike: float
    unions: dict[int, float]
    most_picked: int
    mean_picked: float
    flops: int
    dense_flops: int
    table_bytes: int
    time: str | None = None

    @property
    def speedup(self) -> float:
        """Predicted speed-up over causal attention: causal pairs / kept pairs. Infinite if nothing is kept."""
        return 1 / self.causal_density if self.causal_density else float("inf")

    @property
    def hints(self) -> list[str]:
        """Suggestions, as sentences."""
        if self.every > 1 or self.alike < ALIKE_SHARE:
            return []
        return [f"{self.alike:.0%} of picks were picked by the query before: a choice for several queries (every=) is faster."]

    def lines(self) -> dict[str, str]:
        """The numbers as sentences, by name."""
        unions = ", ".join(
            f"{tile} queries: {width:.1f} blocks, {ratio_text(width / self.picks)}"
            for tile, width in self.unions.items()
            if self.picks
        )
        return {
            "kept pairs": f"{self.density:.3%} of all, {self.causal_density:.3%} of the causal ones",
            "picks": f"{self.picks:.1f} blocks of a choice on average; {self.alike:.1%} were picked by the choice before as well",
            "unions": unions or "none",
            "load over blocks": f"a block is picked {self.mean_picked:.1f} times on average, {self.most_picked:,} at most",
            "table": size_text(self.table_bytes),
            "forward FLOPs": f"{flops_text(self.flops)} kept, {flops_text(self.dense_flops)} of causal attention",
            **({"rough time": self.time} if self.time else {}),
            "predicted speed-up": f"{ratio_text(self.speedup)} over causal attention by kept pairs",
        }

    def __str__(self):
        return explanation_text([self.call], self.lines(), self.hints)


def explain_selection(
    selection: BlockSelection, heads: int, kv_heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype
) -> SelectionExplanation:
    """See ``explain``. heads: query heads, of which equal numbers share the picks of a head."""
    batch, picking, groups, _ = selection.picks.shape
    if not batch:
        raise ValueError("explain needs the picks of at least one sequence; got a selection of batch 0")
    if heads % picking:
        raise ValueError(f"heads must be a multiple of the {picking} heads that pick; got {heads}; pass the number of query heads")
    lines = selection.picks.cpu().flatten(0, 1)
    valid = lines >= 0
    before = (lines[:, 1:, :, None] == lines[:, :-1, None, :]).any(-1) & valid[:, 1:]
    counts = torch.stack([torch.bincount(line[line >= 0], minlength=selection.kv_blocks) for line in lines])
    position = torch.arange(selection.q_len, device="cpu") + selection.offset
    causal = int((position + 1).clamp(min=0).sum())
    density, flops = selection.density, forward_flops(head_dim, v_head_dim)
    shared = "" if selection.every == 1 else f" for {selection.every} queries"
    lengths = f"{selection.q_len:,} queries x {selection.kv_len:,} keys, blocks of {selection.block_size} picked{shared}"
    return SelectionExplanation(
        call=f"{lengths}; batch {batch}, {heads} heads on {kv_heads}, {picking} pick; head_dim {head_dim}, "
        f"{str(dtype).removeprefix('torch.')}",
        every=selection.every,
        density=density,
        causal_density=density * selection.q_len * selection.kv_len / causal if causal else 0.0,
        picks=float(valid.sum() / (len(lines) * groups)),
        alike=float(before.sum() / valid[:, 1:].sum().clamp(min=1)),
        unions={tile: _union(lines, tile // selection.every) for tile in TILES if 2 <= tile // selection.every <= groups},
        most_picked=int(counts.max()),
        mean_picked=float(counts.double().mean()),
        flops=flops * count_selected_pairs(selection, heads),
        dense_flops=flops * batch * heads * causal,
        table_bytes=selection.nbytes,
    )


def _union(lines: torch.Tensor, together: int) -> float:
    """How many different blocks as many groups in a row picked, on average. lines: (heads, groups, n)."""
    whole = lines.shape[1] // together
    tiles = lines[:, : whole * together].reshape(len(lines) * whole, -1).sort(1).values
    first = torch.nn.functional.pad(tiles[:, 1:] != tiles[:, :-1], (1, 0), value=True)
    return float((first & (tiles >= 0)).sum() / len(tiles))
