"""The choice on GPUs, as bits: scores of a range of rows at a time, then the rule. No tensor of queries x keys is made."""

import torch
from torch import Tensor

from ..core import hopper
from ..masks.grid import BlockGrid
from .features import Features
from .rules_torch import Limits

MOST_BYTES = 1 << 29  # of log-sums and scores held at a time


def pack_block_bits(blocks: Tensor) -> Tensor:
    """(..., ceil(n / 32)) int32 of (..., n) bool: block c is bit c % 32 of word c // 32."""
    words = torch.nn.functional.pad(blocks, (0, -blocks.shape[-1] % 32)).unflatten(-1, (-1, 32))
    return (words.long() << torch.arange(32, device=blocks.device)).sum(-1).to(torch.int32)


def score_blocks(features: Features, grid: BlockGrid, low: int, high: int) -> Tensor:
    """Returns what ``rules_torch.score_blocks`` returns."""
    from .kernels import log_sums

    by, device = log_sums, features.rows.device
    if hopper.runs_on(device):
        from .kernels import hopper_log_sums

        by = hopper_log_sums if hopper_log_sums.supports(features.rows, features.per_kv_block) else log_sums
    return log_sums.scores_of_blocks(features, grid.kv_blocks, low, high, by)


def write_kept_blocks(scores: Tensor, limits: Limits, bits: Tensor, first: int, rule: str, number: int | float, adds: bool) -> None:
    """Writes the blocks that a rule keeps to bits, (batch, heads, q_blocks, words) int32, from row ``first`` on, or adds them."""
    from .kernels.rules import apply_rule

    allowed, forced, numbers = limits.allowed, limits.forced, limits.numbers(rule, number, scores.shape[1])
    if scores.shape[2] < len(numbers):
        allowed, forced, numbers = (x[first : first + scores.shape[2]] for x in (allowed, forced, numbers))
    apply_rule(scores.contiguous(), allowed, forced, numbers, bits, first, rule, float(number), adds)
