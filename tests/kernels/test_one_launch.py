"""The portable backward pass in one launch: gradients for every kind of block, and with what a call may add to scores."""

import pytest
from accepted import needs_triton
from calls import assert_right, attention_with_terms, sizes_for
from oracle import tiles

pytestmark = [pytest.mark.usefixtures("poison"), needs_triton]
LENGTHS, CHANGES, PER_HEAD = ("kv_lens", "q_lens"), ("alibi of batch", "softcap"), "per_head([causal, local(20), causal, full])"
# spec, terms, what differs from one head of one sequence
ROWS = [
    *((spec, (), {}) for spec in (None, "local(20)", "butterfly(block=16)", "causal & strided(7, block=1)")),
    ("causal", (), {"heads": 4, "kv_heads": 2}),
    (PER_HEAD, (), {"heads": 4, "kv_heads": 2, "v_head_dim": 32, "kv_len": 50}),
    *((spec, terms, {"batch": 2, "heads": 2}) for spec in (None, "causal & local(30)") for terms in (LENGTHS, CHANGES)),
]


@pytest.mark.parametrize("spec, terms, changed", ROWS)
def test_gradients_are_right(spec, terms, changed):
    usual = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 50, "kv_len": 60}
    with tiles(short=True):
        assert_right(attention_with_terms(sizes_for("triton", spec=spec, terms=terms, **usual | changed)), "triton", True)
