"""Held-out loss of a model by position, on the same windows whatever the model's own length."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from examples.train_lm.data import Tokens
from examples.train_lm.evaluate import BORDERS
from examples.train_lm.model import Decoder
from examples.train_lm.parallel import World, mixed_precision

from .arms import LENGTH
from .windows import Windows

_TOGETHER = 4096  # rows of logits
STRIDES, CURVE_STRIDES = 8, 2  # of a sliding window, in one context: of 8,192 tokens, 1,024 and 4,096 are new each time


@torch.no_grad()
def token_losses(model: Decoder, ids: torch.Tensor, context: int, stride: int, together: int) -> torch.Tensor:
    """(length,) float32 nats: the loss at each label of ids, (length + 1,). A label is predicted from at most ``context`` tokens
    before it, and from at least context - stride if there are that many. together: tokens of a pass."""
    length = len(ids) - 1
    if not 0 < stride <= context or (length - context) % stride:
        raise ValueError(f"windows of {context:,} tokens, {stride:,} apart, do not cover {length:,} tokens; pass another stride")
    firsts = range(0, length - context + 1, stride)
    room = together // context
    found = torch.empty(length, device=ids.device)
    for number in range(0, len(firsts), room):
        some = list(firsts[number : number + room])
        rows = torch.stack([ids[first : first + context] for first in some + [some[-1]] * (room - len(some))])
        with mixed_precision(model, World(ids.device)):
            hidden = model.hidden(rows)
            for first, row in zip(some, hidden, strict=False):
                new = 0 if first == 0 else context - stride
                labels = ids[first + new + 1 : first + context + 1]
                pieces = zip(row[new:].split(_TOGETHER), labels.split(_TOGETHER), strict=True)
                nats = [F.cross_entropy(model.head(h).float(), y, reduction="none") for h, y in pieces]
                found[first + new : first + context] = torch.cat(nats)
    return found


def evaluate(model: Decoder, text: Tokens, windows: Windows, context: int, device: torch.device, strides: int = STRIDES) -> dict:
    """Sums of nats, for what can be asked later: "nats" and "tokens" by window and position (BORDERS), "far_nats" and "far_tokens"
    by window, of labels that repeat a far identifier."""
    length = windows.far.shape[1]
    borders = [*(border for border in BORDERS if border < length), length]
    context, nats, far_nats = min(context, length), [], []
    for start, far in zip(windows.starts.tolist(), windows.far, strict=True):
        ids = text.window(start, length + 1).to(device)
        losses = token_losses(model, ids, context, context // strides, length).double()
        nats.append([losses[a:b].sum().item() for a, b in pairwise(borders)])
        far_nats.append(losses[torch.from_numpy(far).to(device)].sum().item())
    return {
        "borders": borders,
        "packages": windows.packages,
        "nats": nats,
        "tokens": [b - a for a, b in pairwise(borders)],
        "far_nats": far_nats,
        "far_tokens": windows.far.sum(1).tolist(),
    }


def mean_loss(found: dict) -> float:
    """Nats a token over all windows."""
    return float(np.sum(found["nats"]) / (len(found["nats"]) * sum(found["tokens"])))


@contextmanager
def changed_rotary(model: Decoder, **changes: float):
    """The model with another rotary base or scale."""
    shape = model.shape
    model.shape = replace(shape, **changes)
    try:
        yield model
    finally:
        model.shape = shape


def reading_modes(model: Decoder, trained: int, length: int = LENGTH) -> dict[str, tuple[int, dict[str, float]]]:
    """How a model that was trained on shorter sequences may read longer ones: context, and changes to its rotary positions.

    A sliding window of the trained length; all tokens as they are; positions interpolated (arXiv:2306.15595); and a larger base
    (NTK-aware).
    """
    if trained >= length:
        return {"whole": (length, {})}
    factor, dim = length / trained, model.shape.head_dim
    base = model.shape.rotary_base * factor ** (dim / (dim - 2))
    return {
        f"sliding {trained:,}": (trained, {}),
        "whole": (length, {}),
        "whole, positions interpolated": (length, {"rotary_scale": factor}),
        "whole, larger rotary base": (length, {"rotary_base": base}),
    }
