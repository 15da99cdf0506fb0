"""Cases, as plain data."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace

from sparse_flash.core.variant import check_counts
from sparse_flash.masks.pattern import Pattern
from sparse_flash.tools.explain import forward_flops

OURS = "sparse_flash"
_LONG_SPEC = 1000  # characters; a map of 512 x 512 blocks has 262,655


@dataclass(frozen=True)
class Shape:
    """tokens: queries and keys. kv_heads: heads of keys and values, None for as many as query heads. v_head_dim: of values, None
    for that of queries and keys. Tensors are (batch, heads, tokens, head_dim)."""

    batch: int
    heads: int
    tokens: int
    head_dim: int
    kv_heads: int | None = None
    v_head_dim: int | None = None

    def __str__(self):
        heads = f"{self.heads}" if self.kv_heads is None else f"{self.heads}/{self.kv_heads}"
        dims = f"{self.head_dim}" if self.v_head_dim is None else f"{self.head_dim}/{self.v_head_dim}"
        return f"B{self.batch} H{heads} N{self.tokens} D{dims}"

    @property
    def flops(self) -> tuple[int, int]:
        """Operations for a pair of a query and a key, in the forward pass (two products) and in the backward pass (five: the score,
        recomputed, the gradient of its weight, and the terms of dq, dk and dv)."""
        qk, v = self.head_dim, self.v_head_dim or self.head_dim
        return forward_flops(qk, v), 2 * (3 * qk + 2 * v)


@dataclass(frozen=True)
class CallSizes:
    """Holds what a user asks of the measured calls; None keeps the suites' own value. dtype: PyTorch's name of it."""

    tokens: int | None = None
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    dtype: str | None = None

    def __post_init__(self):
        check_counts(**{name: size for name, size in self.given.items() if name != "dtype"})

    @property
    def given(self) -> dict[str, int | str]:
        return {name: size for name, size in asdict(self).items() if size is not None}

    def of(self, shape: Shape) -> Shape:
        """The shape with these sizes. Raises ValueError if its heads are no multiple of kv_heads."""
        asked = replace(shape, **{name: size for name, size in self.given.items() if name != "dtype"})  # type: ignore[arg-type]
        if asked.kv_heads and asked.heads % asked.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads; got {asked.heads} and {asked.kv_heads}")
        return asked


USUAL_SIZES = CallSizes()


@dataclass(frozen=True)
class Mask:
    """label: what tables call it. spec: its spec text or pattern, or one for each query head. block_size: of its table, tokens.
    change: of scores or of the layout of tokens, one of ``changes.CHANGES``; empty for none."""

    label: str
    spec: str | Pattern | tuple[str | Pattern, ...]
    block_size: int = 128
    change: str = ""

    @classmethod
    def of(cls, spec: str | Pattern | tuple[str | Pattern, ...]) -> Mask:
        """A mask that tables call by its spec text."""
        return cls("; ".join(map(str, spec)) if isinstance(spec, tuple) else str(spec), spec)


@dataclass(frozen=True)
class Case:
    """Attention under one mask, computed by one peer. kind: "attention", or "paper" for a cell of the tables of arXiv:2205.14135,
    App. E.6.
    dropout_p: of the attention probabilities. padded: each sequence of the batch has keys up to its own length
    (``problem.padded_lengths``). dtype: PyTorch's name of it; None: the device's usual one."""

    shape: Shape
    mask: Mask
    peer: str
    kind: str = "attention"
    dropout_p: float = 0.0
    padded: bool = False
    dtype: str | None = None

    @property
    def label(self) -> str:
        return self.mask.label

    @property
    def tokens(self) -> int:
        return self.shape.tokens

    @property
    def how(self) -> str:
        if self.kind != "paper":
            return ""
        return ", ".join([f"dropout {self.dropout_p}"] * bool(self.dropout_p) + ["padded"] * self.padded) or "plain"

    @property
    def key(self) -> str:
        key = f"{self.shape} | {self.label} | {self.peer}"
        return f"{self.kind} | {key} | {self.how}" if self.how else key

    def as_data(self) -> dict:
        mask = {"label": self.mask.label, "spec": _storable(self.mask.spec), "block_size": self.mask.block_size}
        mask |= {"change": self.mask.change} if self.mask.change else {}
        return {"kind": self.kind, "shape": asdict(self.shape), **mask, "peer": self.peer, "how": self.how}


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


def _storable(spec: str | Pattern | tuple[str | Pattern, ...]) -> str | list[str]:
    """The form of a spec in the results file: a digest distinguishes maps of blocks."""
    return [_short(str(head)) for head in spec] if isinstance(spec, tuple) else _short(str(spec))


def _short(spec: str) -> str:
    if len(spec) <= _LONG_SPEC:
        return spec
    return f"{spec[:40]}... ({len(spec):,} characters, sha256 {hashlib.sha256(spec.encode()).hexdigest()[:12]})"
