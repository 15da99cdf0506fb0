"""Models whose sequence several processes share, against one process."""

from functools import cache

import models_on_ranks
import pytest
from models_on_ranks import PACKED, of_packed, of_tensor_parallel_heads, of_transformers, trained
from pool import DEVICE
from tiny_lm import random_tokens

pytestmark = pytest.mark.ranks
in_float32 = pytest.mark.skipif(DEVICE != "cpu", reason="on GPUs it trains in bfloat16")


@pytest.mark.parametrize(
    "ranks, run, arguments",
    [
        (2, of_transformers, ("llama", 500)),
        (2, of_transformers, ("llama", 60)),  # one rank has all labels
        (2, of_transformers, ("llama", 500, True)),
        *((2, of_transformers, (name, 500)) for name in models_on_ranks.FAMILIES),
        *((2, of_packed, (given, compiled)) for given in ("mask", "planner", "nothing") for compiled in (False, True)),
        (4, of_tensor_parallel_heads, ("blocks",)),
        (4, of_tensor_parallel_heads, ("heads",)),
    ],
)
def test_a_model_gives_what_one_process_gives(pools, ranks, run, arguments):
    for differences in pools(ranks).run(run, *arguments):
        assert all(difference < 1e-5 for difference in differences)


def test_models_and_calls_that_a_plan_does_not_fit_are_refused_by_name(pools):
    assert pools(2).run(models_on_ranks.refused_by_transformers) == [[], []]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return random_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def alone(pools, tokens, tmp_path_factory):
    """What one process says of ten steps, of its settings."""
    return cache(lambda **changes: pools(1).run(trained, tokens, tmp_path_factory.mktemp("alone"), 0, "ddp", 10, **changes)[0])


@in_float32
@pytest.mark.parametrize(
    "sharding, changes",
    [("ddp", {}), ("fsdp", {}), ("ddp", PACKED)],  # two sequences at a time, laid end to end, with other documents in each pass
)
def test_two_by_two_ranks_take_the_ten_steps_of_one_process(pools, tokens, alone, sharding, changes, tmp_path):
    wanted = alone(**changes)
    assert wanted[-3] < wanted[0]
    for found in pools(4).run(trained, tokens, tmp_path, 2, sharding, 10, **changes):
        assert found == pytest.approx(wanted, rel=1e-4)


@in_float32
def test_a_run_of_shared_sequences_goes_on_where_none_is_shared(pools, tokens, alone, tmp_path):
    first = pools(4).run(trained, tokens, tmp_path, 4, "fsdp", 5)[0]
    rest = pools(1).run(trained, tokens, tmp_path, 0, "ddp", 10)[0]
    assert len(first) == len(rest) == 15 and first + rest == pytest.approx(alone(), rel=1e-4)
