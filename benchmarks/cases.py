"""What is measured: plain data, and the suites that choose it.

speedup   speed-up against density, for the patterns      arXiv:2205.14135, Fig. 2 right
length    time and memory against length                  arXiv:2205.14135, Fig. 3
peers     a few masks at large shapes, beside FlexAttention and dense attention
compile   time and memory of compiling masks
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import isqrt

OURS = "sparse_flash"
SUITES = ("speedup", "length", "peers", "compile")
DENSE_PEERS = {"cpu": ("sdpa-flash",), "cuda": ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient")}


@dataclass(frozen=True)
class Shape:
    """tokens: queries and keys. Tensors are (batch, heads, tokens, head_dim)."""

    batch: int
    heads: int
    tokens: int
    head_dim: int

    def __str__(self):
        return f"B{self.batch} H{self.heads} N{self.tokens} D{self.head_dim}"


@dataclass(frozen=True)
class Case:
    """Attention under one mask, computed by one peer. spec: the mask's spec text. label: what tables call the mask."""

    shape: Shape
    label: str
    spec: str
    peer: str

    @property
    def key(self) -> str:
        return f"{self.shape} | {self.label} | {self.peer}"

    def as_data(self) -> dict:
        return {"kind": "attention", **asdict(self)}


@dataclass(frozen=True)
class CompileCase:
    """Compiling one mask for ``tokens`` queries and keys in blocks of ``block_size``."""

    label: str
    spec: str
    tokens: int
    block_size: int = 128

    @property
    def key(self) -> str:
        return f"compile | N{self.tokens} | {self.label}"

    def as_data(self) -> dict:
        return {"kind": "compile", **asdict(self)}


@dataclass(frozen=True)
class Mask:
    label: str
    spec: str


def choose(
    suites: Iterable[str], device: str, quick: bool = False, specs: Iterable[str] = (), backend: str = "auto"
) -> dict[str, list[Case | CompileCase]]:
    """The cases of each suite. device: "cpu" or "cuda". quick: a few small cases, in seconds. specs: masks to measure
    instead of the suite's own. backend: the back end of sparse_flash. A case may belong to several suites."""
    makers = {"speedup": _speedup, "length": _length, "peers": _peers, "compile": _compile}
    own = [Mask(spec, spec) for spec in specs]
    chosen = {suite: list(dict.fromkeys(makers[suite](device, quick, own))) for suite in suites}
    if backend != "auto":
        chosen = {suite: [_with_backend(case, backend) for case in cases] for suite, cases in chosen.items()}
    return chosen


def _with_backend(case, backend: str):
    if isinstance(case, Case) and case.peer == OURS:
        return Case(case.shape, case.label, case.spec, f"{OURS}:{backend}")
    return case


def windowed(tokens: int, share: int) -> int:
    """A window of 1 / share of the tokens, at least a block."""
    return max(tokens // share, 128)


def patterns(tokens: int) -> list[Mask]:
    """Masks of many densities, each of its own kind, sparsest last within a kind."""
    units = tokens // 128
    specs = [
        "random(0.5)",
        "random(0.25)",
        "random(0.1)",
        f"local({windowed(tokens, 8)})",
        f"causal & local({windowed(tokens, 16)})",
        f"strided({max(isqrt(units), 1)})",
        f"fixed({max(isqrt(units), 1)})",
        "butterfly",
        "causal & power_of_two",
        "bigbird",
        f"longformer({windowed(tokens, 32)}, tokens=64)",
        f"causal & block_diagonal({windowed(tokens, 8)})",
        f"causal & (local({windowed(tokens, 16)}) | butterfly)",
    ]
    return [Mask(spec, spec) for spec in specs]


FULL, CAUSAL = Mask("full", "full"), Mask("causal", "causal")


def _speedup(device, quick, own):
    if quick:
        shape = Shape(1, 2, 1024, 64)
        masks = own or [CAUSAL, Mask("random(0.25)", "random(0.25)"), Mask("causal & local(128)", "causal & local(128)")]
    else:
        shape = Shape(1, 4, 8192, 64) if device == "cpu" else Shape(1, 16, 16384, 128)
        masks = own or [CAUSAL, *patterns(shape.tokens)]
    dense = ("sdpa-flash",) if device == "cpu" or quick else DENSE_PEERS[device]
    yield from (Case(shape, *_pair(FULL), peer) for peer in (*dense, OURS))
    yield Case(shape, *_pair(CAUSAL), "sdpa-flash")
    yield from (Case(shape, *_pair(mask), OURS) for mask in masks)


def _length(device, quick, own):
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
    masks = own or [Mask(f"causal & local({window})", f"causal & local({window})"), Mask("butterfly", "butterfly")]
    for tokens in lengths:
        shape = Shape(1, heads, tokens, 64)
        if device == "cuda" or tokens <= 8192:
            # Dense attention of 16,384 tokens would take most of a CPU's three minutes and say nothing new.
            yield from (Case(shape, *_pair(FULL), peer) for peer in (*DENSE_PEERS[device][:2], OURS))
        if tokens <= most_math:
            yield Case(shape, *_pair(FULL), "sdpa-math")
        yield from (Case(shape, *_pair(mask), OURS) for mask in masks)
        if tokens in flex:
            yield Case(shape, *_pair(masks[0]), "flex")


def _peers(device, quick, own):
    if quick or device == "cpu":
        shape = Shape(1, 2, 1024, 64) if quick else Shape(1, 4, 4096, 64)
        window = 128 if quick else 512
        masks = own or [CAUSAL, Mask(f"causal & local({window})", f"causal & local({window})"), Mask("butterfly", "butterfly")]
        rows = [(shape, mask) for mask in masks]
    else:
        rows = [(shape, mask) for shape in PEER_SHAPES for mask in (own or peer_masks(shape))]
    for shape, mask in rows:
        yield Case(shape, *_pair(mask), OURS)
        if mask.spec in ("full", "causal"):
            yield from (Case(shape, *_pair(mask), peer) for peer in DENSE_PEERS[device][:2])
        if device == "cuda" and (mask.spec in ("full", "causal") or mask.spec.startswith("causal & local(")):
            yield Case(shape, *_pair(mask), "fa4")
        # On a CPU the compiler takes about 20 s for each mask, so that two of them are enough.
        if not quick and (device == "cuda" or own or mask.spec != "causal"):
            yield Case(shape, *_pair(mask), "flex")


PEER_SHAPES = (Shape(4, 16, 4096, 128), Shape(1, 16, 16384, 128), Shape(1, 8, 65536, 128), Shape(4, 16, 16384, 64))


def peer_masks(shape: Shape) -> list[Mask]:
    """The six masks at the large shapes, in full where a shape is the main one and a choice of them elsewhere."""
    tokens = shape.tokens
    length = max(tokens // 7, 1)
    # Token t is of document t // length: seven documents of that length, and one more of the few tokens that are left.
    bounds = tuple(dict.fromkeys([*range(0, tokens, length), tokens]))
    masks = {
        "full": "full",
        "causal": "causal",
        "causal & window 1024": "causal & local(1024)",
        "butterfly": "butterfly",
        "strided": f"strided({isqrt(tokens // 128)})",
        "causal in 7 documents": f"causal & documents({bounds})",
    }
    kept = {
        4096: ("full", "causal"),
        65536: ("full", "causal", "causal & window 1024", "butterfly", "strided"),
    }.get(tokens, tuple(masks))
    if shape.head_dim == 64:
        kept = ("full", "causal", "butterfly")
    return [Mask(label, masks[label]) for label in kept]


def _compile(device, quick, own):
    tokens = 4096 if quick else 65536
    specs = [mask.spec for mask in own] or [
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
        f"documents({tuple(range(0, tokens + 1, 1000))})",
        "block_diagonal(1024)",
        "bigbird",
        "longformer(512)",
        f"neighborhood(({isqrt(tokens)}, {isqrt(tokens)}), 13)",
        "causal & (local(1024) | butterfly)",
    ]
    yield from (CompileCase(_short(spec), spec, tokens) for spec in specs)
    if not (quick or own):
        million = 1 << 20
        yield CompileCase("causal & (local(1024) | butterfly)", "causal & (local(1024) | butterfly)", million)
        bounds = tuple(range(0, million + 1, 4096))
        yield CompileCase("documents of 4096", f"documents({bounds})", million)


def _short(spec: str) -> str:
    return "documents of 1000" if spec.startswith("documents") else spec


def _pair(mask: Mask) -> tuple[str, str]:
    return mask.label, mask.spec
