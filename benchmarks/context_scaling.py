"""Simulates where context parallelism stops scaling, mask by mask; nothing runs on ranks.

    python -m sparse_flash.benchmarks.context_scaling --out runs/context-scaling

Assigns the tokens of one sequence for each mask and number of ranks, and estimates the time of a forward pass as plans do when they
choose: from visited blocks, bytes, the rate of products and the rate of links. Up to ``--node`` ranks have ``--link-rate``; beyond,
all bytes have ``--between-rate``, except heads exchanged within a node. It knows no latency, no other traffic and no other work.
Writes context-scaling.json, .png and -dark.png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import sparse_flash as sf
from sparse_flash.kernels.cost.choices import DENSE_BLOCK, HEAD_DIM, block_times
from sparse_flash.parallel.costs import ALONE, LINK_RATE, Node, SequenceSizes
from sparse_flash.parallel.explanation import explained

from .report.plots import draw_context_scaling

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SCALES = 0.5  # of linear: below it a mask has stopped scaling
_BLOCK = 128
# ConnectX-7 at 400 Gb/s, one for each GPU, by its data sheet.
_BETWEEN_RATE = 50e9
_FLOP_RATE = 4 * HEAD_DIM * DENSE_BLOCK**2 / (1e-6 * block_times(DENSE_BLOCK, False).full)  # of full blocks, forward


def masks(tokens: int) -> dict[str, sf.Pattern]:
    """Returns the simulated masks. Documents have lengths of a log-normal distribution, median 4,096 tokens, sigma 1.3."""
    drawn = np.random.default_rng(0).lognormal(np.log(4096), 1.3, max(16, tokens // 1024)).astype(int).clip(16)
    ends = np.cumsum(drawn)
    apart = sf.documents((0, *ends[ends < tokens].tolist(), tokens))
    texts = ("causal", "causal & local(4096)", "causal & (local(1024) | power_of_two)", "butterfly", "bigbird")
    return {text: sf.parse(text) for text in texts} | {"causal & documents": sf.causal() & apart}


def simulated(
    mask: sf.BlockMask,
    heads: int,
    kv_heads: int,
    ranks: list[int],
    link_rate: float,
    between_rate: float,
    flop_rate: float,
    node: int,
) -> list[dict]:
    """A row for each number of ranks. seconds: of the slowest rank, forward, by the faster of a plan's strategies; ring: as a ring
    would take. scaling: of linear, by the first row. received: the most bytes that a
    rank gets. balance: the most work of a rank / the mean."""
    sizes = SequenceSizes(mask.q_len, mask.block_size, heads, kv_heads)
    # Estimates are for _FLOP_RATE; another rate changes all of a pass but what travels.
    slower = _FLOP_RATE / flop_rate
    rows: list[dict] = []
    for count in ranks:
        near = Node(node, link_rate * slower) if count > node else ALONE
        found = explained(mask, sizes, count, (link_rate if count <= node else between_rate) * slower, True, node=near)
        cost = found.costs[found.choice]
        took = cost.seconds * slower
        rows.append(
            {
                "ranks": count,
                "strategy": found.choice,
                "assignment": found.assignments[found.choice].name,
                "balance": float(cost.work.max() / cost.work.mean()),
                "received": float(cost.received.max()),
                "seconds": took,
                "ring": found.costs["ring"].seconds * slower,
            }
        )
        rows[-1]["scaling"] = rows[0]["seconds"] * ranks[0] / (count * took)
    return rows


def last_scaling(rows: list[dict]) -> int:
    """The most ranks up to which a mask scales."""
    stopped = next((number for number, row in enumerate(rows) if row["scaling"] < SCALES), len(rows))
    return rows[stopped - 1]["ranks"]


def table(data: dict) -> Table:
    shown = Table(
        title=f"Simulated, not measured: {data['tokens']:,} tokens, {data['heads']}/{data['kv_heads']} heads of 128, forward; "
        f"{data['flop_rate'] / 1e12:.0f} TFLOP/s, {data['link_rate'] / 1e9:.0f} GB/s up to {data['node']} ranks, "
        f"{data['between_rate'] / 1e9:.0f} GB/s beyond"
    )
    for heading in (
        "mask",
        "ranks",
        "strategy",
        "tokens are assigned",
        "most / mean work",
        "most received, MiB",
        "ms",
        "of linear",
    ):
        shown.add_column(heading, justify="left" if heading in ("mask", "strategy", "tokens are assigned") else "right")
    for name, rows in data["masks"].items():
        for row in rows:
            shown.add_row(
                f"{name} (to {last_scaling(rows)})" if row is rows[0] else "",
                str(row["ranks"]),
                row["strategy"],
                row["assignment"],
                f"{row['balance']:.2f}",
                f"{row['received'] / 2**20:,.0f}",
                f"{row['seconds'] * 1e3:.2f}",
                f"{row['scaling']:.2f}",
            )
    return shown


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/context-scaling"), help="folder of the results")
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--heads", type=int, default=32, help="of queries")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="linear is by the smallest of them")
    parser.add_argument("--node", type=int, default=8, help="ranks of a node")
    parser.add_argument("--link-rate", type=float, default=LINK_RATE, help="bytes per second that a rank gets within a node")
    parser.add_argument("--between-rate", type=float, default=_BETWEEN_RATE, help="the same, of more ranks than a node has")
    parser.add_argument("--flop-rate", type=float, default=_FLOP_RATE, help="FLOP per second, over the pairs of visited blocks")
    parser.add_argument("--mask", nargs="+", help="spec texts instead of its own masks")
    given = vars(parser.parse_args(arguments))
    out, names = given.pop("out"), given.pop("mask")
    patterns = {name: sf.parse(name) for name in names} if names else masks(given["tokens"])
    data = {**given, "masks": {}}
    rates = {name: given[name] for name in ("link_rate", "between_rate", "flop_rate", "node")}
    for name, pattern in patterns.items():
        mask = sf.compile_mask(pattern, given["tokens"], block_size=_BLOCK)
        data["masks"][name] = simulated(mask, given["heads"], given["kv_heads"], sorted(given["ranks"]), **rates)
    out.mkdir(parents=True, exist_ok=True)
    (out / "context-scaling.json").write_text(json.dumps(data, indent=1))
    draw_context_scaling(data, out)
    Console(width=150).print(table(data))


if __name__ == "__main__":
    main()
