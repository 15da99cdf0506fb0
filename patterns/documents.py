"""documents: packed sequences; a token sees the tokens of its own document.

use: packed training batches: several documents, prompts or images of different lengths on one axis
formula: any(start <= q < stop and start <= kv < stop for start, stop in pairwise(cu_seqlens))
source: cu_seqlens of the variable-length call of FlashAttention (arXiv:2205.14135); arXiv:2107.02027
specimen: documents((0, 900, 2600, 4096))

    ##..
    ##..        documents([0, 2, 3, 4])
    ..#.
    ...#
"""

from dataclasses import dataclass

import numpy as np

from ..masks.fields import Natural, set_fields
from ..masks.registry import register_pattern
from ..masks.rules import RunPattern


@register_pattern("documents")
@dataclass(frozen=True)
class Documents(RunPattern):
    """Tokens of one document.

    cu_seqlens: tokens; the start of each document and the end of the last one: (documents + 1,) integers in a tuple, list, array or
    tensor, from 0 upwards. Empty ones are dropped. They must hold all tokens of the sequence; ``shifted`` places documents that
    are surrounded by other tokens. For lengths that change between calls, ``attention_varlen`` reads them from a tensor.
    """

    cu_seqlens: tuple[Natural, ...]

    def __post_init__(self):
        super().__post_init__()
        bounds = self.cu_seqlens
        ascends = all(bounds[k - 1] <= bounds[k] for k in range(1, len(bounds)))
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] == 0 or not ascends:
            raise ValueError(
                "documents: cu_seqlens must start with 0, not decrease, and end with the number of tokens, at least 1; got "
                f"{bounds[:9]}; for lengths take (0, *itertools.accumulate(lengths))"
            )
        set_fields(self, cu_seqlens=tuple(dict.fromkeys(bounds)))

    def named_tokens(self):
        return (self.cu_seqlens[-1],) * 2

    def row_runs(self, q):
        bounds = np.array([0, *self.cu_seqlens, self.cu_seqlens[-1]])  # with empty runs for tokens before and after all documents
        document = np.searchsorted(bounds[1:-1], q, side="right")[..., None]
        return bounds[document], bounds[document + 1]
