"""Compiles a kernel for its first launch: says so on a terminal, and does it once for all processes of a machine."""

import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from triton import knobs

_PATIENCE = 1.0  # seconds; anything faster came from Triton's cache on disk, and needs no message


@contextmanager
def first_call(what: str, key: tuple) -> Iterator[None]:
    """Wraps the compilation of a kernel, which is made for ``key``. what: text for the terminal if it takes long.

    Another process that compiles the same kernel into the same cache waits, and Triton then reads the result. The launch stays
    outside: CUDA may wait for an exchange with another rank, which waits here, before it loads a kernel.
    """
    said = f"sparse_flash: compiling {what}: once on this machine"
    timer = threading.Timer(_PATIENCE, print, [said], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        with ExitStack() as locked:
            with suppress(ImportError, OSError):  # ImportError on Windows; without locks, each process compiles by itself
                import fcntl

                os.makedirs(knobs.cache.dir, exist_ok=True)
                name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
                file = locked.enter_context(open(os.path.join(knobs.cache.dir, f"sparse_flash-{name}.lock"), "w"))
                fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, which also happens when the process ends
            yield
    finally:
        timer.cancel()
