"""Several ranks against one process: each strategy, what calls take, copies, layers, models, compiled graphs, and what is
refused."""

import models_on_ranks
import on_ranks
import pytest
from copies_on_ranks import copied
from models_on_ranks import of_packed, of_transformers
from on_ranks import CASES, compared

pytestmark = pytest.mark.ranks
RANKS_AND_OVERLAP = [(2, True), (3, False), (4, None)]
# (ranks, what they run, with which arguments)
STRATEGIES = [
    *((ranks, compared, (name, "blocks"), {"overlap": overlap}) for ranks, overlap in RANKS_AND_OVERLAP for name in CASES),
    *((ranks, compared, (name, "heads"), {}) for name, case in CASES.items() for ranks in (2, 3, 4) if case[5] % ranks == 0),
    (2, compared, ("full, cut block", "blocks"), {"overlap": False}),
]
CHOICES = [
    (2, compared, ("grouped 8:2", "heads"), {"choice_of": {"every": 1, "share_group": True}}),
    (2, compared, ("per head, grouped", "heads"), {"choice_of": {"every": 1, "always": "sinks(3)"}}),
    (3, compared, ("grouped 6:3", "heads"), {"choice_of": {"every": 1}}),
    (2, compared, ("grouped 8:2", "heads"), {"choice_of": {"every": None}}),
    (4, compared, ("ranks that get nothing", "heads"), {"choice_of": {"every": None}}),
    (1, compared, ("grouped 6:3", "heads"), {"choice_of": {"every": 1}}),
]
COPIES = [
    (2, copied, (compared, "causal", "blocks"), {"overlap": True}),
    (3, copied, (compared, "grouped 6:3", "blocks"), {"overlap": False}),
    (4, copied, (compared, "butterfly", "blocks"), {"overlap": False}),
    (3, copied, (compared, "ranks that get nothing", "blocks"), {"overlap": True}),
    (2, copied, (on_ranks.compiled, 2), {}),
]
MODELS = [
    (2, of_transformers, ("llama", 500), {}),
    (2, of_transformers, ("llama", 60), {}),  # one rank has all labels
    (2, of_transformers, ("llama", 500), {"compiled": True}),
    *((2, of_transformers, (name, 500), {}) for name in models_on_ranks.FAMILIES),
    *((2, of_packed, (compiled,), {}) for compiled in (False, True)),
    (4, on_ranks.of_tensor_parallel_heads, ("blocks",), {}),
    (4, on_ranks.of_tensor_parallel_heads, ("heads",), {}),
]
NAN = [
    (2, on_ranks.poisoned, ("blocks",), {"overlap": True}),
    (2, on_ranks.poisoned, ("blocks",), {"overlap": False}),
    (2, on_ranks.poisoned, ("heads",), {}),
]
MORE = [
    (2, on_ranks.varied, ("blocks",), {}),
    (2, on_ranks.varied, ("heads",), {}),
    (2, on_ranks.of_a_layer, (), {"compiled": True}),
    (2, on_ranks.of_a_layer, (), {"select": True, "compiled": True}),
    (2, on_ranks.outlived, ("grouped 8:2", "blocks"), {"compiled": False}),
    (2, on_ranks.outlived, ("grouped 8:2", "heads"), {"compiled": True}),
    (3, on_ranks.checkpointed, ("causal",), {}),
    (2, on_ranks.compiled, (20,), {"strategy": "blocks", "overlap": True}),
    (2, on_ranks.compiled, (4,), {"strategy": "blocks", "overlap": False}),
    (2, on_ranks.compiled, (4,), {"strategy": "heads"}),
    (2, on_ranks.of_documents, ("blocks",), {}),
    (2, on_ranks.of_documents, ("heads",), {}),
]


def id_of(case: tuple) -> str:
    ranks, run, arguments, options = case
    return "-".join(str(getattr(one, "__name__", one)) for one in (run, ranks, *arguments, *options.items()))


@pytest.mark.parametrize("case", [*STRATEGIES, *CHOICES, *COPIES, *MODELS, *NAN, *MORE], ids=id_of)
def test_ranks_give_what_one_process_gives(pools, case):
    ranks, run, arguments, options = case
    if run is on_ranks.poisoned and on_ranks.DEVICE != "cpu":
        pytest.skip("kernels on GPUs take what out receives as it is")
    for differences in pools(ranks).run(run, *arguments, **options):
        assert all(difference < 1e-5 for difference in differences)


LAYERS = ["causal", "local(64)", "causal"]


@pytest.mark.parametrize(
    "by_rank, texts",
    [
        ({1: {"mask": "local(64)", "strategy": "blocks"}}, ["mask is", "of causal on ranks [0, 2]", "of local(64) on ranks [1]"]),
        ({2: {"q_len": 1001}}, ["q_len is 1000 on ranks [0, 1], 1001 on ranks [2]"]),
        (
            {rank: {"mask": LAYERS[: 3 - rank // 2]} for rank in range(3)},
            ["for layers [0, 1, 0] on ranks [0, 1]", "for layers [0, 1] on ranks [2]"],
        ),
        ({0: {"strategy": "heads"}}, ["strategy 'heads' needs heads="]),
    ],
)
def test_different_plans_or_one_ranks_error_are_an_error_on_every_rank(pools, by_rank, texts):
    first, *others = pools(3).run(on_ranks.refused, by_rank)
    assert all(text in said for text in texts for said in (first, *others))
    assert all(said == first or f"rank 0: ValueError: {first}" in said for said in others)


REFUSED = [on_ranks.refused_calls, models_on_ranks.refused_by_transformers]


@pytest.mark.parametrize("refused", REFUSED)
def test_what_does_not_fit_is_refused_by_name_on_every_rank(pools, refused):
    assert pools(2).run(refused) == [[], []]
