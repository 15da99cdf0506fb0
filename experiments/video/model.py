"""A diffusion transformer (arXiv:2212.09748) over the patches of a video, in tile order, whose layers attend under any mask."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import sparse_flash as sf
from examples.selection_layers.vsa import VSA

from .masks import Mask

_PAIRS = (12, 10, 10)  # pairs of a head's channels that the frame, the row and the column rotate
_BASE = 100.0  # of rotary positions: axes are short


@dataclass(frozen=True)
class Sizes:
    """frames, side: of a video, in pixels. patch: pixels on a side of a token's square. given: frames of the condition."""

    frames: int = 16
    side: int = 64
    patch: int = 4
    given: int = 2
    dim: int = 384
    heads: int = 6
    layers: int = 8

    @property
    def layout(self) -> sf.VideoLayout:
        """Tiles of 4 x 4 x 4 tokens."""
        cells = self.side // self.patch
        return sf.VideoLayout(self.frames, cells, cells, tile=(4, 4, 4))


PRESETS = {"full": Sizes(), "tiny": Sizes(side=32, dim=128, heads=2, layers=2)}


class Attention(nn.Module):
    """Takes and returns (batch, tokens, dim). keep: tiles that VSA keeps; None for attention under a mask."""

    def __init__(self, sizes: Sizes, keep: int | None):
        super().__init__()
        self.heads, self.head_dim = sizes.heads, sizes.dim // sizes.heads
        self.qkv, self.out = nn.Linear(sizes.dim, 3 * sizes.dim), nn.Linear(sizes.dim, sizes.dim)
        self.gain = nn.Parameter(torch.ones(self.heads, 1, 1))  # how sharp a head wants its scores
        self.vsa = None if keep is None else VSA(sizes.layout, keep, sizes.dim, self.heads, self.head_dim)

    def forward(self, x, cos, sin, mask: Mask):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        q, k = (rotate(F.rms_norm(t.float(), (self.head_dim,)), cos, sin) for t in (q, k))
        q, k = (q * self.gain).to(v.dtype), k.to(v.dtype)
        out = sf.attention(q, k, v, mask) if self.vsa is None else self.vsa(x, q, k, v)
        return self.out(out.transpose(1, 2).flatten(2))


def rotate(x, cos, sin):
    """x: (batch, heads, tokens, head_dim). cos, sin: (tokens, head_dim / 2) float32."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    """Attention and MLP, each after a norm that the time shifts and scales, and added by a gate that begins at 0."""

    def __init__(self, sizes: Sizes, keep: int | None):
        super().__init__()
        dim = sizes.dim
        self.attention = Attention(sizes, keep)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.modulation = nn.Linear(dim, 6 * dim)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x, time, cos, sin, mask: Mask):
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(time)[:, None].chunk(6, -1)
        x = x + gate * self.attention(modulate(x, shift, scale), cos, sin, mask)
        return x + mlp_gate * self.mlp(modulate(x, mlp_shift, mlp_scale))


def modulate(x, shift, scale):
    return F.layer_norm(x, x.shape[-1:]).to(shift.dtype) * (1 + scale) + shift


class Transformer(nn.Module):
    """Predicts a video from a point between it and noise: (batch, frames, 3, side, side), times (batch,) -> the first's shape.

    masks: one for each layer. keep: tiles that VSA's layers keep; None for layers under masks. Raises ValueError for sizes that do
    not fit together."""

    def __init__(self, sizes: Sizes, keep: int | None = None):
        super().__init__()
        if sizes.dim != 64 * sizes.heads:
            raise ValueError(f"dim must be 64 for each head; got {sizes.dim} for {sizes.heads} heads")
        self.sizes, self.layout = sizes, sizes.layout
        self.embed = nn.Linear(3 * sizes.patch**2 + 1, sizes.dim)  # the pixels, and whether they are given
        self.time = nn.Sequential(nn.Linear(256, sizes.dim), nn.SiLU(), nn.Linear(sizes.dim, sizes.dim), nn.SiLU())
        self.blocks = nn.ModuleList(Block(sizes, keep) for _ in range(sizes.layers))
        self.modulation, self.head = nn.Linear(sizes.dim, 2 * sizes.dim), nn.Linear(sizes.dim, 3 * sizes.patch**2)
        for parameter in (*self.modulation.parameters(), *self.head.parameters()):
            nn.init.zeros_(parameter)
        positions = torch.from_numpy(self.layout.positions)
        rates = [_BASE ** -(torch.arange(pairs) / pairs) for pairs in _PAIRS]
        angles = torch.cat([positions[:, axis, None] * rate for axis, rate in enumerate(rates)], 1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("is_given", (positions[:, :1] < sizes.given).float(), persistent=False)

    def forward(self, video, time, masks: Sequence[Mask]):
        pixels = self.layout.to_tiles(self.patches(video), dim=1)
        x = self.embed(torch.cat([pixels, self.is_given.to(pixels.dtype).expand(len(pixels), -1, -1)], 2))
        time = self.time(embed_time(time))
        for block, mask in zip(self.blocks, masks, strict=True):
            x = block(x, time, self.cos, self.sin, mask)
        shift, scale = self.modulation(time)[:, None].chunk(2, -1)
        return self.video(self.layout.to_raster(self.head(modulate(x, shift, scale)), dim=1)).to(video.dtype)

    def patches(self, video):
        """(batch, frames, 3, side, side) -> (batch, tokens, numbers of a patch)."""
        video = video.unflatten(4, (-1, self.sizes.patch)).unflatten(3, (-1, self.sizes.patch))
        return video.permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(1, 3)

    def video(self, patches):
        """The reverse of ``patches``."""
        patches = patches.unflatten(1, self.layout.grid).unflatten(4, (3, self.sizes.patch, self.sizes.patch))
        return patches.permute(0, 1, 4, 2, 5, 3, 6).flatten(5).flatten(3, 4)


def embed_time(time):
    """(batch,) in 0 .. 1 -> (batch, 256)."""
    angle = 1000 * time[:, None] * 10_000 ** -(torch.arange(128, device=time.device) / 128)
    return torch.cat([angle.cos(), angle.sin()], 1)
