"""Attention over key blocks that each query picked, beside the libraries that train it, and dense attention.

    python -m sparse_flash.benchmarks.selection --out runs/selection
    python -m sparse_flash.benchmarks.selection --heads 64 4 --block 64 --alike 0.8 --peer sparse_flash --peer fla

Picks are drawn: a query keeps each pick of the query before with probability ``--alike``, draws it anew otherwise, and always
keeps its own block. docs/performance/selection.md compares times of drawn picks and of a trained model's.
Tables that a library makes of picks are made within its call, and timed. Each result is compared with float64 attention at sampled
queries, gradients too. TFLOP/s count kept pairs: 4 x pairs x head_dim x heads, backward 2.5 times that. Writes selection.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from sparse_flash import BlockSelection

from .baselines.selection import DENSE, PEERS, Leaves, SelectionPeer
from .measure.accuracy import as_attend, errors_against, is_right
from .measure.throughput import OverLimit, failure_text, peak_bytes, time_limit, time_passes
from .results import environment
from .workload.problem import reorder_memory

HEADS = ((32, 8), (64, 4))
BLOCKS = (128, 64)
ALIKE = (0.0, 0.8)
_CPU_SECONDS = 0.3


@dataclass(frozen=True)
class PicksCase:
    """alike: the probability that a query keeps a pick of the query before."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    picks: int
    alike: float

    @property
    def name(self) -> str:
        alike = f"{self.alike:.0%} alike" if self.alike else "independent"
        return f"{self.heads}/{self.kv_heads} {self.picks} of {self.block_size} {alike}"


def draw_picks(case: PicksCase, device: torch.device) -> torch.Tensor:
    """(1, kv_heads, tokens, picks) int32, -1 for none: own blocks, and earlier ones that change from query to query."""
    generator = torch.Generator(device).manual_seed(0)
    query = torch.arange(case.tokens, device=device)[:, None]
    own, few = query // case.block_size, torch.arange(case.picks - 1, device=device)
    heads = []
    for _ in range(case.kv_heads):
        # A query that can pick every earlier block does; the first of a block draws as soon as it has a choice.
        every = own < case.picks
        anew = torch.rand((case.tokens, case.picks - 1), generator=generator, device=device) >= case.alike
        anew |= every & (query % case.block_size == 0)
        anew[0] = True
        since = torch.where(anew, query, 0).cummax(0).values
        chosen = (torch.rand((case.tokens, case.picks - 1), generator=generator, device=device) * own).gather(0, since).int()
        chosen = torch.where(every, few.int(), chosen)
        heads.append(torch.cat([torch.where(chosen < own, chosen, -1), own.int()], 1))
    return torch.stack(heads)[None]


def selection_of(case: PicksCase, device: torch.device) -> BlockSelection:
    return BlockSelection.from_picks(draw_picks(case, device), case.block_size)


