"""``attention``: checks arguments, chooses a back end, computes."""

from typing import Any

import torch

from ..core import operators
from ..core.definition import with_sinks
from ..core.variant import ScoreFunction
from ..masks.block_mask import BlockMask
from ..masks.pattern import Pattern
from ..selection.block_selection import BlockSelection
from ..selection.operators import attend_to_picks, block_lse
from .call import build_call, observe
from .keywords import advises


@advises
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask | BlockSelection | Pattern | str | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    kv_lens: torch.Tensor | None = None,
    q_lens: torch.Tensor | None = None,
    kv_starts: torch.Tensor | None = None,
    q_starts: torch.Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    rel_bias: torch.Tensor | None = None,
    score_mod: ScoreFunction | None = None,
    score_params: tuple[torch.Tensor, ...] = (),
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    return_block_lse: bool = False,
    deterministic: bool | None = None,
    precision: str | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Computes softmax(scale * q k^T) v over the pairs that the mask keeps, at a cost proportional to the kept blocks. Lengths,
    score modifications, sinks and dropout are optional.

    q: (batch, heads, q_len, head_dim). k: (batch, kv_heads, kv_len, head_dim); kv_heads divides heads (grouped-query attention).
    v: (batch, kv_heads, kv_len, v_head_dim); v_head_dim may differ from head_dim. All share one dtype and device. Any strides; a
    contiguous last dimension avoids a copy.
    mask: a BlockMask; a Pattern or its spec text, compiled and cached for these lengths; a FlexAttention BlockMask, read on first
    use and when data that its function reads change; None for dense attention; or a BlockSelection, blocks of keys that each query
    picked. (Within torch.compile: spec text, and Patterns and BlockMasks created outside the compiled function. Patterns with text
    may also be created inside, except by ``~``, and recompile for each value of their numbers. PyTorch before 2.13 accepts no
    Pattern there. One graph serves all lengths under spec text or a pattern with text, choosers included. A pattern without text
    recompiles for each length, a BlockMask for each pair of lengths.)
    scale: positive; 1 / sqrt(head_dim) by default.

    Which tokens exist (padded batches); each is (batch,) int32 or int64 on q's device, read without host synchronization:
    kv_lens, q_lens: tokens at or past these positions do not exist. kv_starts, q_starts: tokens before these positions do not
    exist. A query that does not exist has out 0, lse -inf and no gradient. Blocks without existing tokens are skipped. Positions
    stay as in the padded lengths, so ``last_tokens`` with q_lens or kv_lens raises ValueError. A length past the tokens means all
    tokens, a negative start 0. A negative length or a start past the tokens raises ValueError on a CPU; on a GPU, where values are
    not read, no token exists.

    Score modifications, applied in this order after scale; query i has position i + kv_len - q_len, key j position j:
    softcap: positive; score becomes softcap * tanh(score / softcap).
    alibi_slopes: (heads,) or (batch, heads): adds -slope * |q_pos - k_pos|. (arXiv:2108.12409.)
    rel_bias: (heads, 2 * max_distance + 1): adds rel_bias[head, d + max_distance], where d is k_pos - q_pos clamped to
    -max_distance .. max_distance. Differentiable. (arXiv:1910.10683.)
    score_mod, score_params: a ``ScoreFunction`` and the tensors that it reads, which get no gradient.
    sinks: (heads,), a logit per head that is added to each query's softmax and takes a share of its weight; lse includes it; -inf
    is no sink. Differentiable. (arXiv:2309.17453; logits as in gpt-oss.)

    dropout_p: the share of softmax weights set to 0; the others are divided by 1 - dropout_p. lse does not change. In [0, 1),
    rounded to a multiple of 2^-16: 2^-17 or less is no dropout, the maximum is 1 - 2^-16. Seeded by PyTorch's generator:
    torch.manual_seed repeats it, and activation checkpointing and CUDA graph replay work. The same seed drops the same pairs on
    every back end. (arXiv:2205.14135, Alg. 2 and 5.)

    return_lse: also return lse, (batch, heads, q_len) float32 (float64 for float64 inputs): the natural logarithm of each query's
    softmax sum.
    return_block_lse: of a BlockSelection, also return last, for each block that a query picked, the lse of the query's scores in
    it: (batch, heads, q_len, picks) in lse's dtype, in the order of its picks, -inf where there is no pick. Differentiable.
    exp(block_lse - lse) is the block's share of the weights.
    deterministic: bitwise repeatable gradients; None follows torch.are_deterministic_algorithms_enabled().
    precision: "fp8" computes in e4m3, on Hopper GPUs: forward only, float16 or bfloat16 inputs, head_dim up to 128, sinks but no
    other change of scores, lengths or dropout. docs/guides/lower-precision.md has what it gains and loses. q and k are rotated over
    head_dim. With a scale each, q is rounded in blocks of 64 tokens; k, less its mean over a head's tokens, and v by head. Softmax
    weights are rounded with a fixed scale, and sums are float32. backend="reference" runs this definition on any device.
    (arXiv:2407.08608, Sec. 3.3; arXiv:2411.10958.)
    backend: "auto", "hopper", "triton", "torch" or "reference". A named back end runs or raises; "auto" picks the fastest that
    supports the call, and never turns a sparse mask into a dense one.

    With a BlockSelection, scale, sinks, return_lse, return_block_lse, deterministic and backend apply; other changes raise
    ValueError.

    Returns out, (batch, heads, q_len, v_head_dim) in q's dtype and memory order, or (out, lse). Both are differentiable in q, k, v,
    rel_bias and sinks, once and in reverse mode. torch.func's transforms, forward mode and batched gradients raise
    NotImplementedError. A query that keeps nothing has out 0, lse -inf and no gradient. Tensors may be empty, except in head_dim.
    Raises ValueError for arguments that do not fit together, TypeError for wrong types.
    Under autocast, q, k and v are cast as for scaled_dot_product_attention.

    Source: arXiv:2205.14135 (Alg. 5), arXiv:2307.08691.
    """
    variant_arguments: dict[str, Any] = {}
    plain_tensors = kv_lens is q_lens is kv_starts is q_starts is alibi_slopes is rel_bias is sinks is None
    if not (plain_tensors and softcap is None and score_mod is None):
        # fmt: off
        of_variant = (
            ("kv_lens", kv_lens), ("q_lens", q_lens), ("kv_starts", kv_starts), ("q_starts", q_starts), ("softcap", softcap),
            ("alibi_slopes", alibi_slopes), ("rel_bias", rel_bias), ("score_mod", score_mod), ("sinks", sinks),
        )
        # fmt: on
        variant_arguments = {name: value for name, value in of_variant if value is not None}
    if not (isinstance(dropout_p, float) and dropout_p == 0.0):
        variant_arguments["dropout_p"] = dropout_p
    if not isinstance(score_params, tuple) or len(score_params) > 0:  # Dynamo traces no "not" of a tuple
        variant_arguments["score_params"] = score_params
    call = build_call(q, k, v, mask, scale, deterministic, backend, precision, variant_arguments)
    observe(call.mask, q, k)
    if not isinstance(call.mask, BlockSelection):
        if return_block_lse:
            raise ValueError(f"return_block_lse needs a BlockSelection as mask; got {type(mask).__name__}; leave it out")
        results = operators.attend(call)
        return results if return_lse else results[0]
    out, lse = attend_to_picks(call.q, call.k, call.v, call.mask, call.scale, call.backend)
    if call.variant is not None and call.variant.sinks is not None:
        out, lse = with_sinks(out, lse, call.variant.sinks, None)
    found = [out, lse] if return_lse else [out]
    if return_block_lse:
        found.append(block_lse(call.q, call.k, call.mask, call.scale, call.backend))
    return tuple(found) if len(found) > 1 else out
