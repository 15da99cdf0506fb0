"""Hopper's kernel of choosers scores as operations do, in any order of events, on a CPU."""

import chosen
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash.choosers import choose, features
from sparse_flash.masks.grid import BlockGrid

pytest.importorskip("triton.experimental.gluon")
from gluon_on_cpu import gluon_on_cpu

from sparse_flash.kernels.choosers import hopper_log_sums

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/choosers runs the compiled kernels on this GPU"),
    pytest.mark.usefixtures("poison"),
]


def scores(chooser, q, k, causal, lengths, by_kernel):
    """lengths: starts, ends and q_ends of ``features_of``, lists or None."""
    lengths = (None if one is None else torch.tensor(one) for one in lengths)
    content = features.Content(q, k, BlockGrid(q.shape[2], k.shape[2], chooser.block_size), causal, 0.1, None, *lengths)
    with torch.no_grad():
        return torch.cat([part for *_, part in choose._iter_scores(chooser, content, by_kernel)], 2)


EXISTING = st.none() | st.lists(st.integers(0, 300), min_size=2, max_size=2)


@settings(max_examples=12)
@given(
    chooser=chosen.drawn(chosen.COMPARING),
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)) | st.integers(1, 300).map(lambda n: (n, n)),
    heads=st.sampled_from([(1, 1), (2, 1)]),
    causal=st.booleans(),
    starts=EXISTING,
    ends=EXISTING,
    q_ends=EXISTING,
    head_dim=st.sampled_from([64, 128]),
    seed=st.integers(0, 999),
)
# Rows that precede all existing columns by more than a step read none, and end.
@example(sf.parse("sampled(64, keep=1, block=64)"), (500, 500), (1, 1), True, [0, 499], None, None, 64, 0)
@example(sf.parse("antidiagonal(8, keep=1, block=64)"), (300, 300), (2, 1), True, None, None, None, 128, 0)
@example(sf.parse("sampled(64, keep=1, block=64)"), (500, 500), (1, 1), False, None, [0, 3], [3, 0], 64, 0)
def test_hoppers_log_sums_are_right_in_a_drawn_order_of_events(
    chooser, lengths, heads, causal, starts, ends, q_ends, head_dim, seed
):
    options = {"batch": 2, "heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim, "dtype": torch.float16, "seed": seed}
    q, k = chosen.tensors(*lengths, **options)
    starts = starts and [min(start, lengths[1] - 1) for start in starts]
    existing = starts, ends, q_ends
    wanted = scores(chooser, q, k, causal, existing, False)
    with gluon_on_cpu(seed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_log_sums, "supports", lambda rows, per_kv_block: per_kv_block >= 4)  # head_dim 64 too
        found = scores(chooser, q, k, causal, existing, True)
    torch.testing.assert_close(found, wanted, rtol=3e-3, atol=1e-5)
