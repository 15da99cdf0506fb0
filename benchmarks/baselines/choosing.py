"""Other packages that choose blocks of a prompt by content, each called through its own functions, none of it copied here.

Written for these commits; each package must be importable, from site-packages or PYTHONPATH, under the module's name:

    flashprefill     ops             github.com/qhfan/FlashPrefill 74e42f3 (arXiv:2603.06199); it imports fla.utils of fla-core
    minference       minference      github.com/microsoft/MInference fb56c91 (arXiv:2407.02490), its block-sparse heads
    flexprefill      flex_prefill    github.com/bytedance/FlexPrefill a24b27b (arXiv:2502.20766)
    xattention-8/16  xattn           github.com/mit-han-lab/x-attention e379887 (arXiv:2503.16428), strides 8 and 16
    spargeattn       spas_sage_attn  github.com/thu-ml/SpargeAttn bfd980b (arXiv:2502.18137), its Triton example
    prism            prism           github.com/xinghaow99/prism d5a4252 (arXiv:2602.08426)

These calls need no build. The __init__.py of minference, flex_prefill and spas_sage_attn imports more, compiled extensions too, so
leave it out where those are not installed. XAttention's own attention, block_sparse_attn, must be compiled: a module of that name
with block_sparse_attn_func = None lets xattn be imported, and sparse_flash attends under XAttention's choice. SpargeAttn's
triton_kernel_example.py must lie in spas_sage_attn. MInference's vertical-slash heads need a compiled extension and are left out.
Prism, FlexPrefill and FlashPrefill do not run with triton 3.9, which has no block pointers and checks the keys of autotuners.

The knob is the setting by which a package keeps more or less. Packages that want as many heads of keys as of queries get repeated
ones, made before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

import sparse_flash

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


def flexprefill(problem: Problem) -> Calls:
    """On an H200 it gets the launch options that it has for an H100: it knows no H200. For gamma = 1 it lists blocks of the future
    too, which its attention refuses, so they are left out."""
    ops: Any = import_module("flex_prefill.ops.flex_prefill_attention")
    if "h200" in (ops.GPU_NAME or ""):
        ops.GPU_NAME = "nvidia h100"
    q, k, v = _tokens_first(problem)
    (tau, budget), rows = FLEXPREFILL, q.shape[1] // BLOCK

    def choose(gamma: float) -> list[list[torch.Tensor]]:
        index = ops.get_active_blocks(q, k, v, BLOCK, gamma, budget // BLOCK, rows, tau)
        return index if gamma < 1 else [[of_head[of_head // rows >= of_head % rows] for of_head in index[0]]]

    return Calls(
        choose,
        lambda index: ops.triton_block_wise_attention(q, k, v, index, BLOCK).transpose(1, 2),
        lambda gamma: ops.flex_prefill_attention(q, k, v, gamma, tau, min_budget=budget, block_size=BLOCK).transpose(1, 2),
        lambda index: sum(of_head.numel() for of_head in index[0]),
        _causal_blocks(problem),
    )


def xattention(problem: Problem, stride: int) -> Calls:
    """Its Triton kernels run only where the GPU's name has a 100 in it, so here each GPU is called H100."""
    estimate = import_module("xattn.src.Xattention").xattn_estimate
    q, k, _ = _repeat_keys(problem)
    tokens = q.shape[2]
    power = 1 << (tokens - 1).bit_length()
    chunk = max(min(power, 2**28 // power), 2048)  # as its Xattention_prefill sets it, for more than 2048 tokens
    of_device = torch.cuda.get_device_properties

    def choose(threshold: float) -> torch.Tensor:
        with patch.object(torch.cuda, "get_device_properties", lambda *args, **options: _NamedH100(of_device(*args, **options))):
            _, kept = estimate(q, k, block_size=BLOCK, stride=stride, threshold=threshold, chunk_size=chunk)
        return kept[:, :, : tokens // BLOCK, : tokens // BLOCK]

    def attend(kept: torch.Tensor) -> torch.Tensor:
        mask = sparse_flash.BlockMask.from_blocks(kept, BLOCK, within="causal")
        return sparse_flash.attention(*problem.leaves, mask)  # type: ignore[return-value]  # no return_lse

    return Calls(choose, attend, lambda threshold: attend(choose(threshold)), lambda kept: kept.sum(), _causal_blocks(problem))


class _NamedH100:
    """A GPU's properties, under another name. Triton and PyTorch read others meanwhile."""

    name = "H100"

    def __init__(self, properties: Any):
        self._properties = properties

    def __getattr__(self, name: str) -> Any:
        return getattr(self._properties, name)


def spargeattn(problem: Problem) -> Calls:
    """The steps of its spas_sage_attn_meansim, with topk, which its authors recommend, instead of cdfthreshd."""
    example, utils = import_module("spas_sage_attn.triton_kernel_example"), import_module("spas_sage_attn.utils")
    q, k, v = _repeat_keys(problem)

    def choose(topk: float) -> tuple[torch.Tensor, torch.Tensor]:
        smooth = k - k.mean(dim=-2, keepdim=True)
        options = {"is_causal": True, "simthreshd1": SPARGEATTN[0], "cdfthreshd": None, "topk": topk}
        return smooth, utils.get_block_map_meansim(q, smooth, **options)

    def attend(choice: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        smooth, kept = choice
        q_int8, q_scale, k_int8, k_scale = example.per_block_int8(q, smooth)
        threshold = example.hyperparameter_check(SPARGEATTN[1], q.shape[1], q.device)
        arguments = (q_int8, k_int8, kept, v.to(torch.float16), q_scale, k_scale, threshold)
        return example.forward(*arguments, is_causal=True, output_dtype=q.dtype, tensor_layout="HND")

    rows = q.shape[2] // BLOCK
    return Calls(choose, attend, lambda topk: attend(choose(topk)), lambda choice: choice[1].sum(), q.shape[1] * rows * (rows + 1))


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
FLEXPREFILL = (0.1, 1024)  # tau, min_budget in tokens: as in its README
SPARGEATTN = (-0.1, 50)  # simthreshd1, pvthreshd: the defaults of its topk call

PACKAGES = {
    "flashprefill": Package(flashprefill, "qhfan/FlashPrefill@74e42f3", "alpha", 1.0, 0.0),
    "minference": Package(minference, "microsoft/MInference@fb56c91", "top_k"),  # as a share of a prompt's blocks
    "flexprefill": Package(flexprefill, "bytedance/FlexPrefill@a24b27b", "gamma"),
    "xattention-8": Package(partial(xattention, stride=8), "mit-han-lab/x-attention@e379887", "threshold"),
    "xattention-16": Package(partial(xattention, stride=16), "mit-han-lab/x-attention@e379887", "threshold"),
    "spargeattn": Package(spargeattn, "thu-ml/SpargeAttn@bfd980b", "topk"),
    "prism": Package(prism, "xinghaow99/prism@d5a4252", "threshold"),
}
