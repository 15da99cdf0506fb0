"""Fills the tables of README and docs from results: what stands between ``<!-- table KIND FILE -->`` and ``<!-- end of table -->``.

    python -m sparse_flash.benchmarks.pages    # in a checkout, after a results file, or the FILE that a page names, has changed

KIND: "peers", all peers of ``bench --suite peers``; "best", the fastest of them; "calls", what calls cost, of benchmarks/calls.py.
FILE: a path from the top of the checkout. A test compares the pages with the files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from .report.format import number
from .report.peer_tables import tables

ROOT = Path(__file__).resolve().parents[1]
TABLE = re.compile(r"(<!-- table (\w+) (\S+) -->\n\n).*?(\n<!-- end of table -->)", re.S)
_NAMES = {
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "flex-fa4": "FlexAttention on FlashAttention-4",
    "sdpa-cudnn": "cuDNN",
    "cudnn-blocks": "cuDNN's blocks",
}


def fill(text: str) -> str:
    """Returns a page's text with its tables made again."""
    return TABLE.sub(lambda found: found[1] + _KINDS[found[2]](json.loads((ROOT / found[3]).read_text())) + found[4], text)


def pages() -> list[Path]:
    """The pages that may have such tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _peers(data: dict) -> str:
    names, rows = _rows_of_peers(data)
    short = [_NAMES.get(name, name).replace("FlashAttention-", "FA").replace("FlexAttention", "Flex") for name in names]
    head = ["shape", "mask", "sparse_flash", "/ best peer", *short]
    return _markdown(
        head, [[*facts, ours, f"**{ratio}**", *(cell or "-" for cell in theirs)] for facts, ours, ratio, theirs in rows]
    )


def _best(data: dict) -> str:
    names, rows = _rows_of_peers(data)
    lines = []
    for facts, ours, ratio, theirs in rows:
        speeds = {_NAMES.get(name, name): cell.split(" / ") for name, cell in zip(names, theirs, strict=True) if "/" in cell}
        best = [max((float(of[step]), name, of[step]) for name, of in speeds.items() if of[step] != "-") for step in (0, 1)]
        said = [f"{name}: {figure}" for _, name, figure in best]
        if best[0][1] == best[1][1]:
            said[1] = best[1][2]
        lines.append([*facts, ours, " / ".join(said), f"**{ratio}**"])
    return _markdown(["shape", "mask", "sparse_flash", "best peer", "/ best peer"], lines)


def _rows_of_peers(data: dict) -> tuple[list[str], list[tuple[list[str], str, str, list[str]]]]:
    """Returns (the peers, for each row: shape and mask, our figures, the ratios, the peers' figures). Raises ValueError for results
    that are wrong or not to be relied on, which no page shows."""
    table = tables(data)[0]
    first, last = table.columns.index("sparse_flash"), table.columns.index("spread")
    rows = []
    for cells in table.rows:
        row = dict(zip(table.columns, cells, strict=True))
        if row["correct"] != "yes" or "?" in "".join(cells):
            raise ValueError(f"{row['shape']} | {row['mask']} must be right and reliable; got {cells}; run bench --retry")
        rows.append((cells[:2], row["sparse_flash"], row["x best peer"], cells[first + 1 : last]))
    return table.columns[first + 1 : last], rows


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


_KINDS = {"peers": _peers, "best": _best, "calls": _calls}


def main() -> None:
    for path in pages():
        if (text := path.read_text()) != (filled := fill(text)):
            path.write_text(filled)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
