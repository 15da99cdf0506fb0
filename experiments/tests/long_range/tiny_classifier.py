"""Settings of a classifier that trains in milliseconds, for the tests of experiments/long_range."""

import torch

from examples.train_lm.parallel import World
from examples.train_lm.settings import Shape
from experiments.long_range.data import fields_of
from experiments.long_range.listops import ListOps
from experiments.long_range.settings import Settings

SHORT = ListOps(depth=2, arguments=4, shortest=4, longest=6)  # one operator on digits
TINY = Shape(dim=32, layers=1, heads=2, kv_heads=2, head_dim=16, mlp_dim=64, vocabulary=1)
SETTINGS = Settings(
    fields_of(SHORT), TINY, "local(8)", batch=32, micro_batch=16, steps=6, warmup=5, learning_rate=1e-2, compiled=False
)
ON_CPU = World(torch.device("cpu"))
