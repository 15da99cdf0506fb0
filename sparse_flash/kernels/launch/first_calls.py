"""Compiles a kernel for its first launch: says so on a terminal, does it once per machine however many processes need it, and
compiles kernels that will be needed together in threads."""

import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar

import torch
from triton import knobs
from triton.runtime.errors import OutOfResources

from ..common.compat import AsyncCompileMode

_PATIENCE = 1.0  # seconds; anything faster came from Triton's cache on disk, and is not worth a line

# On a thread whose launches only compile: what Triton's ``warmup`` has returned for each.
_requested: ContextVar[list | None] = ContextVar("sparse_flash_requested", default=None)


def is_compile_only() -> bool:
    """Whether launches of this thread only compile."""
    return _requested.get() is not None


def note_request(kernel) -> None:
    """Notes a kernel that this thread, which only compiles, has requested. kernel: the result of Triton's ``warmup``."""
    _requested.get().append(kernel)  # type: ignore[union-attr]


def compile_in_threads(*calls: Callable[[], object]) -> list:
    """Compiles what these calls launch, in threads, and returns it. Compilation errors surface later, at the real call."""
    requested: list = []
    # Without ignore_errors, Triton 3.6 leaves the mode active after an error.
    with suppress(Exception), _threads() as pool, AsyncCompileMode(pool, ignore_errors=True):
        token = _requested.set(requested)
        try:
            for call in calls:
                call()
        finally:
            _requested.reset(token)
    return requested


def load_in_threads(kernels: list, device: torch.device) -> None:
    """Loads what ``compile_in_threads`` returned. Errors surface later, at the real call."""

    def load(kernel) -> None:
        # A kernel that needs too much shared memory is replaced at run time: see ``run_within_memory``.
        with torch.cuda.device(device), suppress(OutOfResources):
            # A property that loads the kernel; for this, Triton 3.6 compiles a C launcher.
            (kernel.result() if hasattr(kernel, "result") else kernel).run  # noqa: B018

    with suppress(Exception), _threads() as pool:
        list(pool.map(load, kernels))


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))


@contextmanager
def first_call(what: str, key: tuple) -> Iterator[None]:
    """Wraps the compilation of a kernel for its first launch in this process. what: text for the terminal, if it takes long. key:
    everything that it is compiled for.

    Another process that compiles the same kernel into the same cache waits, and Triton then reads the result. It does not wrap the
    launch: CUDA may load a kernel only when all that runs on the GPU has ended, and that may be an exchange with another rank,
    which waits here.
    """
    said = f"sparse_flash: compiling {what}: once on this machine"
    timer = threading.Timer(_PATIENCE, print, [said], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        with _lock_across_processes(hashlib.sha256(repr(key).encode()).hexdigest()[:32]):
            yield
    finally:
        timer.cancel()


@contextmanager
def _lock_across_processes(name: str) -> Iterator[None]:
    """If files cannot be locked, each process compiles for itself."""
    with ExitStack() as locked:
        with suppress(ImportError, OSError):  # ImportError on Windows
            import fcntl

            os.makedirs(knobs.cache.dir, exist_ok=True)
            file = locked.enter_context(open(os.path.join(knobs.cache.dir, f"sparse_flash-{name}.lock"), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, which also happens when the process ends
        yield
