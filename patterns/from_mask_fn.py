"""from_mask_fn: a function of your own.

use: a quick trial of a rule of your own; a class of your own lasts longer
formula: fn(q, kv)
specimen: from_mask_fn(lambda q, kv: (q // 512 + kv // 256) % 4 == 0)

    #.#.
    .#.#        from_mask_fn(lambda q, kv: (q + kv) % 2 == 0)
    #.#.
    .#.#
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..masks.pattern import Pattern
from ..masks.registry import register_pattern


@register_pattern("from_mask_fn")
@dataclass(frozen=True)
class FromMaskFn(Pattern):
    """Pairs for which a function is true.

    fn: called with query positions and key positions in tokens, two int64 NumPy arrays that broadcast against each other; with
    tensors instead if it reads a tensor or names ``torch``. Returns booleans of their broadcast shape. It may read tensors on any
    device, arrays, numbers and texts: a call after one changed compiles anew. (Not seen are changes of attributes of attributes,
    through a tensor's ``.data`` or an array that shares its memory, and in place of a tensor of inference mode on a GPU. Code that
    torch.compile compiled keeps what it read.) ``attention_varlen`` and ``attention_decode`` pass positions beyond the sequence, as
    they round lengths up.

    Compiling evaluates every pair; ``&`` with a pattern whose blocks are known, such as ``local(1024)``, leaves only those to
    evaluate. Equal if the function is the same object. It has no spec text; a class of your own with @register_pattern has.
    """

    fn: Callable

    def __post_init__(self):
        from ..compat.captured import check_parameters  # patterns are listed without PyTorch

        if not callable(self.fn):
            raise TypeError(f"from_mask_fn: fn must be a function of (q, kv) index arrays; got {type(self.fn).__name__}")
        way_out = "FlexAttention's create_block_mask takes one of (b, h, q, kv), and attention what that returns"
        check_parameters(self.fn, "from_mask_fn", ("q", "kv"), way_out)

    def __hash__(self):
        from ..compat.captured import state_of

        return hash((self.fn, state_of(self.fn)))  # tables are looked up by it: of data that changed, there are none yet

    def __repr__(self):
        return f"from_mask_fn({getattr(self.fn, '__name__', self.fn)})"

    def token_rule(self, q, kv):
        from ..compat.positions import call_with_positions

        return call_with_positions(self.fn, q, kv)

    def to_spec(self):
        raise ValueError(f"{self!r} has no spec text, as a function has none; write a Pattern class with @register_pattern")
