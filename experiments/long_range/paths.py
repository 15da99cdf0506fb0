"""Paths that grow without touching each other: many scenes side by side as arrays, a step of a path at a time.

Positions are (row, column) in pixels; the middle of the first pixel is (0, 0). A step of a path is a dash with a gap before and
after it. It keeps its distance at ``POINTS`` points, evenly spaced from its start to its end, and is passed around as these points.
"""

from dataclasses import dataclass

import numpy as np

POINTS = 3
_TOGETHER = 256  # the most scenes that grow side by side
_NARROW, _WIDE = 6, 4  # directions that a path tries at each step: with the drawing's bend, and turning up to a quarter circle
_FEELERS, _AHEAD = 2, 1.5  # points ahead of a step that should be clear too; the last is 1.5 steps ahead
_BACK = 12  # the most steps that a scene without room undoes
_PATIENCE = 8  # after 8 times its number of steps, a scene starts again
_TRIES = 8  # for each short path
_NOWHERE = 1e5  # the position of steps that are not there

# Turns have the density cos(bend * turn)^2, as in arXiv:1805.08315.
_TURNS = np.linspace(-np.pi / 2, np.pi / 2, 1001)
_SHARES = np.cumsum(np.cos(_TURNS) ** 2) / np.sum(np.cos(_TURNS) ** 2)


@dataclass(frozen=True)
class Drawing:
    """How images are drawn; lengths in pixels.

    size: of the image's sides. dash, gap: of a step. thickness: of dashes. radius: of dots. grey: of dashes, where dots are 1.
    bend: most turns between steps are at most a quarter circle / bend. start: distance of the long paths' first ends. clutter:
    dashes of all short paths, if there is room. dashes: of a long path; a short one has a third of them.
    """

    size: int
    dash: float
    gap: float
    thickness: float
    radius: float
    grey: float
    bend: float
    start: float
    clutter: int
    dashes: int = 14

    @property
    def step(self) -> float:
        return self.dash + 2 * self.gap

    @property
    def apart(self) -> float:
        """The least distance between paths: wider than the gaps within one, and enough for a dot."""
        return max(2 * self.gap + self.thickness, self.radius + self.thickness / 2 + 0.5)

    @property
    def short_dashes(self) -> int:
        return self.dashes // 3

    @property
    def short_paths(self) -> int:
        return self.clutter // self.short_dashes


def long_paths(drawing: Drawing, count: int, rng: np.random.Generator) -> np.ndarray:
    """(count, steps, POINTS, 2) float32: two paths, whose steps alternate. If a path finds no room, the last steps of both are
    undone, and others tried."""
    together, steps = min(_TOGETHER, count), 2 * drawing.dashes
    rows = np.arange(together)
    points = np.full((together, steps, POINTS, 2), _NOWHERE, np.float32)
    headings = np.zeros((together, steps))
    at, age = np.zeros(together, int), np.zeros(together, int)  # the step that comes next; steps tried
    border = min(2 * drawing.start, 0.4 * drawing.size)  # the first path starts at least this far inside the image
    kept: list[np.ndarray] = []
    while sum(map(len, kept)) < count:
        before = at - 2  # the last step of this path
        origin = np.repeat(points[rows, before, -1][:, None], _NARROW + _WIDE, axis=1)
        heading = headings[rows, before][:, None] + _turns(drawing, together, rng)
        (first,), (second,), starts = np.nonzero(at == 0), np.nonzero(at == 1), at < 2
        origin[first] = rng.uniform(border, drawing.size - 1 - border, origin[first].shape)
        origin[second] = points[second, :1, 0] + drawing.start * _direction(_draw_headings(heading[second].shape, rng))
        heading[starts] = _draw_headings(heading[starts].shape, rng)
        obstacles = points.copy()
        obstacles[rows, before] = _NOWHERE
        found, step, headed = _choose_step(drawing, origin, heading, obstacles)
        points[rows[found], at[found]], headings[rows[found], at[found]] = step[found], headed[found]
        at = np.where(found, at + 1, np.maximum(at - rng.integers(1, _BACK + 1, together), 0))
        age += 1
        kept.append(points[at == steps])
        at[(at == steps) | (age > _PATIENCE * steps)] = 0
        age[at == 0] = 0
        points[np.arange(steps) >= at[:, None]] = _NOWHERE
    return np.concatenate(kept)[:count]


