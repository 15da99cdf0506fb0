"""Draws the fuzzer's calls and judges them: everything follows from a back end's name and a seed.

Seeds of one group, ``seed // CALLS_PER_MASK``, share a mask, because compiling one and evaluating its definition takes longer than
a call. The ideas are from ``strategies``; hypothesis itself would take most of the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
import oracle
import torch
from calls import OWN, attention_call

import sparse_flash as sf
from sparse_flash import backends
from sparse_flash.masks.grid import BLOCK_SIZES, BlockGrid
from sparse_flash.variant.variant import build_variant

CALLS_PER_MASK = 8
LONGEST = 700  # tokens
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HEAD_DIMS = (16, 32, 40, 64, 64, 80, 96, 128, 128, 192, 256)  # the common ones more often
UNITS = (1, 2, 7, 16, 24, 32, 64, 100, 128, 300)


@dataclass(frozen=True)
class Drawn:
    """mask: what a back end gets, None for dense. kept: its definition, bool, broadcastable to the scores. batch, heads: the
    mask's; if more than 1, calls must have the same."""

    text: str
    q_len: int
    kv_len: int
    mask: sf.BlockMask | None
    kept: torch.Tensor
    batch: int = 1
    heads: int = 1


@dataclass(frozen=True)
class DrawnCall:
    seed: int
    backend: str
    drawn: Drawn
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    layouts: tuple[str, ...]  # of q, k, v and the incoming gradient
    scale: float | None
    lse_gradient: bool
    deterministic: bool
    score_shift: float
    short: bool  # as in short calls: the portable backward pass in one launch, Hopper's forward pass in tiles of 64 queries
    terms: tuple[str, ...] = ()  # what the call does besides its mask: names of ``TERMS``

    def __str__(self):
        drawn, size = self.drawn, "" if self.drawn.mask is None else f" in blocks of {self.drawn.mask.block_size}"
        return (
            f"seed {self.seed}: {self.backend}, {str(self.dtype).removeprefix('torch.')}, batch {self.batch}, heads "
            f"{self.heads} over {self.kv_heads}, {drawn.q_len} x {drawn.kv_len} tokens, head_dim {self.head_dim}, of v "
            f"{self.v_head_dim}, q, k, v, dout {', '.join(self.layouts)}, scale {self.scale}, "
            f"scores shifted by {self.score_shift}, lse "
            f"{'' if self.lse_gradient else 'not '}differentiated, {'' if self.deterministic else 'not '}deterministic, "
            f"{'as a short call, ' if self.short else ''}{', '.join((*self.terms, ''))}mask {drawn.text}{size}"
        )


def draw(seed: int, backend: str, kernels: int | None = None) -> DrawnCall:
    """The call of a seed. Raises RuntimeError if the back end accepts none of what is drawn.

    kernels: what a kernel is compiled for (dtype, head dimensions, blocks, terms) is drawn so many times only, and taken where it
    goes with the rest of a call. On a GPU, compiling takes a hundred times as long as a call."""
    group = seed // CALLS_PER_MASK
    if kernels is None:
        return _drawn(seed, backend, _mask(group, backend))
    block_size, compiled_for = _compiled_for(group % kernels, backend)
    call = _drawn(seed, backend, _mask(group, backend, (block_size,)))
    alike = replace(call, **compiled_for, score_shift=0.0 if compiled_for["terms"] else call.score_shift)
    return alike if _refusal(alike) is None else call


@cache
def _compiled_for(number: int, backend: str) -> tuple[int | None, dict]:
    """(a mask's block size, None for dense attention; other fields of a call)"""
    seed = number * CALLS_PER_MASK + number % 4  # in which the launches differ
    call = draw(seed, backend)
    block_size = None if call.drawn.mask is None or call.drawn.mask.keeps_all else call.drawn.mask.block_size
    return block_size, {
        name: getattr(call, name) for name in ("dtype", "head_dim", "v_head_dim", "deterministic", "short", "terms")
    }


