"""A pytest plugin, -p simulated: the calls that tests would make on an H100, and which would be refused. Needs no H100.

For each test function that takes ``backend``, and each back end, some cases run until they ask whether they can run; nothing is
computed. Writes to the file named by $SIMULATED_REPORT how many cases were accepted for each function and back end, and how often
each reason was given.
"""

import json
import os
import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

CASES = 8  # per function and back end: chosen at random, because a fixed step would hit the same values of some parameter
outcomes: dict[str, Counter] = defaultdict(Counter)


def an_h100(patch: pytest.MonkeyPatch) -> None:
    """Makes all back ends answer as on an H100, about calls on "cuda"."""
    import accepted

    from sparse_flash.backends import hopper, triton

    for module in (hopper, triton):
        patch.setattr(module, "_available", lambda: None)
    patch.setattr(triton, "_interpreted", lambda: False)
    patch.setattr(triton, "_refusal", lambda device: None)
    patch.setattr(hopper, "_capability", lambda device: (9, 0))
    patch.setattr(accepted, "DEVICE", "cuda")


def pytest_collection():
    """Runs before test modules import names that are changed here, and after conftest.py."""
    import oracle
    import torch

    from sparse_flash import backends

    def ask(name, call, attempt=None):
        reason = backends.backend(name).supports(replace(call, device=torch.device("cuda")))
        outcomes[family][reason or "accepted"] += 1
        pytest.skip("asked")

    def unasked(*args):
        pytest.skip("computes what nobody asked about")

    patch = pytest.MonkeyPatch()
    an_h100(patch)
    patch.setattr(oracle, "require", ask)
    for name in backends.NAMES:
        for function in ("forward", "decode"):
            patch.setattr(backends.backend(name), function, unasked)


def pytest_collection_modifyitems(items):
    families = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and "backend" in item.callspec.params:
            families[family_of(item)].append(item)
    chosen = random.Random(0)
    items[:] = [item for cases in families.values() for item in chosen.sample(cases, min(CASES, len(cases)))]


def family_of(item) -> str:
    return f"{item.path.parent.name}/{item.path.stem}::{item.originalname}[{item.callspec.params['backend']}]"


family = ""


def pytest_runtest_setup(item):
    global family
    family = family_of(item)


def pytest_sessionfinish():
    with open(os.environ["SIMULATED_REPORT"], "w") as file:
        json.dump(outcomes, file, indent=1)
