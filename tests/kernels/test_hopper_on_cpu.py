"""The Hopper kernels, run on a CPU in drawn orders of events: see ``gluon_on_cpu``. On a GPU, other tests run the compiled ones."""

import fuzz_calls
import pytest
import torch
from oracle import check, heavy_rows_split, poisoned_memory

import sparse_flash as sf

pytest.importorskip("triton.experimental.gluon")
import gluon_on_cpu as emulated

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernels run on this GPU"),
    pytest.mark.usefixtures("poison"),
]

CASES = {
    "dense, ragged": (None, 200, 190, {}),
    "causal": ("causal", 300, 300, {"kv_heads": 1}),
    "one document": ("causal & documents((0, 33, 40, 200, 385))", 385, 385, {"head_dim": 128}),
    "bits": ("causal & (local(70) | strided(7, block=1))", 300, 300, {"head_dim": 96}),
    "whole blocks": ("butterfly(block=128)", 512, 512, {"kv_heads": 1}),
    "empty rows and columns": ("prefix(70) & ~causal", 400, 300, {}),
    "blocks of 256": ("causal & local(200)", 400, 400, {"block_size": 256}),
}


@pytest.mark.parametrize("name, deterministic", [*((name, False) for name in CASES), ("causal", True), ("bits", True)])
def test_hopper_kernels_are_right_in_a_drawn_order_of_events(name, deterministic):
    spec, q_len, kv_len, changed = CASES[name]
    options = {"block_size": 128, "dtype": torch.float16, "head_dim": 64, "heads": 2, "deterministic": deterministic} | changed
    with emulated.gluon_on_cpu(seed=len(name)):
        check("hopper", spec, q_len, kv_len, **options)


OF_LENGTHS = [(None, 700, 40, 192), (None, 100, 40, 64), (None, 100, 80, 64), (None, 700, 80, 128)]
OF_LENGTHS += [("causal & local(90) | sinks(70)", *row) for row in ((700, 40, 128), (100, 40, 64), (100, 80, 64), (700, 80, 128))]


@pytest.mark.parametrize("spec, q_len, head_dim, queries", OF_LENGTHS)
def test_calls_are_right_in_tiles_that_suit_their_length(monkeypatch, spec, q_len, head_dim, queries):
    from sparse_flash.kernels.hopper import configs, forward

    chosen, choose = [], forward.forward_of_call
    monkeypatch.setattr(configs, "SHORT_TILES", {64: 2, 128: 2})
    monkeypatch.setattr(forward, "forward_of_call", lambda *call: chosen.append(choose(*call)) or chosen[-1])
    with emulated.gluon_on_cpu(seed=5):
        check("hopper", spec, q_len, 300, block_size=128, dtype=torch.float16, head_dim=head_dim, heads=2, kv_heads=1)
    assert {config.queries for config in chosen} == {queries}


def test_splits_of_heavy_rows_are_combined():
    with heavy_rows_split():
        mask = sf.compile_mask("causal | sinks(130)", 512, 512, 128)
    assert mask.by_query.is_split and mask.by_key.is_split
    with emulated.gluon_on_cpu():
        check("hopper", mask, 512, 512, block_size=128, dtype=torch.float16, head_dim=64, heads=2, kv_heads=1)


def test_dropout_drops_the_pairs_that_it_drops_elsewhere():
    inputs = [torch.randn(1, 2, 200, 64, dtype=torch.float16, requires_grad=True) for _ in range(3)]

    def results(backend):
        torch.manual_seed(3)  # of the pairs
        out = sf.attention(*inputs, "causal", dropout_p=0.3, backend=backend)
        return out, *torch.autograd.grad(out.float().sum(), inputs)

    with emulated.gluon_on_cpu():
        found = results("hopper")
    for one, other in zip(found, results("torch"), strict=True):
        assert (one.float() - other.float()).norm() < 1e-3 * other.float().norm()


@pytest.mark.parametrize("seed", (0, 24, 60))
def test_drawn_calls_are_right_in_drawn_orders_of_events(seed):
    with emulated.gluon_on_cpu(seed), poisoned_memory():
        call = fuzz_calls.draw(seed, "hopper")
        wrong = fuzz_calls.failure(call)
    assert wrong is None, f"{call}: {wrong}"


def attend():
    q = torch.randn(1, 2, 400, 64, dtype=torch.float16)
    return sf.attention(q, q, q, "causal", backend="hopper")


def test_a_barrier_that_counts_one_arrival_too_many_is_a_deadlock(monkeypatch):
    init = emulated.mbarrier.init
    monkeypatch.setattr(emulated.mbarrier, "init", lambda barrier, count: init(barrier, count + 1))
    with emulated.gluon_on_cpu(), pytest.raises(emulated.Deadlock, match="of program"):
        attend()


def test_data_used_before_it_has_arrived_or_after_it_was_overwritten_shows(monkeypatch):
    monkeypatch.setattr(emulated.mbarrier, "wait", lambda *_, **__: emulated.here().pause())
    with emulated.gluon_on_cpu():
        try:
            assert attend().isnan().any()
        except AssertionError as error:  # arrivals that nobody waited for
            assert "more arrivals" in str(error)
