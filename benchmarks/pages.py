"""Fills the tables of README and docs from results: what stands between ``<!-- table KIND FILE -->`` and ``<!-- end of table -->``.

    python -m sparse_flash.benchmarks.pages    # in a checkout, after a results file, or the FILE that a page names, has changed

KIND: "peers", all peers of ``bench --suite peers``; "ranges", ratios to the fastest of them, for rows of three FILEs or more;
"calls", what calls cost. FILE: a path from the top of the checkout, the newest last, whose rows replace those of the others. A test
compares the pages with the files.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

from .report.format import number
from .report.peer_tables import tables
from .workload.cases import OURS, Shape

ROOT = Path(__file__).resolve().parents[1]
TABLE = re.compile(r"(<!-- table (\w+) (\S+(?: \S+)*?) -->\n\n).*?(\n<!-- end of table -->)", re.S)
_NAMES = {"fa3": "FA3", "fa4": "FA4", "flex-fa4": "Flex on FA4", "sdpa-cudnn": "cuDNN"}
_NAMES |= {"cudnn-blocks": "cuDNN's blocks", "cudnn-flex": "cuDNN flex"}


def fill(text: str) -> str:
    """Returns a page's text with its tables made again."""

    def made(found: re.Match) -> str:
        return _KINDS[found[2]](*(json.loads((ROOT / file).read_text()) for file in found[3].split()))

    return TABLE.sub(lambda found: found[1] + made(found) + found[4], text)


def pages() -> list[Path]:
    """The pages that may have such tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _peers(*runs: dict) -> str:
    """Raises ValueError for results that are wrong or not to be relied on, which no page shows."""
    newest: dict[str, dict] = {}
    for run in runs:
        own = {key.rpartition(" | ")[0] for key in run["cases"]}
        newest = {key: case for key, case in newest.items() if key.rpartition(" | ")[0] not in own} | run["cases"]
    table = tables(runs[-1] | {"suites": {"peers": list(newest)}, "cases": newest})[0]
    first, last = table.columns.index("sparse_flash"), table.columns.index("spread")
    peers = [_NAMES.get(name, name) for name in table.columns[first + 1 : last]]
    rows = []
    for cells in table.rows:
        row = dict(zip(table.columns, cells, strict=True))
        if row["correct"] != "yes" or "?" in "".join(cells):
            raise ValueError(f"{row['shape']} | {row['mask']} must be right and reliable; got {cells}; run bench --retry")
        theirs = (cell or "-" for cell in cells[first + 1 : last])
        rows.append([*cells[:2], row["sparse_flash"], f"**{row['x best peer']}**", *theirs])
    return _markdown(["shape", "mask", "sparse_flash", "/ best peer", *peers], rows)


def _ranges(*runs: dict) -> str:
    measured = [_ratios(run) for run in runs]
    newest = {row: ours for of_run in measured for row, (ours, _) in of_run.items()}
    lines = []
    for row, ours in newest.items():
        ratios = [of_run[row][1] for of_run in measured if row in of_run]
        if len(ratios) >= 3:
            spans = (f"{min(ratio):.2f} to {max(ratio):.2f}" for ratio in zip(*ratios, strict=True))
            lines.append([*row, *map(number, ours), *spans])
    return _markdown(["shape", "mask", "forward, ms", "backward, ms", "/ best peer, forward", "/ best peer, backward"], lines)


def _ratios(run: dict) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """Returns (our milliseconds; the fastest peer's over ours) of each row that has peers, forward and backward."""
    times: dict[tuple[str, str], tuple[list, list]] = {}
    for one in run.get("rows") or [case["case"] | case["result"] for case in run["cases"].values()]:
        if "backward_ms" in one and one.get("correct", True):
            of_row = times.setdefault((str(Shape(**one["shape"])), one["label"]), ([], []))
            of_row[one["peer"] != OURS].append((one["forward_ms"], one["backward_ms"]))
    found = {row: [[min(each) for each in zip(*side)] for side in of_row] for row, of_row in times.items() if all(of_row)}
    return {row: (ours, [peer / mine for peer, mine in zip(theirs, ours)]) for row, (ours, theirs) in found.items()}


def _calls(data: dict) -> str:
    costs: dict[tuple[str, int], dict[bool, dict]] = {}
    for row in data["rows"]:
        costs.setdefault((row["call"], row["tokens"]), {})[row["gradients"]] = row
    lines = []
    for (call, tokens), passes in costs.items():
        forward, both = passes[False], passes.get(True, {})
        cells = [forward["host_us"], forward["host_over_pytorch"], forward.get("graph_us")]
        cells += [both.get("host_us"), both.get("host_over_pytorch")]
        lines.append([call, f"{tokens:,}", *("-" if figure is None else number(figure) for figure in cells)])
    return _markdown(["call", "tokens", "forward: host", "x PyTorch's", "on the GPU", "both: host", "x PyTorch's"], lines)


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = (columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


_KINDS: dict[str, Callable[..., str]] = {"peers": _peers, "ranges": _ranges, "calls": _calls}


def main() -> None:
    for path in pages():
        if (text := path.read_text()) != (filled := fill(text)):
            path.write_text(filled)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
