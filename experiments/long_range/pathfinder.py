"""Pathfinder: does a dashed path join the two dots? (arXiv:1805.08315, sec. 2; arXiv:2011.04006, sec. 2.2.5)

A scene has two long paths that start near each other, and short ones beside them. No path touches or crosses another, or itself.
Two dots mark the first end of a long path, and the last end of the same one in a positive image, of the other one in a negative.

All scenes come from one distribution: a label says which ends are marked, and nothing else. But ends of one path are at other
distances than ends of two. At the same distance, ends of one path leave in other directions than ends of two. A small network that
sees only positions and directions is right for four of five images. So positive and negative scenes are matched in pairs whose dots
are at nearly the same positions and whose paths leave them in nearly the same directions, after turning and mirroring. The pairs
that match worst are dropped.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from ..files import check_one_of
from .paths import POINTS, Drawing, long_paths, short_paths, squared_length

# The hard sets of arXiv:2011.04006, as lra_benchmarks/data/pathfinder.py documents them; at 128 their gap is 2 or 3. Their easy
# sets have paths of 6 dashes, their intermediate ones of 9.
DRAWINGS = {
    32: Drawing(32, dash=2, gap=1, thickness=0.5, radius=1.5, grey=1.0, bend=1.0, start=7, clutter=20),
    64: Drawing(64, dash=5, gap=1, thickness=1, radius=2.5, grey=0.8, bend=1.8, start=12, clutter=22),
    128: Drawing(128, dash=5, gap=2.5, thickness=1.5, radius=3, grey=0.9, bend=1.8, start=20, clutter=35),
    256: Drawing(256, dash=5, gap=3, thickness=2, radius=5, grey=1.0, bend=1.8, start=27, clutter=30),
}
_LEAST_DASHES = 3
_SPARE = 3.0  # pairs made beyond those asked for, as a share of those
_AHEAD = 0.25  # of the image's side: how far ahead of a dot is the point whose position stands for a direction
_NEVER = 1e9  # the cost of a pair with dots that are not apart
# How a pair may match: (path of the positive scene, path of the negative scene with the first dot, symmetry of the square).
_CHOICES = list(product(range(2), range(2), range(8)))


@dataclass(frozen=True)
class Pathfinder:
    """The task. A token is a pixel, by its grey value. size: of the image's sides, in pixels. dashes: of the long paths."""

    size: int = 32
    dashes: int = 14
    name: ClassVar[str] = "pathfinder"
    classes: ClassVar[int] = 2
    vocabulary: ClassVar[int] = 256
    padding: ClassVar[int | None] = None
    together: ClassVar[int] = 1000  # images that are made at once, and matched
    wavelengths: ClassVar[tuple[float, float]] = 1.0, 32.0  # of rotary positions, the shortest and the longest, in units

    def __post_init__(self):
        check_one_of(DRAWINGS, size=self.size)
        most = DRAWINGS[self.size].dashes
        if not _LEAST_DASHES <= self.dashes <= most:
            raise ValueError(f"dashes must be {_LEAST_DASHES} to {most}; got {self.dashes}")

    @property
    def drawing(self) -> Drawing:
        return replace(DRAWINGS[self.size], dashes=self.dashes)

    @property
    def shape(self) -> tuple[int, int]:
        """Pixels of an example, (rows, columns)."""
        return self.size, self.size

    @property
    def unit(self) -> float:
        """Pixels in a step of a path."""
        return self.drawing.step

    def make(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Images (count, size, size) uint8 and labels (count,) uint8, half of them 1."""
        made = scenes(self.drawing, count, rng)
        return draw_images(self.drawing, made), made.labels


@dataclass(frozen=True)
class Scenes:
    """Before they are drawn. Positions are (row, column) in pixels, float32; the middle of the first pixel is (0, 0).

    steps: (scenes, steps, 2, 2), where each step of a path starts and ends; NaN for steps of a short path that did not fit.
    dots: (scenes, 2, 2). labels: (scenes,) uint8, 1 where the dots are on one path.
    """

    steps: np.ndarray
    dots: np.ndarray
    labels: np.ndarray


def scenes(drawing: Drawing, count: int, rng: np.random.Generator) -> Scenes:
    """``count`` scenes. The more are made at once, the better dots of positive and of negative ones match."""
    pairs = -(-count // 2)
    long, dots, labels = _match_pairs(drawing, long_paths(drawing, 2 * int(np.ceil(pairs * (1 + _SPARE))), rng), pairs)
    order = rng.permutation(2 * pairs)[:count]
    long, dots, labels = long[order], dots[order], labels[order]
    points = np.concatenate([long, short_paths(drawing, long, rng).reshape(count, -1, POINTS, 2)], axis=1)
    return Scenes(points[:, :, [0, -1]], dots, labels)


def _match_pairs(drawing: Drawing, long: np.ndarray, pairs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Makes one half of the scenes positive and the other half negative, and keeps the ``pairs`` of a positive and a negative scene
    that match best. Negative scenes are turned and mirrored to match.

    long: see ``long_paths``. Returns long paths, dots and labels of 2 * pairs scenes, the positive ones first.
    """
    positive, negative = np.split(long, 2)
    same, crossed = _ends(drawing, positive), _ends(drawing, negative)
    crossed[:, :, 1] = crossed[:, ::-1, 1].copy()  # the first end of each path, and the last of the other
    cost, choice = _match_ends(drawing, crossed, same)
    # Rows are negative scenes: with positive ones as rows, the assignment takes two to four times as long.
    of_negative, of_positive = linear_sum_assignment(cost)
    by_positive = of_positive.argsort()
    of_negative, of_positive = of_negative[by_positive], of_positive[by_positive]
    best = np.argsort(cost[of_negative, of_positive])[:pairs]
    of_negative, of_positive = of_negative[best], of_positive[best]
    path, other, symmetry = np.array(_CHOICES)[choice[of_negative, of_positive]].T
    turned = _apply_symmetry(negative[of_negative], drawing.size, symmetry)
    turned_dots = _apply_symmetry(crossed[of_negative, other, :, 0], drawing.size, symmetry)
    dots = np.concatenate([same[of_positive, path, :, 0], turned_dots])
    return np.concatenate([positive[of_positive], turned]), dots, np.repeat(np.uint8([1, 0]), pairs)


def _match_ends(drawing: Drawing, crossed: np.ndarray, same: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the least cost of each pair, the index in _CHOICES that has it), (negative scenes, positive scenes) each. crossed, same: the
    ends that dots may mark in negative and in positive scenes, as ``_ends`` returns."""
    least = np.full((len(crossed), len(same)), np.inf)
    choice = np.zeros(least.shape, np.uint8)
    for number, (path, other, symmetry) in enumerate(_CHOICES):
        cost = _cost(drawing, _apply_symmetry(crossed[:, other], drawing.size, np.array(symmetry)), same[:, path])
        np.copyto(choice, number, where=cost < least)
        np.minimum(least, cost, out=least)
    return least, choice


def _ends(drawing: Drawing, long: np.ndarray) -> np.ndarray:
    """(scenes, paths, 2 ends, 2, 2): for each path, where its first dash starts and its last one ends; for both, this point and one
    further along the dash."""
    steps = long[:, :2], long[:, -2:, ::-1]
    inset, ahead = drawing.gap / drawing.step, _AHEAD * drawing.size / drawing.step
    points = [step[:, :, 0] + share * (step[:, :, -1] - step[:, :, 0]) for step in steps for share in (inset, inset + ahead)]
    return np.stack(points, axis=2).reshape(len(long), 2, 2, 2, 2)


def _apply_symmetry(positions: np.ndarray, size: int, turn: np.ndarray) -> np.ndarray:
    """By one of the symmetries of the square, 0 to 7. positions: (scenes, ..., 2). turn: (scenes,) or ()."""
    turn = turn.reshape(-1, *[1] * (positions.ndim - 1))
    centred = positions - (size - 1) / 2
    centred = np.where(turn & 4, centred[..., ::-1], centred)
    return (centred * (1 - (turn >> [0, 1] & 1) * 2) + (size - 1) / 2).astype(np.float32)


def _cost(drawing: Drawing, dots: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(scenes, others): the squared difference of the positions of dots and of the points ahead of them, and of the distance
    between the dots, which would tell most. dots, others: (scenes, 2, 2, 2), of one path of ``_ends``."""
    pairs = dots, others
    apart = [np.sqrt(squared_length(pair[:, 0, 0] - pair[:, 1, 0])) for pair in pairs]
    features = [np.column_stack([pair.reshape(-1, 8), distance]) for pair, distance in zip(pairs, apart, strict=True)]
    close = [distance < 3 * drawing.radius for distance in apart]  # no gap to be seen between them
    cost = cdist(*features, "sqeuclidean")
    cost[close[0]] = cost[:, close[1]] = _NEVER
    return cost


def draw_images(drawing: Drawing, made: Scenes) -> np.ndarray:
    """(scenes, size, size) uint8: black, with grey dashes and white dots."""
    images = np.zeros((len(made.labels), drawing.size, drawing.size), np.uint8)
    starts, ends = made.steps[:, :, 0], made.steps[:, :, 1]
    gap = (ends - starts) * (drawing.gap / drawing.step)
    draw_lines(images, starts + gap, ends - gap, drawing.thickness, drawing.grey)
    draw_lines(images, made.dots, made.dots, 2 * drawing.radius, 1.0)
    return images


def draw_lines(images: np.ndarray, starts: np.ndarray, ends: np.ndarray, thickness: float, grey: float) -> None:
    """Draws into images (scenes, size, size) uint8, where a line is brighter than what is there. starts, ends: (scenes, lines, 2);
    lines of NaN are left out. Ends are round. A pixel is as bright as the line covers it, by the distance of its middle."""
    scene, line = np.nonzero(~np.isnan(starts[..., 0]))
    starts, ends = starts[scene, line], ends[scene, line]
    along = ends - starts
    reach = int(np.ceil(np.abs(along).max() / 2 + thickness / 2 + 1))
    offsets = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * 2, indexing="ij"), axis=-1).reshape(-1, 2)
    pixels = np.rint((starts + ends) / 2).astype(int)[:, None] + offsets  # (lines, pixels, 2)
    within = ((pixels >= 0) & (pixels < images.shape[1])).all(-1)
    to = pixels - starts[:, None]
    share = (to * along[:, None]).sum(-1) / np.maximum(squared_length(along), 1e-12)[:, None]
    distance = np.sqrt(squared_length(to - share.clip(0, 1)[..., None] * along[:, None]))
    covered = (0.5 + thickness / 2 - distance).clip(0, 1) * within
    which = np.broadcast_to(scene[:, None], covered.shape), *pixels.clip(0, images.shape[1] - 1).transpose(2, 0, 1)
    np.maximum.at(images, which, np.rint(255 * grey * covered).astype(np.uint8))
