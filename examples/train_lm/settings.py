"""Holds the settings of a run and its presets, and refuses settings that cannot work."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, get_args

import torch

import sparse_flash as sf
from sparse_flash.masks.compiler import is_shift_invariant

Recompute = Literal["none", "selective", "full"]
Parallel = Literal["ddp", "fsdp"]
SDPA = "sdpa"  # instead of a mask: PyTorch's own dense causal attention
_CHOICE = re.compile(r"topk_blocks\((?P<keep>\d+), block=(?P<block_size>\d+)\)(?: \| (?P<always>.+))?")


@dataclass(frozen=True)
class Choice:
    """Replaces a mask, written "topk_blocks(12, block=128) | local(208)". Each query keeps its own block of keys and the earlier
    blocks that score highest by mean keys, ``keep`` in all, and what the spec text ``always`` keeps. Heads with the same keys share
    choices."""

    keep: int
    block_size: int
    always: str | None

    @classmethod
    def of(cls, mask: str) -> Choice | None:
        """Returns None for text of another kind."""
        found = _CHOICE.fullmatch(mask)
        return found and cls(int(found["keep"]), int(found["block_size"]), found["always"])

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> sf.BlockSelection:
        """q: (batch, heads, tokens, head_dim), k: (batch, kv_heads, tokens, head_dim). Raises ValueError for numbers and spec text
        that cannot be."""
        return sf.topk_blocks(q, k, self.keep, every=1, block_size=self.block_size, always=self.always, share_group=True)


@dataclass(frozen=True)
class Shape:
    """Holds the decoder's sizes. heads: of queries; kv_heads divides them. mlp_dim: of SwiGLU's two inner projections.
    rotary_scale: positions are divided by it (position interpolation, arXiv:2306.15595)."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int
    vocabulary: int
    rotary_base: float = 500_000.0
    rotary_scale: float = 1.0

    @property
    def block_parameters(self) -> int:
        """Returns the number of parameters of all blocks and the final norm."""
        attention = self.dim * self.head_dim * 2 * (self.heads + self.kv_heads) + self.heads
        return self.layers * (attention + 3 * self.dim * self.mlp_dim + 2 * self.dim) + self.dim

    @property
    def parameters(self) -> int:
        return self.block_parameters + 2 * self.vocabulary * self.dim


PRESETS = {
    "tiny": Shape(dim=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_dim=352, vocabulary=1024),
    "30M": Shape(dim=512, layers=8, heads=4, kv_heads=2, head_dim=128, mlp_dim=1408, vocabulary=8192),
    "150M": Shape(dim=1024, layers=12, heads=8, kv_heads=2, head_dim=128, mlp_dim=2816, vocabulary=8192),
    "1B": Shape(dim=2048, layers=16, heads=16, kv_heads=4, head_dim=128, mlp_dim=8192, vocabulary=32768),
    "8B": Shape(dim=4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp_dim=14336, vocabulary=32768),
}


@dataclass(frozen=True)
class Settings:
    """Holds all that a run's result depends on, and how it is computed.

    shape: the model. masks: spec texts for the layers in turn, repeated to the last layer; "sdpa" is PyTorch's dense attention, and
    see ``Choice``.
    length: tokens of a sequence. step_tokens: tokens of an optimizer step over all GPUs, whole sequences. context: GPUs that share
    a sequence. micro_tokens: tokens that one GPU, or ``context`` GPUs together, compute at a time; the rest of a step is
    accumulated. chunk: tokens of the pieces in which the training text is shuffled, whatever the length, so that runs of
    different lengths read the same text in the same order.
    steps: optimizer steps; if 0, ``minutes`` become steps after 50 timed ones. warmup: steps. learning_rate: its peak; it
    falls to a tenth on a cosine. extend_to, extend_at: sequences have length extend_to from step extend_at on, if not 0.
    log_length: scores of a query that sees n tokens are multiplied by log(n) / log(1024), so that attention over many keys stays
    sharp (arXiv:2501.19399).
    packed: documents do not see each other. offload: how many blocks, from the first on, keep their input in the host's memory
    between the passes. context, recompute, offload, compiled: change speed and memory, and results by rounding only.
    """

    shape: Shape
    masks: tuple[str, ...] = ("causal",)
    length: int = 65_536
    step_tokens: int = 65_536
    micro_tokens: int = 65_536
    chunk: int = 65_536
    steps: int = 1000
    minutes: float = 0.0
    warmup: int = 100
    learning_rate: float = 1e-3
    extend_to: int = 0
    extend_at: int = 0
    log_length: bool = False
    weight_decay: float = 0.1
    clip: float = 1.0
    packed: bool = False
    context: int = 1
    recompute: Recompute = "none"
    offload: int = 0
    compiled: bool = True
    deterministic: bool = False
    seed: int = 0

    def mask_of(self, layer: int) -> str:
        return self.masks[layer % len(self.masks)]

    def length_at(self, step: int) -> int:
        """Returns the length of sequences after ``step`` steps."""
        return self.extend_to if self.extend_to and step >= self.extend_at else self.length

    @property
    def last_length(self) -> int:
        return self.extend_to or self.length

    def count_passes(self, replicas: int) -> int:
        """Returns how many passes forward and backward a step has on each GPU. replicas: GPUs, or groups that share sequences."""
        return self.step_tokens // (self.micro_tokens * replicas)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Reads what ``to_json`` wrote. Fields that this version does not know are ignored."""
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in json.loads(text).items() if name in known}
        return cls(**{**given, "shape": Shape(**given["shape"]), "masks": tuple(given["masks"])})


