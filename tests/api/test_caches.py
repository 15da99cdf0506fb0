"""Calls remember tables and choices, and release them on request."""

import functools
import gc
import multiprocessing
import subprocess
import sys
import weakref
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from calls import ENTRIES, replayed
from oracle import DEVICE, Sizes

import sparse_flash as sf
from sparse_flash.api import call as api_call
from sparse_flash.core import backends
from sparse_flash.kernels.launch import memory
from sparse_flash.masks import block_mask, registry


def results() -> list[torch.Tensor]:
    sizes = Sizes(head_dim=64, v_head_dim=64)
    return [t for entry in ENTRIES if entry != "model" for t in ENTRIES[entry](sizes)()]


def test_clearing_empties_every_memory_of_calls():
    before = results()
    if backends.get_backend("triton").why_unavailable() is None:
        from sparse_flash.kernels.hopper import own_scores
        from sparse_flash.kernels.portable.configs import decode_config

        decode_config(torch.float16, 64, 128, 1)
        own_scores.refusal(None, (torch.complex64,))  # else every score function would stay for good
    # Not of the benchmarks, which other tests of the process may have run.
    names = [name for name in sys.modules if name.startswith("sparse_flash.") and ".benchmarks" not in name]
    modules = [sys.modules[name] for name in names]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, functools._lru_cache_wrapper)}
    bounded = [value for value in found if value.cache_parameters()["maxsize"] is not None]
    assert api_call.fitting and memory.prepared_under(None)
    assert len([value for value in bounded if value.cache_info().currsize]) >= 7
    sf.clear_caches()
    assert not api_call.fitting and not memory.prepared_under(None)
    assert [value for value in bounded if value.cache_info().currsize] == []
    assert all(map(torch.equal, results(), before))


def attend(tokens: int, spec: str) -> torch.Tensor:
    q, k, v = torch.randn(3, 1, 2, tokens, 16, generator=torch.Generator().manual_seed(0))
    return sf.attention(q, k, v, spec)


def test_repeated_calls_read_the_values_of_their_arguments_again():
    q, slopes, lens = torch.randn(1, 2, 40, 64, device=DEVICE), torch.ones(2, device=DEVICE), torch.tensor([9], device=DEVICE)

    def attend(**given) -> torch.Tensor:
        return sf.attention(q, q, q, "causal", backend="torch", **given)

    dropped = [attend(dropout_p=0.5) for _ in range(3)]
    assert not torch.equal(dropped[1], dropped[2])
    for name, value in (("alibi_slopes", slopes), ("kv_lens", lens)):
        one, other, again = (attend(**{name: value * n}) for n in (1, 3, 1))
        assert torch.equal(one, again) and not torch.equal(one, other)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="kv_lens must be at least 0"):
            attend(kv_lens=-lens)
    with pytest.raises(ValueError, match="alibi_slopes requires a gradient"):
        attend(alibi_slopes=slopes.requires_grad_())


@pytest.mark.skipif(DEVICE == "cuda", reason="CUDA does not survive a fork")
@pytest.mark.parametrize("tokens, spec", [(100, "causal & local(20)"), (90, "causal & strided(7)")])
def test_a_forked_process_computes_what_its_parent_does_with_what_that_prepared_and_without(tokens, spec):
    for _ in range(3):
        attend(100, "causal & local(20)")
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as forked:
        torch.testing.assert_close(forked.submit(attend, tokens, spec).result(timeout=60), attend(tokens, spec))


def test_masks_that_nobody_holds_are_freed():
    q = torch.randn(1, 1, 100, 16, device=DEVICE)
    sf.attention(q, q, q, "causal & local(33)")
    mask = weakref.ref(block_mask.compile_cached("causal & local(33)", 100, 100, 128, q.device))
    gc.collect()
    assert mask() is not None
    sf.clear_caches()
    gc.collect()
    assert mask() is None


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_captured_graphs_survive_cleared_caches():
    q = torch.randn(1, 2, 300, 64, device=DEVICE, dtype=torch.float16)
    tokens = q[0].transpose(0, 1)
    documents = torch.tensor([0, 70, 300], dtype=torch.int32, device=DEVICE)

    def results() -> list[torch.Tensor]:
        packed = [
            sf.attention_varlen(*[tokens] * 3, documents, mask=f"causal & {each}") for each in ("local(9)", "strided(3, block=16)")
        ]
        return [sf.attention(q, q, q, "causal & local(31)"), sf.attention_decode(q[:, :, :1], q, q, "causal & local(100)"), *packed]

    noise = []

    def clear():
        sf.clear_caches()
        gc.collect()
        torch.cuda.empty_cache()
        noise.extend(torch.full((1 << 16,), 1 << 20, dtype=torch.int32, device=DEVICE) for _ in range(64))  # in what was freed

    wanted = [out.clone() for out in results()]
    torch.testing.assert_close(replayed(results, clear), wanted)
    torch.testing.assert_close(results(), wanted)


def test_a_pattern_defined_anew_in_a_notebook_is_not_taken_for_the_one_before(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))

    def define(distance):
        @sf.register_pattern("notebook_ring")
        @dataclass(frozen=True)
        class Ring(sf.Pattern):
            def token_rule(self, q, kv):
                return abs(q - kv) < distance

        return Ring

    monkeypatch.setitem(globals(), "__name__", "__main__")  # where a notebook's classes are defined
    for distance in (3, 7):
        assert define(distance).__module__ == "__main__"
        q = torch.randn(1, 1, 40, 16, device=DEVICE)
        expected = sf.attention(q, q, q, sf.local(distance))
        torch.testing.assert_close(sf.attention(q, q, q, "notebook_ring"), expected)


def test_clearing_works_where_there_is_no_triton():
    program = (
        "import sys; sys.modules['triton'] = None; import torch, sparse_flash as sf; q = torch.randn(1, 1, 40, 16);"
        "sf.attention(q, q, q, 'causal'); sf.clear_caches(); print(sf.attention(q, q, q, 'causal').shape[2])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "40"
