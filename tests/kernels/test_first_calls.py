"""What happens around compiling a kernel, with fake compilers."""

import multiprocessing
import os
import sys
import threading
import time
import types
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from sparse_flash.kernels.launch import first_calls, launch


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
    assert ("compiling attention forward for Hopper, head_dim 128" in capsys.readouterr().err) == terminal


def compile_once(folder, barrier) -> None:
    """Compiles unless the cache has it, like Triton, and records that it did."""
    barrier.wait()
    with first_calls.first_call("a kernel", ("kernel",)):
        if not (folder / "compiled").exists():
            time.sleep(0.2)
            with (folder / "log").open("a") as log:
                log.write("compiled\n")
            (folder / "compiled").touch()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
def test_eight_ranks_compile_a_kernel_once(cache):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    ranks = [context.Process(target=compile_once, args=(cache, barrier)) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(600)
    assert [rank.exitcode for rank in ranks] == [0] * 8
    assert (cache / "log").read_text() == "compiled\n"


def test_no_rank_waits_for_another_to_load_a_kernel_as_that_may_wait_for_an_exchange_with_it(monkeypatch):
    events = []

    @contextmanager
    def first_call(what, key):
        events.append("others wait")
        yield
        events.append("others go on")

    class Kernel:
        """What a launch needs of one of Triton's."""

        fn, params = compile_once, (types.SimpleNamespace(name="q", do_not_specialize=False),)

        def warmup(self, *arguments, grid, **options):
            events.append("compiled")

        def __getitem__(self, grid):
            return lambda *arguments, **options: events.append("launched")

    monkeypatch.setattr(launch, "first_call", first_call)
    monkeypatch.setattr(launch, "ensure_context", lambda device: None)
    monkeypatch.setattr(launch, "compiled_kernels", {})
    launch.launch(Kernel(), (1, 1), [torch.zeros(16)], {}, {})
    assert events == ["others wait", "compiled", "others go on", "launched"]


def test_a_cache_that_cannot_be_locked_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "below"))
    with first_calls.first_call("a kernel", ("kernel",)):
        pass
