"""Settings for all tests. Property tests draw new inputs each time; a failure prints the lines that repeat it."""

import os
from importlib.util import find_spec

# One thread per test process unless asked for more: tests are small, and threads that wait for each other spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests use the built-in configs, whatever was tuned on this machine.
os.environ["SPARSE_FLASH_CACHE"] = os.path.join(os.path.dirname(__file__), "no-such-folder")

import pytest
import torch
from counts import Counts
from hypothesis import settings
from interpreted import hasten

# Triton reads this when kernels are defined: without a GPU it then interprets them on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The first call of anything loads scipy, torch or a compiled kernel, so time limits would fail by chance.
settings.register_profile("sparse_flash", deadline=None, print_blob=True)
settings.load_profile("sparse_flash")


def pytest_addoption(parser):
    parser.addoption("--record-counts", action="store_true", help="record how many tests the files have and skip: tests/counts.py")


def pytest_configure(config):
    config.pluginmanager.register(Counts(config))


@pytest.fixture(autouse=True)
def unsettled():
    """For tests that change which back ends exist or what they support: forgets choices from earlier calls."""
    from sparse_flash.api import arguments

    arguments._selected.clear()


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
