"""Decoding over blocks that queries pick from the cache: cases of the entry ``decode_selection`` that draws seldom have."""

import pytest
import torch
from accepted import needs_triton
from calls import assert_right, decode_selection, sizes_for
from oracle import DEVICE

import sparse_flash as sf
from sparse_flash.selection import decode

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize
on_each = parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])

# A seed takes one of ``calls.SELECTIONS``.
CASES = {
    "a group of 4, odd lengths": {"kv_heads": 1, "queries": 1, "kv_len": 131, "head_dim": 24, "v_head_dim": 40, "page": 8},
    "a group of 3, several queries, in one piece": {"heads": 6, "queries": 5, "kv_len": 100},
    "a group of 16, longer blocks than a step": {"heads": 16, "kv_heads": 1, "queries": 2, "kv_len": 700, "seed": 5, "page": 64},
    "heads that pick for themselves": {"kv_len": 90, "seed": 1, "page": 8},
    "a choice for 4 queries": {"queries": 7, "kv_len": 90, "seed": 3, "page": 8},
    "more heads than rows of a tile": {"heads": 80, "kv_heads": 1, "queries": 1, "kv_len": 60, "page": 64},
    "queries before the first key": {"queries": 5, "lens": (2, 0, 40), "kv_len": 40},
}


@on_each
@parametrize("name", CASES)
def test_queries_attend_to_the_blocks_that_they_picked(name, backend):
    assert_right(decode_selection(sizes_for(backend, **{"heads": 4, "kv_heads": 2, "q_len": 20} | CASES[name])), backend)


def test_a_cache_read_in_parts_gives_the_same(monkeypatch):
    monkeypatch.setattr(decode, "CHUNK", 1)
    assert_right(decode_selection(sizes_for("torch", queries=16, kv_len=100, page=8)), "torch")


@on_each
def test_lengths_past_the_cache_are_its_capacity(backend):
    q, k = (torch.randn(1, heads, tokens, 32, device=DEVICE) for heads, tokens in ((4, 2), (2, 64)))
    chosen, past = sf.topk_blocks(q, k, 3, every=1, block_size=16), torch.tensor([900], device=DEVICE)
    found, whole = (sf.attention_decode(q, k, k, chosen, kv_lens=lens, backend=backend) for lens in (past, None))
    assert torch.equal(found, whole)
