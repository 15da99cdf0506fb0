"""What happens around compiling a kernel, with fake compilers."""

import importlib
import multiprocessing
import os
import sys
import threading
import time
import types

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from sparse_flash.kernels.launch import first_calls

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert knobs.cache.dir == str(tmp_path)
    return tmp_path


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_what_is_compiled_where_that_takes_long(cache, monkeypatch, capsys, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(first_calls, "_PATIENCE", 0.0)
    with first_calls.first_call("attention forward for Hopper, head_dim 128", ("kernel",)):
        for timer in (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)):
            timer.join()
    expected = "sparse_flash: compiling attention forward for Hopper, head_dim 128: once on this machine\n"
    assert capsys.readouterr().err == (expected if terminal else "")


def _compile(folder: str, key: str, barrier) -> None:
    """Compiles unless the cache has it, like Triton, and records that it did."""
    barrier.wait()
    with first_calls.first_call("a kernel", (key,)):
        if not os.path.exists(f"{folder}/{key}.compiled"):
            time.sleep(0.2)
            with open(f"{folder}/{key}.log", "a") as log:
                log.write("compiled\n")
            open(f"{folder}/{key}.compiled", "w").close()


@forks
def test_eight_ranks_compile_a_kernel_once(cache):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    ranks = [context.Process(target=_compile, args=(str(cache), "kernel", barrier)) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(600)
    assert [rank.exitcode for rank in ranks] == [0] * 8
    assert (cache / "kernel.log").read_text() == "compiled\n"


@forks
def test_no_rank_waits_for_another_to_load_a_kernel_as_that_may_wait_for_an_exchange_with_it(cache, monkeypatch):
    import fcntl

    events = []

    def did(what):
        for path in cache.glob("*.lock"):
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    events.append((what, "others may compile"))
                except BlockingIOError:
                    events.append((what, "others wait"))

    class Kernel:
        """What a launch needs of one of Triton's."""

        fn, params = _compile, (types.SimpleNamespace(name="q", do_not_specialize=False),)

        def warmup(self, *arguments, grid, **options):
            did("compiled")

        def __getitem__(self, grid):
            return lambda *arguments, **options: did("launched")

    module = importlib.import_module("sparse_flash.kernels.launch.launch")
    monkeypatch.setattr(module, "ensure_context", lambda device: None)
    monkeypatch.setattr(module, "compiled_kernels", {})
    module.launch(Kernel(), (1, 1), [torch.zeros(16)], {}, {})
    assert events == [("compiled", "others wait"), ("launched", "others may compile")]


def test_a_cache_that_cannot_be_locked_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "below"))
    ran = False
    with first_calls.first_call("a kernel", ("kernel",)):
        ran = True
    assert ran
