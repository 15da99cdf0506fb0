"""attention_decode equals float64 attention by the mask's definition for the last queries of each sequence."""

from itertools import product

import pytest
import torch
from accepted import needs_triton
from calls import Counted, assert_right, decode, decode_in_eight_bits, in_pages, name_of
from oracle import BACKENDS, DEVICE, check, record, sizes_for, tensor, unless_refused

import sparse_flash as sf
from sparse_flash.core import backends, variant

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize
E4M3 = torch.float8_e4m3fn
on_each = parametrize("backend", ["torch", "reference", pytest.param("triton", marks=needs_triton)])

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
    # After padding, each sequence is what it is at the front of its cache.
    *({"spec": spec, "terms": ("starts",), "queries": 1, "lens": (200, 90, 200, 151, 64)} for spec in (None, WINDOW)),
    *({"spec": spec, "terms": ("starts",), "queries": 3, "lens": (200, 90, 200, 151, 64)} for spec in ("causal", HEADS)),
    *({"spec": WINDOW, "layout": layout, "lens": (290, 40)} for layout in ("tokens first", "sliced", "head_dim first")),
]


@parametrize("backend", BACKENDS)
@parametrize("row", ROWS, ids=name_of)
def test_every_cache_is_read_as_the_definition_says(row, backend):
    sizes = sizes_for(backend, **{"q_len": 64, "heads": 4, "kv_heads": 2, "kv_len": 320, "lens": LENGTHS} | row)
    with unless_refused():
        assert_right(decode(sizes), backend, keeps_order=True)


# The size of a page, and what else differs from usual sizes.
IN_EIGHT_BITS = [
    (None, {"head_dim": 22, "v_head_dim": 128, "layout": "tokens first", "q_len": 1}),
    (16, {"dtype": torch.float16, "heads": 3, "kv_heads": 1, "layout": "sliced"}),
    (None, {"dtype": torch.float16, "terms": ("starts",)}),
    (128, {"dtype": torch.bfloat16, "head_dim": 32, "q_len": 20, "queries": 20}),
]


@on_each
@parametrize("name", ["dense", "causal", "window and sinks", "bits", "nothing"])
@parametrize("page, changed", IN_EIGHT_BITS)
def test_every_kind_of_e4m3_cache_is_read_as_its_numbers_times_their_scales(backend, page, changed, name):
    usual = {"lens": (150, 0, 77), "kv_len": 256, "spec": PATTERNS[name], "page": page}
    for seed in (0, 1):  # a scale for each token, for each page
        with unless_refused():
            assert_right(decode_in_eight_bits(sizes_for(backend, **usual | changed, seed=seed)), backend)


@parametrize("backend", ["torch", "triton"])
def test_keys_of_one_shape_serve_values_of_one_head_dim_after_another(backend):
    for width in (16, 64):
        given = {"heads": 1, "kv_heads": 1, "head_dim": 16, "v_head_dim": width, "kv_len": 150, "lens": (130,), "queries": 1}
        assert_right(decode(sizes_for(backend, spec="causal", **given)), backend)


@parametrize("far", [2**31 - 1, 2**31, 2**32 + 5, 2**40, 2**63 - 1])
@on_each
def test_lengths_past_the_capacity_are_the_capacity_and_negative_ones_are_none(backend, far, monkeypatch):
    monkeypatch.setattr(variant, "is_plain_eager", lambda *_: False)  # as where lengths are not read
    q, k, v = (torch.randn(3, 2, tokens, 16, device=DEVICE) for tokens in (1, 96, 96))
    (k, table), (v, _) = in_pages(k, 16), in_pages(v, 16)
    outs = []
    for lens, dtype in (((96, 7, 0), torch.int32), ((far, 7, -far), torch.int64), (None, torch.int32)):
        lens = lens if lens is None else torch.tensor(lens, dtype=dtype, device=DEVICE)
        given = {"kv_lens": lens, "block_table": table.to(dtype), "backend": backend}
        outs.append(sf.attention_decode(q, k, v, "local(70)", **given))
    assert torch.equal(*outs[:2]) and torch.equal(outs[2][0], outs[0][0])  # without lengths, the cache is full


