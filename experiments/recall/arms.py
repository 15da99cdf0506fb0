"""The masks that are compared, and how far each lets information travel."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

import sparse_flash as sf
from examples.train_lm.settings import SDPA
from sparse_flash.tools.explain import MOST_UNITS


@dataclass(frozen=True)
class Arm:
    """masks: spec texts for the layers in turn, "sdpa" for PyTorch's dense attention. keep: if not 0, the masks say what is always
    kept, and ``sf.topk_blocks`` chooses: each block of queries visits ``keep`` blocks of keys in all, by means of both.
    by_query: each query chooses instead, by its largest product with a key of a block, its own block and others, ``keep`` in all,
    beside what the masks say."""

    masks: tuple[str, ...]
    keep: int = 0
    by_query: bool = False

    def choice(self, mask: str, block: int) -> dict[str, Any]:
        """Arguments of ``sf.topk_blocks`` besides queries and keys."""
        return {"keep": self.keep, "block_size": block, "always": mask} | ({"every": 1, "score": "max"} if self.by_query else {})

    def readable_mask(self, layer: int) -> str:
        """Spec text of the mask of all tokens that a layer may read: any earlier block may be chosen."""
        mask = self.masks[layer % len(self.masks)]
        return "causal" if self.keep or mask == SDPA else mask


def build_arms(window: int, block: int, length: int) -> dict[str, Arm]:
    """By name. window: tokens that each query sees next to it, itself included, under every mask. block: tokens of a unit of the
    coarser patterns, and of a chosen block. length: tokens of a sequence."""
    near = f"local({window})"
    stride = 1 << (length // block).bit_length() // 2
    powers_past_window = (length // block - 1).bit_length() - (window // block).bit_length()
    return {
        "dense": Arm((SDPA,)),
        "window": Arm((f"causal & {near}",)),
        "powers": Arm((f"causal & ({near} | power_of_two(block={block}))",)),
        "butterfly": Arm((f"causal & ({near} | butterfly(block={block}))",)),
        # It connects all tokens in two hops for fewest pairs, among unions of one pattern more in all layers and heads.
        "fixed": Arm((f"causal & ({near} | fixed({stride}, block={block}))",)),
        # It keeps as many blocks as the longest rows of powers.
        "chosen": Arm((f"causal & {near}",), keep=window // block + 1 + powers_past_window),
        "chosen-max": Arm((f"causal & {near}",), keep=1 + powers_past_window, by_query=True),
        "mixed": Arm((SDPA, *[f"causal & {near}"] * 3)),
        "mixed-second": Arm((f"causal & {near}", SDPA, *[f"causal & {near}"] * 2)),
        "mixed-last": Arm((*[f"causal & {near}"] * 3, SDPA)),
    }


def count_hops(arm: Arm, layers: int, length: int, block: int) -> tuple[torch.Tensor, int]:
    """((units, units) int64, tokens of a unit): through how many layers' attention, at least, anything in one unit (column) can
    come to another (row), with the layers in their order; layers + 1 where nothing can. As in ``explain``, units are tokens if
    there are at most ``MOST_UNITS``. Otherwise they are blocks, of which one kept pair is enough to count as read, so that more
    is counted as within reach than is."""
    unit = 1 if length <= MOST_UNITS else block
    units = -(-length // unit)
    # within[m]: what is m hops away or nearer.
    within = [torch.eye(units)] + [torch.zeros(units, units) for _ in range(layers)]
    for layer in range(layers):
        mask = sf.compile_mask(arm.readable_mask(layer), length, block_size=block)
        read = (mask.to_dense() if unit == 1 else mask.kept_blocks()).float()
        within[1:] = [((read @ nearer + farther) > 0).float() for nearer, farther in pairwise(within)]
    least = torch.full((units, units), layers + 1)
    for count in range(layers, 0, -1):
        least[within[count] > 0] = count
    return least, unit


def measure_reach(arm: Arm, layers: int, length: int, block: int) -> dict:
    """density: the share of causal pairs kept, mean over layers. masks: for each mask its layers, and what ``sf.explain`` says: the
    share of causal pairs within reach, by number of such layers. within_reach: the same of the layers in their order.
    most_hops: of what is within reach."""
    counts = Counter(arm.readable_mask(layer) for layer in range(layers))
    explained = {mask: sf.explain(mask, q_len=length, block_size=block) for mask in counts}
    if arm.keep:
        q, k = torch.randn(2, 1, 1, length, 16, generator=torch.Generator().manual_seed(0))  # any: how many are kept is fixed
        any_choice = arm.choice(arm.masks[0], block) | ({"score": "mean"} if arm.by_query else {})  # mean: in less time
        kept = sf.topk_blocks(q, k, **any_choice).density * 2 * length / (length + 1)
    else:
        kept = sum(explained[mask].causal_density * count for mask, count in counts.items()) / layers
    least, _ = count_hops(arm, layers, length, block)
    return {
        "density": kept,
        "masks": [{"mask": m, "layers": n, "explained": explained[m].reach.shares} for m, n in counts.items()],
        "within_reach": (least <= layers).sum().item() / (len(least) * (len(least) + 1) / 2),
        "most_hops": least[least <= layers].max().item(),
    }
