"""Queries and keys whose attention looks like a pretrained model's: heads differ in what they attend to, and in how sharply."""

import torch

from .cases import Shape

_STRONGEST = 14.0  # what a feature adds to a logit, at most; log(131,072) is 11.8
_BESIDE = 0.5  # standard deviation of what is random
_BAND = 128  # tokens
_COLUMNS, _OF_COLUMN = 8, 0.7  # how many of a key head, and how strong they are beside the first key
_TOPICS, _SEGMENT = 32, 256  # tokens of a segment


def draw_planted(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """q, (1, heads, tokens, head_dim), and k, (1, kv_heads, tokens, head_dim).

    Each query attends to four features. Columns: the first key, a sink, and a few weaker keys that each key head draws. Scattered
    blocks: each segment of keys has one of a few topics, and each segment of queries asks for one. A band: keys near the query. A
    slash: a band at a distance that each query head draws.

    Query heads are sharp or diffuse. The most that a feature adds to a head's logits is uniform between a third of ``_STRONGEST``
    and all of it, and each feature has 0.7 to 1 of that. So heads need unequal numbers of blocks. head_dim is at least 8.
    """
    tokens, head_dim, kv_heads = shape.tokens, shape.head_dim, shape.kv_heads or shape.heads
    generator, pairs = torch.Generator(device).manual_seed(0), head_dim // 4
    group, segments = shape.heads // kv_heads, -(-tokens // _SEGMENT)

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

    def topics_of_segments() -> torch.Tensor:
        return topics[(uniform(segments) * _TOPICS).long()].repeat_interleave(_SEGMENT, 0)[:tokens]

    def made(*features: torch.Tensor) -> torch.Tensor:
        # Scaled so that of features of 1 in a query and in its key, a logit gets _STRONGEST.
        return (_BESIDE * normal(tokens, head_dim) + (_STRONGEST**2 * head_dim) ** 0.25 * torch.cat(features, 1)).to(dtype)

    queries, keys = [], []
    for _ in range(kv_heads):
        column = torch.zeros(tokens, 1, device=device)
        column[(uniform(_COLUMNS) * tokens).long()] = _OF_COLUMN
        column[0] = 1
        keys.append(made(column, topics_of_segments(), at(position)))
        for sharp, distance, *others in uniform(group, 6):
            sink, scattered, band, slash = ((1 + 2 * sharp) / 3 * (0.7 + 0.3 * other) for other in others)
            places = band * at(position) + slash * at(position - distance * tokens / 4)
            queries.append(made(sink.expand(tokens, 1), scattered * topics_of_segments(), places))
    return torch.stack(queries)[None], torch.stack(keys)[None]
