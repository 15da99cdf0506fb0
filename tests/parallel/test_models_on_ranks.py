"""Models whose sequence several processes share, against one process."""

import models_on_ranks
import pytest
from tiny_lm import random_tokens

pytestmark = pytest.mark.ranks


OF_MODELS = [(1, "llama", 500, False), (2, "llama", 500, False), (2, "llama", 60, False), (2, "llama", 500, True)]
OF_MODELS += [(2, name, 500, False) for name in models_on_ranks.FAMILIES]


@pytest.mark.parametrize("ranks, name, labelled, compiled", OF_MODELS)
def test_a_model_of_transformers_gives_what_one_process_gives_also_where_one_rank_has_all_labels(
    pools, ranks, name, labelled, compiled
):
    for errors in pools(ranks).run(models_on_ranks.of_transformers, name, labelled, compiled):
        assert max(errors) < 1e-5


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("given", ["mask", "planner", "nothing"])
def test_positions_restart_only_with_the_documents_of_the_plan(pools, given, compiled):
    for errors in pools(2).run(models_on_ranks.of_packed, given, compiled):
        if given == "nothing":
            assert "position_ids must restart only where a document of the plan's mask starts" in errors
        else:
            assert max(errors) < 1e-5


def test_models_and_calls_that_a_plan_does_not_fit_are_refused_by_name(pools):
    assert pools(2).run(models_on_ranks.refused_by_transformers) == [[], []]


@pytest.fixture(scope="module")
def alone(pools, tmp_path_factory):
    """(a folder of tokens, what one process says of each of ten steps)"""
    folder = tmp_path_factory.mktemp("alone")
    tokens = random_tokens(folder)
    return tokens, pools(1).run(models_on_ranks.trained, tokens, folder / "run", 0, "ddp", 10)[0]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_by_two_ranks_take_the_ten_steps_of_one_process(pools, alone, sharding, tmp_path):
    tokens, wanted = alone
    for rows in pools(4).run(models_on_ranks.trained, tokens, tmp_path / "run", 2, sharding, 10):
        assert [number for row in rows for number in row] == pytest.approx([number for row in wanted for number in row], rel=1e-4)


def test_packed_documents_that_ranks_share_train_as_in_one_process(pools, alone, tmp_path):
    """Two sequences at a time, laid end to end, with other documents in each pass."""
    tokens, _ = alone
    one, shared = (tmp_path / name for name in ("one", "shared"))
    wanted = pools(1).run(models_on_ranks.trained, tokens, one, 0, "ddp", 10, models_on_ranks.PACKED)[0]
    assert wanted[-1][0] < wanted[0][0]
    for rows in pools(4).run(models_on_ranks.trained, tokens, shared, 2, "ddp", 10, models_on_ranks.PACKED):
        assert [number for row in rows for number in row] == pytest.approx([number for row in wanted for number in row], rel=1e-4)


def test_a_run_of_shared_sequences_goes_on_where_none_is_shared(pools, alone, tmp_path):
    tokens, wanted = alone
    first = pools(4).run(models_on_ranks.trained, tokens, tmp_path / "run", 4, "fsdp", 5)[0]
    rest = pools(1).run(models_on_ranks.trained, tokens, tmp_path / "run", 0, "ddp", 10)[0]
    numbers = [number for row in first + rest for number in row]
    assert len(rest) == 5 and numbers == pytest.approx([number for row in wanted for number in row], rel=1e-4)


def test_gradients_are_those_of_one_process_where_one_rank_has_all_labels(pools):
    assert max(pools(3).run(models_on_ranks.of_a_decoder, 60)) < 1e-5


@pytest.mark.parametrize("strategy", ["blocks", "heads"])
def test_ranks_that_share_heads_by_tensor_parallelism_share_the_sequence_with_others(pools, strategy):
    for error, of_parameters in pools(4).run(models_on_ranks.of_tensor_parallel_heads, strategy):
        assert error < 1e-5 and of_parameters < 1e-5
