"""Settings of a language model that trains in milliseconds, and tokens for it, for the tests of examples/train_lm."""

from pathlib import Path

import numpy as np
import torch

from examples.train_lm import data
from examples.train_lm.parallel import World
from examples.train_lm.settings import Settings, Shape

SHAPE = Shape(dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_dim=64, vocabulary=300)
SETTINGS = Settings(
    SHAPE,
    masks=("causal & (local(16) | sinks(4))", "causal"),
    length=64,
    step_tokens=256,
    micro_tokens=128,
    chunk=128,
    steps=6,
    warmup=2,
    learning_rate=1e-2,
    compiled=False,
    deterministic=True,
)
ON_CPU = World(torch.device("cpu"))


def random_tokens(folder: Path) -> Path:
    """Fills a folder as ``prepare`` does: 40 documents of two groups in each half."""
    # Each token follows from the one before, mostly: there is something to learn.
    rng = np.random.default_rng(0)
    tokens = np.empty(9000, np.int64)
    tokens[0] = 1
    for i in range(1, len(tokens)):
        tokens[i] = rng.integers(300) if rng.random() < 0.2 else (tokens[i - 1] * 7 + 3) % 300
    np.save(folder / "tokens.npy", tokens)
    data.import_tokens(folder / "data", folder / "tokens.npy", 300)
    for split, count in (("train", 8550), ("held_out", 450)):
        starts = np.sort(rng.choice(np.arange(1, count), 39, replace=False))
        starts = np.append(0, starts)
        np.save(folder / "data" / f"{split}.starts.npy", np.stack([starts, np.arange(40) // 20], axis=1).astype(np.int64))
    return folder / "data"
