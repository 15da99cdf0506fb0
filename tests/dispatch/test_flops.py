"""PyTorch's FlopCounterMode counts the work of kept pairs, as ``explain`` does, however a call enters PyTorch."""

import subprocess
import sys

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from oracle import DEVICE
from picked import drawn_picks
from strategies import block_sizes, dense, expressions
from torch.utils.flop_counter import FlopCounterMode

import sparse_flash as sf

BACKEND = "triton" if DEVICE == "cuda" else "torch"
parametrize = pytest.mark.parametrize


def counted(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def passes(pairs: int, head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """(forward, backward) by the products: two of scores and out; five of scores again, dweights, dq, dk and dv."""
    return 2 * pairs * (head_dim + v_head_dim), 2 * pairs * (3 * head_dim + 2 * v_head_dim)


def inputs(batch=2, heads=4, kv_heads=2, q_len=200, kv_len=200, head_dim=16, v_head_dim=8, device=DEVICE):
    shapes = (heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, v_head_dim)
    return [torch.randn(batch, *shape, device=device, requires_grad=True) for shape in shapes]


def check(call, pairs: int, head_dim=16, v_head_dim=8) -> None:
    """The counts of a function that returns out: of both passes, and of each where the other is outside of the mode."""
    forward, backward = passes(pairs, head_dim, v_head_dim)
    kept = []
    assert counted(lambda: kept.append(call())) == forward
    kept[0].sum().backward()
    out = call()
    assert counted(lambda: out.sum().backward()) == backward
    assert counted(lambda: call().sum().backward()) == forward + backward


lengths = st.integers(1, 300)


@given(expressions, lengths, lengths, block_sizes, st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.sampled_from([(16, 16), (8, 24)]))
@example(sf.causal(), 131, 131, 64, (4, 2), (16, 16))
@example(sf.causal() & sf.local(50), 77, 205, 32, (4, 2), (8, 24))
def test_a_masks_kept_pairs_are_counted_as_explain_counts_them(pattern, q_len, kv_len, block_size, heads, dims):
    try:
        mask = sf.compile_mask(pattern, q_len, kv_len, block_size, DEVICE)
    except ValueError:
        assume(False)  # it names another number of tokens
    q, k, v = inputs(2, *heads, q_len, kv_len, *dims)
    check(lambda: sf.attention(q, k, v, mask, backend=BACKEND), 2 * heads[0] * int(dense(pattern, q_len, kv_len).sum()), *dims)
    e = sf.explain(mask, heads[0], dims[0], batch=2, kv_heads=heads[1], v_head_dim=dims[1])
    assert e.flops == counted(lambda: sf.attention(q, k, v, mask, backend=BACKEND))


@given(st.integers(0, 2**32), lengths, block_sizes, st.sampled_from([(1, 1), (2, 4), (1, 4), (2, 1)]))
def test_the_pairs_of_masks_made_at_run_time_are_counted_for_each_batch_entry_and_head(seed, tokens, block_size, entries):
    blocks = -(-tokens // block_size)
    kept = torch.rand(*entries, blocks, blocks, generator=torch.Generator().manual_seed(seed)).to(DEVICE) < 0.4
    mask = sf.BlockMask.from_blocks(kept, block_size, tokens, tokens, within="causal")
    q, k, v = inputs(q_len=tokens, kv_len=tokens)
    pairs = mask.to_dense().expand(2, 4, -1, -1).sum()
    check(lambda: sf.attention(q, k, v, mask, backend=BACKEND), int(pairs))


@parametrize("mask", [None, "causal & local(50)"])
def test_a_pattern_and_a_dense_call_are_counted_eager_and_compiled(mask):
    q, k, v = inputs()
    pairs = 2 * int(sf.compile_mask(mask or "full", 200).to_dense().expand(1, 4, -1, -1).sum())
    check(lambda: sf.attention(q, k, v, mask), pairs)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: sf.attention(q, k, v, mask), backend="aot_eager")
    check(lambda: compiled(q, k, v), pairs)


def test_blocks_chosen_in_a_graph_are_counted_as_those_of_an_eager_call():
    tensors, spec = inputs(), "causal & (sampled(8, keep=1, block=64) | sinks(4))"
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: sf.attention(q, k, v, spec), backend="aot_eager")
    kept = int(sf.choose_blocks(spec, *tensors[:2]).to_dense().sum())
    for call in (lambda: sf.attention(*tensors, spec), lambda: compiled(*tensors)):
        choice = 2 * 2 * 4 * (4 * 8) * 200 * 16  # 8 queries of each of 4 blocks with all keys
        assert counted(call) == choice + passes(kept, 16, 8)[0]
        assert counted(lambda call=call: call().sum().backward()) == choice + sum(passes(kept, 16, 8))


@given(st.data(), st.sampled_from([None, "causal", "local(40) | sinks(3)", "per_head([causal, local(9), causal, full])"]))
def test_tokens_that_do_not_exist_are_not_counted(data, mask):
    given = {name: data.draw(st.lists(st.integers(0, 90), min_size=2, max_size=2)) for name in ("q_starts", "kv_starts")}
    given |= {name: data.draw(st.lists(st.integers(60, 250), min_size=2, max_size=2)) for name in ("q_lens", "kv_lens")}
    names = data.draw(st.sets(st.sampled_from(sorted(given)), min_size=1))
    given = {name: torch.tensor(values, device=DEVICE) for name, values in given.items() if name in names}
    q, k, v = inputs()
    token = torch.arange(200, device=DEVICE)
    kept = sf.compile_mask(mask or "full", 200).to_dense().to(DEVICE).expand(2, 4, 200, 200)
    for name, values in given.items():
        exists = token >= values[:, None] if "starts" in name else token < values[:, None]
        kept = kept & (exists[:, None, :, None] if name.startswith("q") else exists[:, None, None])
    check(lambda: sf.attention(q, k, v, mask, **given, backend=BACKEND), int(kept.sum()))


@parametrize("mask", [None, "causal", "causal & local(20)"])
def test_packed_documents_are_counted_each_under_its_own_mask(mask):
    starts = torch.tensor([0, 70, 73, 200, 330], device=DEVICE)
    q, k, v = (t[0].transpose(0, 1) for t in inputs(1, q_len=330, kv_len=330))
    pairs = sum(int(sf.compile_mask(mask or "full", n).to_dense().sum()) for n in starts.diff().tolist())
    check(lambda: sf.attention_varlen(q, k, v, starts, mask=mask), 4 * pairs)


@given(
    st.sampled_from([None, "causal", "causal & (local(20) | sinks(3))", "per_head([causal, local(9), causal, full])"]),
    st.integers(1, 5),
    st.none() | st.lists(st.integers(0, 150), min_size=2, max_size=2),
)
def test_a_step_of_decoding_counts_the_pairs_of_its_rows(mask, q_len, lens):
    q, k, v = (t.detach() for t in inputs(q_len=q_len, kv_len=150))
    square = sf.compile_mask(mask or "full", 150).to_dense().expand(1, 4, -1, -1)[0]
    ends = [150, 150] if lens is None else lens
    pairs = sum(int(square[:, max(0, end - q_len) : end, :end].sum()) for end in ends)
    kv_lens = None if lens is None else torch.tensor(lens, device=DEVICE)
    call = {"mask": mask, "kv_lens": kv_lens, "backend": BACKEND}
    assert counted(lambda: sf.attention_decode(q, k, v, **call)) == passes(pairs, 16, 8)[0]


@parametrize("picking", [2, 4])
@parametrize("every, always", [(1, None), (3, "local(9) | sinks(5)")])
def test_a_selections_pairs_are_counted_as_explain_counts_them(picking, every, always):
    q, k, v = inputs()
    picks = drawn_picks((2, picking, -(-200 // every), 3), every, 16, 200, 200)
    chosen = sf.BlockSelection.from_picks(picks, 16, every=every, q_len=200, always=always)
    pairs = int(chosen.to_dense().sum()) * 4 // picking
    check(lambda: sf.attention(q, k, v, chosen), pairs)
    assert sf.explain(chosen, 4, 16, kv_heads=2, v_head_dim=8).flops == passes(pairs, 16, 8)[0]
    of_picks = int(sf.BlockSelection.from_picks(picks, 16, every=every, q_len=200).to_dense().sum()) * 4 // picking
    both = counted(lambda: sf.attention(q, k, v, chosen, return_block_lse=True)[1].sum().backward())
    assert both == passes(pairs, 16, 8)[0] + 2 * 16 * of_picks * (1 + 3)


@given(st.integers(1, 3), st.none() | st.lists(st.integers(3, 150), min_size=2, max_size=2))
def test_a_step_over_picked_blocks_counts_their_pairs(every, lens):
    q, k, v = (t.detach() for t in inputs(q_len=3, kv_len=150))
    chosen = sf.BlockSelection.from_picks(
        drawn_picks((2, 2, -(-3 // every), 3), every, 16, 3, 150), 16, every=every, q_len=3, kv_len=150
    )
    key = torch.arange(150, device=DEVICE)
    picked = (chosen.picks.repeat_interleave(every, 2)[:, :, :3, :, None] == key // 16).any(3)
    ends = torch.tensor([150, 150] if lens is None else lens, device=DEVICE)
    position = ends[:, None] - 3 + torch.arange(3, device=DEVICE)
    pairs = 2 * int((picked & (key <= position[:, None, :, None])).sum())
    kv_lens = None if lens is None else ends
    assert counted(lambda: sf.attention_decode(q, k, v, chosen, kv_lens=kv_lens, backend=BACKEND)) == passes(pairs, 16, 8)[0]


def test_patterns_count_alike_on_tensors_without_values_and_unknown_tables_at_most_as_dense():
    def counts(device):
        q, k, v = inputs(device=device)
        blocks = torch.eye(2, dtype=torch.bool, device=device)
        masks = "causal & local(50)", None, sf.BlockMask.from_blocks(blocks, 128, 200, 200)
        return [counted(lambda mask=mask: sf.attention(q, k, v, mask).sum().backward()) for mask in masks]

    real = counts(DEVICE)
    with torch._subclasses.FakeTensorMode():
        fake = counts(DEVICE)
    assert fake == counts("meta")
    assert fake[:2] == real[:2] and real[2] < fake[2] <= fake[1]


def test_a_partitioner_that_counts_symbolic_lengths_does_not_fix_them():
    compiles = []

    def backend(graph, example):
        compiles.append(graph)
        return torch._dynamo.lookup_backend("aot_eager_decomp_partition")(graph, example)

    torch._dynamo.reset()
    call = torch.compile(lambda x: sf.attention(x.sin(), x, x, "causal & local(30)").exp().sum(), backend=backend, fullgraph=True)
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        for tokens in (200, 300, 400):
            call(torch.randn(1, 2, tokens, 16, requires_grad=True)).backward()
    assert len(compiles) == 2


@parametrize("first, then", [("sparse_flash", "torch.utils.flop_counter"), ("torch.utils.flop_counter", "sparse_flash")])
def test_formulas_are_there_whichever_is_imported_first(first, then):
    probe = "import importlib.util; importlib.util.find_spec('torch.utils.flop_counter')"
    check = "assert torch.ops.sparse_flash.attention in torch.utils.flop_counter.flop_registry"
    program = f"import {first}; {probe}; import {then}, torch; {check}"
    subprocess.run([sys.executable, "-c", program], check=True)
