"""Back ends compute attention under a mask, forward and backward, behind one interface.

A back end is a module of this folder with five functions:

    supports(call) -> str | None          why it cannot run this call, or None if it can
    why_unavailable() -> str | None       why it cannot run anything on this machine, or None
    forward(call) -> (out, lse)
    backward(call, dout, dlse, out, lse) -> (dq, dk, dv)
    decode(q, k, v, mask, kv_lens, block_table, causal, scale, k_scale, v_scale, kv_starts) -> (out, lse)

call: a ``core.call.AttentionCall`` whose table is a BlockMask, or None for dense attention. kv_heads divides heads; v may have
another head_dim. out: (batch, heads, q_len, v's head_dim), in q's memory order (``empty_out``). lse: (batch, heads, q_len) float32
(float64 for float64 inputs), natural logarithm, without dropout, -inf for queries that keep nothing, whose out is 0. dlse: like
lse, or None if nothing depends on lse. If variant.rel_bias is learned, its gradient is a fourth result. If sinks are learned,
the last result is (batch, heads, n), terms whose sum over the batch and n is their gradient. Arguments are checked before a back
end gets them. ``supports`` takes a ``Call``, which describes a call without its tensors.

decode: the queries are the last of each sequence; mask is square and covers the cache's capacity. kv_lens: (batch,) int32, the
number of existing keys of each sequence, or None for all. block_table: (batch, pages of a sequence) int32 into k and v of shape
(pages, kv_heads, page_size, head_dim), or None. causal: without a mask, no query sees a later key. k_scale, v_scale: factors of
e4m3 k and v, otherwise None; float32 of k's shape without head_dim, with equal strides: over tokens 1, or 0 if all tokens of a head
and page or batch entry share a scale. kv_starts: (batch,) int32 or None. ``attention_decode`` in ``api/decode.py`` documents the
rest.

A back end that supports ``EIGHT_BITS``, which excludes all other features, has a sixth:

    forward_in_eight_bits(call) -> (out, lse)                 see ``core.eight_bits``
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from .description import Call

# Fastest first: ``auto`` takes the first that supports the call. ``reference`` builds the whole attention matrix, so it only runs
# on request.
AUTOMATIC = ("hopper", "triton", "torch")
NAMES = (*AUTOMATIC, "reference")
_MODULES = {name: import_module(f"{__package__}.{name}") for name in NAMES}


def get_backend(name: str) -> ModuleType:
    """The back end's module. Raises ValueError for an unknown name."""
    if name not in NAMES:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(map(repr, NAMES))}; got {name!r}")
    return _MODULES[name]


def check_name(name: str) -> None:
    """Raises ValueError unless this is "auto" or the name of a back end."""
    if name != "auto":
        get_backend(name)


_REFERENCE_CAN = "backend='reference' can, slowly and with the whole matrix in memory"


def choose_backend(name: str, call: Call, supports: Callable[[str, Call], str | None] | None = None) -> str:
    """The back end to run: ``name``, or for "auto" the fastest that supports the call. Raises ValueError with the reasons if none
    does. supports: (name, call) -> the refusal or None; by default the back ends' functions."""
    refusal = supports or _refusal
    if name != "auto":
        get_backend(name)
        reason = refusal(name, call)
        if reason:
            way_out = "no other back end can either, so leave that out"
            if any(refusal(other, call) is None for other in AUTOMATIC):
                way_out = "pass backend='auto' to take one that can"
            elif refusal("reference", call) is None:
                way_out = _REFERENCE_CAN
            raise ValueError(f"backend {name!r} cannot run this call: {reason}; {way_out}")
        return name
    reasons = {}
    for candidate in AUTOMATIC:
        reasons[candidate] = refusal(candidate, call)
        if reasons[candidate] is None and candidate == "triton" and call.device.type != "cuda":
            # Its interpreter is thousands of times slower: for tests, which ask for it by name.
            reasons[candidate] = "it runs on a GPU"
        if reasons[candidate] is None:
            return candidate
    listed = "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items())
    hint = "" if refusal("reference", call) else f"; {_REFERENCE_CAN}"
    raise ValueError(f"no back end can run this call ({listed}){hint}")


def _refusal(name: str, call: Call) -> str | None:
    return get_backend(name).supports(call)
