"""Text from a checkpoint: the prompt in one pass, then token by token through ``sf.attention_decode``."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import sparse_flash as sf

from .model import Decoder
from .settings import SDPA


class Cache:
    """Keys and values of a sequence for all layers, in memory taken at once: (layers, 1, kv_heads, capacity, head_dim) each."""

    def __init__(self, model: Decoder, capacity: int):
        shape, weight = model.shape, model.head.weight
        room = (shape.layers, 1, shape.kv_heads, capacity, shape.head_dim)
        self.keys, self.values = (torch.zeros(room, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self.tokens = 0


@torch.no_grad()
def step(model: Decoder, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Appends tokens, (1, count), to the cache; returns the logits of the last, (vocabulary,)."""
    first, count = cache.tokens, tokens.shape[1]
    stop = first + count
    if stop > cache.keys.shape[3]:
        raise ValueError(f"the cache has room for {cache.keys.shape[3]} tokens and holds {first}; {count} more do not fit")
    positions = model.positions(stop, tokens.device).since(first)
    lengths = torch.tensor([stop], dtype=torch.int32, device=tokens.device)
    x = model.embed(tokens)
    for layer, block in enumerate(model.blocks):
        attention = block.attention
        q, k, v = attention.qkv(block.attention_norm(x), positions)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        keys, values = cache.keys[layer], cache.values[layer]
        keys[:, :, first:stop], values[:, :, first:stop] = k, v
        mask = "causal" if attention.mask == SDPA else attention.mask
        if attention.choice is not None:
            keys, values = keys[:, :, :stop], values[:, :, :stop]
            out = sf.attention(q, keys, values, attention.choice(q, keys))
        elif count <= 64:
            out = sf.attention_decode(q, keys, values, mask, kv_lens=lengths)
        else:
            out = sf.attention(q, keys[:, :, :stop], values[:, :, :stop], mask)
        x = x + attention.out_proj(out.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.mlp_norm(x))
    cache.tokens = stop
    return model.head(model.norm(x[0, -1]))


def generate(model: Decoder, prompt: list[int], count: int, temperature: float = 0.0, seed: int = 0) -> Iterator[int]:
    """Up to ``count`` tokens after the prompt. temperature: 0 takes the likeliest."""
    if not prompt:
        raise ValueError("the prompt has no tokens; pass some text")
    device = model.head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    cache = Cache(model, len(prompt) + count)
    logits = step(model, torch.tensor([prompt], device=device), cache)
    for _ in range(count):
        if temperature > 0:
            token = torch.multinomial(F.softmax(logits.float() / temperature, -1), 1, generator=generator).item()
        else:
            token = logits.argmax().item()
        yield token
        logits = step(model, torch.tensor([[token]], device=device), cache)
