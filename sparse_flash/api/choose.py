"""choose_blocks: the mask of an expression with choosers for given queries and keys."""

from typing import Any

import torch

from ..choosers.choose import chosen_mask
from ..choosers.report import report_of
from ..core.arguments import cast_for_autocast, check_tensors, check_types, resolve_scale, stand_in_for_empty_batch
from ..core.variant import build_variant
from ..masks.cache import to_traceable
from ..masks.chooser import has_choosers
from ..masks.fit import check_known_end
from ..masks.pattern import Pattern


def choose_blocks(
    spec: Pattern | str,
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float | None = None,
    kv_lens: torch.Tensor | None = None,
    q_lens: torch.Tensor | None = None,
    kv_starts: torch.Tensor | None = None,
    q_starts: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    report: bool = False,
    v: torch.Tensor | None = None,
) -> Any:  # a BlockMask, or (BlockMask, ChoiceReport)
    """Makes the mask that an expression with choosers keeps for these queries and keys, head by head.

        mask = sf.choose_blocks("causal & (sampled(8, floor=0.01) | sinks(64) | local(256))", q, k)
        out = sf.attention(q, k, v, mask)

    spec: ``within & (chooser | always)``, a Pattern or its spec text. There may be several choosers and ``always``, joined by
    ``|``; each chooser adds the blocks that it keeps. Only pairs of ``within`` are kept. Blocks in which ``always`` keeps a pair,
    and the blocks at the positions of a row's queries, are always kept. Or ``per_head([...])`` of such expressions with one
    ``within``, in which an expression without chooser keeps its blocks.
    q: (batch, heads, q_len, head_dim). k: (batch, kv_heads, kv_len, head_dim), kv_heads dividing heads. With fewer queries than
    keys, the last query is aligned with the last key.
    scale: of the logits; 1 / sqrt(head_dim) by default.
    kv_lens, q_lens, kv_starts, q_starts: which tokens exist, as for ``attention``; pass the same to both. Nonexistent tokens do not
    influence the choice; blocks without existing tokens are kept only if all blocks are.
    scores: for the chooser ``scored``, (batch, heads, q_blocks, kv_blocks), floating-point.
    report: return (mask, ``ChoiceReport``), which says what the choice loses here compared with attention under ``within``:

        mask, report = sf.choose_blocks(spec, q, k, v=v, report=True)
        print(report)  # density, recall and error: the mean over heads, and the worst head

    v: for the report's error, (batch, kv_heads, kv_len, v_head_dim).

    Scores are softmax weights, over the keys up to each query if ``within`` says causal, otherwise over all keys. Other patterns of
    ``within``, such as documents, do not limit these keys. Under causal, no token after a block of queries changes what the block
    keeps.

    q and k should be finite, as a choice hides NaN. If queries of a row see a NaN key, the row keeps only what is always kept on
    CPUs, and perhaps other blocks on GPUs. So attention under the choice may be finite although attention under only ``within`` has
    NaN.

    Returns a BlockMask of (batch, heads) on q's device, in blocks of the choosers' ``block``. Attention under it is differentiable,
    the choice is not. No host synchronization. On a GPU, scores stream through kernels: memory grows with queries x keys only by a
    bit for each block and head. Before a CUDA graph is captured, patterns must have been compiled for these lengths. Within
    torch.compile, this call recompiles for each length, while ``attention`` under the expression does not. A report multiplies 251
    queries with all keys, and evaluates ``within`` on the host, so only outside of graphs.

    Raises ValueError for expressions and arguments that do not fit together, TypeError for wrong types.
    """
    if not isinstance(spec, (Pattern, str)):
        way_out = "; use per_head for an expression of each head" * isinstance(spec, (list, tuple))
        raise TypeError(f"spec must be an expression with choosers, a Pattern or its text; got {type(spec).__name__}{way_out}")
    spec = to_traceable(spec) if torch.compiler.is_compiling() else spec
    if not has_choosers(spec):
        raise ValueError(f"spec must have a chooser, such as sampled(8, floor=0.01); got {spec}; compile_mask takes patterns")
    if v is not None and not report:
        raise ValueError("v is read only by the report, and report is False; pass report=True, or leave v out")
    check_types(q, k, k if v is None else v)
    q, k, value = cast_for_autocast(q, k, k if v is None else v)
    if report and q.shape[:1] == (0,):
        raise ValueError("q must have a sequence to report on; got a batch of 0; leave report out")
    given: dict[str, Any] = {"kv_lens": kv_lens, "q_lens": q_lens, "kv_starts": kv_starts, "q_starts": q_starts}
    if report and not all(one is None for one in given.values()):
        raise ValueError("a report must be of whole sequences; got lengths; leave report out, or report on each sequence by itself")
    tensors = stand_in_for_empty_batch(q, k, value if report else k)
    check_tensors(*tensors)
    lengths = build_variant(q, k, **given)
    if q.shape[0] == 0:  # no sequence: a mask of batch 1 fits that, and tables hold one at least
        q, k, lengths = *tensors[:2], None
        scores = scores.new_zeros(1, *scores.shape[1:]) if isinstance(scores, torch.Tensor) else scores
    scale = resolve_scale(scale, q.shape[3])
    if not (kv_lens is q_lens is None):
        check_known_end(spec)
    mask = chosen_mask(spec, q, k, scale, scores, lengths)
    return (mask, report_of(spec, mask, q, k, None if v is None else value, scale)) if report else mask
