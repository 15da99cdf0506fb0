"""Random small calls of a back end, forward and backward, against the oracle, until the calls or the seconds are used up.

    python tests/fuzz.py --backend hopper --calls 20000 --seconds 300 --seed 0 --kernels 60
    python tests/fuzz.py --backend hopper --only 1234        # one call again
    python tests/fuzz.py --backend hopper --of selections    # calls on key blocks chosen by query
    python tests/fuzz.py --backend hopper --of fp8           # calls in precision="fp8", forward, against its definition

Without a GPU, hopper runs as in ``gluon_on_cpu``, and triton in Triton's interpreter: a call a second.

Calls run in separate processes, and each is announced before it is launched: one that hangs or kills its process is reported and
costs only that process. Exit status: 0, 1 if anything was wrong, 2 if the back end cannot run here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from contextlib import nullcontext
from importlib import import_module
from multiprocessing.connection import wait

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

START_SECONDS = 180  # to import everything on a busy machine
SEEDS_AT_A_TIME = 8  # seeds that share a mask; see fuzz_calls
DRAWN = {"masks": "fuzz_calls", "selections": "fuzz_selections", "fp8": "fuzz_eight_bits"}  # the modules that draw and check calls


def work(backend: str, pipe, of: str = "masks", options: dict | None = None) -> None:
    """The child: runs the lists of seeds that it receives through the pipe. Sends ("ready", why it cannot run anything | None),
    ("start", description) before each call, and ("done", what was wrong | None, whether the process must end) after it.
    options: for what draws calls."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    runs = nullcontext
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
        if backend == "hopper":
            from gluon_on_cpu import gluon_on_cpu as runs
    from oracle import poisoned_memory

    from sparse_flash import backends

    calls = import_module(DRAWN[of])
    with runs():
        pipe.send(("ready", backends.get_backend(backend).why_unavailable()))
    with poisoned_memory():
        while seeds := pipe.recv():
            for seed in seeds:
                try:
                    with runs(seed):
                        call = calls.draw(seed, backend, **(options or {}))
                        pipe.send(("start", str(call)))
                        wrong, broken = calls.failure(call), False
                except Exception as error:
                    # A GPU error stays with the process: everything launched after it fails too.
                    wrong, broken = f"{type(error).__name__}: {error}", True
                pipe.send(("done", wrong, broken))
                if broken:
                    return


class Worker:
    """A child and the seeds that it still has to run; the first one is running."""

    def __init__(self, backend: str, seeds: list[int] | None = None, of: str = "masks", options: dict | None = None):
        context = multiprocessing.get_context("spawn")  # a GPU's state does not survive a fork
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(backend, theirs, of, options), daemon=True)
        self.process.start()
        theirs.close()  # so that the child's end closes with the child
        self.backend, self.seeds = backend, []
        self.ready, self.text, self.since = False, None, time.monotonic()
        if seeds:
            self.give(seeds)

    def give(self, seeds: list[int]) -> None:
        self.seeds, self.since = list(seeds), time.monotonic()
        self.pipe.send(self.seeds)

    def describe(self) -> str:
        return self.text or f"seed {self.seeds[0]}: {self.backend}, while the call was drawn"

    def late(self, hang: float) -> bool:
        return bool(self.seeds) and time.monotonic() - self.since > (hang if self.ready else START_SECONDS)

    def end(self) -> None:
        self.process.kill()
        self.process.join(30)
        self.pipe.close()


