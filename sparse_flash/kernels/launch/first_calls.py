"""What is done around compiling a kernel: it is said on a terminal, it happens once on a machine however many processes need
it, and kernels that will be needed together are compiled side by side."""

import gc
import hashlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import NamedTuple

import torch
from triton import knobs
from triton.runtime.errors import OutOfResources

from ..common.compat import AsyncCompileMode

_PATIENCE = 1.0  # seconds; what takes less came from Triton's cache on disk, and is not worth a line


class Ahead(NamedTuple):
    """What a thread that only compiles has asked for: kernels by their names, as Triton's ``warmup`` gives them."""

    kernels: list[tuple[str, object]]

    def names(self) -> list[str]:
        """Of the kernels, each once."""
        return [name for _, name in {id(kernel): name for name, kernel in self.kernels}.items()]


_ahead: ContextVar[Ahead | None] = ContextVar("sparse_flash_ahead", default=None)


def compiles_only() -> bool:
    """Whether launches of this thread compile and launch nothing."""
    return _ahead.get() is not None


def compile_only(name: str, kernel) -> None:
    """Notes a kernel that this thread has asked for. kernel: what Triton's ``warmup`` gives."""
    _ahead.get().kernels.append((name, kernel))


@contextmanager
def compiling_ahead(device: torch.device, workers: int | None = None) -> Iterator[Ahead]:
    """Launches of this thread compile their kernels and launch nothing; all are compiled and loaded when the block ends. Gives
    what was asked for. workers: kernels compiled at a time; by default as many as there are cores, 8 at most. Raises what the
    compiler raises."""
    asked = Ahead([])
    workers = workers or min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        compilers = _Forking(pool, workers)
        with AsyncCompileMode(compilers, ignore_errors=True):  # which, in Triton 3.6, would stay active after an error
            token = _ahead.set(asked)
            try:
                yield asked
            finally:
                _ahead.reset(token)
        for future in compilers.futures:
            future.result()
        list(pool.map(lambda kernel: _load(kernel[1], device), asked.kernels))


class _Forking:
    """What Triton asks to compile, in forked processes, as most of a compilation holds Python's lock; what they leave in Triton's
    cache on disk is then read by a thread of this one."""

    def __init__(self, pool: ThreadPoolExecutor, workers: int):
        self.pool, self.workers, self.futures = pool, workers, []

    def submit(self, call) -> Future:
        at_work = [future for future in self.futures if not future.done()]
        if len(at_work) >= self.workers:
            wait(at_work, return_when=FIRST_COMPLETED)
        child = _forked(call) if hasattr(os, "fork") else None
        self.futures.append(self.pool.submit(_after, child, call))
        return self.futures[-1]


def _forked(call) -> int:
    """A process that makes the call and ends. It takes no locks of other threads but those that forks know of; where it hangs all
    the same, ``_after`` ends it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks of a program of several threads
        child = os.fork()
    if child == 0:
        gc.disable()  # 7 % of a compilation
        try:
            call()
        finally:
            os._exit(0)
    return child


_LONGEST = 120.0  # seconds that a process may take


def _after(child: int | None, call):
    """What ``call`` gives, made when the process has ended."""
    ends = time.monotonic() + _LONGEST
    while child is not None and os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > ends:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.005)
    return call()


def _load(kernel, device: torch.device) -> None:
    """Triton 3.6 compiles a launcher of C for a kernel when it is loaded."""
    kernel = kernel.result() if hasattr(kernel, "result") else kernel
    # What takes more shared memory than there is, a launcher replaces when it runs: see ``run_within_memory``.
    with torch.cuda.device(device), suppress(OutOfResources):
        kernel.run  # noqa: B018 (a property that loads)


def together(device: torch.device, *calls: Callable[[], object]) -> None:
    """Compiles what these calls launch, side by side. What cannot be compiled fails later, where it is called."""
    with suppress(Exception), compiling_ahead(device):
        for call in calls:
            call()


@contextmanager
def first_call(what: str, key: tuple) -> Iterator[None]:
    """Around the first launch of a kernel in this process. what: words for the terminal. key: all that it is compiled for."""
    with _said(what), _one_process(key):
        yield


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Says on a terminal what is compiled, if it takes long enough to be waited for."""
    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(_PATIENCE, _say, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(what: str) -> None:
    print(f"sparse_flash: compiling {what}: once on this machine", file=sys.stderr, flush=True)


@contextmanager
def _one_process(key: tuple) -> Iterator[None]:
    """Waits for another process that compiles the same into the same cache, whose result Triton then reads. Where files cannot be
    locked, each process compiles for itself."""
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    with ExitStack() as locked:
        with suppress(ImportError, OSError):  # ImportError: Windows
            import fcntl

            os.makedirs(knobs.cache.dir, exist_ok=True)
            file = locked.enter_context(open(os.path.join(knobs.cache.dir, f"sparse_flash-{name}.lock"), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, as it is when the process ends
        yield
