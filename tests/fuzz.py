"""Random small calls of a back end, forward and backward, against the oracle, until the calls or the seconds are used up.

    python tests/fuzz.py --backend hopper --calls 20000 --seconds 300 --seed 0 --kernels 60
    python tests/fuzz.py --backend hopper --only 1234        # one call again
    python tests/fuzz.py --backend hopper --of selections    # calls on key blocks chosen by query
    python tests/fuzz.py --backend hopper --of fp8           # calls in precision="fp8", forward, against its definition

Without a GPU, hopper runs as in ``gluon_on_cpu``, and triton in Triton's interpreter: a call a second.

Calls run in separate processes, and each is announced before it is launched: one that hangs or kills its process is reported and
costs only that process. Exit status: 0, 1 if anything was wrong, 2 if the back end cannot run here.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from threading import Thread

START_SECONDS = 180  # to import everything on a busy machine
SEEDS_AT_A_TIME = 8  # seeds that share a mask; see fuzz_calls
DRAWN = {"masks": "fuzz_calls", "selections": "fuzz_selections", "fp8": "fuzz_eight_bits"}  # the modules that draw and check calls


def work(backend: str, pipe, of: str = "masks", options: dict | None = None) -> None:
    """The child: runs the seeds that it receives through the pipe. Sends ("ready", why it cannot run anything | None),
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

    from sparse_flash.core import backends

    calls = import_module(DRAWN[of])
    with runs():
        pipe.send(("ready", backends.get_backend(backend).why_unavailable()))
    with poisoned_memory():
        while (seed := pipe.recv()) is not None:
            wrong, broken = None, False
            try:
                with runs(seed):
                    call = calls.draw(seed, backend, **(options or {}))
                    pipe.send(("start", str(call)))
                    wrong = calls.failure(call)
            except Exception as error:
                # A GPU error stays with the process: everything launched after it fails too.
                wrong, broken = f"{type(error).__name__}: {error}", True
            pipe.send(("done", wrong, broken))


class Child:
    """A process that runs calls."""

    def __init__(self, backend: str, of: str, options: dict):
        context = multiprocessing.get_context("spawn")  # a GPU's state does not survive a fork
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(backend, theirs, of, options), daemon=True)
        self.process.start()
        theirs.close()  # so that the child's end closes with the child
        self.ready = False

    def outcome(self, seed: int, hang: float) -> tuple[str | None, str | None, str]:
        """(what became of the call of a seed, None if all is well; what was wrong; the call)"""
        text = f"seed {seed}, while the call was drawn"
        try:
            self.pipe.send(seed)
            while self.pipe.poll(hang if self.ready else START_SECONDS):
                kind, *news = self.pipe.recv()
                if kind == "ready":
                    self.ready = True
                    if news[0]:
                        return "refused", news[0], text
                elif kind == "start":
                    text = news[0]
                else:
                    wrong, broken = news
                    return "error" if broken else "mismatch" if wrong else None, wrong, text
        except (EOFError, OSError):
            self.process.join(5)
            return "error", f"its process ended with status {self.process.exitcode}", text
        return "hang", f"no result in {hang if self.ready else START_SECONDS:g} s", text

    def end(self) -> None:
        self.process.kill()
        self.process.join(30)
        self.pipe.close()


class Fuzzer:
    """Hands seeds to children, each watched by a thread, and counts calls and what became of them."""

    def __init__(self, backend: str, seeds: range, hang: float, report: Callable, of: str = "masks", options: dict | None = None):
        self.backend, self.hang, self.report, self.of, self.options = backend, hang, report, of, options or {}
        # Whole groups, so each mask is made once.
        starts = sorted({seeds.start, *(s for s in seeds if s % SEEDS_AT_A_TIME == 0)})
        self.groups = iter([range(a, b) for a, b in zip(starts, [*starts[1:], seeds.stop])])
        self.counts = Counter(call=0, mismatch=0, hang=0, error=0)
        self.refused: str | None = None
        self.over = False

    def run(self, workers: int, seconds: float | None = None) -> None:
        threads = [Thread(target=self._watch, daemon=True) for _ in range(workers)]
        for thread in threads:
            thread.start()
        end = None if seconds is None else time.monotonic() + seconds
        for thread in threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        self.over = True

    def _watch(self) -> None:
        child = None
        while (group := next(self.groups, None)) and not self.refused:
            for seed in group:
                child = child or Child(self.backend, self.of, self.options)
                kind, wrong, text = child.outcome(seed, self.hang)
                if kind == "refused":
                    self.refused = wrong
                    break
                if self.over:  # the call was cut off
                    return
                self._count(kind, wrong, text, seed)
                if kind in ("hang", "error"):
                    child = child.end()
        if child is not None:
            child.end()

    def _count(self, kind: str | None, wrong: str | None, text: str, seed: int) -> None:
        self.counts["call"] += 1
        if kind:
            self.counts[kind] += 1
            of = "" if self.of == "masks" else f" --of {self.of}"
            given = "".join(f" --{name} {value}" for name, value in self.options.items())
            again = f"python tests/fuzz.py --backend {self.backend}{of}{given} --only {seed}"
            self.report(f"{kind}: {wrong}\n  {text}\n  again: {again}")


def main() -> int:
    options, begin = _options(), time.monotonic()
    seeds = range(options.seed, options.seed + options.calls) if options.only is None else range(options.only, options.only + 1)
    fuzzer = Fuzzer(options.backend, seeds, options.hang, print, options.of, options.drawing)
    fuzzer.run(options.workers, options.seconds)
    if fuzzer.refused:
        print(f"{options.backend} cannot run here: {fuzzer.refused}")
        return 2
    print(", ".join(f"{kind}: {count}" for kind, count in fuzzer.counts.items()), f"in {time.monotonic() - begin:.0f} s")
    return int(fuzzer.counts.total() > fuzzer.counts["call"])


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