def _drawn(seed: int, backend: str, drawn: Drawn) -> DrawnCall:
    rng = random.Random(f"call {seed}")
    batch = drawn.batch if drawn.batch > 1 else rng.randint(1, 3)
    heads = drawn.heads if drawn.heads > 1 else rng.choice((1, 2, 3, 4, 6))
    kv_heads = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    lse_gradient, deterministic = rng.random() < 0.5, rng.random() < 0.3
    layouts = tuple(rng.choice(oracle.LAYOUTS) for _ in range(4))
    scale = None if rng.random() < 0.6 else round(10 ** rng.uniform(-2.5, -0.5), 4)
    score_shift = 0.0 if rng.random() < 0.8 else rng.choice((-200.0, -30.0, 30.0))
    short = backend in ("triton", "hopper") and seed % 2 == 0

    def fitting() -> tuple[torch.dtype, int]:
        dtype, head_dim = rng.choice(DTYPES), rng.choice(HEAD_DIMS) if rng.random() < 0.7 else rng.randint(1, 256)
        asked = _asked(drawn, dtype, head_dim, batch=batch, heads=heads, kv_heads=kv_heads, deterministic=deterministic)
        return (dtype, head_dim) if backends.get_backend(backend).supports(asked) is None else None

    dtype, head_dim = _first(fitting, backend)

    def fitting_v() -> int | None:
        v_head_dim = head_dim if rng.random() < 0.7 else rng.choice(HEAD_DIMS)
        asked = _asked(drawn, dtype, head_dim, batch=batch, heads=heads, kv_heads=kv_heads, v_head_dim=v_head_dim)
        return v_head_dim if backends.get_backend(backend).supports(asked) is None else None

    sizes = batch, heads, kv_heads, head_dim, _first(fitting_v, backend)
    call = DrawnCall(seed, backend, drawn, dtype, *sizes, layouts, scale, lse_gradient, deterministic, score_shift, short)
    # From numbers of its own, so that the rest of a seed's call stays what it was. The peer of shifted scores is another.
    rng = random.Random(f"terms {seed}")
    if score_shift or rng.random() < 0.5:
        return call

    def fitting_terms() -> DrawnCall | None:
        with_terms = replace(call, terms=tuple(rng.sample(sorted(TERMS), rng.choice((1, 1, 2, 3, 5)))))
        return with_terms if _refusal(with_terms) is None else None

    return _first(fitting_terms, backend)


def _refusal(call: DrawnCall) -> str | None:
    """Why the back end does not take a call."""
    q, k, v, *_ = (torch.empty(size, dtype=call.dtype, device="meta") for size in _shapes(call))
    given = {name: value for name, value in _given(call).items() if name != "sinks"}  # no back end sees those
    variant = build_variant(q, k, **_moved(given, "meta"))
    mask = call.drawn.mask
    fields = {"device": torch.device(oracle.DEVICE), "block_size": None if mask is None or mask.keeps_all else mask.block_size}
    asked = replace(backends.Call.from_tensors(q, k, v, None, variant, call.deterministic), **fields)
    return backends.get_backend(call.backend).supports(asked)


def _shapes(call: DrawnCall) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of q, k, v and the incoming gradient."""
    queries, keys = (call.batch, call.heads, call.drawn.q_len), (call.batch, call.kv_heads, call.drawn.kv_len)
    return (*queries, call.head_dim), (*keys, call.head_dim), (*keys, call.v_head_dim), (*queries, call.v_head_dim)


def _lengths_of(call: DrawnCall, rng: random.Random, side: str, past: int = 9) -> torch.Tensor:
    tokens = call.drawn.q_len if side == "q" else call.drawn.kv_len
    ends = 0, 1, tokens // 2, tokens - 1, tokens, tokens + past
    return torch.tensor([rng.choice(ends) if rng.random() < 0.3 else rng.randint(0, tokens) for _ in range(call.batch)])


# Arguments of ``attention`` by a name for them.
TERMS: dict[str, Callable[[DrawnCall, random.Random], dict]] = {
    "dropout": lambda call, rng: {"dropout_p": rng.choice((0.1, 0.5))},
    "softcap": lambda call, rng: {"softcap": rng.choice((0.5, 3.0, 30.0))},
    "alibi": lambda call, rng: {"alibi_slopes": torch.tensor([rng.uniform(0, 0.2) for _ in range(call.heads)])},
    "frozen bias": lambda call, rng: {"rel_bias": _bias(call, rng)},
    "learned bias": lambda call, rng: {"rel_bias": _bias(call, rng).requires_grad_()},
    "sinks": lambda call, rng: {"sinks": torch.tensor([rng.gauss(0, 5) for _ in range(call.heads)]).requires_grad_()},
    "own function": lambda call, rng: {"score_mod": OWN, "score_params": _own_params(call, rng)},
    "kv_lens": lambda call, rng: {"kv_lens": _lengths_of(call, rng, "kv")},
    "kv_starts": lambda call, rng: {"kv_starts": _lengths_of(call, rng, "kv", 0)},
    "q_lens": lambda call, rng: {"q_lens": _lengths_of(call, rng, "q")},
    "q_starts": lambda call, rng: {"q_starts": _lengths_of(call, rng, "q", 0)},
}


def _bias(call: DrawnCall, rng: random.Random) -> torch.Tensor:
    return torch.tensor([[rng.gauss(0, 1) for _ in range(2 * 9 + 1)]] * call.heads)


def _own_params(call: DrawnCall, rng: random.Random) -> tuple[torch.Tensor, ...]:
    weights = [[rng.uniform(-0.1, 0.1) for _ in range(call.heads)] for _ in range(call.batch)]
    return torch.tensor(weights), torch.tensor([call.heads], dtype=torch.int32)


def _given(call: DrawnCall) -> dict:
    """The arguments of ``attention`` for a call's terms, on the CPU."""
    given: dict = {}
    for name in call.terms:
        given |= TERMS[name](call, random.Random(f"{name} {call.seed}"))
    return given


