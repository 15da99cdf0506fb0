"""Draws the fuzzer's calls and judges them: everything follows from a back end's name and a seed.

Seeds of one group, ``seed // CALLS_PER_MASK``, share a mask, because compiling one and evaluating its definition takes longer than
a call. The ideas are from ``strategies``; hypothesis itself would take most of the time.
"""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
import oracle
import torch
from calls import TERMS, attention_call, name_of, terms_of
from oracle import Sizes
from strategies import BARE, attempt, of_any_length

import sparse_flash as sf
from sparse_flash.core import backends
from sparse_flash.core.description import Call
from sparse_flash.core.variant import build_variant
from sparse_flash.masks.grid import BLOCK_SIZES, BlockGrid

CALLS_PER_MASK = 8
LONGEST = 700  # tokens
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HEAD_DIMS = (16, 32, 40, 64, 64, 80, 96, 128, 128, 192, 256)  # the common ones more often


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
    """short: as in short calls: the portable backward pass in one launch, Hopper's forward pass in tiles of 64 queries."""

    drawn: Drawn
    sizes: Sizes
    lse_gradient: bool
    short: bool

    def __str__(self):
        sizes = {name: value for name, value in vars(self.sizes).items() if value is not None and name != "seed"}
        size = "" if self.drawn.mask is None else f" in blocks of {self.drawn.mask.block_size}"
        return (
            f"seed {self.sizes.seed}: {name_of(sizes)}, lse {'' if self.lse_gradient else 'not '}differentiated, "
            f"{'as a short call, ' if self.short else ''}mask {self.drawn.text}{size}"
        )


def draw(seed: int, backend: str, kernels: int | None = None) -> DrawnCall:
    """The call of a seed. Raises RuntimeError if the back end accepts none of what is drawn.

    kernels: what a kernel is compiled for (dtype, head dimensions, blocks, terms) is drawn so many times only, and taken where it
    goes with the rest of a call. On a GPU, compiling takes a hundred times as long as a call."""
    group = seed // CALLS_PER_MASK
    if kernels is None:
        return _drawn(seed, backend, _mask(group, backend))
    block_size, short, compiled_for = _compiled_for(group % kernels, backend)
    call = _drawn(seed, backend, _mask(group, backend, (block_size,)))
    score_shift = 0.0 if compiled_for["terms"] else call.sizes.score_shift
    alike = replace(call, short=short, sizes=replace(call.sizes, **compiled_for, score_shift=score_shift))
    return alike if _refusal(alike) is None else call


@cache
def _compiled_for(number: int, backend: str) -> tuple[int | None, bool, dict]:
    """(a mask's block size, None for dense attention; whether the call is short; some of its sizes)"""
    call = draw(number * CALLS_PER_MASK + number % 4, backend)  # seeds in which the launches differ
    fields = "dtype", "head_dim", "v_head_dim", "deterministic", "terms"
    block_size = None if call.drawn.mask is None or call.drawn.mask.keeps_all else call.drawn.mask.block_size
    return block_size, call.short, {name: getattr(call.sizes, name) for name in fields}


def _drawn(seed: int, backend: str, drawn: Drawn) -> DrawnCall:
    rng = random.Random(f"call {seed}")

    def plain() -> DrawnCall | None:
        heads = drawn.heads if drawn.heads > 1 else rng.choice((1, 2, 3, 4, 6))
        head_dim = rng.choice(HEAD_DIMS) if rng.random() < 0.7 else rng.randint(1, 256)
        sizes = Sizes(
            batch=drawn.batch if drawn.batch > 1 else rng.randint(1, 3),
            heads=heads,
            kv_heads=rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
            q_len=drawn.q_len,
            kv_len=drawn.kv_len,
            head_dim=head_dim,
            v_head_dim=head_dim if rng.random() < 0.7 else rng.choice(HEAD_DIMS),
            dtype=rng.choice(DTYPES),
            layout="mixed",
            backend=backend,
            seed=seed,
            spec=None,
            terms=(),
            scale=None if rng.random() < 0.6 else round(10 ** rng.uniform(-2.5, -0.5), 4),
            deterministic=rng.random() < 0.3,
            score_shift=0.0 if rng.random() < 0.8 else rng.choice((-200.0, -30.0, 30.0)),
        )
        call = DrawnCall(drawn, sizes, rng.random() < 0.5, backend in ("triton", "hopper") and seed % 2 == 0)
        return call if _refusal(call) is None else None

    def with_terms() -> DrawnCall | None:
        terms = tuple(rng.sample(TERMS, rng.choice((1, 1, 2, 3, 5))))
        alike = replace(call, sizes=replace(call.sizes, terms=terms))
        return alike if _refusal(alike) is None else None

    call = _first(plain, backend)
    # The peer of shifted scores is another.
    return call if call.sizes.score_shift or rng.random() < 0.5 else _first(with_terms, backend)


