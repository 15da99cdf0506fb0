"""One sequence over several GPUs: each strategy, and other ways to divide it, next to one GPU.

    torchrun --nproc-per-node 2 -m sparse_flash.benchmarks.context --out runs/context
    torchrun --nproc-per-node 4 -m sparse_flash.benchmarks.context --tokens 524288 --mask "causal & documents" --way heads
    python -m sparse_flash.benchmarks.context --draw two/context.json four/context.json --out docs/images

One GPU's time is the time of the whole sequence on every rank by itself. Times are medians, and the slowest rank counts. Tables
show the share of linear scaling: one GPU's time / ranks / the time. Errors are relative L2 distances from one GPU, the worst of
out, dq, dk and dv. ``exchange_ms``: the exchange of a strategy of ours in a forward pass, packing included, and nothing else. Calls
of over 2 s are timed once. Rank 0 writes context.json after each way.

The process group and its time-out are the command's own: a rank that fails in a way alone ends the run after 150 s.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sparse_flash as sf
from sparse_flash.parallel.peer_memory import peer_memory

from .baselines.context import PATIENCE, WAYS, DividedSequence, Way, barrier, gather_from_ranks
from .measure.throughput import failure_text, peak_bytes
from .program import Table, add_device, create_parser, print_tables
from .report.plots import draw_context
from .results import environment, write_json

HEADS = ((8, 8), (32, 8))
TOKENS = (131_072, 524_288)
_LEAST, _MOST = 3, 20  # runs of a figure
_LONG = 2.0  # seconds of a run that is not repeated
PASSES = "forward_ms", "both_ms"


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


def masks(tokens: int) -> dict[str, sf.Pattern]:
    """Returns the masks of a sequence. Documents have lengths of a log-normal distribution, median 4,096 tokens, sigma 1.3."""
    lengths = np.random.default_rng(0).lognormal(np.log(4096), 1.3, max(16, tokens // 1024)).astype(int).clip(16)
    ends = np.cumsum(lengths)
    documents = sf.documents((0, *ends[ends < tokens].tolist(), tokens))
    texts = ("causal", "causal & local(4096)", "causal & (local(1024) | power_of_two)", "butterfly", "bigbird")
    return {text: sf.parse(text) for text in texts} | {"causal & documents": sf.causal() & documents}


def sequence_of(case: ContextCase, device: torch.device, dtype: torch.dtype, ranks: int) -> DividedSequence:
    generator, pattern = torch.Generator(device).manual_seed(0), sf.parse(case.mask)
    mask = sf.compile_mask(pattern, case.tokens, device=device)
    q, k, v = (
        torch.randn(1, heads, case.tokens, case.head_dim, generator=generator, device=device, dtype=dtype)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    return DividedSequence(pattern, mask, q, k, v, ranks)


def time_on_ranks(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The median, of the slowest rank. Ranks begin each run together, and make as many."""

    def once() -> float:
        return max(gather_from_ranks(_time_once(call, device)))

    for _ in range(2):  # the first compiles; both warm up
        first = once()
    if first > 1e3 * _LONG:
        return first
    taken: list[float] = []
    while len(taken) < _LEAST or (sum(taken) < 1e3 * seconds and len(taken) < _MOST):
        taken.append(once())
    return median(taken)


def _time_once(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()  # what others wait for at the barrier is done, not only launched
        barrier()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)
    barrier()
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def time_both_passes(
    leaves: tuple[torch.Tensor, ...], attend: Callable[[], torch.Tensor], device: torch.device, seconds: float
) -> dict[str, float]:
    """{"forward_ms", "both_ms"}"""

    def forward():
        with torch.no_grad():
            attend()

    def both():
        out = attend()
        torch.autograd.grad(out, leaves, out.detach())

    return {name: time_on_ranks(call, device, seconds) for name, call in zip(PASSES, (forward, both), strict=True)}


