"""Estimates the memory that a run takes before it starts, and counts the arithmetic of a step."""

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


def estimate_memory(settings: Settings, world: World, parallel: Parallel) -> dict[str, float]:
    """Returns GiB of one GPU, by purpose, at the peak of a step: the backward pass through the last block. All that blocks keep
    exists then; the gradients of other blocks do not. Activations are taken to be in bfloat16, of compiled blocks.
    docs/guides/train-lm.md compares the sum with measured peaks."""
    shape, tokens = settings.shape, settings.micro_tokens // settings.context
    backward = tokens * _backward_bytes(settings, tokens)
    # At the peak, the head's gradient alone; before it, the logits, if they take more than a block's backward pass.
    logits = max(4 * shape.vocabulary * shape.dim, 10 * LOGITS_TOGETHER - backward)
    return {
        "parameters, gradients and optimizer": _parameter_bytes(settings, world, parallel) / GIB,
        "activations": (tokens * _kept_bytes(settings) + backward) / GIB,
        "logits": logits / GIB,
    }


def _parameter_bytes(settings: Settings, world: World, parallel: Parallel) -> float:
    """Returns bytes of parameters, their copies and gradients, and the optimizer's state."""
    shape = settings.shape
    sharded = world.mesh is not None and parallel == "fsdp"
    total = 12 * shape.parameters / (world.size if sharded else 1)  # in float32, with two moments of AdamW
    if sharded:  # bfloat16 copies of two blocks, the embedding and the head, whole
        total += 2 * (2 * (shape.block_parameters // shape.layers) + 2 * shape.vocabulary * shape.dim)
    elif settings.recompute != "full":  # bfloat16 copies are kept for the backward pass
        total += 2 * shape.parameters
    if settings.count_passes(world.replicas) > 1:  # float32 gradients of the passes before, of whole parameters
        total += 4 * shape.parameters
    if world.mesh is not None and parallel == "ddp":
        total += 4 * shape.parameters  # DDP's buckets
    return total


def _kept_bytes(settings: Settings) -> float:
    """Returns bytes that a token keeps in all blocks for the backward pass."""
    shape, queries, keys = settings.shape, *_projected_dims(settings)
    # Numbers in a block: stream and norm twice; q before and after its norm, out; k twice, v; gate, up and their product.
    attention, mlp = 4 * shape.dim + 3 * queries + 3 * keys, 3 * shape.mlp_dim
    products = shape.dim + 2 * queries + 2 * keys + 2 * shape.mlp_dim
    of_block = {"none": attention + mlp, "selective": products, "full": shape.dim}[settings.recompute]
    numbers = of_block * shape.layers - settings.offload * shape.dim
    if settings.recompute != "none":
        numbers += attention  # of the block that is computed again
    return 2 * numbers * (1 if settings.compiled else 1.25)  # uncompiled: norms and rotary positions in float32


def _backward_bytes(settings: Settings, tokens: int) -> float:
    """Returns further bytes of a token in the backward pass of a block: through its MLP, or through its attention, with float32
    sums of dQ. If blocks are recomputed in full, the MLP's activations exist for one piece of the tokens at a time."""
    mlp_dim, (queries, _) = settings.shape.mlp_dim, _projected_dims(settings)
    piece = min(1.0, MLP_TOGETHER / tokens) if settings.recompute == "full" and settings.compiled else 1.0
    mlp = 4 * mlp_dim + (2 * mlp_dim if settings.recompute != "none" else 0)
    return max(8 * queries + piece * mlp, 15 * queries)


def _projected_dims(settings: Settings) -> tuple[int, int]:
    """Returns the numbers of a token's queries, and of its keys."""
    shape = settings.shape
    return shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim


def check(settings: Settings, world: World, parallel: Parallel) -> str:
    """Returns a line for the user. Raises ValueError if a GPU has too little memory: what is needed, what it has, what to do."""
    parts = estimate_memory(settings, world, parallel)
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
    """Returns how many (query, key) pairs the masks keep in a sequence, the mean over layers, without documents."""
    layers = Counter(settings.mask_of(layer) for layer in range(settings.shape.layers))
    return sum(count * _pairs(mask, length) for mask, count in layers.items()) / layers.total()


@cache
def _pairs(mask: str, length: int) -> float:
    if choice := Choice.of(mask):
        # Queries and keys do not matter: choices differ only by picked blocks that are always kept as well.
        return choice(*torch.randn(2, 1, 1, length, 8, generator=torch.Generator().manual_seed(0))).density * length**2
    return length * (length + 1) / 2 if mask == SDPA else sf.compile_mask(mask, q_len=length).density * length**2


def step_flop(settings: Settings, length: int) -> float:
    """Returns the FLOP of the products of one step of sequences of ``length``: six for each parameter and token, without the
    embedding; twelve for each kept pair, query head and number of head_dim. Recomputation is not counted."""
    shape = settings.shape
    of_parameters = 6 * (shape.parameters - shape.vocabulary * shape.dim) * settings.step_tokens
    sequences = settings.step_tokens / length
    return of_parameters + 12 * kept_pairs(settings, length) * sequences * shape.heads * shape.head_dim * shape.layers


def find_peak_flops(device: torch.device) -> float | None:
    """Returns the FLOP/s of a GPU, or None if it is not listed."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for part, value in PEAKS.items() if part in name), None)
