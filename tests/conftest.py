"""Settings of all tests. Property tests draw anew each time; a failure prints the lines that repeat it."""

import os

# One thread for each test process, unless asked for more: tests are small, and threads that wait for each other spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

# Triton reads this when kernels are defined: without a GPU it then interprets them on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The first call of anything loads scipy, torch or a compiled kernel, so time limits would fail by chance.
settings.register_profile("sparse_flash", deadline=None, print_blob=True)
settings.load_profile("sparse_flash")


@pytest.fixture(scope="module")
def poison():
    """Fills what torch.empty and its relatives return with NaN, so that a value never written shows."""

    def poisoned(make):
        def filled(*args, **kwargs):
            tensor = make(*args, **kwargs)
            with torch.no_grad():
                return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return filled

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield
