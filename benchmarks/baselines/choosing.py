"""Other packages that choose blocks of a prompt by content, each called through its own functions, none of it copied here.

Written for these commits; each package must be importable, from site-packages or PYTHONPATH, under the module's name:

    flashprefill     ops             github.com/qhfan/FlashPrefill 74e42f3 (arXiv:2603.06199); it imports fla.utils of fla-core
    minference       minference      github.com/microsoft/MInference fb56c91 (arXiv:2407.02490), its block-sparse heads
    prism            prism           github.com/xinghaow99/prism d5a4252 (arXiv:2602.08426)

These calls need no build. The __init__.py of minference imports more, compiled extensions too, so leave it out where those are not
installed. MInference's vertical-slash heads need a compiled extension and are left out. Prism and FlashPrefill do not run with
triton 3.9, which has no block pointers and checks the keys of autotuners.

The knob is the setting by which a package keeps more or less. Packages that want as many heads of keys as of queries get repeated
ones, made before anything is timed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from ..workload.problem import Problem

BLOCK = 128


@dataclass(frozen=True)
class Calls:
    """A package's calls for one problem. knob: its value, a float. A choice: whatever the package returns for it.

    choose(knob) -> choice. attend(choice) -> out, (1, heads, tokens, head_dim). both(knob) -> out. kept(choice) -> the number of
    causal blocks kept, of all heads. causal_blocks: how many there are."""

    choose: Callable[[float], Any]
    attend: Callable[[Any], torch.Tensor]
    both: Callable[[float], torch.Tensor]
    kept: Callable[[Any], torch.Tensor | int]
    causal_blocks: int

    def density(self, choice: Any) -> float:
        """The share of causal blocks that the choice keeps."""
        return float(self.kept(choice)) / self.causal_blocks


@dataclass(frozen=True)
class Package:
    """calls(problem) -> Calls; raises ImportError if the package is missing. source: repository and commit. knob: a setting's name.
    sparsest, densest: its ends."""

    calls: Callable[[Problem], Calls]
    source: str
    knob: str
    sparsest: float = 0.0
    densest: float = 1.0


def flashprefill(problem: Problem) -> Calls:
    """It has one call for both; the choice is that call without its last launch, which ``attend`` makes."""
    native = import_module("ops.flashprefill_native_forward")
    q, k, v = _tokens_first(problem)

    def both(alpha: float) -> torch.Tensor:
        out = torch.empty_like(q)
        native.flash_prefill(q, k, v, out, BLOCK, *FLASHPREFILL[:2], alpha, *FLASHPREFILL[2:])
        return out.transpose(1, 2)

    def choose(alpha: float) -> tuple:
        with patch.object(native, "_flash_forward", _Recorder()) as kernel:
            both(alpha)
        return kernel.launch

    def attend(choice: tuple) -> torch.Tensor:
        grid, arguments, options = choice
        native._flash_forward[grid](*arguments, **options)
        return arguments[3].transpose(1, 2)

    return Calls(choose, attend, both, lambda choice: choice[1][5].sum(), _causal_blocks(problem))


class _Recorder:
    """Takes the place of a kernel and keeps its launch."""

    launch: tuple

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **options: setattr(self, "launch", (grid, arguments, options))


def minference(problem: Problem) -> Calls:
    """Its call also pads copies of q, k and v by a block of 64; choose and attend get them padded."""
    ops, block = import_module("minference.ops.block_sparse_flash_attention"), 64
    q, k, v = _repeat_keys(problem)
    tokens = q.shape[2]
    padded = [torch.nn.functional.pad(t, (0, 0, 0, block - tokens % block)) for t in (q, k, v)]
    rows, lengths = tokens // block, torch.tensor([tokens], dtype=torch.int32, device=q.device)

    def count(share: float) -> int:
        return max(1, round(share * rows))

    def kept(index: torch.Tensor) -> torch.Tensor:
        row = torch.arange(index.shape[2], device=index.device)[:, None]
        return (index <= row)[:, :, :rows].sum()

    return Calls(
        lambda share: ops._build_block_index(*padded[:2], count(share), block, block),
        lambda index: ops._triton_block_sparse_attention(*padded, lengths, index, q.shape[3] ** -0.5, block, block)[:, :, :tokens],
        lambda share: ops.block_sparse_attention(q, k, v, count(share)),
        kept,
        _causal_blocks(problem, block),
    )


def prism(problem: Problem) -> Calls:
    """The two calls of its layer. Its choice wants repeated keys, its attention does not."""
    module = import_module("prism.prism")
    q, k, v = problem.leaves
    keys = _repeat_keys(problem)[1]

    def choose(threshold: float) -> torch.Tensor:
        thresholds = {"low_freq_threshold": threshold, "high_freq_threshold": threshold}
        return module.prism_block_estimate(q, keys, block_size=BLOCK, **thresholds)

    def attend(kept: torch.Tensor) -> torch.Tensor:
        return module.block_sparse_attention(q, k, v, kept, block_size=BLOCK, causal=True)

    return Calls(choose, attend, lambda knob: attend(choose(knob)), lambda kept: kept.tril().sum(), _causal_blocks(problem))


def _causal_blocks(problem: Problem, block: int = BLOCK) -> int:
    """Counts the causal blocks of all heads. The tokens must be whole blocks: not every package has others."""
    rows, rest = divmod(problem.q.shape[2], block)
    if rest or problem.q.shape[0] != 1:
        raise ValueError(f"a batch of 1 and whole blocks of {block} tokens are compared; got {tuple(problem.q.shape)}")
    return problem.q.shape[1] * rows * (rows + 1) // 2


def _repeat_keys(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v, with as many heads of keys and values as of queries."""
    q, k, v = problem.leaves
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _tokens_first(problem: Problem) -> list[torch.Tensor]:
    """q, k and v as (batch, tokens, heads, head_dim), contiguous."""
    return [t.transpose(1, 2).contiguous() for t in problem.leaves]


FLASHPREFILL = (2, 4, 2, 0)  # sinks and window in blocks, last blocks of queries that are dense, min_budget: its models' settings

PACKAGES = {
    "flashprefill": Package(flashprefill, "qhfan/FlashPrefill@74e42f3", "alpha", 1.0, 0.0),
    "minference": Package(minference, "microsoft/MInference@fb56c91", "top_k"),  # as a share of a prompt's blocks
    "prism": Package(prism, "xinghaow99/prism@d5a4252", "threshold"),
}
