"""Indexers of layers whose queries choose blocks of keys (MiniMax-M3). Switched ones return vectors, by which attention chooses on
kernels; the model's code would hold a score of each query and key."""

import inspect
from functools import partial

import torch
from torch import nn
from torch.nn.functional import pad

from ...api.topk import topk_blocks
from ...decoding.arguments import MAX_QUERIES


def switch_indexer(indexer: nn.Module | None, name: str) -> None:
    """Makes an indexer of blocks return its queries and keys while the model's attention has this name."""
    # ``topk_blocks`` also keeps the query's block, which is one local block.
    if indexer is not None and hasattr(indexer, "build_block_mask") and indexer.local_blocks == 1:
        indexer.forward = partial(_read_vectors, indexer, name)


@torch.no_grad()
def _read_vectors(indexer, name, x, embeddings, cache, position_ids):
    forward = type(indexer).forward
    of_step = torch.compiler.is_compiling() and x.shape[1] <= MAX_QUERIES  # a graph does not know how many keys a static cache has
    if of_step or indexer.config._attn_implementation != name:
        return forward(indexer, x, embeddings, cache, position_ids)
    q, k = (project(x).unflatten(2, (-1, indexer.head_dim)) for project in (indexer.q_proj, indexer.k_proj))
    q, k = indexer.q_norm(q).transpose(1, 2), indexer.k_norm(k).transpose(1, 2)
    rotate = inspect.unwrap(forward).__globals__["apply_rotary_pos_emb"]
    q, k = rotate(q, k, *(one[..., : indexer.head_dim] for one in embeddings))
    return q, k if cache is None else cache.layers[indexer.layer_idx].update_index(k)


def choose_blocks(indexer, q: torch.Tensor, k: torch.Tensor, runs: list[tuple[int, ...]] | None) -> torch.Tensor:
    """Returns the blocks in which a key has the largest products with each query, (batch, heads, tokens, n); of runs, see
    ``_attend_runs``, blocks of positions. q: (batch, heads, tokens, head_dim). k: (batch, 1, keys, head_dim)."""
    choose = partial(topk_blocks, keep=indexer.topk_blocks, every=1, block_size=indexer.block_size, score="max")
    if runs is None:
        return choose(q, k).picks
    picks = q.new_full((*q.shape[:3], indexer.topk_blocks), -1, dtype=torch.int32)
    for row, low, high, start, stop, first in runs:
        from_position_0 = pad(k[row, None, :, :stop], (0, 0, first - start, 0))
        some = choose(q[row, None, :, low:high], from_position_0).picks[0]
        picks[row, :, low:high, : some.shape[2]] = some
    return picks