# A resumed run may change these: they move results by rounding at most, or only say when to stop.
MAY_CHANGE = ("micro_tokens", "context", "recompute", "offload", "compiled", "deterministic", "minutes")


def preset(name: str) -> Shape:
    """Returns a preset. Raises ValueError for another name."""
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}")
    return PRESETS[name]


def every_nth_dense(mask: str, every: int) -> tuple[str, ...]:
    """Returns masks for layers in turn: ``mask``, but causal for each ``every``-th layer; every = 0: for none."""
    return (mask,) * (every - 1) + ("causal",) if every else (mask,)


def check_settings(settings: Settings, ranks: int = 1) -> Settings:
    """Returns the settings, their masks in canonical spelling. Raises ValueError for settings that cannot work."""
    _check_sizes(settings, ranks)
    _check_training(settings)
    if settings.context > 1:
        _check_context(settings)
    if not settings.masks:
        raise ValueError("masks must name at least one mask; 'causal' is dense attention")
    return replace(settings, masks=tuple(_check_mask(mask, settings) for mask in settings.masks))


def _check_sizes(settings: Settings, ranks: int) -> None:
    shape = settings.shape
    sizes = asdict(shape) | {name: getattr(settings, name) for name in ("length", "step_tokens", "micro_tokens", "chunk")}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"kv_heads must divide heads; got {shape.kv_heads} and {shape.heads}")
    if shape.head_dim % 2:
        raise ValueError(f"head_dim must be even, as rotary positions turn pairs; got {shape.head_dim}")
    if (settings.extend_to > 0) != (settings.extend_at > 0) or settings.extend_to < 0:
        raise ValueError(
            f"--extend-to and --extend-at go together: the longer length and the step that it begins at; got "
            f"{settings.extend_to:,} and {settings.extend_at:,}"
        )
    for length in {settings.length, settings.last_length}:
        if settings.chunk % length:
            raise ValueError(
                f"length must divide chunk, the piece in which text is shuffled; got {length:,} and {settings.chunk:,}; "
                f"pass --chunk {-(-settings.chunk // length) * length}"
            )
        if settings.micro_tokens % length:
            raise ValueError(
                f"micro_tokens must be whole sequences; got {settings.micro_tokens:,} tokens and sequences of {length:,}; "
                f"pass --micro-tokens {max(1, settings.micro_tokens // length) * length}"
            )
    replicas = ranks // settings.context
    pass_tokens = settings.micro_tokens * replicas
    if settings.step_tokens % pass_tokens:
        groups = "GPUs" if settings.context == 1 else f"groups of {settings.context} GPUs"
        instead = max(1, settings.step_tokens // pass_tokens) * pass_tokens
        raise ValueError(
            f"step_tokens must be a multiple of micro_tokens x {groups}, {settings.micro_tokens:,} x {replicas}; got "
            f"{settings.step_tokens:,}; pass --step-tokens {instead}, or fewer tokens"
        )


def _check_training(settings: Settings) -> None:
    if settings.steps < 0 or (settings.steps == 0) == (settings.minutes <= 0):
        raise ValueError(f"pass either --steps or --minutes, positive; got {settings.steps} and {settings.minutes}")
    if settings.recompute not in get_args(Recompute):
        raise ValueError(f"recompute must be one of {', '.join(get_args(Recompute))}; got {settings.recompute!r}")
    blocks = settings.shape.layers
    if not 0 <= settings.offload <= blocks or (settings.offload and settings.recompute != "full"):
        raise ValueError(
            f"--offload must be 0 to {blocks}, the number of blocks, and needs --recompute full, which keeps "
            f"the inputs of blocks alone; got {settings.offload} with --recompute {settings.recompute}"
        )


def _check_context(settings: Settings) -> None:
    """Refuses what GPUs that share a sequence cannot do."""
    chosen = next(filter(Choice.of, settings.masks), "")
    unsupported = {f"mask {SDPA!r}": SDPA in settings.masks, f"mask {chosen!r}": chosen}
    for name, used in unsupported.items():
        if used:
            raise ValueError(f"{name} is not supported where GPUs share a sequence; leave it out, or pass --context 1")
    positional = [mask for mask in settings.masks if settings.packed and not is_shift_invariant(sf.parse(mask), 1)]
    if positional:
        raise ValueError(
            f"mask {positional[0]!r} counts positions from the start of each document, which GPUs that share packed sequences "
            "cannot; use masks of distances, as 'causal' and 'causal & local(1024)', leave --packed out, or pass --context 1"
        )


def _check_mask(text: str, settings: Settings) -> str:
    if text == SDPA:
        if settings.packed:
            raise ValueError(f"mask {SDPA!r} cannot keep packed documents apart; use 'causal', which is dense too")
        return text
    if choice := Choice.of(text):
        if settings.packed:
            raise ValueError(f"mask {text!r} does not keep packed documents apart here; leave --packed out, or use another mask")
        choice(*torch.zeros(2, 1, 1, 1, 1))  # says what is wrong with it
        return text
    pattern = sf.parse(text)  # says what is wrong with a text, and where
    # Compiled for the length of training, as a mask of another length may differ above the diagonal.
    if sf.compile_mask(pattern & ~sf.causal(), q_len=settings.last_length).density:
        raise ValueError(f"mask {text!r} lets tokens see later ones; write 'causal & ({text})'")
    return pattern.to_spec()


def differences(now: Settings, then: Settings) -> list[str]:
    """Returns the differences from a saved run that a resumed run must not have."""
    ours, theirs = asdict(now), asdict(then)
    return [
        f"{name} is {ours[name]!r} here and {theirs[name]!r} there"
        for name in ours
        if name not in MAY_CHANGE and ours[name] != theirs[name]
    ]