class Fuzzer:
    """Hands seeds to workers, watches them, and counts: "calls", "mismatches", "hangs", "errors"."""

    def __init__(
        self, backend: str, seeds: range, hang: float, workers: int, report, of: str = "masks", options: dict | None = None
    ):
        self.backend, self.hang, self.report, self.of, self.options = backend, hang, report, of, options or {}
        # Whole groups, so each mask is made once.
        starts = sorted({seeds.start, *(s for s in seeds if s % SEEDS_AT_A_TIME == 0)})
        self.left = [range(a, b) for a, b in zip(starts, [*starts[1:], seeds.stop])]
        self.counts = Counter(calls=0, mismatches=0, hangs=0, errors=0)
        self.refused: str | None = None
        self.workers = [Worker(backend, self._next(), of, options) for _ in range(min(workers, len(self.left)))]

    def _next(self) -> list[int]:
        return list(self.left.pop(0)) if self.left else []

    def step(self) -> bool:
        """Waits a little for news; False once there is nothing left to run."""
        for pipe in wait([worker.pipe for worker in self.workers], timeout=0.2):
            self._hear(next(worker for worker in self.workers if worker.pipe is pipe))
        for worker in [worker for worker in self.workers if worker.late(self.hang)]:
            self._count("hangs", worker, f"no result in {self.hang if worker.ready else START_SECONDS:g} s")
            self._replace(worker)
        return bool(self.workers) and self.refused is None

    def _hear(self, worker: Worker) -> None:
        try:
            kind, *news = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(5)
            if worker.seeds:
                self._count("errors", worker, f"its process ended with status {worker.process.exitcode}")
            self._replace(worker)
            return
        if kind == "ready":
            worker.ready, worker.since, self.refused = True, time.monotonic(), news[0]
        elif kind == "start":
            worker.text, worker.since = news[0], time.monotonic()
        else:
            wrong, broken = news
            self._count("errors" if broken else "mismatches" if wrong else None, worker, wrong)
            if broken:
                self._replace(worker)
            elif not worker.seeds:
                seeds = self._next()
                if seeds:
                    worker.give(seeds)
                else:
                    self._replace(worker)

    def _count(self, kind: str | None, worker: Worker, wrong: str | None) -> None:
        """Counts the worker's current call, which has ended."""
        self.counts["calls"] += 1
        if kind:
            self.counts[kind] += 1
            seed = worker.seeds[0]
            of = "" if self.of == "masks" else f" --of {self.of}"
            given = "".join(f" --{name} {value}" for name, value in self.options.items())
            again = f"python tests/fuzz.py --backend {self.backend}{of}{given} --only {seed}"
            self.report(
                f"{kind.removesuffix('s').replace('mismatche', 'mismatch')}: {wrong}\n  {worker.describe()}\n  again: {again}"
            )
        worker.seeds, worker.text, worker.since = worker.seeds[1:], None, time.monotonic()

    def _replace(self, worker: Worker) -> None:
        """Starts a new worker where this one ended, if anything is left."""
        worker.end()
        self.workers.remove(worker)
        if seeds := worker.seeds or self._next():
            self.workers.append(Worker(self.backend, seeds, self.of, self.options))

    def end(self) -> None:
        for worker in self.workers:
            worker.end()


def main() -> int:
    options = _options()
    seeds = range(options.seed, options.seed + options.calls) if options.only is None else range(options.only, options.only + 1)
    console, begin = Console(highlight=False, markup=False, soft_wrap=True), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    interrupted = False
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=len(seeds))
        fuzzer = Fuzzer(options.backend, seeds, options.hang, options.workers, console.print, options.of, options.drawing)
        try:
            while fuzzer.step() and not (options.seconds and time.monotonic() - begin > options.seconds):
                bar.update(task, completed=fuzzer.counts["calls"], description=_summary(fuzzer.counts, ("mismatches", "hangs")))
        except KeyboardInterrupt:
            interrupted = True
        finally:
            fuzzer.end()
    if fuzzer.refused:
        console.print(f"{options.backend} cannot run here: {fuzzer.refused}")
        return 2
    done = _summary(fuzzer.counts, fuzzer.counts)
    console.print(f"{done}, {time.monotonic() - begin:.0f} s{', interrupted' if interrupted else ''}")
    wrong = fuzzer.counts.total() > fuzzer.counts["calls"]
    return 1 if wrong else 130 if interrupted else 0


def _summary(counts: Counter, kinds) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", required=True, choices=("hopper", "triton", "torch", "reference"))
    parser.add_argument("--of", choices=tuple(DRAWN), default="masks", help="what calls are on (default %(default)s)")
    parser.add_argument("--calls", type=int, default=1000, help="how many calls at most (default %(default)s)")
    parser.add_argument("--seconds", type=float, help="how long at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first call; the others follow it one by one")
    parser.add_argument("--only", type=int, metavar="SEED", help="run the call of this seed alone")
    parser.add_argument(
        "--hang", type=float, default=60, help="seconds after which a call hangs, compiling included (default %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes at a time; they share the GPU (default %(default)s)")
    parser.add_argument("--kernels", type=int, help="for how many kinds of call kernels are compiled; all drawn by default")
    options = parser.parse_args()
    if options.kernels is not None and (options.kernels < 1 or options.of != "masks"):
        parser.error("--kernels must be at least 1, and goes with --of masks")
    options.drawing = {} if options.kernels is None else {"kernels": options.kernels}
    if min(options.calls, options.workers) < 1:
        parser.error("--calls and --workers must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
