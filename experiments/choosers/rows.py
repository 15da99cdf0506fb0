"""The rows that are compared. A row is one expression for all layers, except some dense ones."""

from dataclasses import dataclass

from .. import row_files

# The choosers that are compared under each rule. true_mass says what an exact choice loses. Few rows have it, because they take
# eight times as long as others.
COMPARED = {
    "budget": (
        *("sampled(8)", "sampled(16)", "sampled(4)", "sampled(32)", "antidiagonal(8)", "sub_blocks(16)", "pooled", "pooled_keys"),
        "true_mass(reduce='max')",
    ),
    "mass": ("sampled(8)", "sampled(16)", "antidiagonal(8)", "pooled", "last_queries(64)"),
    "floor": ("sampled(8)", "sampled(16)"),
    "keep": ("sampled(8)", "pooled"),
    "relative": ("sampled(8)",),
}
# Choosers and rules that the package had at commit 628d6506 and has no more. Their rows are kept as they were measured.
GONE = "sub_blocks(16)", "pooled_keys", "last_queries(64)", "sampled(8, share_group=True)", "relative"
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


def rows(recorded: bool = False) -> dict[str, Row]:
    """All rows by name; with ``recorded``, also the rows of choosers that are gone."""
    made = [Row("dense"), *(Row("window", "local", share) for share in SHARES)]
    made += [Row(chooser, rule, share) for rule, choosers in COMPARED.items() for chooser in choosers for share in SHARES]
    made += [Row(f"sampled({queries})", "budget", share, block=128) for queries in (8, 16) for share in SHARES]
    made += [Row("sampled(16)", "mass", share, block=128) for share in SHARES[:2]]
    made += [Row("sampled(8)", "budget", 0.15, beside=one) for one in ("", "sinks(64)", "sinks(64) | local(256)")]
    made += [Row(chooser, "budget", 0.15) for chooser in ("sampled(8, share_group=True)", "true_mass")]
    made += [Row("sampled(8)", "budget", 0.15, dense=2), Row("sampled(8)", "floor", 0.15, by_head=True)]
    return {row.name: row for row in made if recorded or not {row.chooser, row.rule} & {*GONE}}


def select_rows(patterns: list[str]) -> dict[str, Row]:
    """The rows whose names fit one of the patterns, or begin with its words. See ``row_files.select_rows``."""
    return row_files.select_rows(rows(), patterns, ("", " *", ",*"))