@parametrize("block_size", [16, 64, 256])
@parametrize("backend", ["torch", "triton"])
def test_each_head_decodes_under_its_mask_at_every_block_size(backend, block_size):
    specs = [PATTERNS[name] for name in ("causal", "window and sinks", "bits", "nothing")]
    mask = sf.BlockMask.per_head([sf.compile_mask(spec, 320, block_size=block_size) for spec in specs]).to(DEVICE)
    given = {"heads": 4, "q_len": 20, "kv_len": 320, "lens": (290, 129), "queries": 20, "spec": sf.per_head(specs)}
    assert_right(decode(sizes_for(backend, **given), mask), backend)


@needs_triton
@parametrize("name, splits", [("dense", 1), ("dense", 23), ("window and sinks", 23), ("bits", 2)])
def test_any_number_of_programs_gives_the_same(name, splits, monkeypatch):
    from sparse_flash.kernels.portable import decode as kernels

    monkeypatch.setattr(kernels, "_choose_splits", lambda *_: splits)
    monkeypatch.setattr(kernels, "_plan", kernels._plan.__wrapped__)
    for _ in range(2):  # counters of programs are zeros again
        assert_right(decode(sizes_for("triton", spec=PATTERNS[name], kv_len=320, lens=(300, 77))), "triton")


def test_a_growing_cache_compiles_its_pattern_seldom():
    q, k = torch.randn(1, 2, 1, 16, device=DEVICE), torch.randn(1, 2, 4096, 16, device=DEVICE)
    compilations = []
    for length in (4096, 1, 700, *range(3600, 4096, 16)):
        lens = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        keys = k if length < 3600 else k[:, :, :length]  # a cache of one capacity, and one that grows by concatenation
        Counted.evaluations.clear()
        sf.attention_decode(q, keys, keys, Counted(), kv_lens=lens, backend="torch")
        compilations.append(len(Counted.evaluations) > 0)
    assert compilations[:3] == [True, False, False] and sum(compilations) <= 3


@parametrize("q_len, spec", [(1, None), (33, None), (1, "causal & local(300)"), (33, "causal & strided(9, block=64)")])
def test_attention_itself_shares_few_queries_among_programs_and_is_differentiable(q_len, spec, monkeypatch):
    triton, kv_len = backends.get_backend("triton"), 2100 if DEVICE == "cuda" else 600
    monkeypatch.setattr(triton, "MANY_KEYS", kv_len)
    q, k = torch.empty(1, 2, q_len, 32, device=DEVICE), torch.empty(1, 1, kv_len, 32, device=DEVICE)
    check("triton", spec, q_len, kv_len, block_size=128, heads=2, kv_heads=1)
    assert triton.decodes(record(q, k, k, None, 1.0))


FIRST_BLOCK = sf.BlockSelection.from_picks(torch.zeros(2, 2, 1, 1, dtype=torch.int32), 16, kv_len=768, own=False)


@parametrize("backend, mask", [("torch", None), ("reference", None), ("torch", FIRST_BLOCK)], ids=["torch", "reference", "picks"])
@parametrize("page", [-1, 2])
def test_pages_that_do_not_exist_are_refused_where_they_are_read_and_nowhere_else(backend, mask, page):
    q, k = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 256, 32)
    lens, table = torch.tensor([3, 4], dtype=torch.int32), torch.tensor([[0, page, page], [page, 0, 0]])
    options = {"kv_lens": lens, "block_table": table, "backend": backend}
    with pytest.raises(ValueError, match=f"one of the 2 pages for each token of a sequence; sequence 1 has {page} to {page}"):
        sf.attention_decode(q, k, k, mask, **options)
    # Nothing reads pages that the mask does not keep, or that are past a length.
    sf.attention_decode(q, k, k, "~full", **options)
    few = options | {"kv_lens": torch.tensor([256, 0])}
    wanted = sf.attention_decode(q, k, k, mask, **few | {"block_table": table.clamp(0, 1)})
    assert torch.equal(sf.attention_decode(q, k, k, mask, **few), wanted)


