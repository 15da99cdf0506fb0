"""Stands in for the mask of an expression with a chooser, before there are queries and keys."""

from __future__ import annotations

import torch

from ..choosers.choose import mask_by_scores
from ..masks.block_mask import BlockMask
from ..masks.chooser import HeadChoice, choices_of
from ..masks.grid import BlockGrid
from ..masks.pattern import Pattern


def draw_chosen_mask(spec: Pattern | str, q_len: int, kv_len: int | None, density: float | None) -> tuple[BlockMask, HeadChoice]:
    """Returns (a mask of one head, what chooses): the mask keeps blocks drawn at random beside what is kept in any case.

    density: the share of the blocks of ``within`` that it keeps, None for that of the rules keep and budget. Raises ValueError for
    other rules, whose density depends on q and k, and for expressions with several choosers.
    """
    choice, *others = dict.fromkeys(choices_of(spec))
    if others or len(choice.choosers) != 1:
        raise ValueError(f"explain takes expressions with one chooser, the same for all heads; got {spec}; explain them one by one")
    chooser = choice.choosers[0]
    rule, keep = chooser.rule
    if density is None and rule not in ("keep", "budget"):
        raise ValueError(
            f"density must say which share of the blocks is kept, as {rule}= depends on q and k; got None; pass density=0.15, or "
            "what a mask of choose_blocks keeps"
        )
    if density is not None and not 0 < density <= 1:
        raise ValueError(f"density must be a share of the blocks, in (0, 1]; got {density}")
    grid = BlockGrid(q_len, q_len if kv_len is None else kv_len, chooser.block_size)
    scores = torch.rand((1, 1, *grid.shape), generator=torch.Generator("cpu").manual_seed(0))
    return mask_by_scores(scores, grid, choice.within, choice.always, keep if density is None else density), choice