def short_paths(drawing: Drawing, long: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(scenes, drawing.short_paths, drawing.short_dashes, POINTS, 2) float32, NaN where a scene has no room for one.

    long: what ``long_paths`` returns.
    """
    shape = drawing.short_paths, drawing.short_dashes, POINTS, 2
    points, number = np.full((len(long), *shape), _NOWHERE, np.float32), np.zeros(len(long), int)
    for _ in range(_TRIES * drawing.short_paths):
        (rows,) = np.nonzero(number < drawing.short_paths)
        if not rows.size:
            break
        obstacles = np.concatenate([long[rows], points[rows].reshape(len(rows), -1, POINTS, 2)], axis=1)
        heading = _draw_headings((len(rows), _NARROW + _WIDE), rng)
        origin = rng.uniform(0, drawing.size - 1, (*heading.shape, 2))
        alive, steps = np.ones(len(rows), bool), []
        for _ in range(drawing.short_dashes):
            around = np.concatenate([obstacles, *(one[:, None] for one in steps[:-1])], axis=1)
            found, step, headed = _choose_step(drawing, origin, heading, around)
            alive &= found
            steps.append(step)
            origin = step[:, -1:]
            heading = headed[:, None] + _turns(drawing, len(rows), rng)
        points[rows[alive], number[rows[alive]]] = np.stack(steps, axis=1)[alive]
        number[rows[alive]] += 1
    points[np.arange(drawing.short_paths) >= number[:, None]] = np.nan
    return points


def _choose_step(
    drawing: Drawing, origin: np.ndarray, heading: np.ndarray, obstacles: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first of several steps that are clear at all their points, among the ones with the most room ahead. Room ahead is how
    many further points in the same direction are clear, up to the first that is not.

    origin: (scenes, directions or 1, 2). heading: (scenes, directions). obstacles: (scenes, steps, POINTS, 2).
    Returns whether a step is clear (scenes,), its points (scenes, POINTS, 2) and its heading (scenes,).
    """
    along = np.append(np.linspace(0, 1, POINTS), 1 + _AHEAD * np.arange(1, _FEELERS + 1) / _FEELERS) * drawing.step
    scenes, directions = heading.shape
    axes = [
        (origin[..., axis, None] + towards[..., None] * along).reshape(scenes, -1).astype(np.float32)
        for axis, towards in enumerate((np.sin(heading), np.cos(heading)))
    ]
    # Points first: numpy takes several times as long where the last axis is short.
    clear = np.ascontiguousarray(_are_clear(drawing, *axes, obstacles).reshape(scenes, directions, -1).transpose(2, 0, 1))
    possible = clear[:POINTS].all(0)
    room = possible * (1 + clear[POINTS:].cumprod(0).sum(0))
    chosen = np.arange(scenes), room.argmax(-1)
    step = np.stack([axis.reshape(scenes, directions, -1)[chosen][:, :POINTS] for axis in axes], axis=-1)
    return possible.any(-1), step, heading[chosen]


def _are_clear(drawing: Drawing, row: np.ndarray, column: np.ndarray, obstacles: np.ndarray) -> np.ndarray:
    """Whether points are within the image and far enough from all obstacles: (scenes, points), as row and column are.

    By a product of matrices, |p - o|^2 = |p|^2 + (|o|^2 - 2 p.o) is several times as fast as by differences.
    """
    scenes = len(row)
    factors = np.empty((scenes, 3, obstacles[0].size // 2), np.float32)
    factors[:, 0], factors[:, 1] = (obstacles[..., axis].reshape(scenes, -1) for axis in range(2))
    factors[:, 2] = factors[:, 0] ** 2 + factors[:, 1] ** 2
    factors[:, :2] *= -2
    points = np.stack([row, column, np.ones_like(row)], axis=1)
    distance = (factors.swapaxes(1, 2) @ points).min(1) + (row**2 + column**2)
    middle = (drawing.size - 1) / 2
    off_centre = np.maximum(np.abs(row - middle), np.abs(column - middle))
    return (off_centre <= drawing.size / 2 - drawing.radius) & (distance >= drawing.apart**2)


def _turns(drawing: Drawing, scenes: int, rng: np.random.Generator) -> np.ndarray:
    """(scenes, directions) in radians, narrow ones first."""
    bend = np.repeat([drawing.bend, 1.0], [_NARROW, _WIDE])
    return np.interp(rng.random((scenes, len(bend))), _SHARES, _TURNS) / bend


def _draw_headings(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(0, 2 * np.pi, shape)


def _direction(heading: np.ndarray) -> np.ndarray:
    return np.stack([np.sin(heading), np.cos(heading)], axis=-1)


def squared_length(vectors: np.ndarray) -> np.ndarray:
    """Squared lengths of vectors, (..., 2)."""
    return vectors[..., 0] ** 2 + vectors[..., 1] ** 2
