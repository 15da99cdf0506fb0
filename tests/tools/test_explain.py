"""The numbers of ``explain`` and the pictures of ``draw``, against the dense mask."""

import copy
import tracemalloc

import numpy as np
import pytest
import strategies
import torch
from hypothesis import example, given, settings

import sparse_flash as sf
from sparse_flash.tools import draw
from sparse_flash.tools.explain import explain, reachability


@settings(max_examples=40)
@given(pattern=strategies.expressions, lengths=strategies.lengths, block=strategies.block_sizes)
@example("causal", (300, 300), 64)
@example("causal & local(40)", (200, 330), 32)
@example("causal", (330, 200), 32)
def test_numbers_are_those_of_the_dense_mask(pattern, lengths, block):
    mask, (q_len, kv_len) = sf.compile_mask(pattern, *lengths, block), lengths
    dense, states, e = mask.to_dense().numpy(), mask.block_states().numpy(), explain(mask, heads=3, head_dim=32)
    assert e.kept_pairs == dense.sum()
    assert (e.kept_blocks, e.partial_blocks) == ((states > 0).sum(), (states == 1).sum())
    assert e.most_in_row == (states > 0).sum(1).max()
    assert e.flops == 4 * 3 * 32 * dense.sum() and explain(mask, heads=3, head_dim=48, v_head_dim=16).flops == e.flops
    causal = np.tri(q_len, kv_len, kv_len - q_len, dtype=bool)
    assert e.causal == mask.is_causal == (not (dense & ~causal).any())
    if e.causal:
        assert e.causal_density == pytest.approx(dense.sum() / causal.sum())
        assert e.rival_blocks == (sf.compile_mask("causal", q_len, kv_len, block).block_states() > 0).sum()


def test_costs_are_compared_with_the_dense_call_that_the_mask_replaces():
    specs = "causal & local(512)", "local(512)", "causal", "full"
    mask, both_ways, causal, full = (explain(sf.compile_mask(spec, 4096), heads=2) for spec in specs)
    for name, e, rival in (("dense causal attention", mask, causal), ("dense attention", both_ways, full)):
        assert e.dense_flops == rival.flops and e.share_of_blocks == e.kept_blocks / rival.kept_blocks
        assert all(f" {name}" in e.lines[line] for line in ("share of blocks", "forward FLOPs"))


def test_explaining_and_drawing_a_dense_mask_takes_little_memory():
    mask = sf.compile_mask("causal & ~local(5000)", 1 << 19)
    for look in (explain, lambda mask: draw.make_picture(mask, 64, 64)):
        tracemalloc.start()
        look(mask)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < mask.nbytes / 4


@pytest.mark.parametrize("spec", ["causal & local(3)", "butterfly(block=1)", "causal & power_of_two(block=1)", "full", "local(2)"])
def test_reachability_is_a_power_of_the_mask(spec):
    mask = sf.compile_mask(spec, 48, block_size=16)
    step, lower, reach = mask.to_dense().numpy() | np.eye(48, dtype=bool), np.tri(48, dtype=bool), reachability(mask)
    assert reach.unit == 1
    for layers, share in reach.shares.items():
        power = np.linalg.matrix_power(step.astype(object), layers) > 0
        assert share == pytest.approx((power & lower).sum() / lower.sum())


@pytest.mark.parametrize("spec", ["full", "causal", "strided(5, block=3)", "random(0.1, block=7) & causal", "local(3) & ~local(2)"])
@pytest.mark.parametrize("units", [2, 5, 200])
def test_units_of_reachability_are_connected_where_a_pair_is_kept(spec, units):
    mask = sf.compile_mask(spec, 387, block_size=16)
    reach = reachability(mask, units)
    starts = np.arange(0, 387, reach.unit)
    connected = np.logical_or.reduceat(np.logical_or.reduceat(mask.to_dense().numpy(), starts, 0), starts, 1)
    sizes = np.diff(starts, append=387)
    pairs = np.tril(np.outer(sizes, sizes), -1) + np.diag(sizes * (sizes + 1) // 2)
    share = pairs[connected | np.eye(len(sizes), dtype=bool)].sum() / pairs.sum()
    assert reach.unit >= 16 and reach.shares[1] == pytest.approx(share)


def test_hints_say_where_dense_wins_where_nothing_is_kept_and_where_most_of_the_past_is_out_of_reach():
    assert any("dense causal attention" in hint for hint in explain("causal", q_len=1024).hints)
    assert explain("causal & local(128)", q_len=4096).hints == []
    nothing = explain("causal & ~causal", q_len=256)
    assert nothing.share_of_blocks == 0 and "keeps nothing" in nothing.hints[0]
    flat, difference = (explain(f"causal & {name}(block=16)", q_len=1024, block_size=16) for name in ("butterfly", "power_of_two"))
    assert flat.reach.limit < 0.5 and any("any depth" in hint for hint in flat.hints) and difference.reach.limit == 1


def test_memory_of_a_call_on_this_device_is_what_it_leaves_and_what_it_peaks_at():
    """On a CPU, what remains after a call; on a GPU, also the peak."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mask = sf.compile_mask("causal & local(200)", 4096, device=device)
    m = explain(mask, heads=4, dtype=torch.float16).memory
    q, k, v = (torch.randn(1, 4, 4096, 64, dtype=torch.float16, device=device, requires_grad=True) for _ in range(3))
    out, lse = sf.attention(q, k, v, mask, return_lse=True)
    assert (out.nbytes + lse.nbytes, q.nbytes + k.nbytes + v.nbytes) == (m["outputs"], m["inputs"])
    assert m["table"] == mask.nbytes and m["gradients"] == m["inputs"] + out.nbytes
    if device == "cuda":
        out.sum().backward()  # compiled, and with room for gradients
        q.grad = k.grad = v.grad = out = lse = None
        dout = torch.randn_like(q)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated() - m["inputs"] - m["table"] - dout.nbytes
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(sf.attention(q, k, v, mask), (q, k, v), dout)
        assert torch.cuda.max_memory_allocated() - before == pytest.approx(m["backward"], abs=1 << 16)


@pytest.mark.parametrize(
    "options, backend, reason",
    [
        ({}, "hopper", ""),
        ({"block_size": 32}, "triton", "; hopper: it runs masks of block_size 64 to 256; got 32"),
        ({"dtype": torch.float8_e4m3fn, "q_len": 1, "kv_len": 512}, "triton", "; hopper: it runs float16 and bfloat16; got "),
    ],
    ids=str,
)
def test_explain_says_the_back_end_and_why_no_faster_one(options, backend, reason):
    e = explain("random(0.05, block=32)", **{"q_len": 1024} | options)
    assert e.backend == backend and e.lines["back end"].startswith(f"{backend} on an H100 or H200{reason}")
    assert (e.memory["sums"] > 100 * e.q_len) == (backend == "hopper")


def test_an_explanation_reads_as_sentences_and_has_them_as_fields():
    e = copy.deepcopy(sf.explain("causal & local(1024)", 8, 128))
    sizes = "65,536 queries x 65,536 keys in blocks of 128; batch 1, 8 heads of 128, bfloat16"
    assert str(e).startswith(f"causal & local(1024)\n{sizes}\n") and all(text in str(e) for text in e.lines.values())
    assert e.kept_blocks == 4572 and "4,572 of 262,144" in str(e)
    assert "hint: " in str(sf.explain(sf.compile_mask(sf.per_head(["causal", "causal"]), 256)))
    with pytest.raises(AttributeError, match="no figure 'kept'; it has kept_pairs, density"):
        _ = e.kept
