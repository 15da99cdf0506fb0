"""Tables in Markdown: one of all rows, and the tables of docs/guides/choosers.md."""

import math
import re
from collections.abc import Iterable
from statistics import mean

from ..row_files import dense_row, markdown_table, rows_by_name
from .report import at_longest, loss_above_dense
from .rows import SHARES, Row

TEXTS = "english", "python"  # the guide's losses

_CHOOSERS = {
    "sampled(32)": ["budget"],
    "sampled(16)": ["mass", "budget", "floor"],
    "sampled(8)": ["mass", "budget"],
    "sampled(4)": ["budget"],
    "antidiagonal(8)": ["budget", "mass"],
    "sub_blocks(16)": ["budget"],
    "pooled_keys": ["budget"],
    "pooled": ["budget", "mass", "keep"],
    "last_queries(64)": ["mass"],
    "window": ["local"],
    "true_mass(reduce='max')": ["budget"],
}
_BY_LENGTH = (
    *(Row("sampled(16)", rule, share) for rule in ("mass", "budget") for share in SHARES),
    Row("sampled(16)", "floor", 0.15),
)
_BESIDE = {
    "`sampled(8, budget=…, block=64)` beside `sinks(64)` and `local(64)`": Row("sampled(8)", "budget", 0.15),
    "beside `sinks(64)` alone": Row("sampled(8)", "budget", 0.15, beside="sinks(64)"),
    "beside `sinks(64)` and `local(256)`": Row("sampled(8)", "budget", 0.15, beside="sinks(64) | local(256)"),
    "beside nothing": Row("sampled(8)", "budget", 0.15, beside=""),
    "blocks of 128": Row("sampled(8)", "budget", 0.15, block=128),
    "blocks of 128, `sampled(16)`": Row("sampled(16)", "budget", 0.15, block=128),
    "blocks of 128, `sampled(16)`, budget for 0.25": Row("sampled(16)", "budget", 0.25, block=128),
    "the first two layers dense": Row("sampled(8)", "budget", 0.15, dense=2),
    "a fixed share for each head": Row("sampled(8)", "floor", 0.15, by_head=True),
}
_MISLED = (
    *(Row("sampled(16)", rule, 0.15) for rule in ("mass", "budget", "floor")),
    *(Row("last_queries(64)", "mass", 0.25), Row("window", "local", 0.25)),
)


def full_table(results: dict, names: Iterable[str]) -> str:
    """Needles by length, all else at the greatest length. Dense attention has its loss, other rows how far they are above it, with
    the standard error over windows of all kinds."""
    dense, names = dense_row(results), set(names)
    kinds, lengths = list(at_longest(dense)["loss"]), _lengths(dense)
    made = [["row", "density", "recall", "error", *kinds, "all", "digits", *(f"needles {int(length):,}" for length in lengths)]]
    for result in (one for one in results["rows"] if one["row"] in names):
        found = at_longest(result)
        losses = [*(f"{mean(found['loss'][kind]):.3f}" for kind in kinds), ""]
        if result is not dense:
            of_all = "{:+.3f} ± {:.3f}".format(*loss_above_dense(result, dense, kinds))
            losses = [*(f"{loss_above_dense(result, dense, [kind])[0]:+.3f}" for kind in kinds), of_all]
        kept = [f"{found[name]:.3f}" for name in ("density", "recall", "error")]
        needles = [f"{result['lengths'][length]['needles']:.1%}" for length in lengths]
        made.append([result["row"].replace("|", "\\|"), *kept, *losses, f"{found['digits']:.1%}", *needles])
    return markdown_table(made)


def guide_tables(results: dict) -> list[str]:
    """The guide's tables: choosers and rules, lengths, settings, and what recall and error say. Rows without results are left out;
    single cells are empty."""
    dense, by_name = dense_row(results), rows_by_name(results)
    lengths, questions = _lengths(dense), results["setup"]["needles"]

    def result_of(row: Row) -> dict | None:
        return by_name.get(row.name)

    def loss(result: dict | None, length: str | None = None, digits: int = 3) -> str:
        return f"{loss_above_dense(result, dense, TEXTS, length)[0]:+.{digits}f}" if result else ""

    def needles(result: dict | None, length: str) -> str:
        if result is None:
            return ""
        found = result["lengths"][length]["needles"]
        return f"{100 * found:.1f} ± {100 * math.sqrt(found * (1 - found) / questions):.1f}"

    choosers = [["chooser", "rule", *(f"loss at {share:.2f}" for share in SHARES), *(f"needles, {int(one):,}" for one in lengths)]]
    choosers.append(["dense", "", *["0"] * len(SHARES), *(needles(dense, length) for length in lengths)])
    for chooser, rule in ((chooser, rule) for chooser, rules in _CHOOSERS.items() for rule in rules):
        of_shares = [result_of(Row(chooser, rule, share)) for share in SHARES]
        if any(of_shares):
            middle = of_shares[SHARES.index(0.15)]
            name, of_window = ("a window", "") if chooser == "window" else (f"`{chooser}`", rule)
            choosers.append([name, of_window, *map(loss, of_shares), *(needles(middle, length) for length in lengths)])

    by_length = [["rule", *(f"{int(length):,} tokens" for length in lengths)]]
    for row in _BY_LENGTH:
        if result := result_of(row):
            cells = [f"{loss(result, one)}, {result['lengths'][one]['needles']:.1%}" for one in lengths]
            kept = [f"{result['lengths'][one]['density']:.2f}: {cell}" for one, cell in zip(lengths, cells, strict=True)]
            number = next(map(float, re.findall(rf"\b{row.rule}=([\d.e-]+)", result["spec"])))
            by_length.append([f"`{row.chooser[:-1]}, {row.rule}={number:.3g})`", *kept])

    settings = [["setting", "kept", "loss", "needles"]]
    settings += [
        [said, f"{at_longest(result)['density']:.2f}", loss(result), needles(result, lengths[-1])]
        for said, row in _BESIDE.items()
        if (result := result_of(row))
    ]

    misled = [["row", "kept", "recall", "error", "loss", "needles"]]
    for row in _MISLED:
        if result := result_of(row):
            found = at_longest(result)
            name = "a window" if row.chooser == "window" else f"`{row.chooser}`, {row.rule}"
            kept = [f"{found[key]:.{digits}f}" for key, digits in (("density", 2), ("recall", 3), ("error", 3))]
            misled.append([name, *kept, loss(result), needles(result, lengths[-1])])
    return [markdown_table(made) for made in (choosers, by_length, settings, misled)]


def _lengths(dense: dict) -> list[str]:
    return sorted(dense["lengths"], key=int)
