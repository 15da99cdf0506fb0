"""choose_blocks: the mask that an expression with choosers keeps of given queries and keys."""

from __future__ import annotations

import torch

from ..choosers.choose import chosen_mask
from ..masks.block_mask import BlockMask
from ..masks.cache import traceable
from ..masks.chooser import is_chosen
from ..masks.pattern import Pattern
from .arguments import autocast, check_tensors, check_types, checked_scale


def choose_blocks(
    spec: Pattern | str,
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float | None = None,
    scores: torch.Tensor | None = None,
) -> BlockMask:
    """The mask that an expression with choosers keeps for these queries and keys, head by head.

        mask = sf.choose_blocks("causal & (sampled(8, floor=0.01) | sinks(64) | local(256))", q, k)
        out = sf.attention(q, k, v, mask)

    spec: ``within & (chooser | always)``, a Pattern or its spec text. Choosers and ``always`` may be several, joined by ``|``; each
    chooser adds the blocks that it keeps. Only pairs of ``within`` are kept; in the blocks that ``always`` has a part in, all of
    these. A row's own blocks, those in which the positions of its queries fall, are kept in any case. Or ``per_head([...])`` of
    such expressions with one ``within``, where a pattern alone keeps its blocks.
    q: (batch, heads, q_len, head_dim). k: (batch, kv_heads, kv_len, head_dim), kv_heads dividing heads. With fewer queries than
    keys, the last query is aligned with the last key.
    scale: of the logits; 1 / sqrt(head_dim) by default.
    scores: for the chooser ``scored``, (batch, heads, q_blocks, kv_blocks), floating-point.

    Scores are softmax weights over the keys up to each query if ``within`` says causal, and over all keys otherwise. Under causal,
    no key and no query after a block of queries changes what the block keeps, except for ``last_queries``.

    Returns a BlockMask of (batch, heads) on q's device, in blocks of the choosers' ``block``. The choice is not differentiated;
    attention under it is. No host synchronization. On a GPU, scores stream through kernels: memory does not grow with queries x
    keys, but for a bit a block and head. Patterns must have been compiled for these lengths before a CUDA graph is captured.

    Raises ValueError for expressions and arguments that do not fit together, TypeError for wrong types.
    """
    if not isinstance(spec, (Pattern, str)):
        raise TypeError(f"spec must be an expression with choosers, a Pattern or its text; got {type(spec).__name__}")
    spec = traceable(spec) if torch.compiler.is_compiling() else spec
    if not is_chosen(spec):
        raise ValueError(
            f"spec must have a chooser, such as causal & sampled(8, floor=0.01); got {spec}; compile_mask takes patterns"
        )
    check_types(q, k, k)
    q, k, _ = autocast(q, k, k)
    if q.shape[:1] == k.shape[:1] == (0,):  # no sequence: a mask of batch 1 fits that, and tables hold one at least
        q, k = (x.new_zeros(1, *x.shape[1:]) for x in (q, k))
        scores = None if scores is None else scores.new_zeros(1, *scores.shape[1:])
    check_tensors(q, k, k)
    return chosen_mask(spec, q, k, checked_scale(scale, q.shape[3]), scores)