def failure(call: DrawnCall) -> str | None:
    """Runs a call forward and backward. Returns what is wrong with its results, or None. Other exceptions pass through."""
    generator = torch.Generator(oracle.DEVICE).manual_seed(call.seed)
    with torch.device(oracle.DEVICE):  # so a GPU's own generator draws the numbers
        *inputs, dout = (
            oracle.tensor(size, layout, dtype=call.dtype, generator=generator)
            for size, layout in zip(_shapes(call), call.layouts, strict=True)
        )
    oracle.shifted(*inputs[:2], call.scale, call.score_shift)
    given, options = _moved(_given(call), oracle.DEVICE), {"deterministic": call.deterministic, "backend": call.backend}
    made = attention_call(inputs, call.drawn.mask, call.drawn.kept, given, call.scale, **options)
    try:
        with _launches(call):
            errors = oracle.errors_of(replace(made, out_alone=not call.lse_gradient, dout=dout), call.backend, keeps_order=True)
    except AssertionError as error:
        return str(error)
    # Shifted scores: the rounding of a row's weights moves its whole gradient one way, so a few rows decide the largest error.
    # PyTorch's error then says less about ours (of some 100 such calls two were at 1.1 and 1.2 times what would be allowed), and
    # with few rows little.
    few = min(dout.shape[:3].numel(), inputs[1].shape[:3].numel()) < 64
    slack = (4 if few else 1.5) if call.score_shift else 1
    names = *oracle.NAMES, *(f"d{name}" for name in ("rel_bias", "sinks") if name in given and given[name].requires_grad)
    wrong = {name: both for name, both in zip(names, errors, strict=True) if not both[0] <= both[1] * slack}
    return "; ".join(f"{name} is off by {error:.3g}, {allowed:.3g} is allowed" for name, (error, allowed) in wrong.items()) or None


