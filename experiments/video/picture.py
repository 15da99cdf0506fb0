"""The picture: frames of some rows."""

import base64
import io
from pathlib import Path
from statistics import mean

import torch

from ..row_files import rows_by_name
from .measure import COLUMNS, strip
from .model import Sizes
from .report import decibels
from .scenes import make_videos

SHOWN = (
    *("dense", "dense, seed 1", "window 0.125", "sampled 0.125", "random 0.125", "sampled 0.25", "random 0.25"),
    *("window 0.125, tuned", "sampled 0.125, tuned", "random 0.125, tuned", "vsa 0.125, tuned", "vsa 0.125, trained"),
)


def draw(results: dict, target: Path, scene: int) -> Path:
    """Draws the frames of one scene: the truth, and the rows of SHOWN that have results. Raises ValueError for a scene whose frames
    are not in the results."""
    from matplotlib import pyplot as plt

    by_name, setup = rows_by_name(results), results["setup"]
    shown = [by_name[name] for name in SHOWN if name in by_name]
    if not shown or not all(scene < len(row.get("strips", [])) for row in shown):
        raise ValueError(f"scene must be one whose frames are in the results; got {scene}; pass files that measure wrote")
    sizes = Sizes(**setup["sizes"])
    truth = make_videos(setup["scenes"], setup["seed"], sizes.frames, sizes.side, torch.device("cpu"))[scene]
    strips = {"the truth": strip(truth, sizes.given)}
    for row in shown:
        like = f"{mean(decibels(row['truth'])):.1f} dB"
        strips[f"{row['row']}\nkeeps {row['density']:.1%}: {like}"] = row["strips"][scene]
    width, height = COLUMNS + 2.2, len(strips) * 1.04 + 0.25  # the names take 2.1 inches, the numbers of the frames 0.25
    figure, axes = plt.subplots(len(strips), 1, figsize=(width, height), squeeze=False)
    for axis, (said, one) in zip(axes[:, 0], strips.items(), strict=True):
        axis.imshow(plt.imread(io.BytesIO(base64.b64decode(one))), interpolation="nearest")
        axis.set_ylabel(said, rotation=0, ha="right", va="center", fontsize=9)
        axis.set_xticks([sizes.side * (column + 0.5) for column in range(COLUMNS)], [])
        axis.set_yticks([])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    picked = torch.linspace(sizes.given - 1, sizes.frames - 1, COLUMNS).round().long().tolist()
    axes[0, 0].set_xticks(axes[0, 0].get_xticks(), [f"frame {number + 1}" for number in picked], fontsize=8)
    axes[0, 0].xaxis.set_ticks_position("top")
    axes[0, 0].tick_params(length=0)
    figure.subplots_adjust(left=2.1 / width, right=0.995, top=1 - 0.25 / height, bottom=0.005, hspace=0.04)
    figure.savefig(target, dpi=110)
    plt.close(figure)
    return target
