"""The call of XAttention, computed here: a program that uses it changes one import.

    from sparse_flash.integrations.xattn import Xattention_prefill

Argument names, their order and defaults are as in ``xattn.src.Xattention``. The call is ``attention`` under
``causal & (antidiagonal(stride, mass=threshold) | sinks(block_size))``: each block of queries keeps the blocks of keys that have
the share ``threshold`` of its scores, the first block of keys, and its own.

Differences: the call has gradients in q, k and v, though not through the choice, and takes the batches, lengths, head_dims, dtypes
and devices of ``attention``. ``kv_heads`` may divide ``heads``. The first block and a row's own blocks come beside the blocks that
have the mass. That package counts these two first, and so keeps as many blocks or fewer. Only in the first chunk of queries it
counts the own block alone, and keeps one block more than the mass needs. Without ``causal`` a row's own blocks are kept too.
``keep_sink`` keeps the first block of keys; that package fills the first row of its map instead, the first block of queries.

Source: https://github.com/mit-han-lab/x-attention, commit e37988770b9d1bebd489eba011d615f35587ba08: Xattention.py and utils.py in
xattn/src, for the meaning of arguments alone, as the repository names no licence of its own. arXiv:2503.16428.
Its PyTorch path ran in float32 on a CPU, with chunks of 2,048, lengths up to 5,001, strides of 4, 8 and 16, and blocks of 64 and
128. Causal scores equal ``antidiagonal`` to 1.8e-7, and the maps follow from the scores by the rule above. Padding makes others:
without ``causal``, padding takes part in its softmax; a length of several whole chunks loses all chunks but the row's own; and if
queries are fewer than keys by less than a chunk, it aligns both at the start.
"""

from __future__ import annotations

import torch

from ..api.arguments import check_types
from ..api.attention import attention
from ..api.choose import choose_blocks
from ..masks.chooser import Antidiagonal
from ..masks.pattern import Pattern, PerHead
from ..patterns import causal as causal_pattern
from ..patterns import sinks


def Xattention_prefill(
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    stride: int,
    norm: float = 1,
    threshold: float | torch.Tensor = 0.8,
    block_size: int = 128,
    use_triton: bool = True,
    causal: bool = True,
    kdb: int = 1,
    chunk_size: int | None = None,
    keep_sink: bool = False,
    keep_recent: bool = False,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Returns attention over the blocks of keys that antidiagonal sums choose, (batch, heads, q_len, head_dim). Differentiable.

    query_states: (batch, heads, q_len, head_dim). key_states, value_states: (batch, kv_heads, kv_len, head_dim). The last query is
    aligned with the last key.
    stride: tokens of a side of the squares whose antidiagonals are summed; it divides 64.
    norm: divides the logits by which blocks are chosen; attention does not see it.
    threshold: the share of a row's scores that its blocks have together, or a tensor with one for each head, (heads,), which is
    read on the host. Each distinct share is a choice of its own.
    block_size: 64 or 128. causal: each query sees the keys up to its position, and the first block of keys is kept.
    kdb: must be 1, as the choice reads all queries.
    keep_sink: keeps the first block of keys without ``causal`` too. keep_recent: has no effect, as a row's own blocks are kept.
    use_triton, chunk_size: have no effect. backend: as in ``attention``.

    Raises ValueError or TypeError for arguments that do not fit together, and whenever ``attention`` does.
    """
    check_types(query_states, key_states, value_states)
    if query_states.dim() != 4:
        raise ValueError(f"query_states must have shape (batch, heads, q_len, head_dim); got {tuple(query_states.shape)}")
    if kdb != 1:
        raise ValueError(f"kdb must be 1, as the choice reads all queries; got {kdb}; raise stride for a cheaper choice")
    if not norm > 0:
        raise ValueError(f"norm must be above 0; got {norm}")
    shares = [threshold]
    if isinstance(threshold, torch.Tensor) and threshold.dim():
        if threshold.shape != query_states.shape[1:2]:
            raise ValueError(
                f"threshold must be a number, or a tensor of one for each of the {query_states.shape[1]} heads; got shape "
                f"{tuple(threshold.shape)}"
            )
        shares = threshold.tolist()
    choices = [_build_pattern(stride, float(share), block_size, causal, causal or keep_sink) for share in shares]
    spec = choices[0] if len(set(choices)) == 1 else PerHead(tuple(choices))
    mask = choose_blocks(spec, query_states, key_states, scale=query_states.shape[3] ** -0.5 / norm)
    return attention(query_states, key_states, value_states, mask, backend=backend)  # type: ignore[return-value]  # a tuple with return_lse


def _build_pattern(stride: int, share: float, block: int, causal: bool, sink: bool) -> Pattern:
    """The expression of a head."""
    chooser: Pattern = Antidiagonal(stride, mass=share, block=block)
    chosen = chooser | sinks(block) if sink else chooser
    return causal_pattern() & chosen if causal else chosen