def _moved(value, device):
    """Moves the tensors of an argument, or of several arguments, to a device."""
    if isinstance(value, dict):
        return {name: _moved(argument, device) for name, argument in value.items()}
    if isinstance(value, tuple):
        return tuple(_moved(tensor, device) for tensor in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _launches(call: DrawnCall):
    """Sets whether kernels run as in short calls, and whether Hopper's take tiles of 192 queries or blocks by document."""
    if call.backend not in ("triton", "hopper"):
        return nullcontext()
    # The first call with a mask decides about blocks by document.
    return oracle.tiles(call.short, tall=call.seed % 4 == 1, by_document=call.seed // CALLS_PER_MASK % 3 == 0)


def _first(make: Callable, backend: str):
    for _ in range(2000):
        if (made := make()) is not None:
            return made
    raise RuntimeError(f"{backend} takes nothing of what the fuzzer draws on {oracle.DEVICE}")


def _asked(drawn: Drawn, dtype: torch.dtype, head_dim: int, **fields) -> backends.Call:
    block_size = None if drawn.mask is None or drawn.mask.keeps_all else drawn.mask.block_size
    fields = {
        "device": torch.device(oracle.DEVICE),
        "q_len": drawn.q_len,
        "kv_len": drawn.kv_len,
        "block_size": block_size,
    } | fields
    return backends.Call(dtype=dtype, head_dim=head_dim, **fields)


@lru_cache(maxsize=1)
def _mask(group: int, backend: str, given: tuple[int | None] | None = None) -> Drawn:
    """given: the block size, None for dense attention; otherwise drawn."""
    rng = random.Random(f"mask {group}")
    q_len, kv_len = _lengths(rng)
    weights = (1, 3, 3, 1) if given is None else (1, 0, 0, 0) if given == (None,) else (0, 3, 3, 1)
    kind = rng.choices(("dense", "pattern", "blocks", "per head"), weights)[0]
    if kind == "dense":
        return Drawn("none", q_len, kv_len, None, torch.ones(q_len, kv_len, dtype=torch.bool, device=oracle.DEVICE))

    def fitting() -> int | None:
        if given:
            return given[0]
        # With float16 and head_dim 64, which all back ends accept, so calls can be drawn for the mask.
        size = rng.choice(BLOCK_SIZES)
        asked = backends.Call(torch.device(oracle.DEVICE), torch.float16, 1, 1, 1, q_len, kv_len, 64, size)
        return size if backends.get_backend(backend).supports(asked) is None else None

    grid = BlockGrid(q_len, kv_len, _first(fitting, backend))
    with oracle.heavy_rows_split() if rng.random() < 0.4 else nullcontext():
        drawn = {"pattern": _pattern_mask, "blocks": _block_map, "per head": _mask_per_head}[kind](rng, grid)
    # Without the same mask in blocks of 128, which GPU kernels would take in its place.
    mask = replace(drawn.mask, coarse=None).to(oracle.DEVICE)
    return replace(drawn, mask=mask, kept=drawn.kept.to(oracle.DEVICE))


def _lengths(rng: random.Random) -> tuple[int, int]:
    def tokens() -> int:
        return rng.choice((rng.randint(1, LONGEST), 128 * rng.randint(1, 5), 128 * rng.randint(1, 5) + rng.choice((-1, 1))))

    q_len, kv_len = tokens(), tokens()
    return rng.choice(((q_len, q_len), (q_len, kv_len), (q_len, kv_len), (1 + q_len % 3, kv_len)))


def _pattern_mask(rng: random.Random, grid: BlockGrid) -> Drawn:
    pattern = expression(rng)
    mask = sf.compile_mask(pattern, grid.q_len, grid.kv_len, grid.block_size)
    return Drawn(str(pattern), grid.q_len, grid.kv_len, mask, oracle.kept_pairs(pattern, mask, grid.q_len, grid.kv_len))


def _mask_per_head(rng: random.Random, grid: BlockGrid) -> Drawn:
    """A compiled mask per head, per batch entry, or per head of each batch entry."""
    batch, heads = rng.choice(((1, 2), (1, 4), (2, 1), (3, 1), (2, 2), (2, 3)))
    several = [expression(rng) for _ in range(rng.randint(2, 3))]
    patterns = [rng.choice(several) for _ in range(batch * heads)]
    mask = sf.BlockMask.per_head(patterns, grid.q_len, grid.kv_len, grid.block_size)
    mask = replace(mask, mask_index=mask.mask_index.view(batch, heads))
    kept = torch.stack([oracle.kept_pairs(pattern, None, grid.q_len, grid.kv_len) for pattern in patterns])
    text = f"{batch} x {heads} of [{', '.join(map(str, patterns))}]"
    return Drawn(text, grid.q_len, grid.kv_len, mask, kept.unflatten(0, (batch, heads)), batch, heads)


def _block_map(rng: random.Random, grid: BlockGrid) -> Drawn:
    """Random blocks, with random rows and columns that keep nothing, everything or one block."""
    batch, heads = rng.choice(((1, 1), (1, 1), (1, 3), (2, 1), (2, 2)))
    density = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0, round(rng.random(), 2)))
    numbers = np.random.default_rng(rng.getrandbits(32))
    blocks = numbers.random((batch, heads, *grid.shape)) < density
    for lines in (blocks, blocks.swapaxes(2, 3)):
        if rng.random() < 0.5:
            for index in np.ndindex(lines.shape[:3]):
                _redraw(lines[index], rng)
    blocks = torch.from_numpy(np.ascontiguousarray(blocks)).to(oracle.DEVICE)
    mask = sf.BlockMask.from_blocks(blocks, grid.block_size, grid.q_len, grid.kv_len)
    # By definition, not from the table: the map's blocks, cut at the lengths.
    kept = blocks.repeat_interleave(grid.block_size, 2).repeat_interleave(grid.block_size, 3)
    text = f"{batch} x {heads} block maps that keep {blocks.float().mean().item():.2f}"
    return Drawn(text, grid.q_len, grid.kv_len, mask, kept[:, :, : grid.q_len, : grid.kv_len], batch, heads)


