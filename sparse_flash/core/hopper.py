"""The back end for Hopper GPUs (H100, H200) and 16-bit types: the fastest there."""

from functools import cache
from types import SimpleNamespace

import torch

from ..compat.constants import constant_in_graphs
from ..kernels.common.layout import is_addressable
from . import triton as triton_backend
from .description import Call, eight_bits_refusal
from .eight_bits import EIGHT_BITS
from .variant import LEARNED, ScoreFunction

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = range(33, 257)  # of q and k, and of v
WIDE_HEAD_DIMS, NARROWER_HEAD_DIMS = range(129, 257), range(65, 129)  # of q and k, and of v, with a backward kernel
MAX_HEAD_DIM_OF_EIGHT_BITS = 128
BLOCK_SIZES = (None, 64, 128, 256)
# A score's error is up to about the cap times 2^-22 (``kernels/hopper/scores``). At this cap it is 2^-14, an eighth of the error
# from rounding a weight to float16.
MAX_SOFTCAP = 256
MAX_ROWS = 2**31 - 1  # of all heads together: TMA coordinates are 32-bit


@constant_in_graphs  # torch.compile cannot trace what asks for GPUs
@cache
def why_unavailable() -> str | None:
    if triton_backend.is_interpreted():
        return "Triton's interpreter does not run Gluon kernels; backend='triton' is what it runs"
    if torch.version.hip is not None:  # ROCm reports 9.0 for some of its chips
        return "it needs an NVIDIA GPU of compute capability 9.0 (H100, H200); this torch is built for AMD's"
    if not any(_is_hopper(torch.device("cuda", index)) for index in range(torch.cuda.device_count())):
        return "it needs a GPU of compute capability 9.0 (H100, H200)"
    return triton_backend.why_unavailable()  # last: without a GPU, it advises the interpreter


def runs_on(device: torch.device) -> bool:
    """Whether kernels for these chips run on a device."""
    return why_unavailable() is None and _is_hopper(device)


@constant_in_graphs
@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@constant_in_graphs  # torch.compile cannot trace the import
def _score_mod_refusal(score_mod: ScoreFunction, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Why the kernels cannot take a score function, or None."""
    from ..kernels.hopper.own_scores import refusal

    return refusal(score_mod, dtypes)


def _term_refusal(call: Call) -> str | None:
    """The refusal of this call's changes of scores, or None."""
    if LEARNED in call.features:
        return "it computes no gradient of rel_bias"
    if call.softcap > MAX_SOFTCAP:
        return f"it runs softcap up to {MAX_SOFTCAP}, as its tanh is less exact near 0; got {call.softcap:g}"
    if call.deterministic and call.score_mod is not None:
        return "it adds up dQ in units that a score_mod's derivative may exceed, and this call is deterministic"
    if call.score_mod is not None and call.score_mod.triton is None:
        return f"it does not support the score_mod {call.score_mod.name}, which has no triton function"
    return None


def has_backward(head_dim: int, v_head_dim: int) -> bool:
    """Whether Hopper's backward kernels take head dimensions that forward kernels take; if not, the portable kernels run."""
    return head_dim == v_head_dim or (head_dim in WIDE_HEAD_DIMS and v_head_dim in NARROWER_HEAD_DIMS)


def shape_refusal(head_dim: int, v_head_dim: int, block_size: int | None) -> str | None:
    """Returns why no kernel takes such shapes, or None. block_size: of the table that kernels iterate over; None if dense."""
    for dim, of_v in ((head_dim, ""), (v_head_dim, " of v")):
        if dim not in HEAD_DIMS:
            return f"it runs head_dim {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}{of_v}; got {dim}"
    if block_size not in BLOCK_SIZES:
        return f"it runs masks of block_size {BLOCK_SIZES[1]} to {BLOCK_SIZES[-1]}; got {block_size}"
    return None


def supports(call: Call) -> str | None:
    eight = EIGHT_BITS in call.features
    reason = (eight_bits_refusal(call) if eight else _term_refusal(call)) or why_unavailable()
    if reason:
        return reason
    if call.device.type != "cuda" or not _is_hopper(call.device):
        return f"it needs a GPU of compute capability 9.0 (H100, H200); q is on {call.device}"
    if call.dtype not in DTYPES:
        return f"it runs float16 and bfloat16; got {call.dtype}"
    if reason := shape_refusal(call.head_dim, call.v_head_dim, call.block_size):
        return reason
    if eight and (widest := max(call.head_dim, call.v_head_dim)) > MAX_HEAD_DIM_OF_EIGHT_BITS:
        return f"in {EIGHT_BITS} it runs head_dim up to {MAX_HEAD_DIM_OF_EIGHT_BITS}; got {widest}"
    if call.block_size == 64 and "dropout_p" in call.features and call.head_dim > 64:
        return f"with dropout it runs masks of block_size 64 up to head_dim 64; got {call.head_dim}; block_size=128 runs"
    if call.score_mod is not None and (reason := _score_mod_refusal(call.score_mod, call.score_params)):
        return reason
    if call.e4m3 and (reason := triton_backend.supports(call)):
        return reason
    if call.batch * call.heads * (call.q_len + 128) > MAX_ROWS:
        return f"it runs up to {MAX_ROWS:,} queries over batch and heads; got {call.batch} x {call.heads} x {call.q_len}"
    return None


def forward(call):
    if triton_backend.decodes(call):
        return triton_backend.forward(call)
    return _kernels().forward.attention_forward(call)


def forward_in_eight_bits(call):
    return _kernels().forward.attention_forward_of_eight_bits(call)


def backward(call, dout, dlse, out, lse):
    by = _kernels().backward.attention_backward if has_backward(call.q.shape[3], call.v.shape[3]) else triton_backend.backward
    return by(call, dout, dlse, out, lse)


def joint_backward(dout, dlse, q, out, lse, calls, scale):
    """A ``kernels.hopper.backward.JointBackward``, or None if calls must be separate. calls: (k, v, mask) of each call, without
    variant and not deterministic."""
    tensors = [dout, q, out, *(t for call in calls for t in call[:2])]
    if not has_backward(q.shape[3], calls[0][1].shape[3]) or not all(map(is_addressable, tensors)):
        return None
    if not _kernels().backward.can_share_sums(q, calls[0][1], [mask for *_, mask in calls]):
        return None
    return _kernels().backward.JointBackward(dout, dlse, q, out, lse, scale)


@cache
def _kernels():
    """The modules of both passes, imported on demand because they import triton."""
    from ..kernels.hopper import backward, forward

    return SimpleNamespace(forward=forward, backward=backward)


decode = triton_backend.decode
