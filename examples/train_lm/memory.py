"""What a run takes: memory before it starts, and the arithmetic of a step."""

from __future__ import annotations

from collections import Counter
from functools import cache

import torch

import sparse_flash as sf

from .model import LOGITS_TOGETHER, MLP_TOGETHER
from .parallel import World
from .settings import SDPA, Choice, Parallel, Settings

GIB = 1 << 30
# Dense bfloat16 products, FLOP/s, by the first of these names that is in the GPU's. NVIDIA's data sheets.
PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12, "B200": 2250e12}


def needed(settings: Settings, world: World, parallel: Parallel) -> dict[str, float]:
    """GiB of one GPU, by what it is for, at the peak of a step: the backward pass through the last block. All that blocks keep is
    there then, and the gradients of other blocks are not. Activations are those of compiled blocks in bfloat16.
    docs/guides/train-lm.md compares the sum with measured peaks."""
    shape, tokens = settings.shape, settings.micro_tokens // settings.context
    sharded = world.mesh is not None and parallel == "fsdp"
    block, ends = shape.block_parameters // shape.layers, 2 * shape.vocabulary * shape.dim
    # Float32 parameters and two moments of AdamW. With FSDP2 bfloat16 copies of two blocks, the embedding and the head are whole.
    # Otherwise those of all parameters are kept for the backward pass, except where blocks are computed again.
    parameters = 12 * shape.parameters / (world.size if sharded else 1)
    if sharded:
        parameters += 2 * (2 * block + ends)
    elif settings.recompute != "full":
        parameters += 2 * shape.parameters
    if settings.accumulated(world.replicas) > 1:  # float32 gradients of the passes before, of whole parameters
        parameters += 4 * shape.parameters
    if world.mesh is not None and parallel == "ddp":
        parameters += 4 * shape.parameters  # DDP's buckets
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # A token's numbers in a block: stream and norm twice; q before and after its norm, out; k twice, v; gate, up and their product.
    attention, mlp = 4 * shape.dim + 3 * queries + 3 * keys, 3 * shape.mlp_dim
    products = shape.dim + 2 * queries + 2 * keys + 2 * shape.mlp_dim
    kept = {"none": attention + mlp, "selective": products, "full": shape.dim}[settings.recompute] * shape.layers
    kept -= settings.offload * shape.dim
    again = settings.recompute != "none"
    if again:
        kept += attention
    if not settings.compiled:
        kept *= 1.25  # norms and rotary positions in float32
    # Bytes of a token in the backward pass of a block, besides: through its MLP, or through its attention, with float32 sums of dQ.
    # Where blocks are recomputed in full, the MLP of one piece of the tokens is there at a time.
    piece = min(1.0, MLP_TOGETHER / tokens) if settings.recompute == "full" and settings.compiled else 1.0
    backward = max(8 * queries + piece * (2 * mlp * again + 4 * shape.mlp_dim), 15 * queries)
    return {
        "parameters, gradients and optimizer": parameters / GIB,
        "activations": (2 * kept + backward) * tokens / GIB,
        # At the peak the head's gradient alone; the logits come before it, where a block's backward pass takes less than they do.
        "logits": max(4 * shape.vocabulary * shape.dim, 10 * LOGITS_TOGETHER - backward * tokens) / GIB,
    }


def check(settings: Settings, world: World, parallel: Parallel) -> str:
    """One line for the user. Raises ValueError where a GPU has too little memory: what is needed, what is there, what to use."""
    parts = needed(settings, world, parallel)
    total = sum(parts.values())
    said = f"memory: about {total:.1f} GiB a GPU ({', '.join(f'{name} {size:.1f}' for name, size in parts.items())})"
    if world.device.type != "cuda":
        return said
    there = torch.cuda.mem_get_info(world.device)[0] / GIB
    if total > there:
        ways = []
        if settings.recompute != "full":
            ways.append("--recompute full" if settings.recompute == "selective" else "--recompute selective")
        if settings.micro_tokens > settings.length:
            ways.append(f"--micro-tokens {max(settings.length, settings.micro_tokens // 2)}")
        elif not settings.packed:
            ways.append(f"--context {2 * settings.context} on several GPUs")
        if parallel == "ddp" and parts["parameters, gradients and optimizer"] > 0.3 * there:
            ways.append("--parallel fsdp on several GPUs")
        if not ways:
            ways.append("a shorter --length or a smaller --preset")
        raise ValueError(f"needs {total:.0f} GiB, has {there:.0f}: use {' or '.join(ways)}; {said}")
    return said


def kept_pairs(settings: Settings, length: int) -> float:
    """(query, key) pairs that the masks keep in a sequence, mean over layers, without documents."""
    layers = Counter(settings.mask_of(layer) for layer in range(settings.shape.layers))
    return sum(count * _pairs(mask, length) for mask, count in layers.items()) / layers.total()


@cache
def _pairs(mask: str, length: int) -> float:
    if choice := Choice.of(mask):
        # Of any queries and keys: another choice differs by the picked blocks that are always kept too.
        return choice(*torch.randn(2, 1, 1, length, 8, generator=torch.Generator().manual_seed(0))).density * length**2
    return length * (length + 1) / 2 if mask == SDPA else sf.compile_mask(mask, q_len=length).density * length**2


def step_flop(settings: Settings, length: int) -> float:
    """Products of one step of sequences of ``length``: six for each parameter and token (the embedding is none), twelve for each
    kept pair, query head and number of head_dim. Recomputation is not counted."""
    shape = settings.shape
    of_parameters = 6 * (shape.parameters - shape.vocabulary * shape.dim) * settings.step_tokens
    sequences = settings.step_tokens / length
    return of_parameters + 12 * kept_pairs(settings, length) * sequences * shape.heads * shape.head_dim * shape.layers


def peak(device: torch.device) -> float | None:
    """FLOP/s of a GPU, or None for one that is not listed."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for part, value in PEAKS.items() if part in name), None)
