"""What is chosen by predicted time: block sizes, and masks that gain nothing over dense attention."""

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash.kernels.cost import choices
from sparse_flash.kernels.cost.hopper import describe_backward, describe_forward
from sparse_flash.kernels.cost.model import AttentionSizes, predict_pass
from sparse_flash.masks import memory

HEADS = 64  # enough that programs rarely idle


def microseconds(mask, tokens: int) -> float:
    sizes, chip = AttentionSizes(1, HEADS, HEADS, tokens, tokens, choices.HEAD_DIM, choices.HEAD_DIM), choices.reference_chip()
    return sum(
        sum(predict_pass(f(sizes, mask, chip), chip).parts.get(p, 0) for p in PARTS) for f in (describe_forward, describe_backward)
    )


PARTS = "products", "row starts", "sums of dQ"


@pytest.mark.parametrize("block_size", [64, 128, 256])
@pytest.mark.parametrize("spec", ["causal", "causal & local(700)", "butterfly(block=256)"])
def test_counts_of_a_table_take_as_long_as_the_calls_of_many_heads(spec, block_size):
    mask = sf.compile_mask(spec, 8192, block_size=block_size)
    mask = replace(mask, coarse=None)
    table = mask.by_query
    full, entries = int((table.row_split[..., 0] - table.row_ptr[:, :-1]).sum()), int(table.row_ptr[0, -1])
    counted = HEADS * choices.predict_both_passes(block_size, mask.grid.q_blocks, full, entries - full)
    assert counted == pytest.approx(microseconds(mask, 8192), rel=0.03)


@settings(deadline=None, max_examples=40)
@given(
    spec=st.sampled_from(["causal & local({})", "local({})", "causal & random(0.{:03}, block=128)", "random(0.{:03}, block=128)"]),
    number=st.integers(100, 999),
    tokens=st.integers(1000, 5000),
    more=st.sampled_from([0, 128, 700]),
)
def test_the_gain_of_a_mask_is_that_over_the_dense_call_in_its_place(spec, number, tokens, more):
    mask = sf.compile_mask(spec.format(number), tokens, tokens + more)
    dense = sf.compile_mask("causal" if spec.startswith("causal") else "local(1000000)", tokens, tokens + more)

    def counted(mask) -> float:
        table = mask.by_query
        full, entries = int((table.row_split[..., 0] - table.row_ptr[:, :-1]).sum()), int(table.row_ptr[0, -1])
        return choices.predict_both_passes(128, mask.grid.q_blocks, full, entries - full)

    # Blocks that the lengths cut off count as full in the dense call.
    assert choices.compare_with_dense(mask).gain == pytest.approx(counted(dense) / counted(mask), rel=0.05)


def test_the_gain_of_heads_with_masks_of_their_own_is_that_of_their_mean():
    mixed = sf.BlockMask.per_head(["causal & local(200)", "causal"], 4096)
    assert (
        choices.compare_with_dense(sf.compile_mask("causal & local(200)", 4096)).gain > choices.compare_with_dense(mixed).gain > 1.5
    )
    assert choices.compare_with_dense(sf.compile_mask("causal", 4096)).gain == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(
    "spec, kv_len, slow",
    [
        ("causal & strided(3, block=1)", 1024, True),
        ("random(0.5, block=1)", 1024, True),
        ("causal & local(1000)", 1024, False),  # keeps nearly all pairs
        ("causal & local(100)", 1024, False),
        ("causal", 1024, False),
        ("causal", 1500, False),
        ("full", 1024, False),
    ],
)
def test_a_mask_that_gains_nothing_is_said_once_and_by_auto_alone(spec, kv_len, slow):
    mask = sf.compile_mask(spec, 1024, kv_len)
    assert mask.to("meta").slow == mask.to("meta").to("meta").slow == slow
    here = replace(mask, slow=mask.to("meta").slow)  # as on a GPU
    q, k = torch.zeros(1, 1, 1024, 16), torch.zeros(1, 1, kv_len, 16)
    memory.clear_memories()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sf.attention(q, k, k, here, backend="torch")
        assert not said
        for _ in range(2):
            sf.attention(q, k, k, here)
            sf.attention(q, k, k, replace(here), dropout_p=0.5)
    assert [str(one.message)[:32] for one in said] == ["this mask is predicted to take a"] * slow
    assert not said or said[0].filename == __file__


def test_warnings_point_at_the_users_line_whatever_calls_attention():
    slow = replace(sf.compile_mask("causal & local(250)", 256), slow=True)
    layer, x, q = sf.SparseAttention(32, 2, mask=slow), torch.randn(1, 256, 32), torch.randn(1, 2, 256, 16)
    transposed = torch.randn(1, 300, 4, 16)
    calls = {
        "call": lambda: sf.attention(q, q, q, slow),
        "layer": lambda: layer(x),
        "layer in a layer": lambda: torch.nn.Sequential(layer)(x),
        "tensors": lambda: sf.attention(transposed, transposed, transposed),
    }
    for name, call in calls.items():
        memory.clear_memories()
        with pytest.warns(UserWarning, match="predicted to take|tokens come before heads") as said:
            call()
        assert [(one.filename, one.lineno) for one in said] == [(__file__, call.__code__.co_firstlineno)], name