def test_heads_may_share_a_mask_in_one_sequence_and_not_in_the_next():
    near, causal = (sf.compile_mask(spec, 200).to_dense() for spec in ("causal & local(20)", "causal"))
    mask = sf.BlockMask.from_dense(torch.stack([torch.stack([causal, causal]), torch.stack([causal, near])]).to(DEVICE))
    assert mask.mask_index.tolist() == [[0, 0], [0, 1]]
    q, k, v = torch.randn(3, 2, 2, 200, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    wanted = sf.attention(q, k, v, mask)[:, :, -1:]
    torch.testing.assert_close(sf.attention_decode(q[:, :, -1:], k, v, mask), wanted)


# Caches in e4m3.


@needs_triton
@parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_small_weights_and_queries_past_the_range_of_float16_are_not_lost(dtype):
    # One key has weight 1 and value 0; 4,095 others have weight 2^-26 and value 1, in tokens whose scales differ by 2^10.
    tokens = 4096
    q = torch.zeros(1, 1, 1, 32, dtype=dtype, device=DEVICE)
    q[..., 0] = 2.0**14 if dtype == torch.float16 else 2.0**30
    k = torch.zeros(1, 1, tokens, 32, device=DEVICE)
    k[:, :, 0, 0] = 1.0
    v = (torch.arange(tokens, device=DEVICE) > 0).float()[:, None].expand(1, 1, tokens, 32)
    v_scale = (2.0 ** (torch.arange(tokens, device=DEVICE) % 11 - 5)).expand(1, 1, -1)
    k_scale = torch.ones_like(v_scale) / q[0, 0, 0, 0].float()
    scale = 26 * torch.tensor(2.0).log().item()
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    out = sf.attention_decode(q, k.to(E4M3), v.to(E4M3), scale=scale, **scales, backend="triton")
    small = 2.0**-26
    wanted = (small * v_scale[0, 0, 1:]).sum() / (1 + small * (tokens - 1))
    torch.testing.assert_close(out.float(), wanted.expand_as(out), atol=0, rtol=2e-3 if dtype == torch.float16 else 1.5e-2)


def test_a_scale_of_size_1_broadcasts():
    q, k, v = (tensor((2, heads, tokens, 32)) for heads, tokens in ((4, 2), (2, 128), (2, 128)))
    for shape in ((1, 2), (2, 1), (1, 1), (1, 2, 1), (2, 1, 128), (1, 1, 128)):
        some = {name: torch.rand(shape, device=DEVICE) + 0.5 for name in ("k_scale", "v_scale")}
        whole = {name: (t[..., None] if t.dim() == 2 else t).expand(2, 2, 128).contiguous() for name, t in some.items()}
        few, all_ = (sf.attention_decode(q, k.to(E4M3), v.to(E4M3), "causal", **given) for given in (some, whole))
        torch.testing.assert_close(few, all_, atol=1e-6, rtol=1e-6)


@needs_triton
@parametrize("chip, named", [((8, 0), "8.0"), ((8, 6), "8.6"), ((8, 9), None), ((9, 0), None)])
def test_a_gpu_without_e4m3_is_named(chip, named, monkeypatch):
    from sparse_flash.kernels.portable import configs

    monkeypatch.setattr(configs, "detect_gpu", lambda device: configs.Gpu(chip, 232448))
    reason = configs.refusal(torch.device("cuda"), e4m3=True)
    assert reason is None if named is None else f"8.9 or newer; this GPU has {named}" in reason
