"""On a GPU, for every pattern, head dimension and dtype: right by the rule of ``oracle.check``. Skipped without one."""

from contextlib import nullcontext

import pytest
import torch
from oracle import check, heavy_rows_split, no_host_synchronization, tiles
from torch.nn.attention.flex_attention import BlockMask as FlexMask

import sparse_flash as sf

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.usefixtures("poison")]
parametrize = pytest.mark.parametrize

PATTERNS = {
    "full": "full",
    "causal": "causal",
    "local": "causal & local(100)",
    "strided": "strided(3, block=32)",
    "strided tokens": "causal & strided(7, block=1)",
    "fixed": "causal & fixed(4, summary=1, block=32)",
    "butterfly": "butterfly(block=32)",
    "power_of_two": "causal & power_of_two(block=32)",
    "dilated": "causal & dilated(9, 3, block=1)",
    "global_tokens": "local(30) | global_tokens(5)",
    "sinks": "causal & (local(64) | sinks(4))",
    "random": "causal & random(0.3, block=32)",
    "prefix": "prefix(70)",
    "documents": "causal & shifted(documents((0, 33, 40, 200, 385)), 0)",
    "block_diagonal": "block_diagonal(block=100)",
    "bigbird": "bigbird(block=32)",
    "longformer": "longformer(40, 3)",
    "neighborhood": "shifted(neighborhood((19, 20), (5, 7)), 0)",
    "tile_window": "shifted(tile_window(video_layout(3, 9, 11, tile=(1, 4, 4), prefix=9), (1, 2, 2)), 0)",
    "from_blocks": 'shifted(from_blocks("110/011/101", block=128), 0)',
    "complement": "~local(50)",
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BACKENDS = ["triton", "hopper"]


@parametrize("dtype", DTYPES, ids=str)
@parametrize("head_dim", [16, 32, 40, 64, 80, 96, 128, 192, 256])
@parametrize("name", PATTERNS)
@parametrize("backend", BACKENDS)
def test_every_pattern_head_dim_and_dtype_is_right(backend, name, head_dim, dtype):
    check(backend, PATTERNS[name], 385, 380, block_size=128, dtype=dtype, head_dim=head_dim, heads=4, kv_heads=2, batch=2)


@parametrize("mask", [None, "causal & local(90)"])
@parametrize("backend", BACKENDS)
def test_what_a_call_took_is_free_once_its_results_are_gone(backend, mask):
    def call():
        q, k, v = (torch.randn(2, 2, 300, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
        sf.attention(q, k, v, mask, backend=backend).sum().backward()
        with torch.no_grad():
            sf.attention_decode(q[:, :, :1], k, v, mask)

    call()
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        call()
    assert torch.cuda.memory_allocated() == before


@parametrize("density", [0.0, 0.02, 0.5, 1.0])
@parametrize("tokens", [1024, 1000])
@parametrize("within", [None, "causal", "complement"])
@parametrize("split", [False, True])
@parametrize("backend", BACKENDS)
def test_block_maps_made_on_the_gpu_are_right_with_empty_full_and_split_rows(backend, split, within, density, tokens):
    generator = torch.Generator(device="cuda").manual_seed(0)
    blocks = torch.rand(2, 4, 8, 8, device="cuda", generator=generator) < density
    blocks[:, :, 3] = True
    with heavy_rows_split() if split else nullcontext():
        mask = sf.BlockMask.from_blocks(blocks, 128, q_len=tokens, kv_len=tokens, within=PATTERNS.get(within))
    assert mask.by_query.is_split == mask.by_key.is_split == split
    check(backend, mask, tokens, dtype=torch.bfloat16, head_dim=64, batch=2, heads=4)


def lists_of(blocks):
    return blocks.byte().argsort(dim=-1, descending=True).int(), blocks.sum(-1, dtype=torch.int32)


def flex_mask(index, count):
    return FlexMask.from_kv_blocks(torch.zeros_like(count), index, count, index, BLOCK_SIZE=128, compute_q_blocks=False)


# How many blocks of keys, the tensors of a map, and the mask of these tensors.
AT_RUN_TIME = {
    "maps": (64, lambda blocks: (blocks.clone(),), lambda blocks: sf.BlockMask.from_blocks(blocks, 128)),
    "FlexAttention": (64, lists_of, flex_mask),
}


@parametrize("made", AT_RUN_TIME)
def test_masks_made_at_run_time_wait_for_nothing_and_are_made_anew_by_each_replay_of_a_graph(made):
    columns, tensors_of, mask_of = AT_RUN_TIME[made]
    q, k, v = (torch.randn(1, 2, 64 * 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    blocks = torch.rand(1, 1, 64, columns, device="cuda") < 0.1
    blocks[:, :, 5] = True  # which is split: from 64 blocks on there is room for that
    tensors = tensors_of(blocks)
    first = mask_of(*tensors)
    sf.attention(q, k, v, first)
    with no_host_synchronization():
        sf.attention(q, k, v, mask_of(*tensors))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sf.attention(q, k, v, first if isinstance(first, FlexMask) else mask_of(*tensors))
    for kept in (blocks, ~blocks, torch.zeros_like(blocks)):
        for ours, theirs in zip(tensors, tensors_of(kept), strict=True):
            ours.copy_(theirs)
        graph.replay()
        spread = kept.repeat_interleave(128, 2).repeat_interleave(8192 // columns, 3)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, spread).nan_to_num()
        expected *= spread.any(-1, keepdim=True)  # on GPUs PyTorch returns other numbers for queries without keys
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@parametrize("group", [1, 2])
@parametrize("head_dim", [64, 128])
@parametrize("block_size", [128, 256])
@parametrize("name", ["global_tokens", "bigbird", "complement", "dilated"])
@parametrize("deterministic", [False, True])
def test_rows_and_columns_that_come_in_parts_are_right(deterministic, name, block_size, head_dim, group):
    pattern = f"({PATTERNS[name]}) | global_tokens(40)"
    with heavy_rows_split():
        mask = sf.compile_mask(pattern, 1500, 1400, block_size)
        assert mask.by_query.work.shape[1] > mask.by_query.row_order.shape[1]
        options = {
            "dtype": torch.bfloat16,
            "head_dim": head_dim,
            "heads": 4,
            "kv_heads": 4 // group,
            "deterministic": deterministic,
        }
        check("hopper", pattern, 1500, 1400, block_size=block_size, batch=2, **options)
        check("hopper", sf.BlockMask.per_head([mask, sf.compile_mask("causal", 1500, 1400, block_size)] * 2), 1500, 1400, **options)


@parametrize("head_dim, v_head_dim", [(64, 64), (192, 128), (256, 256)])
@parametrize("spec", [None, "causal", "butterfly(block=128)"])
def test_programs_that_compute_many_tiles_each_are_right(spec, head_dim, v_head_dim):
    shape = {"head_dim": head_dim, "v_head_dim": v_head_dim, "heads": 24, "batch": 1}
    check("hopper", spec, 2048, block_size=128, dtype=torch.bfloat16, **shape)


@parametrize("head_dim", (64, 80, 128, 192, 256))
@parametrize("spec", (None, "causal", "local(100) | sinks(70)"))
def test_short_calls_are_right_in_tiles_of_64_queries(spec, head_dim):
    given = {"dtype": torch.bfloat16, "head_dim": head_dim, "heads": 4, "kv_heads": 2}
    for q_len, block_size in ((700, 128), (515, 256)):
        with tiles(short=True):
            check("hopper", spec, q_len, 600, block_size=block_size, **given)


@parametrize("split", [False, True])
@parametrize("name", PATTERNS)
def test_tiles_of_192_queries_are_right(name, split):
    with tiles(tall=True):
        with heavy_rows_split() if split else nullcontext():
            mask = sf.compile_mask(PATTERNS[name], 385, 380, device="cuda")
            assert mask.tall is not None
        check("hopper", mask, 385, 380, dtype=torch.bfloat16, head_dim=64, heads=4, kv_heads=2, batch=2)


OF_DOCUMENTS = "shifted(documents((0, 33, 40, 200, 385, 1000)), 0)"


@parametrize("deterministic", [False, True])
@parametrize("head_dim", (64, 96, 128))
@parametrize("spec", (f"causal & {OF_DOCUMENTS}", OF_DOCUMENTS, f"causal & local(100) & {OF_DOCUMENTS}"))
def test_tiles_that_start_where_documents_start_are_right(spec, head_dim, deterministic):
    with tiles(by_document=True):
        mask = sf.compile_mask(spec, 1100, device="cuda")
        assert mask.by_document is not None
        for kv_heads in (4, 2):
            options = {"head_dim": head_dim, "kv_heads": kv_heads, "deterministic": deterministic}
            check("hopper", mask, 1100, dtype=torch.bfloat16, heads=4, batch=2, **options)


@parametrize("backend", BACKENDS)
def test_calls_of_one_tensor_leave_nothing_for_calls_of_three(backend):
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.float16) for _ in range(3))

    def results(q, k, v):
        leaves = [t.detach().clone().requires_grad_() for t in dict.fromkeys((q, k, v))]
        of = dict(zip(dict.fromkeys((q, k, v)), leaves, strict=True))
        out = sf.attention(of[q], of[k], of[v], "causal & local(150)", backend=backend)
        return out, *torch.autograd.grad(out, leaves, v)

    wanted = results(q, k, v)
    sf.clear_caches()
    for _ in range(3):
        results(q, q, q)
    torch.testing.assert_close(results(q, k, v), wanted, rtol=1e-2, atol=1e-2)


def test_launches_on_several_streams_do_not_share_tiles():
    q, k, v = (torch.randn(1, 8, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    wanted = sf.attention(q, k, v, "causal")
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    torch.cuda.synchronize()
    for stream in streams * 8:
        with torch.cuda.stream(stream):
            results.append(sf.attention(q, k, v, "causal"))
    torch.cuda.synchronize()
    assert all(torch.equal(result, wanted) for result in results)


@parametrize("kv_heads", [4, 2])
@parametrize("spec", [None, "causal & (local(300) | power_of_two(block=128))", "causal & (local(300) | global_tokens(100))"])
@parametrize("dropout_p", [0.0, 0.1])
@parametrize("backend", ["hopper", "triton"])
def test_gradients_repeat_bit_for_bit_where_asked_to(backend, dropout_p, spec, kv_heads):
    def run():
        torch.manual_seed(0)
        shapes = [(2, heads, 4096, 128) for heads in (4, kv_heads, kv_heads)]
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
        with heavy_rows_split():
            out = sf.attention(q, k, v, spec, backend=backend, deterministic=True, dropout_p=dropout_p)
        return torch.autograd.grad(out, (q, k, v), torch.randn_like(out))

    first = run()
    assert all(torch.equal(a, b) for _ in range(4) for a, b in zip(first, run(), strict=True))


@parametrize("deterministic", [False, True])
def test_numbers_that_are_not_finite_reach_the_gradients(deterministic):
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q[0, 0, 7, 3], v[0, 1, 40, 5] = float("nan"), float("inf")
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = sf.attention(q, k, v, "causal", backend="hopper", deterministic=deterministic)
    dq, dk, _ = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert dq[0, 0, 7].isnan().all() and dk[0, 0, :8].isnan().all() and not dq[0, 1, 41:].isfinite().any()


@parametrize("dtype", [torch.float16, torch.bfloat16])
@parametrize("head_dim, v_head_dim", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
@parametrize("spec", [None, "causal", "local(150)", "strided(100, block=64)"])
@parametrize("rise", [10.0, 300.0])
def test_scores_that_rise_far_from_key_to_key_are_right(rise, spec, head_dim, v_head_dim, dtype):
    # Queries of one warp find their highest scores again in different steps.
    check("hopper", spec, 1000, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, score_rise=rise)


def test_offsets_beyond_two_to_the_31_are_right():
    # 1 x 9 x 1,048,576 tokens x 256 is more than 2^31 numbers; the window needs few of them.
    tokens = 1 << 20
    q = torch.randn(1, 9, tokens, 256, device="cuda", dtype=torch.bfloat16)
    mask = sf.compile_mask("causal & local(64)", tokens, device="cuda")
    out = sf.attention(q, q, q, mask)
    last = slice(tokens - 128, tokens)
    short = sf.attention(*(q[:, :, tokens - 256 :].contiguous(),) * 3, "causal & local(64)")
    torch.testing.assert_close(out[:, :, last], short[:, :, 128:], rtol=0, atol=0)
