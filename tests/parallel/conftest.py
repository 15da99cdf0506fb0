"""Pools of processes, one for each number of ranks, kept for the whole session."""

import pytest
import torch
from pool import DEVICE, Pool


@pytest.fixture(scope="session")
def pools(tmp_path_factory):
    """Number of ranks -> its Pool, started at its first use."""
    folder, started = tmp_path_factory.mktemp("ranks"), {}

    def pool(ranks: int) -> Pool:
        if DEVICE == "cuda" and torch.cuda.device_count() < ranks:
            pytest.skip(f"it needs {ranks} GPUs; there are {torch.cuda.device_count()}")
        if ranks not in started:
            started[ranks] = Pool(ranks, folder)
        return started[ranks]

    yield pool
    for one in started.values():
        one.close()
