"""Pathfinder: labels by other means than the generator's, paths that stay apart, and nothing else that tells the label."""

from itertools import product

import numpy as np
import pytest
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from experiments.long_range.pathfinder import DRAWINGS, Pathfinder, Scenes, draw_images, scenes

SIZES = list(DRAWINGS)


@pytest.fixture(scope="module")
def made() -> dict[int, Scenes]:
    return {size: scenes(Pathfinder(size).drawing, 240 if size == 32 else 16, np.random.default_rng(0)) for size in SIZES}


def steps_of(made: Scenes, scene: int) -> np.ndarray:
    """The steps that fit, (steps, 2, 2)."""
    steps = made.steps[scene]
    return steps[~np.isnan(steps[:, 0, 0])]


def dashes_of(size: int, steps: np.ndarray) -> np.ndarray:
    """(dashes, 2, 2): the two ends of each."""
    drawing = DRAWINGS[size]
    middle, half = steps.mean(1, keepdims=True), (steps[:, 1:] - steps[:, :1]) / 2
    return middle + half * (drawing.dash / drawing.step) * np.array([-1.0, 1.0])[:, None]


@pytest.mark.parametrize("size", SIZES)
def test_dashes_a_gap_apart_connect_the_dots_only_in_positive_images(size, made):
    drawing, these = DRAWINGS[size], made[size]
    for scene in range(16):
        dashes = dashes_of(size, steps_of(these, scene))
        ends = dashes.reshape(-1, 2)
        near = np.linalg.norm(ends[:, None] - ends, axis=-1) <= 2 * drawing.gap + 0.01
        one, two = (index // 2 for index in np.nonzero(near))
        _, path = connected_components(coo_array((np.ones(len(one)), (one, two)), shape=(len(dashes),) * 2))
        first, second = (np.linalg.norm(ends - dot, axis=-1) for dot in these.dots[scene])
        assert first.min() < 0.01 and second.min() < 0.01  # dots are where dashes end
        assert (path[first.argmin() // 2] == path[second.argmin() // 2]) == these.labels[scene]
        lengths = np.bincount(path)
        assert sorted(lengths)[-2:] == [14, 14] and set(lengths) <= {4, 14}


def test_ink_dots_and_their_positions_do_not_tell_the_label(made):
    these = made[32]
    images, labels = draw_images(DRAWINGS[32], these), these.labels.astype(bool)
    apart = np.linalg.norm(these.dots[:, 0] - these.dots[:, 1], axis=-1)
    numbers = {
        "ink": images.mean((1, 2)),
        "bright pixels": (images > 127).sum((1, 2)),
        "dim pixels": ((images > 0) & (images < 128)).sum((1, 2)),
        "distance of the dots": apart,
        "short paths": np.isfinite(these.steps[:, :, 0, 0]).sum(1),
    }
    for index, axis in product(range(2), range(2)):
        numbers[f"dot {index}, axis {axis}"] = these.dots[:, index, axis]
        numbers[f"dot {index}, axis {axis}, from the middle"] = np.abs(these.dots[:, index, axis] - 15.5)
    half = len(labels) // 2
    for name, values in numbers.items():
        # The best border between two values in one half of the images, tried on the other half; 4.6 % is a standard error.
        above = values[:half, None] >= values[:half]
        right = (above == labels[:half, None]).mean(0)
        border, flip = values[:half][np.abs(right - 0.5).argmax()], right[np.abs(right - 0.5).argmax()] < 0.5
        assert (((values[half:] >= border) != flip) == labels[half:]).mean() < 0.66, name
    # Matched in pairs, dots of both labels are on average as far apart and as far out, to a small part of a pixel.
    places = np.column_stack([apart, np.abs(these.dots - 15.5).reshape(-1, 4)])
    assert np.abs(places[labels].mean(0) - places[~labels].mean(0)).max() < 0.2 and labels.mean() == 0.5


def test_directions_in_which_paths_leave_the_dots_do_not_tell_the_label(made):
    these = made[32]
    long = these.steps[:, :28]
    ends = np.stack([long[:, 0], long[:, 1], long[:, -2, ::-1], long[:, -1, ::-1]], axis=1)  # (scenes, ends, 2, 2), each inwards
    inwards = (ends[:, :, 1] - ends[:, :, 0]) / DRAWINGS[32].step
    nearest = np.linalg.norm(ends[:, None, :, 0] - these.dots[:, :, None], axis=-1).argmin(-1)  # (scenes, 2): the end at each dot
    to_other = these.dots[:, ::-1] - these.dots
    to_other /= np.linalg.norm(to_other, axis=-1, keepdims=True)
    cosine = (inwards[np.arange(len(nearest))[:, None], nearest] * to_other).sum(-1).mean(1)
    labels = these.labels.astype(bool)
    # The difference is 0.33 if only positions are matched; its standard error is 0.06.
    assert abs(cosine[labels].mean() - cosine[~labels].mean()) < 0.16
