"""The suites, and the cases that each of them chooses.

speedup         speed-up against density, for the patterns      arXiv:2205.14135, Fig. 2 right
length          time and memory against length                  arXiv:2205.14135, Fig. 3
peers           masks of every kind at large shapes, against FlexAttention, FlashAttention-3 and -4, cuDNN and its blocks
small           time and host time of one call of a short problem, eager and under a CUDA graph
deterministic   gradients that repeat bit for bit, with FlashAttention-4 for comparison
compile         time and memory of compiling masks
paper           each pass and memory, plain, with dropout, padded, both   arXiv:2205.14135, App. E.6; hours, so only if asked for
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import isqrt
from typing import Any

from sparse_flash.backends import check_name

from ..results import Results, has_numbers
from . import SUITES, masks
from .cases import OURS, USUAL_SIZES, CallCase, CallSizes, Case, CompileCase, Mask, PaperCase, Shape
from .masks import BUTTERFLY, CAUSAL, FULL
from .problem import check_fits, is_causal

DETERMINISTIC = f"{OURS}-deterministic"
DENSE_PEERS = {"cpu": ("sdpa-flash",), "cuda": ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient")}
PEER_SHAPES = (Shape(4, 16, 4096, 128), Shape(1, 16, 16384, 128), Shape(1, 8, 65536, 128), Shape(4, 16, 16384, 64))
# Single rows beside PEER_SHAPES: grouped heads, other head dims, short rows, random blocks.
PEER_ROWS = (
    (Shape(1, 32, 16384, 128, kv_heads=8), CAUSAL),
    (Shape(4, 16, 8192, 96), CAUSAL),
    (Shape(1, 16, 8192, 192, v_head_dim=128), CAUSAL),
    (Shape(1, 16, 8192, 256), FULL),
    (Shape(1, 16, 8192, 256), CAUSAL),
    (Shape(1, 16, 8192, 256), masks.window(1024)),
    (Shape(2, 16, 8192, 128), masks.window(256)),
    (Shape(1, 16, 32768, 128), masks.random_blocks(0.08, 128)),
    (Shape(1, 16, 32768, 128), masks.random_blocks(0.08, 64)),
    (Shape(1, 8, 1024, 128), FULL),
    (Shape(1, 8, 1024, 128), CAUSAL),
)
SMALL_LENGTHS = (256, 512, 1024, 2048)
PAPER_LENGTHS = tuple(128 << k for k in range(10))
PAPER_DROPOUT = 0.1


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
    own = [Mask.of(spec) for spec in specs]
    chosen = {}
    for suite in suites:
        found = (_with_backend(case, backend) for case in _MAKERS[suite](device, quick, own, sizes))
        if device == "cpu" and not full:
            found = (case for case in found if case.tokens == sizes.tokens or not _is_long(suite, case, bool(own)))
        chosen[suite] = list(dict.fromkeys(replace(case, dtype=sizes.dtype) if isinstance(case, Case) else case for case in found))
        for mask in own:
            given = {case: case.spec if isinstance(case, CompileCase) else case.mask.spec for case in chosen[suite]}
            theirs = [case for case, spec in given.items() if spec == mask.spec]
            at_size = [case for case in theirs if case.tokens == sizes.tokens]
            check_fits(mask, sorted(at_size or theirs, key=lambda case: case.tokens))
    return chosen


# Their points lie between the points of the other masks.
_FULL_RUN_ONLY = ("random(0.5)", "random(0.1)", "strided(", "fixed(", "longformer(", "causal & block_diagonal(")


def _is_long(suite: str, case: Case | CompileCase, own: bool) -> bool:
    """Whether only a full run on a CPU has the case. Two cores then take two to three minutes for the rest."""
    most = {"length": 4096, "compile": 65536}.get(suite)
    return case.tokens > most if most else suite == "speedup" and not own and case.label.startswith(_FULL_RUN_ONLY)


def sort_cases(cases: Iterable[Case | CompileCase]) -> list[Case | CompileCase]:
    """Problem by problem, in the given order; in each, the peers come first, so our baselines are known."""
    listed = list(cases)
    place: dict = {}
    for case in listed:
        place.setdefault(_without_peer(case), len(place))
    return sorted(listed, key=lambda case: (place[_without_peer(case)], _rank(case)))


def _without_peer(case):
    return replace(case, peer="") if isinstance(case, Case) else case


def _rank(case) -> int:
    if not isinstance(case, Case) or not case.peer.startswith(OURS):
        return 0
    return 2 if case.peer.startswith(DETERMINISTIC) else 1


def is_ours(case: Case | CompileCase) -> bool:
    return _rank(case) > 0


def find_baselines(case: Case | CompileCase, chosen: dict[str, list], results: Results) -> list[Case]:
    """The baselines that tables compare with a case of ours: in each suite that has it, the fastest rival of each pass."""
    found: dict[str, Case] = {}
    for suite, listed in chosen.items():
        if not isinstance(case, Case) or case not in listed or not _rank(case):
            continue
        for rivals in _rivals(case, suite, listed):
            right = {rival: result for rival in rivals if has_numbers(result := results.get(rival.key)) and result["correct"]}
            for figure in ("forward_ms", "backward_ms", "forward_us", "both_us"):
                timed = {rival: result[figure] for rival, result in right.items() if figure in result}
                if timed:
                    fastest = min(timed, key=timed.__getitem__)
                    found[fastest.key] = fastest
    return list(found.values())


def _rivals(case: Case, suite: str, listed: list) -> list[list[Case]]:
    """The sets of cases among which a table looks for the fastest."""
    if suite == "speedup":
        dense = _dense_of(case.mask, case.shape.tokens)
        return [[c for c in listed if c.shape == case.shape and c.mask == dense and not _rank(c)]]
    same = [c for c in listed if _without_peer(c) == _without_peer(case) and c != case]
    others = [c for c in same if not _rank(c)]
    if suite == "deterministic":
        return [[c for c in others if "-deterministic" in c.peer], [c for c in same if _rank(c) == 1]] if _rank(case) == 2 else []
    if suite == "peers" and case.peer == f"{OURS}:triton":
        return [others, [c for c in others if c.peer == "flex"]]
    return [others] if suite in ("peers", "small") else []


def _dense_of(mask: Mask, tokens: int) -> Mask:
    """Returns the mask of the dense call that a user would run instead of this mask."""
    return CAUSAL if is_causal(mask, tokens) else FULL


def _with_backend(case, backend: str):
    automatic = isinstance(case, Case) and case.peer in (OURS, DETERMINISTIC)
    return replace(case, peer=f"{case.peer}:{backend}") if automatic and backend != "auto" else case


def _speedup(device, quick, own, sizes) -> Iterator[Case]:
    if quick:
        shape = sizes.of(Shape(1, 2, 1024, 64))
        chosen = own or [CAUSAL, Mask.of("random(0.25)"), Mask.of("causal & local(128)")]
    else:
        shape = sizes.of(Shape(1, 4, 8192, 64) if device == "cpu" else Shape(1, 16, 16384, 128))
        chosen = own or [CAUSAL, *masks.list_density_masks(shape.tokens)]
    dense = ("sdpa-flash",) if device == "cpu" or quick else DENSE_PEERS[device]
    # One dense call after the other: the timing after a row is the one before the next.
    for rival in (FULL, CAUSAL):
        replacing = [mask for mask in chosen if _dense_of(mask, shape.tokens) == rival]
        if replacing:
            yield from (Case(shape, rival, peer) for peer in (*dense, OURS))
        yield from (Case(shape, mask, OURS) for mask in replacing)


def _length(device, quick, own, sizes) -> Iterator[Case]:
    lengths: tuple[int, ...]
    flex: tuple[int, ...]
    if quick:
        lengths, most_math, flex = (256, 512, 1024), 512, ()
        heads = 2
    elif device == "cpu":
        lengths, most_math, flex = (512, 1024, 2048, 4096, 8192, 16384), 2048, ()
        heads = 4
    else:
        lengths, most_math, flex = tuple(128 << k for k in range(10)), 8192, (4096, 16384, 65536)
        heads = 16
    window = 128 if quick else 512 if device == "cpu" else 1024
    chosen = own or [Mask.of(f"causal & local({window})"), BUTTERFLY]
    if sizes.tokens:
        lengths = (*(tokens for tokens in lengths if tokens < sizes.tokens), sizes.tokens)
    for tokens in lengths:
        shape = replace(sizes.of(Shape(1, heads, tokens, 64)), tokens=tokens)
        if device == "cuda" or tokens <= 8192 or tokens == sizes.tokens:
            # Dense attention over 16,384 tokens would take most of a CPU's three minutes and say nothing new.
            for dense in dict.fromkeys(_dense_of(mask, tokens) for mask in chosen):
                yield from (Case(shape, dense, peer) for peer in (*DENSE_PEERS[device][:2], OURS))
        if tokens <= most_math:
            yield Case(shape, FULL, "sdpa-math")
        yield from (Case(shape, mask, OURS) for mask in chosen)
        if tokens in flex:
            yield Case(shape, chosen[0], "flex")


def _peers(device, quick, own, sizes) -> Iterator[Case]:
    for shape, mask in _peer_rows(device, quick, own, sizes):
        dense = mask.spec in ("full", "causal")
        yield Case(shape, mask, OURS)
        if device == "cuda":
            yield Case(shape, mask, f"{OURS}:triton")
        # On a CPU the compiler takes about 20 s for each mask, so two of them are enough.
        if not quick and (device == "cuda" or own or mask.spec != "causal"):
            yield Case(shape, mask, "flex")
        if device == "cuda" and not quick:
            yield Case(shape, mask, "flex-fa4")
        if device == "cuda" and (dense or str(mask.spec).startswith(("causal & local(", "causal & documents("))):
            yield from (Case(shape, mask, peer) for peer in ("fa3", "fa4"))
        if device == "cuda" and not quick and str(mask.spec).startswith(("from_blocks(", "butterfly", "random(")):
            yield Case(shape, mask, "cudnn-blocks")
        if dense:
            yield from (Case(shape, mask, peer) for peer in DENSE_PEERS[device][:2])


def _peer_rows(device, quick, own, sizes) -> list[tuple[Shape, Mask]]:
    if quick:
        shape = sizes.of(Shape(1, 2, 1024, 64))
        chosen = [
            CAUSAL,
            Mask.of("causal & local(128)"),
            BUTTERFLY,
            masks.equal_documents(shape.tokens),
            masks.windowed_with_globals(128, 128),
            masks.mixed_heads(shape.heads, window=128),
            masks.butterfly_of_half_blocks(),
        ]
        return [*((shape, mask) for mask in own or chosen), (replace(shape, kv_heads=1), CAUSAL)]
    if device == "cpu":
        return [(sizes.of(Shape(1, 4, 4096, 64)), mask) for mask in own or [CAUSAL, Mask.of("causal & local(512)"), BUTTERFLY]]
    shapes = (sizes.of(Shape(1, 16, 16384, 128)),) if sizes.given else PEER_SHAPES
    rows = [(shape, mask) for shape in shapes for mask in own or masks.list_peer_masks(shape)]
    return rows if own or sizes.given else [*rows, *PEER_ROWS]


def _small(device, quick, own, sizes) -> Iterator[CallCase]:
    lengths = (sizes.tokens,) if sizes.tokens else SMALL_LENGTHS[:1] if quick else SMALL_LENGTHS
    rivals = ("sdpa-flash",) if device == "cpu" else ("sdpa-cudnn", "sdpa-flash", "fa3", "fa4")
    for tokens in lengths:
        for mask in own or (FULL, CAUSAL):
            for graph in (False, True) if device == "cuda" else (False,):
                peers = (OURS, *rivals) if mask in (FULL, CAUSAL) else (OURS,)
                yield from (CallCase(sizes.of(Shape(1, 8, tokens, 128)), mask, peer, graph) for peer in peers)


def _deterministic(device, quick, own, sizes) -> Iterator[Case]:
    usual = Shape(1, 2, 1024, 64) if quick else Shape(1, 4, 4096, 64) if device == "cpu" else Shape(1, 16, 16384, 128)
    shape = sizes.of(usual)
    for mask in own or (FULL, CAUSAL):
        yield from (Case(shape, mask, peer) for peer in (DETERMINISTIC, OURS))
        if device == "cuda" and mask in (FULL, CAUSAL):
            yield from (Case(shape, mask, peer) for peer in ("fa3-deterministic", "fa3", "fa4-deterministic", "fa4"))


def _compile(device, quick, own, sizes) -> Iterator[CompileCase]:
    tokens = sizes.tokens or (4096 if quick else 65536)
    specs = (
        [str(mask.spec) for mask in own if not isinstance(mask.spec, tuple)]
        if own
        else [
            "causal",
            "local(1024)",
            "strided(22)",
            "fixed(22)",
            "butterfly",
            "power_of_two",
            "dilated(8, 4)",
            "global_tokens(64)",
            "sinks(4)",
            "random(0.02)",
            "prefix(1024)",
            f"documents({(*range(0, tokens, 1000), tokens)})",
            "block_diagonal(1024)",
            "bigbird",
            "longformer(512)",
            f"neighborhood(({isqrt(tokens)}, {isqrt(tokens)}), 13)",
            "causal & (local(1024) | butterfly)",
        ]
    )
    yield from (CompileCase(_short(spec), spec, tokens) for spec in specs)
    if not (quick or own or sizes.tokens):
        million = 1 << 20
        yield CompileCase("causal & (local(1024) | butterfly)", "causal & (local(1024) | butterfly)", million)
        bounds = tuple(range(0, million + 1, 4096))
        yield CompileCase("documents of 4096", f"documents({bounds})", million)


def _paper(device, quick, own, sizes) -> Iterator[PaperCase]:
    """Exact attention of each kind, and block-sparse attention under the paper's butterfly."""
    if sizes.given:
        raise ValueError(f"suite 'paper' has the paper's sizes; got {', '.join(sizes.given)}; leave them out, or name other suites")
    lengths = (128, 256) if quick else PAPER_LENGTHS[:4] if device == "cpu" else PAPER_LENGTHS
    batch, heads = (2, 2) if quick else (2, 8) if device == "cpu" else (16, 8)
    ours = [OURS, *(f"{OURS}:{name}" for name in ("triton", "torch") if device == "cuda")]
    dense = (*DENSE_PEERS[device], "sdpa-math", *["fa4"] * (device == "cuda"))
    flex = ["flex"] * (device == "cuda")  # on a CPU it has no backward pass
    for dropout in (0.0, PAPER_DROPOUT):
        for padded in (False, True):
            for tokens in lengths:
                shape = Shape(batch, heads, tokens, 64)
                for mask in own or (FULL, BUTTERFLY):
                    peers = (*ours, *dense, *flex) if mask == FULL else (*ours, *flex)
                    yield from (PaperCase(shape, mask, peer, dropout, padded) for peer in peers)


def _short(spec: str) -> str:
    return "documents of 1000" if spec.startswith("documents") else spec


_MAKERS = dict(zip(SUITES, (_speedup, _length, _peers, _small, _deterministic, _compile, _paper), strict=True))
