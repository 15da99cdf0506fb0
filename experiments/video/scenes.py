"""Scenes: discs, squares and triangles that move, bounce off the borders, collide within their depth and hide what is behind.

Lengths are in sides of the picture, times in frames.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

SHAPES, FRONT = 5, 3  # shapes of a scene; the last FRONT of them are in front of the others, and collide with each other
KINDS = 3  # disc, square, triangle
_SLOTS = 3  # a scene begins with shapes in different cells of 3 x 3, so that none overlap
_STEPS = 4  # of the simulation in a frame
_COLORS = torch.tensor(
    [[1, 0.2, 0.2], [0.2, 1, 0.2], [0.35, 0.45, 1], [1, 1, 0.2], [1, 0.3, 1], [0.2, 1, 1], [1, 0.6, 0.2], [1, 1, 1]]
)


@dataclass(frozen=True)
class State:
    """The shapes of some scenes. place, speed: (scenes, shapes, 2) float32, x and y of the middle, and their change in a frame.
    radius: (scenes, shapes) float32. kind: (scenes, shapes) int64. color: (scenes, shapes, 3) and ground: (scenes, 3) float32 in
    0 .. 1."""

    place: torch.Tensor
    speed: torch.Tensor
    radius: torch.Tensor
    kind: torch.Tensor
    color: torch.Tensor
    ground: torch.Tensor

    def to(self, device: torch.device) -> State:
        return State(*(getattr(self, field.name).to(device) for field in fields(self)))


def draw_states(scenes: int, seed: int) -> State:
    """First states of scenes, on the CPU: the same on every machine."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(scenes, *shape, generator=generator)

    slots = torch.rand(scenes, _SLOTS**2, generator=generator).argsort(1)[:, :SHAPES]
    cell = torch.stack([slots % _SLOTS, slots // _SLOTS], -1)
    place = (cell + 0.5 + uniform(-0.08, 0.08, SHAPES, 2)) / _SLOTS
    angle, length = uniform(0, 2 * torch.pi, SHAPES), uniform(0.015, 0.05, SHAPES, 1)
    speed = torch.stack([angle.cos(), angle.sin()], -1) * length
    kind = torch.randint(KINDS, (scenes, SHAPES), generator=generator)
    colors = torch.rand(scenes, len(_COLORS), generator=generator).argsort(1)[:, :SHAPES]
    return State(place, speed, uniform(0.1, 0.135, SHAPES), kind, _COLORS[colors], uniform(0, 0.25, 3))


def simulate(state: State, frames: int) -> torch.Tensor:
    """Places in each frame: (scenes, frames, shapes, 2). Shapes collide as their enclosing discs do, with masses as their areas."""
    place, speed, radius = state.place, state.speed, state.radius[..., None]
    touching = radius + radius.mT
    depth = torch.arange(SHAPES, device=place.device) >= SHAPES - FRONT
    may_collide = (depth[:, None] == depth) & ~torch.eye(SHAPES, dtype=torch.bool, device=place.device)
    mass = radius**2
    share = 2 * mass.mT / (mass + mass.mT)  # of the change of speed that the first of two takes
    places = []
    for _ in range(frames):
        places.append(place)
        for _ in range(_STEPS):
            place = place + speed / _STEPS
            speed = torch.where(place < radius, speed.abs(), torch.where(place > 1 - radius, -speed.abs(), speed))
            apart, relative = (t[:, :, None] - t[:, None] for t in (place, speed))
            distance = apart.norm(dim=-1).clamp(min=1e-6)
            normal = apart / distance[..., None]
            closing = (relative * normal).sum(-1)
            collide = may_collide & (distance < touching) & (closing < 0)
            speed = speed - ((share * closing * collide)[..., None] * normal).sum(2)
    return torch.stack(places, 1)


def render(state: State, places: torch.Tensor, side: int) -> torch.Tensor:
    """(scenes, frames, 3, side, side) float32 in -1 .. 1, with smooth edges. places: (scenes, frames, shapes, 2)."""
    pixel = (torch.arange(side, device=places.device) + 0.5) / side
    canvas = state.ground[:, None, :, None, None].expand(-1, places.shape[1], -1, side, side)
    for shape in range(SHAPES):  # from the back to the front
        x = pixel - places[:, :, shape, 0, None, None]
        y = pixel[:, None] - places[:, :, shape, 1, None, None]
        x, y = torch.broadcast_tensors(x, y)
        radius = state.radius[:, None, None, None, shape]
        disc = (x * x + y * y).sqrt() - radius
        square = torch.maximum(x.abs(), y.abs()) - radius * 0.75
        triangle = torch.maximum(y, 3**0.5 / 2 * x.abs() - y / 2) - radius / 2
        kind = state.kind[:, None, None, None, shape]
        inside = torch.where(kind == 0, disc, torch.where(kind == 1, square, triangle))
        cover = (0.5 - inside * side).clamp(0, 1)[:, :, None]
        canvas = canvas + cover * (state.color[:, None, shape, :, None, None] - canvas)
    return canvas * 2 - 1


def make_videos(number: int, seed: int, frames: int, side: int, device: torch.device) -> torch.Tensor:
    """Videos by seed: (number, frames, 3, side, side) float32 in -1 .. 1."""
    state = draw_states(number, seed).to(device)
    return render(state, simulate(state, frames), side)
