"""Settings of a run, with its attention by name, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import sparse_flash as sf
from examples.train_lm.settings import Shape

from .data import Task, task_of

DENSE = "dense"  # instead of a mask

# By name: the spec text for a number of tokens. A window keeps about as many pairs as the butterfly.
ATTENTIONS: dict[str, Callable[[int], str]] = {
    DENSE: lambda tokens: DENSE,
    "butterfly": lambda tokens: "butterfly(block=128) | local(128)",
    "window": lambda tokens: f"local({max(1, round(density(ATTENTIONS['butterfly'](tokens), tokens) * tokens / 2))})",
}
PRESETS = {
    "full": Shape(dim=128, layers=6, heads=4, kv_heads=4, head_dim=64, mlp_dim=256, vocabulary=1),
    "tiny": Shape(dim=16, layers=1, heads=1, kv_heads=1, head_dim=16, mlp_dim=16, vocabulary=1),
}
_BATCHES = {1024: 256, 4096: 256, 16_384: 64, 65_536: 32}  # by tokens; 128 for others
_MICRO_TOKENS = 1 << 20


@dataclass(frozen=True)
class Settings:
    """All that a run's result depends on, and how it is computed.

    task: its name and fields. attention: spec text, or "dense". shape: of the model; the vocabulary is the
    task's. batch: examples of an optimizer step; micro_batch: of a pass, where the rest of a step is accumulated. steps: optimizer
    steps; where 0, ``minutes`` of training steps. warmup: steps. learning_rate: its peak; it falls to zero on a cosine.
    """

    task: dict[str, Any]
    shape: Shape
    attention: str = DENSE
    batch: int = 128
    micro_batch: int = 128
    steps: int = 0
    minutes: float = 0.0
    warmup: int = 500
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    clip: float = 1.0
    compiled: bool = True
    seed: int = 0

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Settings:
        """Returns the settings of a checkpoint. Fields of other versions are left out."""
        known = {name: value for name, value in fields.items() if name in cls.__dataclass_fields__}
        return cls(**{**known, "shape": Shape(**fields["shape"])})


def tokens_of(task: Task) -> int:
    return prod(task.shape)


def density(attention: str, tokens: int) -> float:
    """The share of all pairs that are kept."""
    return 1.0 if attention == DENSE else sf.compile_mask(attention, tokens).density


def default_batch(task: Task) -> int:
    return _BATCHES.get(tokens_of(task), 128)


def default_micro_batch(task: Task, batch: int) -> int:
    """The most that divide the batch and have no more than ``_MICRO_TOKENS`` tokens; one, where one has more."""
    most = max(1, min(batch, _MICRO_TOKENS // tokens_of(task)))
    return next(count for count in range(most, 0, -1) if batch % count == 0)


def check_settings(settings: Settings) -> Settings:
    """The settings, with the spec text of a named attention. Raises ValueError for what cannot work."""
    task, shape = task_of(settings.task), settings.shape
    if shape.head_dim % (2 * len(task.shape)):
        raise ValueError(
            f"head_dim must be a multiple of {2 * len(task.shape)}, for rotary positions of each axis; got {shape.head_dim}"
        )
    if settings.steps < 0 or (settings.steps == 0) == (settings.minutes <= 0):
        raise ValueError(f"pass either --steps or --minutes, positive; got {settings.steps} steps, {settings.minutes} minutes")
    return replace(settings, attention=_spec(settings.attention, tokens_of(task)))


def _spec(attention: str, tokens: int) -> str:
    text = ATTENTIONS[attention](tokens) if attention in ATTENTIONS else attention
    if text == DENSE:
        return text
    try:
        return sf.parse(text).to_spec()
    except ValueError as error:
        raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, or spec text; got {attention!r}: {error}") from error
