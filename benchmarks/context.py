"""One sequence over several GPUs: each strategy beside one GPU, other ways to divide it, and what the link allows.

    torchrun --nproc-per-node 2 -m sparse_flash.benchmarks.context --out runs/context
    torchrun --nproc-per-node 4 -m sparse_flash.benchmarks.context --tokens 524288 --mask "causal & local(4096)" --way heads

One GPU's time is that of the whole sequence on every rank by itself. Times are medians; that of the slowest rank counts. Tables
show the share of linear scaling: one GPU's time / ranks / the time. ``floor_ms``: the larger of one GPU's time / ranks and the
fewest bytes that a strategy of ours moves / the rate of the link, measured in the same run by an all-to-all of as many contiguous
bytes. Errors are relative L2 distances from one GPU, the worst of out, dq, dk and dv. Rank 0 writes context.json after each case.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sparse_flash as sf

from .baselines.context import WAYS, Planned, Sequence, Way, barrier, of_all_ranks
from .context_scaling import masks
from .measure.throughput import failure_text, peak_bytes
from .results import environment

HEADS = ((8, 8), (32, 8))
TOKENS = (131_072, 524_288)
_SECONDS, _LEAST, _MOST = 1.0, 3, 20  # of a figure: seconds, and runs
_LONG = 2.0  # seconds of a run that is not repeated


@dataclass(frozen=True)
class ContextCase:
    """label: what tables call the mask. mask: its spec text."""

    label: str
    mask: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        return f"{self.label}, {self.tokens:,} tokens, {self.heads}/{self.kv_heads} heads"


def sequence_of(case: ContextCase, device: torch.device, dtype: torch.dtype) -> Sequence:
    generator, pattern = torch.Generator(device).manual_seed(0), sf.parse(case.mask)
    mask = sf.compile_mask(pattern, case.tokens, device=device, progress=False)
    q, k, v = (
        torch.randn(1, heads, case.tokens, case.head_dim, generator=generator, device=device, dtype=dtype)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    return Sequence(pattern, mask, q, k, v)


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """The median, of the slowest rank. Ranks begin each run together, and make as many."""
    taken: list[float] = []
    for _ in range(2):  # the first compiles; both warm up
        _timed(call, device)
    while len(taken) < _LEAST or (sum(taken) < 1e3 * _SECONDS and len(taken) < _MOST):
        taken.append(max(of_all_ranks(_timed(call, device))))
        if taken[0] > 1e3 * _LONG:
            break
    return median(taken)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    barrier()
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def passes(leaves: tuple[torch.Tensor, ...], attend: Callable[[], torch.Tensor], device: torch.device) -> dict[str, float]:
    """{"forward_ms", "both_ms"}"""

    def forward():
        with torch.no_grad():
            attend()

    def both():
        out = attend()
        torch.autograd.grad(out, leaves, out.detach())

    return {"forward_ms": milliseconds(forward, device), "both_ms": milliseconds(both, device)}


def results(leaves: tuple[torch.Tensor, ...], attend: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk and dv, where the gradient of out is out."""
    out = attend()
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]


def measured(way: Way, sequence: Sequence, exact: list[torch.Tensor] | None, mesh: DeviceMesh) -> dict:
    """{"forward_ms", "both_ms", "error", "received_bytes", "extra_bytes"} or {"refused": why}. exact: one GPU's results, or None
    where they are not compared."""
    if reason := way.refuses(sequence, mesh.size()):
        return {"refused": reason}
    device = sequence.q.device
    with way.divided(sequence, mesh) as divided:
        found: dict = {"received_bytes": divided.received}
        if exact is not None:
            own = results(divided.leaves, divided.attend)
            found["error"] = max(of_all_ranks(max(map(_distance, map(divided.whole, own), exact))))
            del own
        found |= passes(divided.leaves, divided.attend, device)
        if device.type == "cuda":
            found["extra_bytes"] = max(of_all_ranks(peak_bytes(lambda: results(divided.leaves, divided.attend), device)))
    return found


def _distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    # Head by head: float32 copies of all would not fit beside a million tokens.
    pairs = [(f.float(), e.float()) for f, e in zip(found.unbind(1), exact.unbind(1), strict=True)]
    difference = sum(float((f - e).square().sum()) for f, e in pairs)
    return (difference / max(sum(float(e.square().sum()) for _, e in pairs), 1e-30)) ** 0.5


