"""The suites, and the cases that each of them chooses.

speedup         speed-up against density, for the patterns      arXiv:2205.14135, Fig. 2 right
length          time and memory against length                  arXiv:2205.14135, Fig. 3
peers           masks of every kind at large shapes, against FlexAttention, FlashAttention-3 and -4, cuDNN and its blocks; dense
                and causal also with gradients that repeat bit for bit
compile         time and memory of compiling masks
paper           each pass and memory, plain, with dropout, padded, both   arXiv:2205.14135, App. E.6; hours, so only if asked for
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import isqrt
from typing import Any

from sparse_flash.core.backends import check_name

from ..results import Results, has_numbers
from . import SUITES, masks
from .cases import OURS, USUAL_SIZES, CallSizes, Case, CompileCase, Mask, Shape
from .masks import BUTTERFLY, CAUSAL, FULL
from .problem import check_fits, is_causal

DETERMINISTIC = f"{OURS}-deterministic"
DENSE_PEERS = {"cpu": ("sdpa-flash",), "cuda": ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient")}
PEER_SHAPES = (Shape(4, 16, 4096, 128), Shape(1, 16, 16384, 128), Shape(1, 8, 65536, 128), Shape(4, 16, 16384, 64))
# Single rows: grouped heads, other head dims, short rows, random blocks, documents back to back, changes of scores.
_GPT_OSS = Shape(1, 64, 32768, 64, kv_heads=8)
PEER_ROWS = (
    (_GPT_OSS, masks.window(128)),
    (_GPT_OSS, masks.changed(masks.window(128), "sinks")),
    (Shape(1, 16, 16384, 128), masks.changed(masks.ragged_documents(16384, 270, 0.3), "varlen")),
    (Shape(1, 32, 65536, 128, kv_heads=8), masks.changed(masks.ragged_documents(65536, 880, 0.2), "varlen")),
    (Shape(1, 16, 32768, 128, kv_heads=4), masks.changed(masks.ragged_documents(32768, 900, 0.7), "varlen")),
    (Shape(1, 8, 131072, 128), masks.changed(masks.ragged_documents(131072, 16384, 0.5, window=2048), "varlen")),
    (Shape(2, 16, 16384, 128), masks.ragged_documents(16384, 2000, 0.7, window=1024)),
    (Shape(64, 16, 512, 128), CAUSAL),
    (Shape(1, 16, 32768, 128), Mask.of("causal & (local(512) | sinks(4))")),
    *((Shape(1, 16, 16384, 128), masks.changed(masks.window(1024), change)) for change in ("soft cap", "ALiBi", "function")),
    (Shape(1, 32, 16384, 128, kv_heads=8), CAUSAL),
    (Shape(8, 32, 4096, 128, kv_heads=8), CAUSAL),
    (Shape(4, 16, 8192, 80), CAUSAL),
    (Shape(4, 16, 8192, 96), CAUSAL),
    (Shape(1, 16, 8192, 192, v_head_dim=128), CAUSAL),
    (Shape(1, 16, 8192, 256), FULL),
    (Shape(1, 16, 8192, 256), CAUSAL),
    (Shape(1, 16, 8192, 256), masks.window(1024)),
    (Shape(2, 16, 8192, 128), masks.window(256)),
    (Shape(1, 16, 32768, 128), masks.random_blocks(0.08, 128)),
    (Shape(1, 16, 32768, 128), masks.random_blocks(0.08, 64)),
)
PAPER_LENGTHS = tuple(128 << k for k in range(10))
PAPER_DROPOUT = 0.1


@dataclass(frozen=True)
class Scale:
    """The sizes of cases. shape: of "peers". speedup: of "speedup". lengths, heads, window: of "length", where
    PyTorch's math goes up to ``math_tokens`` and FlexAttention has ``flex_lengths``. paper: batch and heads. complete: whether
    there are cases that take minutes on a CPU."""

    shape: Shape
    speedup: Shape
    lengths: tuple[int, ...]
    heads: int
    window: int
    math_tokens: int
    paper_lengths: tuple[int, ...]
    paper: tuple[int, int]
    flex_lengths: tuple[int, ...] = ()
    compile_tokens: int = 65536
    complete: bool = True


_TINY, _CPU_LENGTHS = Shape(1, 2, 1024, 64), (512, 1024, 2048, 4096, 8192, 16384)
QUICK = Scale(_TINY, _TINY, (256, 512, 1024), 2, 128, 512, (128, 256), (2, 2), compile_tokens=4096)
CPU = Scale(Shape(1, 4, 4096, 64), Shape(1, 4, 8192, 64), _CPU_LENGTHS, 4, 512, 2048, PAPER_LENGTHS[:4], (2, 8))
CPU_IN_MINUTES = replace(CPU, lengths=_CPU_LENGTHS[:4], complete=False)
GPU = Scale(PEER_SHAPES[1], PEER_SHAPES[1], PAPER_LENGTHS, 16, 1024, 8192, PAPER_LENGTHS, (16, 8), (4096, 16384, 65536))


@dataclass(frozen=True)
class Request:
    """Holds what a user asked for. masks: the user's own; empty for the suites' masks."""

    device: str
    quick: bool
    masks: tuple[Mask, ...]
    sizes: CallSizes
    scale: Scale

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


def choose(
    suites: Iterable[str],
    device: str,
    quick: bool = False,
    specs: Iterable[Any] = (),
    backend: str = "auto",
    sizes: CallSizes = USUAL_SIZES,
    full: bool = True,
) -> dict[str, list[Case | CompileCase]]:
    """The cases of each suite. device: "cpu" or "cuda". quick: a few small cases, in seconds. specs: masks to measure
    instead of the suite's own, as ``Mask.of`` takes them. backend: the back end of sparse_flash; ValueError for an unknown one.
    sizes: instead of the suite's own; ValueError for the paper's, whose sizes are fixed. full: False leaves out what takes longest
    on a CPU. A case may belong to several suites. Raises ValueError for a mask of ``specs`` that no case of a suite can have, of
    ``sizes.tokens`` where they are given."""
    check_name(backend)
    scale = QUICK if quick else GPU if device == "cuda" else CPU if full else CPU_IN_MINUTES
    request = Request(device, quick, tuple(Mask.of(spec) for spec in specs), sizes, scale)
    chosen = {}
    for suite in suites:
        found = (_with_backend(case, backend) for case in _MAKERS[suite](request))
        chosen[suite] = list(dict.fromkeys(replace(case, dtype=sizes.dtype) if isinstance(case, Case) else case for case in found))
        for mask in request.masks:
            given = {case: case.spec if isinstance(case, CompileCase) else case.mask.spec for case in chosen[suite]}
            theirs = [case for case, spec in given.items() if spec == mask.spec]
            at_size = [case for case in theirs if case.tokens == sizes.tokens]
            check_fits(mask, sorted(at_size or theirs, key=lambda case: case.tokens))
    return chosen


def sort_cases(cases: Iterable[Case | CompileCase]) -> list[Case | CompileCase]:
    """Problem by problem, in the given order; in each, the peers come first, so our baselines are known."""
    listed = list(cases)
    place: dict = {}
    for case in listed:
        place.setdefault(_without_peer(case), len(place))
    return sorted(listed, key=lambda case: (place[_without_peer(case)], is_ours(case)))


def _without_peer(case):
    return replace(case, peer="") if isinstance(case, Case) else case


def is_ours(case: Case | CompileCase) -> bool:
    return isinstance(case, Case) and case.peer.startswith(OURS)


def find_baselines(case: Case | CompileCase, chosen: dict[str, list], results: Results) -> list[Case]:
    """The baselines that tables compare with a case of ours: in each suite that has it, the fastest rival of each pass."""
    found: dict[str, Case] = {}
    for suite, listed in chosen.items():
        if not isinstance(case, Case) or case not in listed or not is_ours(case):
            continue
        rivals = find_rivals(case, suite, listed)
        right = {rival: result for rival in rivals if has_numbers(result := results.get(rival.key)) and result["correct"]}
        for figure in ("forward_ms", "backward_ms"):
            timed = {rival: result[figure] for rival, result in right.items() if figure in result}
            if timed:
                fastest = min(timed, key=timed.__getitem__)
                found[fastest.key] = fastest
    return list(found.values())


def find_rivals(case: Case, suite: str, listed: list) -> list[Case]:
    """The cases among which a table looks for the fastest."""
    if suite == "speedup":
        dense = _dense_of(case.mask, case.shape.tokens)
        return [c for c in listed if c.shape == case.shape and c.mask == dense and not is_ours(c)]
    alike = [c for c in listed if _without_peer(c) == _without_peer(case) and not is_ours(c)]
    return alike if suite == "peers" else []


def _dense_of(mask: Mask, tokens: int) -> Mask:
    """Returns the mask of the dense call that a user would run instead of this mask."""
    return CAUSAL if is_causal(mask, tokens) else FULL


def _with_backend(case, backend: str):
    automatic = isinstance(case, Case) and case.peer in (OURS, DETERMINISTIC)
    return replace(case, peer=f"{case.peer}:{backend}") if automatic and backend != "auto" else case


# Their points in the plot lie between the points of the other masks.
_COMPLETE_RUN_ONLY = ("random(0.5)", "random(0.1)", "strided(", "fixed(", "longformer(", "causal & block_diagonal(")


def _speedup(request: Request) -> Iterator[Case]:
    shape = request.sizes.of(request.scale.speedup)
    if request.quick:
        usual = [CAUSAL, Mask.of("random(0.25)"), Mask.of("causal & local(128)")]
    else:
        usual = [CAUSAL, *masks.list_density_masks(shape.tokens)]
    if not (request.scale.complete or request.sizes.tokens):
        usual = [mask for mask in usual if not mask.label.startswith(_COMPLETE_RUN_ONLY)]
    dense = DENSE_PEERS["cuda"] if request.scale is GPU else ("sdpa-flash",)
    # One dense call after the other: the timing after a row is the one before the next.
    for rival in (FULL, CAUSAL):
        replacing = [mask for mask in request.masks or usual if _dense_of(mask, shape.tokens) == rival]
        if replacing:
            yield from (Case(shape, rival, peer) for peer in (*dense, OURS))
        yield from (Case(shape, mask, OURS) for mask in replacing)


def _length(request: Request) -> Iterator[Case]:
    scale, asked = request.scale, request.sizes.tokens
    chosen = request.masks or (Mask.of(f"causal & local({scale.window})"), BUTTERFLY)
    lengths = (*(tokens for tokens in scale.lengths if tokens < asked), asked) if asked else scale.lengths
    for tokens in lengths:
        shape = replace(request.sizes.of(Shape(1, scale.heads, tokens, 64)), tokens=tokens)
        if request.on_gpu or tokens <= 8192 or tokens == asked:
            # Dense attention over 16,384 tokens would take most of a CPU's three minutes and say nothing new.
            for dense in dict.fromkeys(_dense_of(mask, tokens) for mask in chosen):
                yield from (Case(shape, dense, peer) for peer in (*DENSE_PEERS[request.device][:2], OURS))
        if tokens <= scale.math_tokens:
            yield Case(shape, FULL, "sdpa-math")
        yield from (Case(shape, mask, OURS) for mask in chosen)
        if tokens in scale.flex_lengths:
            yield Case(shape, chosen[0], "flex")


def _peers(request: Request) -> Iterator[Case]:
    on_gpu, with_compilers = request.on_gpu, request.on_gpu and not request.quick
    for shape, mask in _peer_rows(request):
        dense, spec = mask.spec in ("full", "causal"), str(mask.spec)
        peers = [OURS, *[DETERMINISTIC] * dense, *[f"{OURS}:triton"] * on_gpu]
        # On a CPU the compiler takes about 20 s for each mask, so two of them are enough.
        if with_compilers or (not request.quick and (request.masks or spec != "causal")):
            peers.append("flex")
        peers += ["flex-fa4"] * with_compilers
        peers += ["fa3", "fa4"] * on_gpu
        peers += ["cudnn-blocks", "cudnn-flex"] * with_compilers  # each refuses what it does not have
        if dense:
            peers += DENSE_PEERS[request.device][:2]
        yield from (Case(shape, mask, peer) for peer in peers)


def _peer_rows(request: Request) -> list[tuple[Shape, Mask]]:
    shape, own = request.sizes.of(request.scale.shape), request.masks
    if request.quick:
        usual = [
            CAUSAL,
            Mask.of("causal & local(128)"),
            BUTTERFLY,
            masks.changed(masks.equal_documents(shape.tokens), "varlen"),
            *(masks.changed(masks.window(128), change) for change in ("sinks", "soft cap", "ALiBi", "function")),
            masks.windowed_with_globals(128, 128),
            masks.random_blocks(0.25, 64),
        ]
        return [*((shape, mask) for mask in own or usual), (replace(shape, kv_heads=1), CAUSAL)]
    if not request.on_gpu:
        return [(shape, mask) for mask in own or [CAUSAL, Mask.of("causal & local(512)"), BUTTERFLY]]
    shapes = (shape,) if request.sizes.given else PEER_SHAPES
    rows = [(shape, mask) for shape in shapes for mask in own or masks.list_peer_masks(shape)]
    return rows if own or request.sizes.given else [*rows, *PEER_ROWS]


def _compile(request: Request) -> Iterator[CompileCase]:
    tokens = request.sizes.tokens or request.scale.compile_tokens
    side = isqrt(tokens)
    usual = (
        "causal; local(1024); strided(22); fixed(22); butterfly; power_of_two; dilated(8, 4); global_tokens(64); sinks(4); "
        f"random(0.02); prefix(1024); documents({(*range(0, tokens, 1000), tokens)}); block_diagonal(1024); bigbird; "
        f"longformer(512); neighborhood(({side}, {side}), 13); causal & (local(1024) | butterfly)"
    ).split("; ")
    own = [str(mask.spec) for mask in request.masks if not isinstance(mask.spec, tuple)]
    yield from (CompileCase(_short(spec), spec, tokens) for spec in (own if request.masks else usual))
    if request.scale.complete and not (request.quick or request.masks or request.sizes.tokens):
        million = 1 << 20
        yield CompileCase(usual[-1], usual[-1], million)
        yield CompileCase("documents of 4096", f"documents({tuple(range(0, million + 1, 4096))})", million)


def _paper(request: Request) -> Iterator[Case]:
    """Exact attention of each kind, and block-sparse attention under the paper's butterfly."""
    if given := request.sizes.given:
        raise ValueError(f"suite 'paper' has the paper's sizes; got {', '.join(given)}; leave them out, or name other suites")
    on_gpu, (batch, heads) = request.on_gpu, request.scale.paper
    ours, flex = [OURS, *[f"{OURS}:triton", f"{OURS}:torch"] * on_gpu], ["flex"] * on_gpu  # on a CPU, flex has no backward pass
    dense = [*DENSE_PEERS[request.device], "sdpa-math", *["fa4"] * on_gpu]
    for dropout, padded, tokens in product((0.0, PAPER_DROPOUT), (False, True), request.scale.paper_lengths):
        shape = Shape(batch, heads, tokens, 64)
        for mask in request.masks or (FULL, BUTTERFLY):
            peers = [*ours, *dense * (mask == FULL), *flex]
            yield from (Case(shape, mask, peer, "paper", dropout_p=dropout, padded=padded) for peer in peers)


def _short(spec: str) -> str:
    return "documents of 1000" if spec.startswith("documents") else spec


_MAKERS = dict(zip(SUITES, (_speedup, _length, _peers, _compile, _paper), strict=True))