def _refusal(call: DrawnCall, **options) -> str | None:
    """Why the back end does not take a call."""
    sizes, number = call.sizes, torch.empty((), dtype=call.sizes.dtype, device=oracle.DEVICE)
    q = number.expand(sizes.batch, sizes.heads, sizes.q_len, sizes.head_dim)
    k, v = (number.expand(sizes.batch, sizes.kv_heads, sizes.kv_len, dim) for dim in (sizes.head_dim, sizes.v_head_dim))
    given = terms_of(sizes)
    given.pop("sinks", None)  # no back end sees those
    asked = oracle.make_call(
        q, k, call.drawn.mask, v=v, variant=build_variant(q, k, **given), deterministic=sizes.deterministic, **options
    )
    return backends.get_backend(sizes.backend).supports(asked)


def failure(call: DrawnCall) -> str | None:
    """Runs a call forward and backward. Returns what is wrong with its results, or None. Other exceptions pass through."""
    sizes = call.sizes
    some = oracle.ALL if call.lse_gradient else oracle.OUT
    made = replace(attention_call(sizes, call.drawn.mask, call.drawn.kept), differentiated=some)
    try:
        with _launches(call):
            errors = oracle.errors_of(made, sizes.backend, keeps_order=True)
    except AssertionError as error:
        return str(error)
    # Shifted scores: the rounding of a row's weights moves its whole gradient one way, so a few rows decide the largest error.
    # PyTorch's error then says less about ours (of some 100 such calls two were at 1.1 and 1.2 times what would be allowed), and
    # with few rows little.
    few = sizes.batch * min(sizes.heads * sizes.q_len, sizes.kv_heads * sizes.kv_len) < 64
    slack = (4 if few else 1.5) if sizes.score_shift else 1
    names = *oracle.NAMES, *(f"gradient {number} of terms" for number in range(len(made.inputs) - 3))
    wrong = {name: both for name, both in zip(names, errors, strict=True) if not both[0] <= both[1] * slack}
    return "; ".join(f"{name} is off by {error:.3g}, {allowed:.3g} is allowed" for name, (error, allowed) in wrong.items()) or None


def _launches(call: DrawnCall):
    """Sets whether kernels run as in short calls, and whether Hopper's take tiles of 192 queries or blocks by document."""
    if call.sizes.backend not in ("triton", "hopper"):
        return nullcontext()
    seed = call.sizes.seed  # the first call with a mask decides about blocks by document, and of 64
    kind = seed // CALLS_PER_MASK % 3
    return oracle.tiles(call.short, tall=seed % 4 == 1, by_document=kind == 0, fine=kind == 1, together=kind == 1)


def _first(make: Callable, backend: str):
    for _ in range(2000):
        if (made := make()) is not None:
            return made
    raise RuntimeError(f"{backend} takes nothing of what the fuzzer draws on {oracle.DEVICE}")


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
        asked = Call(torch.device(oracle.DEVICE), torch.float16, 1, 1, 1, q_len, kv_len, 64, size)
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
        return _leaf(rng)
    match rng.choice("&&|~"):
        case "&":
            return expression(rng, depth - 1) & expression(rng, depth - 1)
        case "|":
            return expression(rng, depth - 1) | expression(rng, depth - 1)
    return ~expression(rng, depth - 1)


# With causal twice, because most masks contain it.
NAMES = (*BARE, "causal")


def _leaf(rng: random.Random) -> sf.Pattern:
    while (pattern := attempt(rng.choice(NAMES), rng)) is None:
        pass
    return of_any_length(pattern)
