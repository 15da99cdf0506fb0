"""The pictures: frames of some rows, and likeness to dense attention's videos against the share that is kept."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from statistics import mean

import torch

from ..row_files import mean_and_error, rows_by_name
from .masks import SHARES, VSA
from .measure import COLUMNS, strip
from .model import Sizes
from .report import decibels
from .rows import DENSE, Arm, Row
from .scenes import make_videos

SHOWN = (
    *("dense", "dense, seed 1", "window 0.125", "sampled 0.125", "random 0.125", "sampled 0.25", "random 0.25"),
    *("window 0.125, tuned", "sampled 0.125, tuned", "random 0.125, tuned", "vsa 0.125, tuned", "vsa 0.125, trained"),
)

# A color and a marker for each mask. Okabe and Ito chose the colors so that people of all color vision tell them apart.
_COLORS = {"sampled": "#0B3C7D", "pooled": "#BF5F95", "window": "#D55E00", "random": "#6A6A6A", VSA: "#008560"}
_MARKERS = dict(zip(_COLORS, "oDsX*", strict=True))


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


def draw_shares(results: dict, target: Path) -> Path:
    """Draws how like dense attention's videos are, in dB, against the share that is kept: lines for masks without training, single
    points for masks after training on, and the other dense model as a level. What has no results is left out."""
    from matplotlib import pyplot as plt

    by_name = rows_by_name(results)

    def found(rows: list[Row]) -> tuple[list[float], list[float], list[float]]:
        there = [by_name[row.name] for row in rows if row.name in by_name]
        likeness = [mean_and_error(decibels(row["dense"])) for row in there]
        return [row["density"] for row in there], [value for value, _ in likeness], [error for _, error in likeness]

    figure, axis = plt.subplots(figsize=(7.5, 4.6))
    for mask, color in _COLORS.items():
        look = {"color": color, "marker": _MARKERS[mask], "capsize": 2}
        for rows, more in (
            ([Row(DENSE, mask, share) for share in SHARES], {"label": mask}),
            ([Row(Arm(mask, tuned=True), mask)], {"label": f"{mask}, tuned", "linestyle": "none", "markerfacecolor": "none"}),
        ):
            kept, likeness, errors = found(rows)
            if kept:
                axis.errorbar(kept, likeness, errors, **look, **more)
    for mask in ("frames", "radial"):
        for kept, likeness, _ in zip(*found([Row(DENSE, mask)]), strict=True):
            axis.annotate(mask, (kept, likeness), xytext=(4, 4), textcoords="offset points", fontsize=9)
            axis.plot(kept, likeness, "k.")
    for arm, said, side in (
        (Arm("dense", seed=1), "dense, another seed", "bottom"),
        (Arm("dense", tuned=True), "dense, tuned", "top"),
    ):
        for _, likeness, error in zip(*found([Row(arm)]), strict=True):
            axis.axhspan(likeness - error, likeness + error, color="black", alpha=0.12, linewidth=0)
            axis.axhline(likeness, color="black", linewidth=0.8)
            axis.text(0.995, likeness, f"{said} ", transform=axis.get_yaxis_transform(), ha="right", va=side, fontsize=9)
    axis.set_xticks(SHARES)
    axis.set_xlabel("share of the pairs of tiles that is kept")
    axis.set_title("PSNR against dense attention's videos from the same noise, dB", loc="left", fontsize=11)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(target, dpi=130, bbox_inches="tight")
    plt.close(figure)
    return target
