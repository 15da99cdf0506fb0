"""The rows that are compared. A row is one expression for all layers, except some dense ones."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from sparse_flash.masks.chooser import RULES

CHOOSERS = (
    *("pooled", "pooled_keys", "sub_blocks(16)", "antidiagonal(8)", "sampled(8)", "sampled(4)", "last_queries(64)"),
    *("true_mass", "true_mass(reduce='max')"),
)
SHARES = (0.1, 0.15, 0.25)
BESIDE = "sinks(64) | local(64)"  # the first block, and the one before a row's own, which is kept in any case


@dataclass(frozen=True)
class Row:
    """chooser: its spec text without rule, or "dense" or "window". rule: of the chooser; "local" for a window, whose number is in
    tokens. share: of the causal blocks, what the sparse layers keep of tuning texts. beside: patterns that are kept in any case.
    dense: how many layers at the bottom are dense. by_head: each head of each layer keeps a fixed share of a row's blocks, the one
    that the rule gives it in tuning texts. block: tokens on a side of a block."""

    chooser: str
    rule: str = ""
    share: float = 1.0
    beside: str = BESIDE
    dense: int = 0
    by_head: bool = False
    block: int = 64

    @property
    def name(self) -> str:
        parts = [f"{self.chooser} {self.rule} {self.share:g}" if self.rule else self.chooser]
        parts += [f"beside {self.beside or 'nothing'}"] * (self.beside != BESIDE)
        parts += [f"{self.dense} dense layers"] * bool(self.dense)
        parts += ["by head"] * self.by_head + [f"blocks of {self.block}"] * (self.block != 64)
        return ", ".join(parts)

    def number(self, share: float, length: int) -> float:
        """The rule's number from one between 0 and 1: itself, rounded, or for a window tokens of ``length``."""
        return max(1, round(share * length / self.block)) * self.block if self.rule == "local" else float(f"{share:.4g}")

    def spec(self, number: float) -> str:
        if self.rule == "local":
            return f"causal & (sinks(64) | local({number}))"
        return self._spec(self.rule, number) if self.rule else "causal"

    def spec_by_head(self, shares: list[float]) -> str:
        return f"per_head([{', '.join(self._spec('keep', share) for share in shares)}])"

    def _spec(self, rule: str, number: float) -> str:
        name, _, given = self.chooser.removesuffix(")").partition("(")
        arguments = ", ".join(filter(None, (given, f"{rule}={number!r}", f"block={self.block}")))
        return f"causal & ({' | '.join(filter(None, (f'{name}({arguments})', self.beside)))})"


def rows() -> dict[str, Row]:
    """All rows by name."""
    made = [Row("dense"), *(Row("window", "local", share) for share in SHARES)]
    made += [Row(chooser, rule, share) for share in SHARES for rule in RULES for chooser in CHOOSERS]
    made += [Row("sampled(8)", "floor", share, by_head=True) for share in SHARES]
    for rule in ("floor", "budget"):
        for share in SHARES[:2]:
            beside = "", "sinks(64)", "local(64)", "sinks(64) | local(256)"
            made += [Row("sampled(8)", rule, share, beside=one) for one in beside]
            made += [Row(chooser, rule, share, dense=2) for chooser in ("sub_blocks(16)", "sampled(8)")]
            made += [Row(f"two_stages({candidates}, reduce='max')", rule, share) for candidates in (0.2, 0.4)]
        others = "sampled(8, reduce='mean')", "sampled(8, share_group=True)", "antidiagonal(8, reduce='max')"
        made += [*(Row(chooser, rule, 0.15) for chooser in others), Row("sampled(8)", rule, 0.15, block=128)]
    return {row.name: row for row in made}


def chosen(patterns: list[str]) -> dict[str, Row]:
    """The rows whose names are one of the patterns or begin with its words, * standing for anything; all for no pattern. Raises
    ValueError for a pattern that fits no name."""

    def fits(name: str, pattern: str) -> bool:
        return any(fnmatchcase(name, pattern + more) for more in ("", " *", ",*"))

    for pattern in patterns:
        if not any(fits(name, pattern) for name in rows()):
            raise ValueError(f"--rows must be names that the command rows prints, or their first words; got {pattern!r}")
    return {name: row for name, row in rows().items() if not patterns or any(fits(name, one) for one in patterns)}
