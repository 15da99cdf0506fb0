"""Training whose sequences several processes share, against one process."""

from functools import cache

import pytest
from models_on_ranks import PACKED, trained
from pool import DEVICE
from tiny_lm import random_tokens

# On GPUs it trains in bfloat16.
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(DEVICE != "cpu", reason="it compares training in float32")]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return random_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def alone(pools, tokens, tmp_path_factory):
    """What one process says of ten steps, of its settings."""
    return cache(lambda **changes: pools(1).run(trained, tokens, tmp_path_factory.mktemp("alone"), 0, "ddp", 10, **changes)[0])


@pytest.mark.parametrize(
    "sharding, changes",
    [("ddp", {}), ("fsdp", {}), ("ddp", PACKED)],  # two sequences at a time, laid end to end, with other documents in each pass
)
def test_two_by_two_ranks_take_the_ten_steps_of_one_process(pools, tokens, alone, sharding, changes, tmp_path):
    wanted = alone(**changes)
    assert wanted[-3] < wanted[0]
    for found in pools(4).run(trained, tokens, tmp_path, 2, sharding, 10, **changes):
        assert found == pytest.approx(wanted, rel=1e-4)


def test_a_run_of_shared_sequences_goes_on_where_none_is_shared(pools, tokens, alone, tmp_path):
    first = pools(4).run(trained, tokens, tmp_path, 4, "fsdp", 5)[0]
    rest = pools(1).run(trained, tokens, tmp_path, 0, "ddp", 10)[0]
    assert len(first) == len(rest) == 15 and first + rest == pytest.approx(alone(), rel=1e-4)
