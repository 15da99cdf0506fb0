"""Handles kernel compilation: announces it on a terminal, does it once per machine however many processes need it, and compiles
kernels that will be needed together in parallel: in threads for a first call, in forked processes for ``sparse-flash warm``."""

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

_PATIENCE = 1.0  # seconds; anything faster came from Triton's cache on disk, and is not worth a line


class CompileRequests(NamedTuple):
    """Holds what a compile-only thread has requested: kernels by name, as returned by Triton's ``warmup``."""

    kernels: list[tuple[str, object]]

    def names(self) -> list[str]:
        """The kernels' names, without repeats."""
        return [name for _, name in {id(kernel): name for name, kernel in self.kernels}.items()]


_requests: ContextVar[CompileRequests | None] = ContextVar("sparse_flash_ahead", default=None)


def is_compile_only() -> bool:
    """Whether launches of this thread only compile."""
    return _requests.get() is not None


def record_request(name: str, kernel) -> None:
    """Records a kernel that this thread has requested. kernel: the result of Triton's ``warmup``."""
    _requests.get().kernels.append((name, kernel))


@contextmanager
def compiling_ahead(device: torch.device, workers: int | None = None) -> Iterator[CompileRequests]:
    """Inside, launches of this thread only compile their kernels, in forked processes; all are compiled and loaded when the block
    ends. For programs that do nothing else, as a process with threads should not fork. Yields what was requested. workers: kernels
    compiled at a time; by default the number of cores, at most 8. Raises what the compiler raises."""
    asked, workers = CompileRequests([]), workers or _workers()
    with ThreadPoolExecutor(workers) as pool:
        compilers = _ForkingExecutor(pool, workers)
        with _compile_only_mode(asked, compilers):
            yield asked
        for future in compilers.futures:
            future.result()
    load_kernels(asked, device)


def compile_in_threads(*calls: Callable[[], object]) -> CompileRequests:
    """Compiles what these calls launch, in threads. Compilation errors surface later, at the real call."""
    asked = CompileRequests([])
    with suppress(Exception), ThreadPoolExecutor(_workers()) as pool, _compile_only_mode(asked, pool):
        for call in calls:
            call()
    return asked


@contextmanager
def _compile_only_mode(asked: CompileRequests, compilers) -> Iterator[None]:
    """Inside, launches of this thread only compile their kernels. asked: gets what is requested. compilers: an executor, which has
    compiled all of them, or failed to, at the end."""
    with AsyncCompileMode(compilers, ignore_errors=True):  # else Triton 3.6 leaves the mode active after an error
        token = _requests.set(asked)
        try:
            yield
        finally:
            _requests.reset(token)


def load_kernels(asked: CompileRequests, device: torch.device) -> None:
    """Loads what was requested and compiled."""
    with ThreadPoolExecutor(_workers()) as pool:
        list(pool.map(lambda kernel: _load_kernel(kernel[1], device), asked.kernels))


def _workers() -> int:
    return min(8, os.cpu_count() or 1)


class _ForkingExecutor:
    """Runs Triton's compilations in forked processes, as most of a compilation holds the GIL. A thread of this process then reads
    the results from Triton's cache on disk."""

    def __init__(self, pool: ThreadPoolExecutor, workers: int):
        self.pool, self.workers, self.futures = pool, workers, []

    def submit(self, call) -> Future:
        at_work = [future for future in self.futures if not future.done()]
        if len(at_work) >= self.workers:
            wait(at_work, return_when=FIRST_COMPLETED)
        child = _fork_call(call) if hasattr(os, "fork") else None
        self.futures.append(self.pool.submit(_call_after, child, call))
        return self.futures[-1]


def _fork_call(call) -> int:
    """Forks a process that makes the call and exits. Of the locks of other threads it takes only the ones that handle forks; if it
    hangs anyway, ``_call_after`` kills it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking a multithreaded program
        child = os.fork()
    if child == 0:
        gc.disable()  # saves 7 % of a compilation
        try:
            call()
        finally:
            os._exit(0)
    return child


_LONGEST = 120.0  # seconds that a process may take


def _call_after(child: int | None, call):
    """The result of ``call``, made after the process has ended."""
    ends = time.monotonic() + _LONGEST
    while child is not None and os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > ends:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.005)
    return call()


def _load_kernel(kernel, device: torch.device) -> None:
    """Loads a kernel, for which Triton 3.6 compiles a C launcher."""
    kernel = kernel.result() if hasattr(kernel, "result") else kernel
    # A kernel that needs too much shared memory is replaced at run time: see ``run_within_memory``.
    with torch.cuda.device(device), suppress(OutOfResources):
        kernel.run  # noqa: B018 (a property that loads)


@contextmanager
def first_call(what: str, key: tuple) -> Iterator[None]:
    """Wraps the compilation of a kernel for its first launch in this process. what: text for the terminal. key: everything that it
    is compiled for.

    It does not wrap the launch: CUDA may load a kernel only when all that runs on the GPU has ended, and that may be an exchange
    with another rank, which waits here.
    """
    with _announce_if_slow(what), _lock_across_processes(key):
        yield


@contextmanager
def _announce_if_slow(what: str) -> Iterator[None]:
    """Reports on a terminal what is being compiled, if it takes noticeably long."""
    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(_PATIENCE, _announce, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _announce(what: str) -> None:
    print(f"sparse_flash: compiling {what}: once on this machine", file=sys.stderr, flush=True)


@contextmanager
def _lock_across_processes(key: tuple) -> Iterator[None]:
    """Waits for another process that compiles the same kernel into the same cache, from which Triton then reads the result. If
    files cannot be locked, each process compiles for itself."""
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    with ExitStack() as locked:
        with suppress(ImportError, OSError):  # ImportError on Windows
            import fcntl

            os.makedirs(knobs.cache.dir, exist_ok=True)
            file = locked.enter_context(open(os.path.join(knobs.cache.dir, f"sparse_flash-{name}.lock"), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, which also happens when the process ends
        yield