def run_both_passes(leaves: tuple[torch.Tensor, ...], attend: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk and dv, where the gradient of out is out."""
    out = attend()
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]


def measure_way(way: Way, sequence: DividedSequence, exact: list[torch.Tensor] | None, mesh: DeviceMesh, seconds: float) -> dict:
    """{"forward_ms", "both_ms", "exchange_ms", "error", "received_bytes", "extra_bytes"}. exact: one GPU's results, or
    None where they are not compared."""
    device = sequence.q.device
    with way.divided(sequence, mesh) as divided:
        found: dict = {"received_bytes": divided.received}
        if exact is not None:
            own = run_both_passes(divided.leaves, divided.attend)
            found["error"] = max(gather_from_ranks(max(map(_distance, map(divided.whole, own), exact))))
            del own

        def timed() -> None:
            found.update(time_both_passes(divided.leaves, divided.attend, device, seconds))

        if device.type == "cuda":
            found["extra_bytes"] = max(gather_from_ranks(peak_bytes(timed, device)))
        else:
            timed()
        if divided.exchange is not None:
            found["exchange_ms"] = time_on_ranks(divided.exchange, device, seconds)
    return found


def try_way(name: str, sequence: DividedSequence, exact: list[torch.Tensor] | None, mesh: DeviceMesh, seconds: float) -> dict:
    """Returns what ``measure_way`` does, or {"refused" or "failed": why}, the same on every rank. Raises RuntimeError where some
    ranks failed and some did not."""
    if reason := WAYS[name].refuses(sequence):
        return {"refused": reason}
    try:
        found = measure_way(WAYS[name], sequence, exact, mesh, seconds)
    except Exception as error:
        found = {"failed": failure_text(error)}
        print(f"rank {dist.get_rank()}, {name}: {found['failed']}", file=sys.stderr, flush=True)
    every = gather_from_ranks(found)
    # A rank that failed alone gathers what the others measure meanwhile.
    if not all(isinstance(one, dict) and ("failed" in one) == ("failed" in found) for one in every):
        raise RuntimeError(f"{name!r} failed on some ranks alone; their exchanges no longer fit the others'")
    return every[0]


def _distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    # Head by head: float32 copies of all would not fit beside a million tokens.
    pairs = [(f.float(), e.float()) for f, e in zip(found.unbind(1), exact.unbind(1), strict=True)]
    difference = sum(float((f - e).square().sum()) for f, e in pairs)
    return (difference / max(sum(float(e.square().sum()) for _, e in pairs), 1e-30)) ** 0.5


def run(
    case: ContextCase, names: list[str], mesh: DeviceMesh, seconds: float, compare: bool, report: Callable[[dict], None]
) -> dict:
    """A case as plain data: {"case", "ranks", "one": of one GPU, "ways": {name: result}}. Every rank returns the same. seconds: to
    repeat a figure. compare: whether with one GPU's results. report: gets the results so far, after each way."""
    device, ranks = torch.empty(0, device=mesh.device_type).device, mesh.size()
    sequence = sequence_of(case, device, torch.bfloat16 if device.type == "cuda" else torch.float32, ranks)
    leaves = q, k, v = tuple(t.detach().requires_grad_() for t in (sequence.q, sequence.k, sequence.v))

    def attend() -> torch.Tensor:
        return sf.attention(q, k, v, sequence.mask)  # type: ignore[return-value]  # no return_lse

    found: dict = {
        "case": asdict(case),
        "ranks": ranks,
        "one": time_both_passes(leaves, attend, device, seconds),
        "ways": {},
    }
    exact = run_both_passes(leaves, attend) if compare else None
    for name in names:
        found["ways"][name] = try_way(name, sequence, exact, mesh, seconds)
        report(found)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def cells(found: dict, name: str) -> list[str]:
    """Returns the columns of a way: milliseconds and the share of linear scaling, each forward / both; milliseconds of the exchange
    alone; MiB that a rank gets, and holds besides; the error."""
    result = found["ways"][name]
    if "both_ms" not in result:
        return [next(iter(result)), *[""] * 5]
    pairs = [[result[n] for n in PASSES], [found["one"][n] / result[n] / found["ranks"] for n in PASSES]]
    sizes = (result.get(key) for key in ("received_bytes", "extra_bytes"))
    texts = [" / ".join(f"{number:.2f}" for number in pair) for pair in pairs]
    texts.append(f"{result['exchange_ms']:.2f}" if "exchange_ms" in result else "")
    return [*texts, *("" if size is None else f"{size / 2**20:,.0f}" for size in sizes), f"{result.get('error', float('nan')):.0e}"]


def join_ranks(kind: str) -> DeviceMesh:
    """All processes that torchrun started. kind: of their device, "cuda" or "cpu"."""
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=PATIENCE)
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("cp",))


