"""Settings for all tests. Property tests draw new inputs each time; a failure prints the lines that repeat it."""

import gc
import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

# One thread per test process unless asked for more: tests are small, and threads that wait for each other spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings
from interpreted import hasten

# Triton reads this when kernels are defined: without a GPU it then interprets them on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The first call of anything loads scipy, torch or a compiled kernel, so time limits would fail by chance.
settings.register_profile("sparse_flash", deadline=None, print_blob=True)
settings.load_profile("sparse_flash")


# The fewest results that a run of all tests compares with the oracle, by back end: three quarters of what such a run compared on
# 2026-11-30. Fewer mean that inputs came to be refused, or that nothing ran on the GPU.
FLOORS = {
    "cpu": {"torch": 530, "triton": 220, "reference": 250},
    "gpu": {"torch": 330, "triton": 800, "reference": 240},
    "hopper": {"torch": 330, "triton": 800, "reference": 240, "hopper": 720},
}


def pytest_configure(config):
    config.pluginmanager.register(Compared(config))


def pytest_collection_finish():
    """Leaves what is imported out of later collections of garbage, each of which would search a million such objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # else nanobind takes Triton's functions for leaked


class Compared:
    """Prints how many results of each back end a run compared with the oracle. A run of all tests fails below ``FLOORS``."""

    def __init__(self, config: pytest.Config):
        self.config, self.results, self.faults = config, Counter(), []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.results.update(getattr(node, "workeroutput", {}).get("compared", {}))

    def pytest_sessionfinish(self, session):
        self.results.update(getattr(sys.modules.get("oracle"), "compared", {}))
        if hasattr(self.config, "workeroutput"):  # a process of pytest-xdist
            self.config.workeroutput["compared"] = dict(self.results)
        elif session.exitstatus == pytest.ExitCode.OK and self.is_whole():
            self.faults = [
                f"{name} compared {self.results[name]}; {least} are the least"
                for name, least in FLOORS[self.machine()].items()
                if self.results[name] < least
            ]
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if self.faults else session.exitstatus

    def pytest_terminal_summary(self, terminalreporter):
        if self.results:
            counted = ", ".join(f"{name} {count}" for name, count in sorted(self.results.items()))
            terminalreporter.write_line(f"results compared with the oracle: {counted}")
        for fault in self.faults:
            terminalreporter.write_line(f"FAILED {fault}", red=True)

    def is_whole(self) -> bool:
        option, every = self.config.option, Path(__file__).parent / "tests"
        narrowing = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "stepwise", "collectonly", "maxfail")
        asked = [(self.config.invocation_params.dir / arg).resolve() for arg in self.config.args]
        by_default = option.markexpr in ("", "not ranks and not compiles")  # as pyproject.toml has it
        return asked == [every] and by_default and not any(getattr(option, name, None) for name in narrowing)

    @staticmethod
    def machine() -> str:
        if not torch.cuda.is_available():
            return "cpu"
        return "hopper" if torch.cuda.get_device_capability() == (9, 0) else "gpu"


@pytest.fixture(autouse=True)
def unsettled():
    """For tests that change which back ends exist or what they support: forgets choices from earlier calls."""
    from sparse_flash.kernels.launch import memory

    memory.forget_calls()


@pytest.fixture(scope="session", autouse=True)
def interpreted():
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
            hasten(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def as_long_calls():
    """Kernels run as in long calls, however short the calls of tests are: portable backward passes in two launches, Hopper's
    forward passes in the tiles of long calls. What short calls take has its own tests, and the fuzzer draws it."""
    try:
        from sparse_flash.kernels.hopper import configs as hopper
        from sparse_flash.kernels.portable import configs as portable
    except ImportError:  # without Triton
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "ONE_LAUNCH_TOKENS", 0)
        patch.setattr(hopper, "SHORT_TILES", dict.fromkeys(hopper.SHORT_TILES, 0))
        yield


@pytest.fixture(scope="module")
def poison():
    """Fills what torch.empty and its relatives return with NaN."""
    from oracle import poisoned_memory  # not earlier: it imports modules that read the variable above

    with poisoned_memory():
        yield
