"""The running softmax of a warp group's 64 rows of scores.

Weights are exp2(score - maximum). Instead of a row's maximum, any number serves as long as nothing overflows. So a step takes the
number of the step before. Only if weights turn out large does the warp find the highest scores of its 16 rows and compute the
weights again (``fold_lazily``). Most steps then have no comparisons, no exchange between threads, for which all weights would
wait, and no sums of values to scale. FlashAttention-4 lets the maximum lag behind, too, but looks for the highest score in each
step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.eight_bits import TOP_EXPONENT
from ..common.tiles import FLOOR
from .pairs import split_columns, to_pairs
from .quads import split_quads, to_quads

# The largest sum of a thread's 16 or 32 weights in one row of a step, in PTX notation. Sums of values are float32, in which 2^40
# suffices for a million tokens with values up to 2^68.
LARGE = {"bf16": "0f53800000", "f16": "0f46800000"}  # 2^40; 2^14, as float16 ends at 65,504
_TOP = gl.constexpr(TOP_EXPONENT)
_MINUS_TOP = "0fC0C00000"


@gluon.jit
def fold_by_maximum(scores, running_max, running_sum, factor):
    """Returns (weights, the factor for sums of values, maximum, sum), the last three (64,), by the maximum of all scores.

    scores: (64, keys), to be multiplied by ``factor``."""
    new_max = gl.maximum(running_max, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - new_max[:, None])
    rescale = gl.exp2(running_max - new_max)
    return weights, rescale, new_max, running_sum * rescale + gl.sum(weights, 1)


@gluon.jit
def new_row_state(scores):
    """Returns the maximum and the sum of rows that have kept nothing, (64,)."""
    floor = gl.full([scores.shape[0]], FLOOR, gl.float32, layout=gl.SliceLayout(1, scores.type.layout))
    return floor, gl.zeros_like(floor)


@gluon.jit
def fold_first_step(scores, factor, dtype: gl.constexpr):
    """Returns (weights as from ``to_pairs``, maximum, sum) of a tile's first step, by the maximum of its scores. The last two are
    (64, 4), a number for each of the four threads that share a row: equal maxima, and sums of each thread's own weights."""
    floor, none = new_row_state(scores)
    weights, _, maximum, _ = fold_by_maximum(scores, floor, none, factor)
    words = to_pairs(weights, dtype)
    maxima = _spread_to_threads(maximum, words)
    sums = gl.sum(gl.sum(weights.reshape([weights.shape[0], weights.shape[1] // 8, 4, 2]), 3), 1)
    return words, maxima, gl.convert_layout(sums, maxima.type.layout)


@gluon.jit
def fold_first_quads(scores, factor):
    """Returns (weights as from ``to_quads``, maximum, 0), as ``fold_first_step`` does, except the sums: products sum quads."""
    floor, _ = new_row_state(scores)
    maximum = gl.maximum(floor, gl.ceil(gl.max(scores, 1) * factor) - _TOP)
    words = to_quads(gl.exp2(scores * factor - maximum[:, None]))
    maxima = _spread_to_threads(maximum, words)
    return words, maxima, gl.zeros_like(maxima)


@gluon.jit
def _spread_to_threads(numbers, words):
    """Returns (64, 4) numbers of threads from (64,)."""
    layout: gl.constexpr = _first_per_thread(words).type.layout
    return gl.convert_layout(numbers, gl.SliceLayout(1, layout))[:, None] + gl.zeros(
        [numbers.shape[0], 4], gl.float32, layout=layout
    )


@gluon.jit
def reduce_threads(maximum, total, layout: gl.constexpr, SUMMED: gl.constexpr):
    """Returns (64,) maxima and sums, from maxima and sums by thread. SUMMED: whether each thread has the sum of its row."""
    of_rows = gl.max(total, 1) if SUMMED else gl.sum(total, 1)
    return gl.convert_layout(gl.max(maximum, 1), layout), gl.convert_layout(of_rows, layout)


@gluon.jit
def fold_lazily(scores, running_max, running_sum, factor, dtype: gl.constexpr):
    """Returns (weights as ``fold_first_step`` does, the factor for sums of values, maximum, sum), the last three by thread. Takes
    the maximum so far; if that gives large weights, also the maximum of these scores. A warp's numbers alternate between two
    rows."""
    low, high = split_columns(scores)
    COUNT: gl.constexpr = low.shape[0] * low.shape[1] // (32 * gl.num_warps())
    code: gl.constexpr = _folding(COUNT, dtype)
    words, maxima, sums = gl.inline_asm_elementwise(
        code[0],
        code[1],
        [low, high, _spread_to_words(running_max, low), factor],
        dtype=(gl.int32, gl.float32, gl.float32),
        is_pure=True,
        pack=COUNT,
    )
    new_max = _first_per_thread(maxima)
    rescale = gl.exp2(running_max - new_max)
    return words, rescale, new_max, running_sum * rescale + _first_per_thread(sums)


@gluon.jit
def fold_quads_lazily(scores, running_max, factor):
    """Returns (weights as from ``to_quads``, the factor for sums, maximum), as ``fold_lazily`` does."""
    low, high, more, most = split_quads(scores)
    COUNT: gl.constexpr = low.shape[0] * low.shape[1] // (32 * gl.num_warps())
    code: gl.constexpr = _folding(COUNT, gl.float8e4nv)
    words, maxima = gl.inline_asm_elementwise(
        code[0],
        code[1],
        [low, high, more, most, _spread_to_words(running_max, low), factor],
        dtype=(gl.int32, gl.float32),
        is_pure=True,
        pack=COUNT,
    )
    new_max = _first_per_thread(maxima)
    return words, gl.exp2(running_max - new_max), new_max


@gluon.jit
def rescale_sums(sums, factors):
    """Returns sums of values times the factors of ``fold_lazily``. A warp whose rows all have the factor 1 skips the
    multiplication. No product may be in flight, because the compiler would serialize all products."""
    result = ()
    for part in gl.static_range(len(sums)):
        result += (_rescaled(sums[part], factors),)
    return result


@gluon.jit
def _rescaled(sums, factors):
    parts = sums.reshape([sums.shape[0], sums.shape[1] // 8, 4, 2])
    of_threads = gl.convert_layout(factors, gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout)))[:, None, :, None]
    COUNT: gl.constexpr = sums.shape[0] * sums.shape[1] // (32 * gl.num_warps())
    code: gl.constexpr = _rescaling(COUNT)
    scaled = gl.inline_asm_elementwise(code[0], code[1], [parts, of_threads], dtype=gl.float32, is_pure=True, pack=COUNT)
    return gl.convert_layout(scaled.reshape([sums.shape[0], sums.shape[1]]), sums.type.layout)


@gluon.jit
def _first_per_thread(words):
    """Returns the first of each thread's numbers in a row, (64, 4), from (64, keys // 2), or (64, keys // 4)."""
    return gl.reduce(words.reshape([words.shape[0], words.shape[1] // 4, 4]), 1, _first)


@gluon.jit
def _first(left, right):
    return left


@gluon.jit
def _spread_to_words(numbers, words):
    """Returns (64, 4) numbers for each of (64, keys // 2) pairs, or of (64, keys // 4) quads."""
    parts = words.reshape([words.shape[0], words.shape[1] // 4, 4])
    given = gl.convert_layout(numbers, gl.SliceLayout(1, parts.type.layout))[:, None, :]
    whole = (given + gl.zeros_like(parts)).reshape([words.shape[0], words.shape[1]])
    return gl.convert_layout(whole, words.type.layout)


@gluon.constexpr_function
def _folding(count, dtype):
    """Returns (assembly, constraints) of ``fold_lazily`` for ``count`` pairs, or of ``fold_quads_lazily`` for ``count`` quads, of
    each thread, alternately of two rows."""
    name = {"bf16": "bf16", "fp8e4nv": "e4m3"}.get(dtype.name, "f16")
    quads = name == "e4m3"
    results, halves = (2, 2) if quads else (3, 1)
    groups = [[f"${group * count + number}" for number in range(count)] for group in range(results, results + 2 * halves + 2)]
    *columns, maximum, factor = groups
    lines = [".reg .f32 m<2>, n<2>, s<2>, x, y, t; .reg .pred p, q; .reg .b16 h<2>; .reg .b32 large, w;"]
    lines += [f"mov.f32 m{row}, {maximum[row]};" for row in (0, 1)]
    # Weights are computed again by the same code, as programs twice as long miss the instruction cache. The loop ends when maxima
    # are equal, so it repeats at most once, whatever the scores are.
    lines += ["AGAIN: mov.b32 large, 0;"]
    lines += [f"neg.f32 n{row}, m{row}; mov.f32 s{row}, 0f00000000;" for row in (0, 1)]
    for number in range(count):
        for half in range(halves):
            for scores, weight in zip(columns[2 * half : 2 * half + 2], "xy", strict=True):
                lines += [f"fma.rn.f32 {weight}, {scores[number]}, {factor[0]}, n{number % 2};"]
                lines += [f"ex2.approx.ftz.f32 {weight}, {weight};"]
                lines += [] if quads else [f"add.f32 s{number % 2}, s{number % 2}, {weight};"]
            lines += [f"cvt.rn.satfinite.e4m3x2.f32 h{half}, y, x;" if quads else f"cvt.rn.{name}x2.f32 ${number}, y, x;"]
        if quads:
            # Bytes of at least 0x7E, the largest number, get their highest bit.
            lines += [f"mov.b32 w, {{h0, h1}}; mov.b32 ${number}, w; add.u32 w, w, 0x02020202; or.b32 large, large, w;"]
    if quads:
        lines += ["and.b32 large, large, 0x80808080; setp.ne.u32 p, large, 0;"]
    else:
        lines += [f"setp.gt.f32 p, s0, {LARGE[name]}; setp.gt.f32 q, s1, {LARGE[name]}; or.pred p, p, q;"]
    lines += ["vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni DONE;"]
    for row in (0, 1):
        lines += [f"mov.f32 x, {columns[0][row]};"]
        lines += [f"max.f32 x, x, {score};" for scores in columns for score in scores[row::2]]
        lines += [f"shfl.sync.bfly.b32 t, x, {lane}, 31, 0xffffffff; max.f32 x, x, t;" for lane in (1, 2)]
        lines += [f"mul.f32 x, x, {factor[0]};"]
        lines += [f"cvt.rpi.f32.f32 x, x; add.f32 x, x, {_MINUS_TOP};"] if quads else []
        lines += [f"max.f32 n{row}, m{row}, x;"]
    lines += ["setp.neu.f32 p, n0, m0; setp.neu.f32 q, n1, m1; or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff;"]
    lines += ["mov.f32 m0, n0; mov.f32 m1, n1; @p bra.uni AGAIN;", "DONE:"]
    for number in range(count):
        lines += [f"mov.f32 ${count + number}, m{number % 2};"]
        lines += [] if quads else [f"mov.f32 ${2 * count + number}, s{number % 2};"]
    constraints = ["=&r"] * count + ["=&f"] * ((results - 1) * count) + ["f"] * (len(groups) * count)
    return "{ " + " ".join(lines) + " }", ",".join(constraints)


@gluon.constexpr_function
def _rescaling(count):
    """Returns (assembly, constraints) of ``rescale_sums`` for ``count`` numbers of each thread, alternately two of each of two
    rows."""
    factor = [f"${2 * count + number}" for number in range(count)]
    products = " ".join(f"mul.f32 ${number}, ${number}, {factor[number]};" for number in range(count))
    assembly = (
        f"{{ .reg .pred p, q; setp.neu.f32 p, {factor[0]}, 0f3F800000; setp.neu.f32 q, {factor[2]}, 0f3F800000; or.pred p, p, q; "
        f"vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni KEPT; {products} KEPT: }}"
    )
    return assembly, ",".join(["=f"] * count + [str(number) for number in range(count)] + ["f"] * count)
