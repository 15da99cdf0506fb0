"""The arms of the comparison, their seeds and their tuned settings."""

import json
from dataclasses import dataclass
from pathlib import Path

from examples.train_lm.settings import SDPA, every_nth_dense

LENGTH, SHORT = 65_536, 8192
TUNED_FILE = Path(__file__).with_name("learning_rates.json")


@dataclass(frozen=True)
class Arm:
    """One way to attend. masks: of the layers in turn. length: of its sequences. extend_after: the share of the time after which
    they are LENGTH tokens long; 1: never."""

    masks: tuple[str, ...]
    length: int = LENGTH
    extend_after: float = 1.0

    @property
    def last_length(self) -> int:
        return LENGTH if self.extend_after < 1 else self.length

    @property
    def is_dense(self) -> bool:
        return self.masks == (SDPA,)


ARMS = {
    "dense": Arm((SDPA,)),
    "dense-8k": Arm((SDPA,), length=SHORT),
    "dense-8k-then-64k": Arm((SDPA,), length=SHORT, extend_after=0.85),
    # It keeps as many pairs as power-of-two, to 0.1 %.
    "window": Arm(("causal & local(1616)",)),
    "window-dense4": Arm(every_nth_dense("causal & local(1024)", 4)),
    "power-of-two": Arm(("causal & (local(1024) | power_of_two(block=128))",)),
    # Each query keeps a window and the eleven blocks before its own that it scores highest: at most as many pairs as power-of-two.
    "chosen-blocks": Arm(("topk_blocks(12, block=128) | local(208)",)),
    "window-far4": Arm(("causal & local(1024)",) * 3 + ("causal & (local(8192) | power_of_two(block=128))",)),
}
LEARNING_RATES = (2.5e-4, 5e-4, 1e-3)
# Seeds of the reported runs, by preset. 30M: three for dense attention, the window, and the best arm; one for other arms.
SEEDS = {
    "30M": {name: (1, 2, 3) if name in ("dense", "dense-8k", "window", "window-far4") else (1,) for name in ARMS},
    "150M": dict.fromkeys(("dense", "dense-8k", "window-far4"), (1,)),
}


@dataclass(frozen=True)
class TunedSettings:
    """The settings that tuning chose for an arm, on a seed that is not reported."""

    learning_rate: float
    log_length: bool


def complete_settings(preset: str, name: str, learning_rate: float | None = None, log_length: bool | None = None) -> TunedSettings:
    """The given settings, completed by the tuned ones. By default scores are not scaled. Raises ValueError if the learning rate is
    neither given nor tuned."""
    table = json.loads(TUNED_FILE.read_text())["chosen"] if TUNED_FILE.exists() else {}
    tuned = table.get(preset, {}).get(name, {"log_length": False})
    given = {"learning_rate": learning_rate, "log_length": log_length}
    how = tuned | {field: value for field, value in given.items() if value is not None}
    if "learning_rate" not in how:
        raise ValueError(f"no learning rate was chosen for {name} of the {preset} model; tune it, or pass --learning-rate")
    return TunedSettings(**how)
