"""Trains one model, and writes a file with the mean weights of late steps (EMA)."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch

from ..files import whole_file
from . import flow
from .masks import VSA, kept_tiles, masks_of
from .model import Sizes, Transformer
from .rows import Arm
from .scenes import make_videos

POOL = 16  # batches whose scenes are made together
_WARM_UP, _DECAY = 0.03, 0.4  # parts of the training in which the rate rises, and falls to 0
_MEAN = 0.998  # what EMA keeps at a step
_NOTED = 50  # steps between two losses that are written down


@dataclass(frozen=True)
class Training:
    """steps: of the optimizer. seconds: the schedule ends early rather than later, the first step not counted. batch: videos."""

    arm: Arm
    sizes: Sizes
    steps: int
    seconds: float
    batch: int
    learning_rate: float


def model_of(arm: Arm, sizes: Sizes, device: torch.device) -> Transformer:
    keep = kept_tiles(sizes.layout, arm.share) if arm.mask == VSA else None
    return Transformer(sizes, keep).to(device)


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU, nothing on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def load(path: Path, device: torch.device) -> tuple[Transformer, dict]:
    """A trained model and what its file says of it. Raises ValueError for other files."""
    try:
        found = torch.load(path, map_location=device, weights_only=True)
        arm, sizes = Arm(**found["arm"]), Sizes(**found["sizes"])
    except (KeyError, TypeError, RuntimeError, UnpicklingError) as error:
        raise ValueError(f"{path} must be a file that train wrote; reading it gave a {type(error).__name__}") from error
    model = model_of(arm, sizes, device)
    model.load_state_dict(found["weights"])
    return model.eval(), found


def train(training: Training, device: torch.device, out: Path, start: Path | None, compiled: bool, step_done: Callable) -> dict:
    """Trains, and writes the file ``out``. start: a file with first weights; gates of VSA begin at their own. step_done: is called
    after each step with the last noted loss. Returns what the file says of the training."""
    arm, sizes = training.arm, training.sizes
    torch.manual_seed(arm.seed + 1000 * arm.tuned)
    model = model_of(arm, sizes, device)
    if start is not None:
        copy_weights(model, load(start, device)[0])
    masks = masks_of(arm.mask, arm.share, model.layout, sizes.layers, device)
    parameters = list(model.parameters())
    means = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda")
    if compiled:
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        for block in model.blocks:
            block.compile(dynamic=False)
    losses: list[float] = []
    total, begin, seconds = torch.zeros((), device=device), time.monotonic(), 0.0
    pool = torch.empty(0)
    for step in range(training.steps):
        if step % POOL == 0:
            seed = (1 + arm.seed + 1000 * arm.tuned << 32) + step
            pool = make_videos(POOL * training.batch, seed, sizes.frames, sizes.side, device)
        done = max(step / training.steps, seconds / training.seconds)
        rate = training.learning_rate * min(1, (done + 1 / training.steps) / _WARM_UP, (1 - done) / _DECAY)
        for group in optimizer.param_groups:
            group["lr"] = rate
        video = pool[step % POOL :: POOL]
        noise, at = torch.randn_like(video), torch.rand(len(video), device=device).sqrt()  # more of the hard, late times
        x = flow.interpolate(video, noise, at, sizes.given)
        with autocast(device):
            predicted = model(x, at, masks)
        loss = flow.loss(flow.to_velocity(predicted, x, at), video, noise, sizes.given).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(means, parameters, 1 - min(_MEAN, (1 + step) / (10 + step)))
            total += loss
        if step == 0:
            total.item()  # waits for compilation
            begin = time.monotonic()
        if (step + 1) % _NOTED == 0:
            losses.append(round(total.item() / _NOTED, 5))
            total.zero_()
            seconds = time.monotonic() - begin
        step_done(losses[-1] if losses else None)
        if seconds >= training.seconds:
            break
    log = {"steps": step + 1, "seconds": round(time.monotonic() - begin, 1), "batch": training.batch}
    log |= {"learning_rate": training.learning_rate, "losses": losses}
    weights = {name: mean for (name, _), mean in zip(model.named_parameters(), means, strict=True)}
    with whole_file(out) as partial:
        torch.save({"arm": asdict(arm), "sizes": asdict(sizes), "weights": weights, "training": log}, partial)
    return log


def copy_weights(model: Transformer, other: Transformer) -> None:
    """Takes another's weights. Raises ValueError if its sizes are others."""
    if model.sizes != other.sizes:
        raise ValueError(f"the start must have the sizes {model.sizes}; got {other.sizes}; train it with the same --preset")
    missing, unexpected = model.load_state_dict(other.state_dict(), strict=False)
    if unexpected or any(".vsa." not in name for name in missing):
        raise ValueError(f"the start must be a dense model; got one with {unexpected} and without {missing}")
