"""Rectified flow (arXiv:2209.03003): straight lines from videos at time 0 to noise at time 1, and Euler steps back.

The first ``given`` frames are the condition: they are never noised, and their velocity counts for nothing.
"""

from collections.abc import Callable

import torch

LONGEST = 50  # steps of sampling
Velocity = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]  # (x, time, number of the step) -> the shape of x


def interpolate(video: torch.Tensor, noise: torch.Tensor, time: torch.Tensor, given: int) -> torch.Tensor:
    """The points at ``time``, (batch,) in 0 .. 1, of the lines. video, noise: (batch, frames, ...)."""
    time = time.view(-1, *[1] * (video.dim() - 1))
    return torch.cat([video[:, :given], torch.lerp(video, noise, time)[:, given:]], 1)


def to_velocity(predicted: torch.Tensor, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """The velocity at the points ``x`` by a prediction of the video (arXiv:2511.13720), for times of at most LONGEST steps."""
    return (x - predicted) / time.clamp(min=1 / LONGEST).view(-1, *[1] * (x.dim() - 1))


def loss(velocity: torch.Tensor, video: torch.Tensor, noise: torch.Tensor, given: int) -> torch.Tensor:
    """The mean squared error of velocities, of each video: (batch,)."""
    return (velocity - (noise - video))[:, given:].square().flatten(1).mean(1)


def sample_videos(velocity: Velocity, video: torch.Tensor, noise: torch.Tensor, given: int, steps: int) -> torch.Tensor:
    """Videos from noise. Of ``video``, only the first ``given`` frames are read."""
    x = torch.cat([video[:, :given], noise[:, given:]], 1)
    for step in range(steps):
        time = torch.full((len(x),), 1 - step / steps, device=x.device)
        x = torch.cat([video[:, :given], (x - velocity(x, time, step) / steps)[:, given:]], 1)
    return x