def _redraw(line: np.ndarray, rng: random.Random) -> None:
    kind = rng.choice(("as it is", "as it is", "empty", "full", "one block"))
    if kind != "as it is":
        line[:] = kind == "full"
    if kind == "one block":
        line[rng.randrange(len(line))] = True


def expression(rng: random.Random, depth: int = 2) -> sf.Pattern:
    """A pattern, or an expression of up to four."""
    if depth == 0 or rng.random() < 0.35:
        return rng.choice(LEAVES)(rng)
    match rng.choice("&&|~"):
        case "&":
            return expression(rng, depth - 1) & expression(rng, depth - 1)
        case "|":
            return expression(rng, depth - 1) | expression(rng, depth - 1)
    return ~expression(rng, depth - 1)


def _unit(rng: random.Random) -> int:
    return rng.choice(UNITS)


def _factors(rng: random.Random) -> int | None:
    return rng.choice((None, *range(6)))


def _documents(rng: random.Random) -> sf.Pattern:
    bounds = [0, *np.cumsum([rng.randint(1, 250) for _ in range(rng.randint(1, 6))]).tolist()]
    return sf.shifted(sf.documents(bounds), 0, allow_uncovered=True)


def _fixed(rng: random.Random) -> sf.Pattern:
    stride = rng.randint(1, 6)
    return sf.fixed(stride, rng.randint(1, stride), _unit(rng))


def _neighborhood(rng: random.Random) -> sf.Pattern:
    extents = [rng.randint(1, 12) for _ in range(rng.randint(1, 3))]
    window = [rng.randint(1, min(extent, 6)) for extent in extents]
    stride, dilation = [rng.randint(1, w) for w in window], [rng.randint(1, s // w) for s, w in zip(extents, window, strict=True)]
    grid = sf.neighborhood(extents, window, *rng.choice([(), (stride, dilation, [rng.random() < 0.5 for _ in extents])]))
    return sf.shifted(grid, 0, allow_uncovered=True)


def _tile_window(rng: random.Random) -> sf.Pattern:
    layout = sf.VideoLayout(rng.randint(1, 3), rng.randint(1, 12), rng.randint(1, 12), (1, 4, 4), rng.randint(0, 40))
    window = [rng.randint(1, tiles) for tiles in layout.tile_grid]
    return sf.shifted(sf.tile_window(layout, window), 0, allow_uncovered=True)


LEAVES: tuple[Callable[[random.Random], sf.Pattern], ...] = (
    lambda rng: sf.full(),
    lambda rng: sf.causal(),
    lambda rng: sf.causal(),  # twice, because most masks contain it
    lambda rng: sf.local(rng.randint(1, 300)),
    lambda rng: sf.prefix(rng.randint(1, 300)),
    lambda rng: sf.sinks(rng.randint(1, 300)),
    lambda rng: sf.global_tokens(rng.randint(1, 300)),
    lambda rng: sf.longformer(rng.randint(1, 100), rng.randint(1, 100)),
    lambda rng: sf.block_diagonal(_unit(rng)),
    lambda rng: sf.butterfly(_factors(rng), _unit(rng)),
    lambda rng: sf.power_of_two(_factors(rng), _unit(rng)),
    lambda rng: sf.strided(rng.randint(1, 9), _unit(rng)),
    lambda rng: sf.dilated(rng.randint(1, 9), rng.randint(1, 5), _unit(rng)),
    lambda rng: sf.random(round(rng.uniform(0.01, 1), 2), rng.randint(0, 99), _unit(rng)),
    lambda rng: sf.bigbird(rng.randint(1, 3), rng.randint(1, 2), round(rng.uniform(0.01, 0.3), 2), rng.randint(0, 9), _unit(rng)),
    _documents,
    _fixed,
    _neighborhood,
    _tile_window,
)
