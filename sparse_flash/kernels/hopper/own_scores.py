"""Whether Gluon compiles a user's score function. Gluon compiles functions of Triton, unless they make tensors of their own
(``tl.arange``, ``tl.zeros``), which need a layout in Gluon. Results must have the shape and the dtype of the scores."""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.gluon import GluonASTSource
from ..launch.launch import FUSED
from ..launch.memory import cached_until_cleared

_TYPES = {torch.bool: "i1", torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}
_TYPES |= {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


@gluon.jit
def own_scores_kernel(scores, batch, head, params, SCORE: gl.constexpr, DERIVATIVE: gl.constexpr):
    """Evaluates both functions on a tile of scores, (64, 128), in place."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))[None, :]
    place = scores + (row * 128 + column)
    score = gl.load(place)
    scored = SCORE(score, batch, head, row, column, params)
    gradient = score * DERIVATIVE(score, batch, head, row, column, params)
    # The kernels expect results in the layout of the scores.
    gl.static_assert(scored.type == score.type, "its results are not a float32 tile like its scores")
    gl.static_assert(gradient.type == score.type, "its derivative is not in float32")
    gl.store(place, scored + gradient)


@cached_until_cleared
def refusal(score_mod, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Returns why Hopper's kernels cannot take a ``ScoreFunction`` with params of these dtypes, or None. Compiles a small kernel,
    once."""
    if unknown := [dtype for dtype in dtypes if dtype not in _TYPES]:
        return f"it does not read score_params of {unknown[0]}"
    pointers = tuple(f"*{_TYPES[dtype]}" for dtype in dtypes)
    constants = {"SCORE": score_mod.triton, "DERIVATIVE": score_mod.derivative} | ({} if pointers else {"params": None})
    signature = {"scores": "*fp32", "batch": "i32", "head": "i32", "params": pointers} | dict.fromkeys(constants, "constexpr")
    try:
        triton.compile(GluonASTSource(own_scores_kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options=FUSED)
    except CompilationError as error:
        while isinstance(error.__cause__, CompilationError):
            error = error.__cause__
        return f"Gluon cannot compile the score_mod {score_mod.name} ({str(error).splitlines()[-1].strip() or 'see triton'})"
    except RuntimeError as error:  # of the compiler's passes, after Gluon has read the function
        return f"Gluon cannot compile the score_mod {score_mod.name} ({error})"
    return None