def _cases_of(path: Path, parser: argparse.ArgumentParser) -> list[dict]:
    try:
        return json.loads(path.read_text())["cases"]
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"--draw takes files that this command wrote; {path}: {error!r}")


def main(arguments: list[str] | None = None) -> int:
    parser = create_parser("context", __doc__)
    parser.add_argument("--mask", action="append", help="spec text, or a name of docs/performance/several-gpus.md (all)")
    parser.add_argument("--tokens", type=int, action="append", help=f"(default {', '.join(map(str, TOKENS))})")
    parser.add_argument("--heads", type=int, nargs=2, action="append", metavar=("HEADS", "KV_HEADS"), help="(default 8 8, 32 8)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default %(default)s)")
    parser.add_argument("--way", action="append", choices=WAYS, help="(default: all)")
    parser.add_argument("--no-compare", action="store_true", help="leave out the comparison with one GPU's results, and its memory")
    parser.add_argument("--seconds", type=float, default=1.0, help="of the runs of a figure (default %(default)s)")
    add_device(parser)
    parser.add_argument("--draw", type=Path, nargs="+", metavar="FILE", help="measure nothing, plot these results in the folder")
    options = parser.parse_args(arguments)
    if options.draw:
        measured_before = [case for path in options.draw for case in _cases_of(path, parser)]
        if not any("both_ms" in case["ways"].get("auto", {}) for case in measured_before):
            parser.error("--draw plots what plans chose by themselves, and no case has it; measure with --way auto")
        print(*draw_context(measured_before, options.out).values(), sep="\n")
        return 0
    if not dist.is_torchelastic_launched():
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 -m sparse_flash.benchmarks.context")
    if int(os.environ["WORLD_SIZE"]) < 2:
        parser.error("it takes two ranks or more: torchrun --nproc-per-node 2 -m sparse_flash.benchmarks.context")
    mesh, names, cases = join_ranks(options.device.type), options.way or list(WAYS), []
    for tokens, (heads, kv_heads) in product(options.tokens or TOKENS, options.heads or HEADS):
        known = {name: mask.to_spec() for name, mask in masks(tokens).items()}
        texts = {text: known.get(text, text) for text in options.mask or known}
        cases += [ContextCase(name, text, tokens, heads, kv_heads, options.head_dim) for name, text in texts.items()]
    device = torch.empty(0, device=mesh.device_type).device
    data: dict = {"format": 1, "environment": environment(device), "ranks": mesh.size(), "cases": []}
    headings = "case", "way", "ms", "of linear", "exchange, ms", "received, MiB", "extra, MiB", "error"
    shown = Table(*headings, title=f"of linear scaling over {mesh.size()}: forward / forward and backward")

    def write(found: dict) -> None:
        memory = peer_memory(mesh.get_group(), device)
        data["allocate_shared"] = 0 if memory is None else memory.size  # which PyTorch's allocator does not count
        if dist.get_rank() == 0:
            write_json(options.out / "context.json", {**data, "cases": [*data["cases"], found]})
            name = list(found["ways"])[-1]
            result = found["ways"][name]
            why = result.get("failed") or result.get("refused") or ""
            print(found["case"]["label"], name, *filter(None, cells(found, name)), why, sep="; ", flush=True)

    for case in cases:
        found = run(case, names, mesh, options.seconds, not options.no_compare, write)
        data["cases"].append(found)
        shown.add_row(case.name, "one GPU", " / ".join(f"{ms:.2f}" for ms in found["one"].values()))
        for name in names:
            if "both_ms" in found["ways"][name]:  # what was said of the others was printed
                shown.add_row("", name, *cells(found, name))
    if dist.get_rank() == 0:
        print_tables(shown, folder=options.out)
    # Gloo's threads drop what they exchanged a little later, which ends a process that is already exiting.
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
