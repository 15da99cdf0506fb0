"""Pools of processes, one for each number of ranks, kept for the whole session."""

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pools(tmp_path_factory):
    """Number of ranks -> its Pool, started at its first use."""
    folder, started = tmp_path_factory.mktemp("ranks"), {}

    def pool(ranks: int) -> Pool:
        if ranks not in started:
            started[ranks] = Pool(ranks, folder)
        return started[ranks]

    yield pool
    for one in started.values():
        one.close()
