"""Plans on several processes against one process."""

import pytest
from on_ranks import CASES, compared

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_blocks_fetched_give_what_one_process_gives_and_the_same_bits_twice(pools, ranks, name):
    for error, same in pools(ranks).run(compared, name, "blocks"):
        assert error < 1e-5 and same
