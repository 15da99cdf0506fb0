"""Loss by position, at any length, also beyond the trained one."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from rich.progress import track

from . import checkpoint
from .data import Batch, Tokens
from .model import Decoder
from .parallel import World, mixed_precision

BORDERS = (0, 1024, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)


@dataclass(frozen=True)
class ByPosition:
    """Holds the mean loss, in nats a token, of positions first .. last - 1 over all windows."""

    first: int
    last: int
    nats: float


def load_decoder(path: Path, device: torch.device) -> Decoder:
    """Loads the model of a checkpoint, or of a run's last one, for use rather than training."""
    path = checkpoint.resolve_checkpoint(path)
    settings, _ = checkpoint.read(path)
    with device:
        model = Decoder(settings).eval()
    checkpoint.load_model(path, model)
    return model.requires_grad_(False)


@torch.no_grad()
def losses(model: Decoder, tokens: Tokens, length: int, windows: int, device: torch.device) -> torch.Tensor:
    """Returns (windows, length) float32, in nats: the loss of each token of ``windows`` sequences spread evenly over a text."""
    tokens.check_holds(length)
    starts = torch.linspace(0, len(tokens) - length - 1, windows).long().tolist()
    rows = []
    for start in track(starts, description=f"evaluating at {length:,}", transient=True):
        batch = Batch.from_starts(tokens, [start], length)
        ids, labels, _ = batch.to_device(device, packed=False)
        with mixed_precision(model, World(device)):
            hidden = model.hidden(ids)[0]
            pieces = zip(hidden.split(4096), labels[0].split(4096), strict=True)
            rows.append(
                torch.cat([torch.nn.functional.cross_entropy(model.head(h).float(), y, reduction="none") for h, y in pieces])
            )
    return torch.stack(rows).cpu()


def by_position(nats: torch.Tensor) -> list[ByPosition]:
    length = nats.shape[1]
    borders = [border for border in BORDERS if border < length] + [length]
    return [ByPosition(a, b, nats[:, a:b].mean().item()) for a, b in pairwise(borders)]
