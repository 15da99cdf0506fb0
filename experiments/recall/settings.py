"""Settings of a trial, their presets and checks, and its curriculum."""

from dataclasses import dataclass, replace

import sparse_flash as sf
from examples.train_lm import settings as lm
from examples.train_lm.settings import Shape

from ..files import check_one_of
from .arms import Arm, build_arms
from .task import SLOT, Task

# The first stage ends when answers are this good, in nats, or at this share of the budget. Matching keys is learned all at once,
# after many more steps with one seed than with another; in longer sequences it is learned later, or never.
_MATCHED, _FIRST_STAGE = 0.5, 0.5
_LAST_STAGE = 0.5  # of what is left of the budget; the stages between share the rest
_SHORTER = 4
_TOKENS_A_KEY = 4  # at least, in short sequences, counting each place where a key stands


@dataclass(frozen=True)
class Trial:
    """All that a result depends on.

    arm: its name. task: of the last stage and of evaluation. window, block: see ``build_arms``. shortest: the curriculum's
    sequences have at least this many tokens. step_tokens: of an optimizer step, at each stage. steps or seconds: the budget, the
    other one is 0; seconds of training steps. learning_rate: its peak. seed: of the weights and the sequences. compiled: by
    torch.compile.
    """

    arm: str
    task: Task
    shape: Shape
    window: int
    block: int
    shortest: int
    step_tokens: int
    steps: int = 0
    seconds: float = 0.0
    learning_rate: float = 3e-3
    seed: int = 0
    compiled: bool = False

    @property
    def masks(self) -> Arm:
        return build_arms(self.window, self.block, self.task.length)[self.arm]

    def done(self, step: int, seconds: float) -> float:
        """The share of the budget that is spent; the last step may pass 1."""
        return step / self.steps if self.steps else seconds / self.seconds

    @property
    def lengths(self) -> list[int]:
        """Tokens of the curriculum's sequences, stage by stage: each a quarter of the next."""
        shorter = [self.task.length]
        while shorter[-1] // _SHORTER >= self.shortest:
            shorter.append(shorter[-1] // _SHORTER)
        return shorter[::-1]

    @property
    def stages(self) -> list[Task]:
        """The curriculum's tasks. In a long sequence, attention that does not match keys yet gives each value next to no weight:
        too weak a gradient to learn from."""
        stages = []
        for length in self.lengths:
            stage = replace(self.task, length=length)
            askings = min(stage.askings, max(1, int(length / stage.mean_distance)))  # more do not fit in
            stages.append(replace(stage, pairs=min(stage.pairs, length // (_TOKENS_A_KEY * (1 + askings)))))
        return stages

    def first_stage_ends(self, done: float, losses: list[float]) -> bool:
        """done: share of the budget. losses: of the last steps, nats an answer."""
        return done >= _FIRST_STAGE or (bool(losses) and max(losses) < _MATCHED)

    def stage(self, done: float, first: float | None) -> Task:
        """The task at a share of the budget. first: the share at which the first stage ended; None if it has not."""
        stages = self.stages
        if first is None:
            return stages[0]
        *between, last = stages[1:] or stages
        passed = int((done - first) / (1 - first) / (1 - _LAST_STAGE) * len(between))
        return between[passed] if passed < len(between) else last

    def to_lm_settings(self) -> lm.Settings:
        """Settings for train_lm's decoder and optimizer."""
        return lm.Settings(
            self.shape,
            self.masks.masks,
            length=self.task.length,
            step_tokens=self.step_tokens,
            micro_tokens=self.step_tokens,
            chunk=self.task.length,
            steps=self.steps,
            minutes=self.seconds / 60,
            learning_rate=self.learning_rate,
            compiled=self.compiled,
            seed=self.seed,
        )


def _preset(dim: int, layers: int, head_dim: int, task: Task, **rest) -> Trial:
    heads = dim // head_dim
    # With a large base, most pairs of a head turn too slowly to notice within a sequence: content can match over any distance
    # (arXiv:2309.16039 raises it for the same reason).
    shape = Shape(dim, layers, heads, heads, head_dim, 2 * dim, task.vocabulary, rotary_base=1e8)
    return Trial("dense", task, shape, **rest)


PRESETS = {
    "tiny": _preset(64, 4, 32, Task(512, 64, 8, 128), window=32, block=16, shortest=32, step_tokens=4096),
    "64K": _preset(256, 8, 128, Task(65_536, 1024, 16, 2048), window=1024, block=128, shortest=256, step_tokens=65_536),
}


def check_trial(trial: Trial) -> Trial:
    """The trial. Raises ValueError for what cannot work: what was wanted, what was given, and the way out."""
    task = trial.task
    check_one_of(build_arms(trial.window, trial.block, task.length), arm=trial.arm)
    if min(trial.steps, trial.seconds) < 0 or bool(trial.steps) == bool(trial.seconds):
        raise ValueError(f"pass either --steps or --seconds, positive; got {trial.steps} and {trial.seconds}")
    stages = len(trial.lengths)
    if task.length % (unit := SLOT * _SHORTER ** (stages - 1)):
        raise ValueError(
            f"length must be a multiple of {unit:,} for {stages} stages of the curriculum; got {task.length:,}; "
            f"pass --length {-(-task.length // unit) * unit}"
        )
    if trial.step_tokens % task.length:
        raise ValueError(
            f"step_tokens must be whole sequences; got {trial.step_tokens:,} and sequences of {task.length:,}; "
            f"pass --step-tokens {max(1, trial.step_tokens // task.length) * task.length}"
        )
    lm.check_settings(trial.to_lm_settings())
    sf.compile_mask("causal", task.length, block_size=trial.block)  # says which sizes blocks may have
    return trial
