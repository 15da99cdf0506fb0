"""How much longer attention on a CPU takes while other programs use the processors.

    python -m sparse_flash.benchmarks.busy

Threads that work on one operation wait for the last of them, which other programs may have displaced from its processor for
milliseconds. So a call's slow-down grows with its number of operations. Every call is measured in turn, round by round, alone and
then alongside processes that spin. Its slow-down is compared with that of PyTorch's own dense attention.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import sparse_flash as sf

PEER = "SDPA, dense"
MOST = 2.0  # times the slow-down of PyTorch's own
_SPIN = "while True: pass"


@dataclass(frozen=True)
class Slowdown:
    """Milliseconds of a call alone (the minimum, because nothing makes a call faster) and with spinning processes (the median)."""

    alone: float
    beside: float

    @property
    def ratio(self) -> float:
        return self.beside / self.alone


@contextmanager
def spinning(processes: int):
    """Runs this many processes, each of which keeps a processor busy, until the end of the block."""
    children = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()


def calls(tokens: int, heads: int, head_dim: int, window: int, backward: bool) -> dict[str, Callable[[], object]]:
    """The calls to measure, by name: PyTorch's dense attention first."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, heads, tokens, head_dim, generator=generator) for _ in range(4))
    q, k, v = (t.requires_grad_(backward) for t in (q, k, v))
    sparse = sf.compile_mask(f"causal & local({window})", tokens)
    attend = {
        PEER: lambda: F.scaled_dot_product_attention(q, k, v),
        "dense": lambda: sf.attention(q, k, v, backend="torch"),
        "causal": lambda: sf.attention(q, k, v, "causal", backend="torch"),
        "window": lambda: sf.attention(q, k, v, sparse, backend="torch"),
    }

    def both(one):
        return lambda: torch.autograd.grad(one(), (q, k, v), dout)

    return {name: both(one) if backward else one for name, one in attend.items()}


def rounds(measured: dict[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Milliseconds of each call, ``count`` times each, in turn."""
    times: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(count):
        for name, call in measured.items():
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e3)
    return times


def slowdowns(measured: dict[str, Callable[[], object]], spinners: int, count: int) -> dict[str, Slowdown]:
    rounds(measured, 2)  # first calls compile and allocate
    alone = rounds(measured, count)
    with spinning(spinners):
        time.sleep(0.2)  # until they have started
        beside = rounds(measured, count)
    return {name: Slowdown(min(alone[name]), statistics.median(beside[name])) for name in measured}


def table(results: dict[str, Slowdown]) -> str:
    peer = results[PEER].ratio
    lines = [f"{'':12} {'alone, ms':>10} {'busy, ms':>10} {'slow-down':>10} {'of SDPAs':>10}"]
    for name, one in results.items():
        lines.append(f"{name:12} {one.alone:10.1f} {one.beside:10.1f} {one.ratio:10.2f} {one.ratio / peer:10.2f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Prints a table for each pass. Returns 1 if a slow-down is more than ``MOST`` times that of PyTorch's own, else 0."""
    parser = argparse.ArgumentParser(prog="python -m sparse_flash.benchmarks.busy", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--window", type=int, default=256, help="of the window, tokens")
    parser.add_argument("--spinners", type=int, help="processes that spin; one and a half for each thread by default")
    parser.add_argument("--rounds", type=int, default=9, help="of each call, alone and beside them")
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    spinners = threads + (threads + 1) // 2 if options.spinners is None else options.spinners
    worst = 0.0
    for backward in (False, True):
        measured = calls(options.tokens, options.heads, options.head_dim, options.window, backward)
        results = slowdowns(measured, spinners, options.rounds)
        passes = "forward and backward" if backward else "forward"
        print(
            f"{passes}; {options.tokens} tokens, {threads} threads, {spinners} processes beside them\n{table(results)}\n",
            flush=True,
        )
        worst = max(worst, *(one.ratio / results[PEER].ratio for one in results.values()))
    print(f"At most {MOST:g} times SDPA's slow-down is wanted; the worst is {worst:.2f}.")
    return int(worst > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
