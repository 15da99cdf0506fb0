"""An encoder for sequences with one label: the blocks of train_lm, in both directions, with learned positions of each axis."""

import numpy as np
import torch
from torch import nn

import sparse_flash as sf
from examples.train_lm import model as decoder

from .data import Task, task_of
from .settings import DENSE, Settings, Shape

TILE = 8, 16  # rows and columns whose pixels make one block of attention


class Attention(decoder.Attention):
    """Both ways, over the tokens that exist. Takes and returns (batch, tokens, dim)."""

    def attend(self, q, k, v, lengths: torch.Tensor | None):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mask = None if self.mask == DENSE else self.mask
        return sf.attention(q, k, v, mask, q_lens=lengths, kv_lens=lengths).transpose(1, 2)


class Block(decoder.Block):
    """(batch, tokens, dim) -> the same. Instead of packed documents it takes lengths, (batch,) int32."""

    def __init__(self, shape: Shape, attention: str):
        super().__init__(shape, attention, recompute="none")
        self.attention = Attention(shape, attention)


class Classifier(nn.Module):
    """inputs (batch, *task.shape) uint8 -> logits (batch, classes) float32.

    Positions are learned, one table for each axis (rows and columns of an image), and added to the tokens as in arXiv:2011.04006.
    Queries and keys also turn by the distance of their tokens (arXiv:2104.09864), one half of a head by rows and the other by
    columns, in steps of a path, whose length in pixels differs with the size. Grey values are embedded as 256 tokens, which start
    as one direction, longer for brighter ones. The classes read a mean of all tokens for each head, whose weights are learned.
    """

    def __init__(self, settings: Settings):
        super().__init__()
        self.task, self.shape = task_of(settings.task), settings.shape
        dim, heads = self.shape.dim, self.shape.heads
        places, axes = coordinates(self.task), self.task.shape
        self.register_buffer("order", torch.from_numpy(np.ravel_multi_index(tuple(places.T), axes)), persistent=False)
        self.register_buffer("places", torch.from_numpy(places), persistent=False)
        cos, sin = rotary(self.task, places, self.shape.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.embed = nn.Embedding(self.task.vocabulary, dim)
        self.positions = nn.ParameterList([nn.Parameter(torch.empty(extent, dim)) for extent in axes])
        self.blocks = nn.ModuleList([Block(self.shape, settings.attention) for _ in range(self.shape.layers)])
        self.norm = decoder.Norm(dim, eps=1e-6)
        self.pool = nn.Linear(dim, heads)
        self.head = nn.Linear(heads * dim, self.task.classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        decoder.reset_matrices(self, self.shape.layers)
        for parameter in (*self.pool.parameters(), self.head.bias):  # the pool starts as the mean
            nn.init.zeros_(parameter)
        if len(self.task.shape) == 2:
            with torch.no_grad():
                grey = torch.linspace(0, 1, self.task.vocabulary, device=self.embed.weight.device)
                self.embed.weight.copy_(grey[:, None] * self.embed.weight[-1])

    def compile(self) -> None:
        """Compiles each block; equal blocks share their code."""
        for block in self.blocks:
            block.compile(fullgraph=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = inputs.flatten(1)[:, self.order].int()
        exist = None if self.task.padding is None else tokens != self.task.padding
        lengths = None if exist is None else exist.sum(1, dtype=torch.int32)
        x = self.embed(tokens) + sum(table[place] for table, place in zip(self.positions, self.places.T, strict=True))
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for block in self.blocks:
            x = block(x, decoder.Positions(self.cos, self.sin), lengths)
        return self.head(self.pooled(self.norm(x), exist)).float()

    def pooled(self, x: torch.Tensor, exist: torch.Tensor | None) -> torch.Tensor:
        """For each head a mean of all tokens, weighted by their content. (batch, tokens, dim) -> (batch, heads * dim)."""
        scores = self.pool(x).float()
        if exist is not None:
            scores = scores.masked_fill(~exist[..., None], -torch.inf)
        return torch.einsum("bth,btd->bhd", scores.softmax(1).to(x.dtype), x).flatten(1)

    def start_from(self, state: dict[str, torch.Tensor], source: str) -> None:
        """Takes parameters of a model of the same shape. Positions of a smaller model are repeated, gridwise for
        images (arXiv:2205.14135, app. E.3). Raises ValueError where parameters do not fit; source: its name in the message."""
        own, fitting = self.state_dict(), {}
        for name, value in own.items():
            given = state.get(name)
            longer = given is not None and name.startswith("positions.") and len(value) % len(given) == 0
            fitting[name] = given.repeat_interleave(len(value) // len(given), dim=0) if longer else given
            if fitting[name] is None or fitting[name].shape != value.shape:
                there = None if given is None else tuple(given.shape)
                raise ValueError(
                    f"{source} is of another model: {name} is {tuple(value.shape)} here and {there} there; pass the options of its "
                    "model, and a size that is a multiple of its size"
                )
        self.load_state_dict(fitting)


def coordinates(task: Task) -> np.ndarray:
    """(tokens, axes) int64: where each token is, in the order in which attention reads them: of images tile by tile, so a
    block of attention holds pixels near each other."""
    places = np.indices(task.shape).reshape(len(task.shape), -1)
    if len(task.shape) == 2:
        (rows, columns), (height, width) = places, TILE
        places = places[:, np.lexsort((columns, rows, columns // width, rows // height))]
    return places.T.copy()


def rotary(task: Task, places: np.ndarray, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of all tokens' positions: (tokens, 1, head_dim / 2) float32. Each axis turns an equal share of a head."""
    shortest, longest = task.wavelengths
    rates = 2 * np.pi / np.geomspace(shortest, longest, head_dim // 2 // places.shape[1])
    angles = torch.from_numpy((places[:, :, None] / task.unit * rates).reshape(len(places), 1, -1))
    return angles.cos().float(), angles.sin().float()