def draw_leaves(case: PicksCase, device: torch.device, dtype: torch.dtype, order: tuple[int, ...]) -> Leaves:
    """The same values for every peer, its dimensions in ``order`` in memory."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        reorder_memory(
            torch.randn((1, heads, case.tokens, case.head_dim), generator=generator, device=device, dtype=dtype), order
        ).requires_grad_()
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    return q, k, v


def kept_pairs(case: PicksCase, selection: BlockSelection) -> int:
    """Over query heads."""
    by_head = [int(selection.kept_pairs(head).sum()) for head in range(case.kv_heads)]
    return sum(by_head) * (case.heads // case.kv_heads)


def measure_peer(
    case: PicksCase,
    peer: SelectionPeer,
    selection: BlockSelection,
    flops: int,
    device: torch.device,
    dtype: torch.dtype,
    checks: bool,
) -> dict:
    """Times in ms, bytes beyond the inputs, errors; or {"refused": why}. flops: of the forward pass. checks: against float64."""
    leaves = draw_leaves(case, device, dtype, peer.order)
    if reason := peer.refuses(leaves, selection):
        return {"refused": reason}
    group = case.heads // case.kv_heads
    kept = {head: selection.select(head) for head in range(case.kv_heads)}

    def kept_by(batch: int, head: int, queries: torch.Tensor) -> torch.Tensor:
        of_head = kept[head // group]
        pairs = torch.zeros(len(queries), case.tokens, dtype=torch.bool, device=device)
        for index, query in enumerate(queries.tolist()):
            pairs[index, of_head.kept_keys(query).to(device)] = True
        return pairs

    result: dict = {}
    with peer.settings():
        fn = peer.prepare(leaves, selection)
        attend = as_attend(leaves, fn)
        if checks:
            errors = errors_against(kept_by, leaves, attend)
            result = {"errors": errors, "correct": is_right(errors, dtype)}
        for name, timing in time_passes(leaves, fn, device, _CPU_SECONDS, True):
            result |= timing.as_result(name)
        dout = torch.randn_like(leaves[0])
        result["extra_bytes"] = peak_bytes(lambda: attend(dout), device)
    if checks:
        result["forward_tflops"] = flops / result["forward_ms"] / 1e9
        result["backward_tflops"] = 2.5 * flops / result["backward_ms"] / 1e9
    return result


def run(case: PicksCase, names: list[str], device: torch.device, dtype: torch.dtype, limit: int | None = None) -> dict:
    """A case as plain data: {"case", "name", "tflop", "results": {peer: result}}. limit: seconds for a peer."""
    selection = selection_of(case, device)
    flops = 4 * kept_pairs(case, selection) * case.head_dim
    results = {}
    for name in names:
        try:
            with time_limit(limit):
                results[name] = measure_peer(case, PEERS[name], selection, flops, device, dtype, name != DENSE)
        except OverLimit:
            results[name] = {"over_limit": limit}
        except Exception as error:  # a peer that fails is a result: the others still can
            results[name] = {"failed": failure_text(error)}
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"case": asdict(case), "name": case.name, "tflop": flops / 1e12, "results": results}


def format_result(result: dict) -> str:
    """One cell of the table: forward / backward ms and TFLOP/s, or why there are none."""
    if "forward_ms" not in result:
        return next(iter(result))
    text = f"{result['forward_ms']:.2f} / {result['backward_ms']:.2f}"
    if "forward_tflops" in result:
        text += f" ({result['forward_tflops']:.0f} / {result['backward_tflops']:.0f})"
    return text if result.get("correct", True) else f"{text} wrong"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog="python -m sparse_flash.benchmarks.selection")
    parser.add_argument("--out", type=Path, default=Path("runs/selection"), help="folder (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=65_536, help="(default %(default)s)")
    parser.add_argument("--heads", type=int, nargs=2, action="append", metavar=("HEADS", "KV_HEADS"), help="(default 32 8, 64 4)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default %(default)s)")
    parser.add_argument("--block", type=int, action="append", help="tokens of a picked block (default 128, 64)")
    parser.add_argument("--picks", type=int, default=16, help="blocks of a query, its own included (default %(default)s)")
    parser.add_argument("--alike", type=float, action="append", help="see above, 0 to 1 (default 0, 0.8)")
    parser.add_argument("--peer", action="append", choices=PEERS, help="(default: all)")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a peer and a case (default %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default %(default)s)")
    options = parser.parse_args(arguments)
    device, names = torch.device(options.device), options.peer or list(PEERS)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cases = [
        PicksCase(options.tokens, heads, kv_heads, options.head_dim, block, options.picks, alike)
        for (heads, kv_heads), block, alike in product(options.heads or HEADS, options.block or BLOCKS, options.alike or ALIKE)
    ]
    data: dict = {"format": 1, "environment": environment(device), "dtype": str(dtype).removeprefix("torch."), "cases": []}
    table = Table("picks", *names, title="forward / backward, ms (TFLOP/s)")
    options.out.mkdir(parents=True, exist_ok=True)
    for case in cases:
        found = run(case, names, device, dtype, options.limit)
        data["cases"].append(found)
        # After each one, so that a run that is stopped keeps what it has.
        (options.out / "selection.json").write_text(json.dumps(data, indent=1) + "\n")
        cells = [format_result(found["results"][name]) for name in names]
        table.add_row(case.name, *cells)
        print(case.name, "; ".join(f"{name} {cell}" for name, cell in zip(names, cells, strict=True)), flush=True)
        for name, result in found["results"].items():
            if why := result.get("refused") or result.get("failed"):
                print(f"  {name}: {why}", file=sys.stderr, flush=True)
    Console(width=200 if not sys.stdout.isatty() else None).print(table)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
