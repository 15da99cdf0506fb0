"""Measures rows: videos of held-out scenes, against the truth and against dense attention's from the same noise."""

import base64
import io
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import torch

import sparse_flash as sf

from . import flow
from .masks import BY_SHARE, VSA, Mask, kept_tiles, masks_of
from .model import Sizes, Transformer
from .rows import DENSE, Row
from .scenes import make_videos
from .train import autocast, load

SEED = 1 << 20  # of the held-out scenes; training's are above 1 << 32
STRIPS = 4  # scenes whose frames are kept
COLUMNS = 8  # frames of a strip


class Measurer:
    """A folder of models, and held-out scenes. Raises ValueError if the folder has no dense model."""

    packages = torch, sf

    def __init__(self, models: Path, scenes: int, steps: int, device: torch.device):
        self.models, self.number, self.steps, self.device = models, scenes, steps, device
        self.batch = 32 if device.type == "cuda" else 8
        if not self.model_file(Row(DENSE)).exists():
            raise ValueError(f"models must be a folder with {DENSE.name}.pt; got {models}; run train dense")
        self._loaded: tuple[Path, tuple[Transformer, dict]] | None = None
        self.sizes = Sizes(**self.load_model(Row(DENSE))[1]["sizes"])
        self.truth = make_videos(scenes, SEED, self.sizes.frames, self.sizes.side, device)
        self.noise = torch.randn(self.truth.shape, generator=torch.Generator().manual_seed(SEED)).to(device)

    def model_file(self, row: Row) -> Path:
        """The file of the row's model. Still videos have the dense model's sizes."""
        return self.models / f"{(row.arm or DENSE).name}.pt"

    def load_model(self, row: Row) -> tuple[Transformer, dict]:
        path = self.model_file(row)
        if self._loaded is None or self._loaded[0] != path:
            self._loaded = path, load(path, self.device)
        return self._loaded[1]

    def setup(self) -> dict:
        """Returns what all rows of a file must have in common."""
        return {"sizes": asdict(self.sizes), "scenes": self.number, "steps": self.steps, "seed": SEED}

    def why_missing(self, row: Row) -> str | None:
        return None if self.model_file(row).exists() else f"{self.model_file(row)} is missing"

    @cached_property
    def dense(self) -> torch.Tensor:
        """Videos that the dense model of seed 0 samples."""
        return self.sample(Row(DENSE))

    @torch.no_grad()
    def measure_row(self, row: Row) -> dict:
        """A row's result as plain data. truth, dense: lists by scene, mean squared errors in pixels of -1 .. 1 over the frames that
        are not given. flow: losses by scene. by_frame: means over scenes. strips: PNG in base64."""
        dense = self.dense
        video = self.sample(row)
        of_truth, of_dense = ((video - other)[:, self.sizes.given :].square().mean((2, 3, 4)) for other in (self.truth, dense))
        return {
            "density": round(self.density(row), 4),
            "truth": _rounded(of_truth.mean(1)),
            "dense": _rounded(of_dense.mean(1)),
            "flow": _rounded(self.flow_losses(row)) if row.arm else None,
            "by_frame": {"truth": _rounded(of_truth.mean(0)), "dense": _rounded(of_dense.mean(0))},
            "training": self.load_model(row)[1]["training"] if row.arm else None,
            "strips": [strip(one, self.sizes.given) for one in video[:STRIPS]],
        }

    @torch.no_grad()
    def sample(self, row: Row) -> torch.Tensor:
        if row.arm is None:
            last = self.truth[:, self.sizes.given - 1 : self.sizes.given]
            return torch.cat([self.truth[:, : self.sizes.given], last.expand_as(self.truth)[:, self.sizes.given :]], 1)
        model, masks = self.load_model(row)[0], self.masks(row)
        dense = [None] * len(masks)

        def velocity(x: torch.Tensor, at: torch.Tensor, step: int) -> torch.Tensor:
            with autocast(self.device):
                predicted = model(x, at, dense if step < row.first * self.steps else masks)
            return flow.to_velocity(predicted, x, at)

        return torch.cat(
            [
                flow.sample_videos(velocity, self.truth[part], self.noise[part], self.sizes.given, self.steps)
                for part in self.batches()
            ]
        )

    def flow_losses(self, row: Row) -> torch.Tensor:
        """At one time for each scene, evenly spread; under the row's mask at all of them."""
        model, masks = self.load_model(row)[0], self.masks(row)
        times, losses = (torch.arange(self.number, device=self.device) + 0.5) / self.number, []
        for part in self.batches():
            video, noise, at = self.truth[part], self.noise[part], times[part]
            x = flow.interpolate(video, noise, at, self.sizes.given)
            with autocast(self.device):
                predicted = model(x, at, masks)
            losses.append(flow.loss(flow.to_velocity(predicted, x, at), video, noise, self.sizes.given))
        return torch.cat(losses)

    def batches(self) -> Iterator[slice]:
        for first in range(0, self.number, self.batch):
            yield slice(first, first + self.batch)

    def masks(self, row: Row) -> list[Mask]:
        return masks_of(row.mask, row.share, self.sizes.layout, self.sizes.layers, self.device)

    def density(self, row: Row) -> float:
        """The share of pairs of tiles that a row's steps keep. Choosers keep what their budget says."""
        mask, layout = self.masks(row)[0], self.sizes.layout
        if row.mask == VSA:
            kept = kept_tiles(layout, row.share) / (layout.length // layout.block)
        elif row.mask in BY_SHARE and isinstance(mask, str):
            kept = row.share
        else:
            kept = 1.0 if mask is None else mask.block_density
        first = -(-row.first * self.steps // 1) / self.steps
        return first + (1 - first) * kept if row.arm else 0.0


def strip(video: torch.Tensor, given: int) -> str:
    """Frames of a video side by side, from the last that is given: PNG in base64. video: (frames, 3, side, side)."""
    from matplotlib import image

    picked = torch.linspace(given - 1, len(video) - 1, COLUMNS).round().long()
    pixels = ((video[picked].float().cpu().clamp(-1, 1) + 1) * 127.5).round().byte()
    image.imsave(file := io.BytesIO(), pixels.permute(2, 0, 3, 1).flatten(1, 2).numpy(), format="png")
    return base64.b64encode(file.getvalue()).decode()


def _rounded(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]
