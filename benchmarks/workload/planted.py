"""Queries and keys whose attention looks like a pretrained model's: heads differ in what they attend to, and in how sharply."""

from __future__ import annotations

import torch

_STRONGEST = 14.0  # what a feature adds to a logit, at most; log(131,072) is 11.8
_BESIDE = 0.5  # standard deviation of what is random
_BAND = 128  # tokens
_COLUMNS, _OF_COLUMN = 8, 0.7  # how many of a key head, and how strong they are beside the first key
_TOPICS, _SEGMENT = 32, 256  # tokens of a segment


def planted(
    tokens: int, heads: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, (1, heads, tokens, head_dim), and k and v, (1, kv_heads, tokens, head_dim); v is random.

    Each key head has a sink, its first key, and a few weaker columns anywhere. Each segment of it has one topic of a few, drawn at
    random, and a query attends to the segments of its own topic: scattered blocks. A query also attends to a band around its own
    position, and to a slash, a band at a distance of its head. How strongly a query head attends to each of the four is uniform
    from 0 to ``_STRONGEST``, so heads need unequal numbers of blocks. head_dim is at least 8, and a multiple of 4.
    """
    generator, pairs = torch.Generator(device).manual_seed(0), head_dim // 4
    group, segments = heads // kv_heads, -(-tokens // _SEGMENT)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator, device=device)

    position = torch.arange(tokens, device=device)
    frequency = normal(pairs) / _BAND
    topics = torch.nn.functional.normalize(normal(_TOPICS, head_dim - 2 * pairs - 1), dim=1)

    def at(where: torch.Tensor) -> torch.Tensor:
        """Vectors of length 1, alike for positions within a band."""
        angle = where[:, None] * frequency
        return torch.cat([angle.cos(), angle.sin()], 1) * pairs**-0.5

    def made(*features: torch.Tensor) -> torch.Tensor:
        # Scaled so that of features of 1 in a query and in its key, a logit gets _STRONGEST.
        return (_BESIDE * normal(tokens, head_dim) + (_STRONGEST**2 * head_dim) ** 0.25 * torch.cat(features, 1)).to(dtype)

    queries, keys = [], []
    for _ in range(kv_heads):
        column = torch.zeros(tokens, 1, device=device)
        column[(uniform(_COLUMNS) * tokens).long()] = _OF_COLUMN
        column[0] = 1
        topic = topics[(uniform(segments) * _TOPICS).long()].repeat_interleave(_SEGMENT, 0)[:tokens]
        keys.append(made(column, topic, at(position)))
        for sink, same, band, slash, distance in uniform(group, 5):
            places = band * at(position) + slash * at(position - distance * tokens / 4)
            queries.append(made(sink.expand(tokens, 1), same * topic, places))
    return torch.stack(queries)[None], torch.stack(keys)[None], normal(1, kv_heads, tokens, head_dim).to(dtype)
