"""attention_decode equals float64 attention by the mask's definition for the last queries of each sequence."""

import importlib
from itertools import product

import pytest
import torch
from calls import assert_right, decode, name_of, normal, sizes_for, unless_refused
from oracle import BACKENDS, DEVICE, check, no_host_synchronization, require

import sparse_flash as sf
from sparse_flash import backends
from sparse_flash.api import decode as decode_module
from sparse_flash.kernels.portable import decode as portable_decode
from sparse_flash.variant import variant

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize

PATTERNS = {
    "dense": None,
    "causal": "causal",
    "full": "full",
    "window and sinks": "causal & (local(50) | sinks(16))",
    "two-sided window": "local(70)",
    "strided": "strided(3, block=32)",
    "butterfly": "causal & butterfly(block=32)",
    "power of two": "causal & power_of_two(block=32)",
    "bits": "causal & strided(7, block=1)",
    "nothing": "causal & ~causal",
}
LENGTHS = (300, 0, 1, 127, 128, 129)

HEADS = "per_head([causal, causal & sinks(2), causal & local(5), causal & prefix(9)])"


WINDOW, BITS, PAGED = "causal & local(50)", PATTERNS["bits"], "causal & (strided(3, block=32) | local(20))"
# What differs from usual sizes.
ROWS = [
    *({"spec": spec, "queries": queries} for spec in PATTERNS.values() for queries in (1, 3)),
    # Queries that straddle blocks, and sequences shorter than the queries.
    *(
        {"spec": PATTERNS[name], "queries": queries, "lens": (290, 5, 128, 129 + queries // 2)}
        for queries in (16, 64)
        for name in ("dense", "causal", "window and sinks", "two-sided window", "bits")
    ),
    *({"spec": PAGED, "queries": 1, "page": n, "kv_len": 512, "lens": (300, 0, 257, 511)} for n in (1, 16, 32, 64, 128, 256)),
    *({"spec": None, "page": n, "kv_len": 512, "lens": (300, 1, 512), "dtype": torch.float16} for n in (16, 256)),
    {"spec": PATTERNS["window and sinks"], "head_dim": 192, "v_head_dim": 128, "lens": (290, 40)},
    {"spec": None, "head_dim": 40, "v_head_dim": 72, "dtype": torch.float16, "page": 32, "lens": (290, 40)},
    {"spec": "causal", "head_dim": 16, "v_head_dim": 64, "layout": "tokens first", "lens": (290, 40)},
    *({"spec": WINDOW, "heads": heads, "kv_heads": kv_heads} for heads, kv_heads in ((1, 1), (6, 6), (6, 2), (8, 1), (40, 1))),
    *(
        {"spec": WINDOW, "dtype": dtype, "head_dim": dim, "lens": (290, 40)}
        for dtype, dim in product((torch.float16, torch.float32, torch.bfloat16, torch.float64), (20, 64, 80))
    ),
    *({"spec": WINDOW, "layout": layout, "lens": (290, 40)} for layout in ("tokens first", "sliced", "head_dim first")),
]


@parametrize("backend", BACKENDS)
@parametrize("row", ROWS, ids=name_of)
def test_every_cache_is_read_as_the_definition_says(row, backend):
    sizes = sizes_for(backend, **{"q_len": 64, "heads": 4, "kv_heads": 2, "kv_len": 320, "lens": LENGTHS} | row)
    with unless_refused():
        assert_right(decode(sizes), backend, keeps_order=True)


@parametrize("backend", ["torch", "triton", "reference"])
def test_lengths_and_tables_of_64_bits_give_what_those_of_32_bits_do(backend):
    q, pages = torch.randn(2, 4, 1, 32, device=DEVICE), torch.randn(9, 2, 16, 32, device=DEVICE)
    require(backend, backends.Call.from_tensors(q, pages, pages, 128))
    lens, table = torch.tensor([60, 3], device=DEVICE), torch.tensor([[1, 0, 3, 8], [4, 2, 5, 7]], device=DEVICE)
    wide, narrow = (
        sf.attention_decode(q, pages, pages, "causal", kv_lens=lens.to(a), block_table=table.to(b), backend=backend)
        for a, b in ((torch.int64, torch.int64), (torch.int32, torch.int32))
    )
    assert torch.equal(wide, narrow)


@parametrize("backend", ["torch", "triton"])
def test_keys_of_one_shape_serve_values_of_one_head_dim_after_another(backend):
    for width in (16, 64):
        given = {"heads": 1, "kv_heads": 1, "head_dim": 16, "v_head_dim": width, "kv_len": 150, "lens": (130,), "queries": 1}
        assert_right(decode(sizes_for(backend, spec="causal", **given)), backend)


@parametrize("far", [2**31 - 1, 2**31, 2**32 + 5, 2**40, 2**63 - 1])
@parametrize("backend", ["torch", "triton", "reference"])
def test_lengths_past_the_capacity_are_the_capacity_and_negative_ones_are_none(backend, far, monkeypatch):
    monkeypatch.setattr(variant, "is_plain_eager", lambda *_: False)  # as where lengths are not read
    q, k, v = (torch.randn(3, 2, tokens, 16, device=DEVICE) for tokens in (1, 90, 90))
    wanted, given = (torch.tensor(lens, device=DEVICE) for lens in ((90, 7, 0), (far, 7, -far)))
    assert torch.equal(*(sf.attention_decode(q, k, v, "local(70)", kv_lens=lens, backend=backend) for lens in (wanted, given)))


@parametrize("q_len", [1, 3])
@parametrize("pattern", [None, "causal", "causal & (local(70) | sinks(3))", HEADS])
@parametrize("backend", ["torch", "triton", "reference"])
def test_a_sequence_after_padding_is_what_it_is_at_the_front_of_its_cache(backend, pattern, q_len):
    generator = torch.Generator().manual_seed(0)
    starts, ends = torch.tensor([0, -4, 37, 150, 200]), torch.tensor([200, 90, 200, 151, 999])
    q = torch.randn(5, 4, q_len, 16, generator=generator).to(DEVICE, torch.float16)
    k, v = torch.randn(2, 5, 2, 200, 16, generator=generator).to(DEVICE, torch.float16)
    scales = 1 + torch.rand(2, 5, 2, 200, generator=generator).to(DEVICE)
    gone = torch.arange(200, device=DEVICE)[None, None, :, None] < starts[:, None, None, None].to(DEVICE)
    later = {"kv_starts": starts.to(DEVICE), "kv_lens": ends.to(DEVICE), "backend": backend, "return_lse": True}
    padded = sf.attention_decode(q, k.masked_fill(gone, float("nan")), v.masked_fill(gone, float("nan")), pattern, **later)
    # e4m3, with a scale for each token; the interpreter computes it in float16.
    k8, v8 = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    scaled = sf.attention_decode(q, k8, v8, pattern, k_scale=scales[0], v_scale=scales[1], **later)
    for row, (start, end) in enumerate(zip(starts.clamp(min=0).tolist(), ends.clamp(max=200).tolist(), strict=True)):
        one, front = slice(row, row + 1), (slice(row, row + 1), slice(None), slice(start, end))
        options = {"backend": backend, "return_lse": True}
        of_scales = {"k_scale": scales[0][front].contiguous(), "v_scale": scales[1][front].contiguous()}
        alone = sf.attention_decode(q[one], k[front], v[front], pattern, **options)
        alone += sf.attention_decode(q[one], k8[front], v8[front], pattern, **of_scales, **options)
        for ours, theirs in zip((*padded, *scaled), alone, strict=True):
            torch.testing.assert_close(ours[one], theirs, atol=2e-3, rtol=2e-3)


@parametrize("block_size", [16, 64, 256])
@parametrize("backend", ["torch", "triton"])
def test_masks_of_heads_and_of_other_blocks_are_visited_head_by_head(backend, block_size):
    specs = [PATTERNS[name] for name in ("causal", "window and sinks", "bits", "nothing")]
    mask = sf.BlockMask.per_head([sf.compile_mask(spec, 320, block_size=block_size) for spec in specs]).to(DEVICE)
    given = {"heads": 4, "q_len": 20, "kv_len": 320, "lens": (290, 129), "queries": 20, "spec": sf.per_head(specs)}
    assert_right(decode(sizes_for(backend, **given), mask), backend)


@parametrize("backend", ["torch", "triton"])
def test_without_lengths_the_cache_is_full(backend):
    q, k, v = normal(sizes_for(backend, q_len=2, kv_len=199))
    outs = [
        sf.attention_decode(q, k, v, WINDOW, kv_lens=lens, backend=backend) for lens in (None, torch.full((2,), 199).to(DEVICE))
    ]
    assert torch.equal(*outs)


@parametrize("splits", [1, 2, 23])
@parametrize("name", ["dense", "window and sinks", "bits"])
def test_any_number_of_programs_gives_the_same(name, splits, monkeypatch):
    kernels = importlib.import_module("sparse_flash.kernels.portable.decode")
    monkeypatch.setattr(kernels, "_choose_splits", lambda *_: splits)
    monkeypatch.setattr(kernels, "_plan", kernels._plan.__wrapped__)
    for _ in range(2):  # counters of programs are zeros again
        assert_right(decode(sizes_for("triton", spec=PATTERNS[name], kv_len=320, lens=(300, 77))), "triton")


def test_a_growing_cache_compiles_its_pattern_once():
    decode_module._compiled.cache_clear()
    q, k = torch.randn(1, 2, 1, 16, device=DEVICE), torch.randn(1, 2, 4096, 16, device=DEVICE)
    for length in (1, 700, 4096):
        lens = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        sf.attention_decode(q, k, k, "causal & local(64)", kv_lens=lens, backend="torch")
    assert decode_module._compiled.cache_info().misses == 1
    for tokens in range(3600, 4096):  # a cache that grows by concatenation, token by token
        decode_module._resolve_mask("causal & local(64)", tokens, q)
    assert decode_module._compiled.cache_info().misses <= 3
    assert all(n <= decode_module._rounded(n) <= max(128, n * 9 / 8 + 128) for n in range(1, 5000))


@parametrize("backend", ["torch", "triton", "reference"])
@parametrize("spec", ["causal", "causal & local(30)"])
def test_compiled_code_takes_caches_of_other_capacities_and_lengths(spec, backend):
    torch._dynamo.reset()

    def step(q, k, lens):
        return sf.attention_decode(q, k, k, spec, kv_lens=lens, backend=backend)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for capacity in (70, 90, 130, 300):
        q, k = torch.randn(2, 4, 2, 16, device=DEVICE), torch.randn(2, 2, capacity, 16, device=DEVICE)
        require(backend, backends.Call.from_tensors(q, k, k, 128))
        lens = torch.tensor([capacity, 50], dtype=torch.int32, device=DEVICE)
        torch.testing.assert_close(compiled(q, k, lens), step(q, k, lens))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_replays_with_new_lengths_and_no_call_waits_for_the_device():
    q, k = (torch.randn(2, h, n, 64, device="cuda", dtype=torch.bfloat16) for h, n in ((8, 1), (2, 4096)))
    lens = torch.tensor([4096, 1000], dtype=torch.int32, device="cuda")

    def step():
        return sf.attention_decode(q, k, k, "causal & (local(500) | sinks(4))", kv_lens=lens)

    step()
    with no_host_synchronization():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = [step() for _ in range(3)]
    for new in ([4096, 1000], [1, 0], [700, 4095]):
        lens.copy_(torch.tensor(new, dtype=torch.int32))
        for _ in range(20):
            graph.replay()
        assert all(torch.equal(one, step()) for one in out)


@parametrize("dim", [16, 32, 64, 128, 256])
def test_a_combining_program_holds_as_many_splits_as_its_registers_and_its_compiler_bear(dim):
    # Their code is unrolled: with 256 splits, of one row of 16 numbers each, compiling took minutes.
    for rows in (1, 2, 8, 64):
        splits = portable_decode.combined_at_a_time(rows, dim)
        assert 1 <= splits <= 32 and (splits == 1 or splits * rows * dim <= 4096)


@parametrize("spec", [None, "causal & local(300)", "causal & strided(9, block=64)"])
@parametrize("q_len", [1, 33])
def test_attention_itself_shares_few_queries_among_programs_and_is_differentiable(q_len, spec):
    triton = backends.get_backend("triton")
    q, k = torch.empty(1, 2, q_len, 32, device=DEVICE), torch.empty(1, 1, 2100, 32, device=DEVICE)
    check("triton", spec, q_len, 2100, block_size=128, heads=2, kv_heads=1)
    assert triton.has_few_queries(q, k)


@parametrize("mask", [None, "causal", "causal & local(3)", sf.local(3)], ids=str)
@parametrize("batch, q_len, capacity", [(0, 1, 100), (2, 0, 100), (2, 1, 0), (0, 0, 0)])
def test_an_empty_batch_or_cache_and_no_queries_give_zeros(batch, q_len, capacity, mask):
    q, k, v = (torch.randn(batch, *shape, device=DEVICE) for shape in ((4, q_len, 16), (2, capacity, 16), (2, capacity, 8)))
    lens = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    out, lse = sf.attention_decode(q, k, v, mask, kv_lens=lens, return_lse=True)
    assert torch.equal(out, out.new_zeros(batch, 4, q_len, 8))
    assert torch.equal(lse, lse.new_full((batch, 4, q_len), float("-inf")))


def test_a_batch_of_none_takes_pages_and_selections():
    q, pages = torch.randn(0, 4, 1, 16, device=DEVICE), torch.randn(5, 2, 16, 16, device=DEVICE)
    table = torch.zeros(0, 3, dtype=torch.int32, device=DEVICE)
    assert sf.attention_decode(q, pages, pages, "causal", block_table=table).shape == q.shape
    picks = torch.zeros(0, 2, 1, 1, dtype=torch.int32, device=DEVICE)
    selection = sf.BlockSelection.from_picks(picks, 16, q_len=1, kv_len=48)
    assert sf.attention_decode(q, pages, pages, selection, block_table=table).shape == q.shape


@parametrize("backend", ["torch", "reference"])
@parametrize("page", [-1, 2])
def test_pages_that_do_not_exist_are_refused_where_they_are_read_and_nowhere_else(backend, page):
    q, k = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 256, 32)
    lens, table = torch.tensor([3, 4], dtype=torch.int32), torch.tensor([[0, page, page], [page, 0, 0]])
    options = {"kv_lens": lens, "block_table": table, "backend": backend}
    with pytest.raises(ValueError, match=f"one of the 2 pages for each token of a sequence; sequence 1 has {page} to {page}"):
        sf.attention_decode(q, k, k, **options)
    # Nothing reads pages that the mask does not keep, or that are past a length.
    sf.attention_decode(q, k, k, "~full", **options)
    sf.attention_decode(q, k, k, **options | {"kv_lens": torch.tensor([256, 0])})


def test_heads_may_share_a_mask_in_one_sequence_and_not_in_the_next():
    mask = sf.BlockMask.from_mask_mod(lambda b, h, i, j: (i >= j) & ((i - j < 20) | (b * h == 0)), 2, 2, 200, device=DEVICE)
    assert mask.mask_index.tolist() == [[0, 0], [0, 1]]
    q, k, v = torch.randn(3, 2, 2, 200, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    wanted = sf.attention(q, k, v, mask)[:, :, -1:]
    torch.testing.assert_close(sf.attention_decode(q[:, :, -1:], k, v, mask), wanted)
