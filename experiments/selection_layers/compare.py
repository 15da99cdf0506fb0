"""The layers that are trained, their sizes, and how many pairs they attend to."""

from dataclasses import dataclass, replace

import torch

from examples.selection_layers.moba import MoBA
from examples.selection_layers.msa import MSA
from examples.selection_layers.nsa import NSA
from examples.selection_layers.shared import ChoosingAttention, Sizes
from examples.train_lm.model import Decoder
from examples.train_lm.parallel import World
from examples.train_lm.settings import SDPA
from experiments.files import check_one_of
from experiments.recall import settings as recall
from experiments.recall import train
from experiments.recall.arms import Arm
from experiments.recall.model import build_decoder
from experiments.recall.settings import Trial

LAYERS: dict[str, type[ChoosingAttention]] = {"moba": MoBA, "nsa": NSA, "msa": MSA}
BESIDE = ("dense", "window")  # recall's arms that the layers are compared with
NAMES = (*BESIDE, *LAYERS)


@dataclass(frozen=True)
class LayerTrial(Trial):
    """recall's trial, of a layer or of one of ``BESIDE``. keep: blocks that a query attends to, its own among them."""

    keep: int = 4

    @property
    def masks(self) -> Arm:
        """For a layer what it may read: everything earlier."""
        return Arm((SDPA,)) if self.arm in LAYERS else super().masks

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.keep, self.block, self.window)


def _preset(name: str, layers: int, heads: int, keep: int, block: int, steps: int) -> LayerTrial:
    base = recall.PRESETS[name]
    shape = replace(base.shape, layers=layers, heads=heads, kv_heads=heads // 2)
    return LayerTrial(**vars(replace(base, shape=shape, block=block, steps=steps)), keep=keep)


PRESETS = {"tiny": _preset("tiny", 2, 2, 4, 16, 300), "64K": _preset("64K", 4, 8, 16, 64, 600)}


def check_layer_trial(trial: LayerTrial) -> LayerTrial:
    """The trial. Raises ValueError for what cannot work."""
    check_one_of(NAMES, layer=trial.arm)
    if trial.keep < 1:
        raise ValueError(f"keep must be at least 1, a query's own block; got {trial.keep}")
    if trial.block > trial.shortest:
        raise ValueError(f"block must be at most the shortest sequences' {trial.shortest} tokens; got {trial.block}")
    recall.check_trial(replace(trial, arm=BESIDE[0]))
    return trial


def model_of(trial: LayerTrial, device: torch.device) -> Decoder:
    """A new model of a trial."""
    layer = LAYERS.get(trial.arm)
    return build_decoder(trial, device, None if layer is None else lambda: layer(trial.shape, trial.sizes))


def run(trial: LayerTrial, world: World, questions: int) -> dict:
    """The result, as of recall's ``run``."""
    result = train.run(trial, world, questions, model_of)
    if trial.arm in LAYERS:
        tokens = trial.task.length
        result["reach"]["density"] = LAYERS[trial.arm].count_pairs(trial.sizes, tokens) / (tokens * (tokens + 1) / 2)
    return result