def link_ms(received: float, device: torch.device, ranks: int) -> float:
    """Of an all-to-all in which every rank gets so many bytes from others, as contiguous tensors."""
    each = max(1, int(received) // (ranks - 1))
    mine = torch.zeros(ranks * each, dtype=torch.uint8, device=device)
    return milliseconds(partial(dist.all_to_all_single, torch.empty_like(mine), mine), device)


def run(case: ContextCase, names: list[str], mesh: DeviceMesh, compare: bool = True) -> dict:
    """A case as plain data: {"case", "one": of one GPU, "ways": {name: result}, "link_ms", "floor_ms"}. compare: results with one
    GPU's. Every rank returns the same."""
    device = torch.empty(0, device=mesh.device_type).device
    sequence = sequence_of(case, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    leaves = q, k, v = tuple(t.detach().requires_grad_() for t in (sequence.q, sequence.k, sequence.v))

    def attend() -> torch.Tensor:
        return sf.attention(q, k, v, sequence.mask)  # type: ignore[return-value]  # no return_lse

    found: dict = {"case": asdict(case), "ranks": mesh.size(), "one": passes(leaves, attend, device), "ways": {}}
    exact = results(leaves, attend) if compare else None
    for name in names:
        try:
            result, failure = measured(WAYS[name], sequence, exact, mesh), None
        except Exception as error:  # a way that fails on all ranks is a result; one that fails on some ends the run by its time-out
            result, failure = {}, failure_text(error)
        found["ways"][name] = {"failed": failure} if failure else result
        if device.type == "cuda":
            torch.cuda.empty_cache()
    ours = [found["ways"][n]["received_bytes"] for n in names if isinstance(WAYS[n], Planned) and "both_ms" in found["ways"][n]]
    if ours and mesh.size() > 1:
        found["fewest_bytes"] = min(ours)
        found["link_ms"] = link_ms(min(ours), device, mesh.size()) if min(ours) else 0.0
        # Gradients of what was fetched travel back.
        times = zip(("forward_ms", "both_ms"), (1, 2), strict=True)
        found["floor_ms"] = {name: max(found["one"][name] / mesh.size(), of_link * found["link_ms"]) for name, of_link in times}
    return of_all_ranks(found)[0]


def said(found: dict, name: str) -> str:
    """A cell: the share of linear scaling, forward / forward and backward, and the error."""
    result = found["ways"][name]
    if "both_ms" not in result:
        return next(iter(result))
    scaling = [found["one"][n] / found["ranks"] / result[n] for n in ("forward_ms", "both_ms")]
    error = f" ({result['error']:.0e})" if "error" in result else ""
    return f"{scaling[0]:.2f} / {scaling[1]:.2f}{error}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog="python -m sparse_flash.benchmarks.context")
    parser.add_argument("--out", type=Path, default=Path("runs/context"), help="folder (default %(default)s)")
    parser.add_argument("--mask", action="append", help="spec text (default: those of docs/performance.md)")
    parser.add_argument("--tokens", type=int, action="append", help=f"(default {', '.join(map(str, TOKENS))})")
    parser.add_argument("--heads", type=int, nargs=2, action="append", metavar=("HEADS", "KV_HEADS"), help="(default 8 8, 32 8)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default %(default)s)")
    parser.add_argument("--way", action="append", choices=WAYS, help="(default: all)")
    parser.add_argument("--no-compare", action="store_true", help="leave out the comparison with one GPU's results, and its memory")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if not dist.is_torchelastic_launched():
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 -m sparse_flash.benchmarks.context")
    mesh = init_device_mesh(options.device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("cp",))
    first, names, cases = dist.get_rank() == 0, options.way or list(WAYS), []
    for tokens, (heads, kv_heads) in product(options.tokens or TOKENS, options.heads or HEADS):
        texts = {text: text for text in options.mask or ()} or {name: mask.to_spec() for name, mask in masks(tokens).items()}
        cases += [ContextCase(name, text, tokens, heads, kv_heads, options.head_dim) for name, text in texts.items()]
    device = torch.empty(0, device=mesh.device_type).device
    data: dict = {"format": 1, "environment": environment(device), "ranks": mesh.size(), "cases": []}
    table = Table("case", "one, ms", "floor, ms", *names, title=f"of linear scaling over {mesh.size()}, forward / both (error)")
    for case in cases:
        found = run(case, names, mesh, not options.no_compare)
        if not first:
            continue
        data["cases"].append(found)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "context.json").write_text(json.dumps(data, indent=1) + "\n")
        cells = [said(found, name) for name in names]
        one, floor = (" / ".join(f"{ms:.2f}" for ms in found.get(key, {}).values()) for key in ("one", "floor_ms"))
        table.add_row(case.name, one, floor, *cells)
        print(case.name, f"one {one} ms;", "; ".join(f"{name} {cell}" for name, cell in zip(names, cells, strict=True)), flush=True)
        for name, result in found["ways"].items():
            if why := result.get("refused") or result.get("failed"):
                print(f"  {name}: {why}", file=sys.stderr, flush=True)
    if first:
        Console(width=200 if not sys.stdout.isatty() else None).print(table)
        print(options.out)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
