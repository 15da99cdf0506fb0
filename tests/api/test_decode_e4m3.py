"""attention_decode over e4m3 caches equals float64 attention over what they hold times its scales."""

import pytest
import torch
from accepted import needs_triton
from calls import assert_right, decode_in_eight_bits, in_eight_bits, in_pages, sizes_for, unless_refused
from oracle import DEVICE, no_host_synchronization, tensor
from test_decode import PATTERNS

import sparse_flash as sf

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize
E4M3 = torch.float8_e4m3fn
on_each = parametrize("backend", ["torch", "reference", pytest.param("triton", marks=needs_triton)])
CAPACITY = 384
# The size of a page, and what differs from usual sizes.
CACHES = [
    (None, {"head_dim": 22, "v_head_dim": 128, "layout": "tokens first", "q_len": 1}),
    (16, {"dtype": torch.float16, "heads": 3, "kv_heads": 1, "layout": "sliced"}),
    (128, {"dtype": torch.bfloat16, "head_dim": 32, "q_len": 20, "queries": 20}),
]
NAMES = ("dense", "causal", "window and sinks", "two-sided window", "bits", "nothing")


@on_each
@parametrize("name", NAMES)
@parametrize("seed", [0, 1], ids=["a scale for each token", "a scale for each page"])
@parametrize("page, changed", CACHES)
def test_every_kind_of_cache_is_read_as_its_numbers_times_their_scales(backend, seed, page, changed, name):
    usual = {"lens": (300, 0, 77), "kv_len": CAPACITY, "spec": PATTERNS[name], "seed": seed, "page": page}
    with unless_refused():
        assert_right(decode_in_eight_bits(sizes_for(backend, **usual | changed)), backend)


@parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
@parametrize("unit, page", [(1, None), (1, 16), (CAPACITY, None), (128, 128)])
@parametrize("block, q_len, share", [(16, 1, True), (64, 3, False)])
def test_picked_blocks_are_read_as_their_numbers_times_their_scales(backend, unit, page, block, q_len, share):
    generator = torch.Generator().manual_seed(unit)
    q, k, v = (tensor((2, heads, tokens, 32), generator=generator) for heads, tokens in ((4, q_len), (2, CAPACITY), (2, CAPACITY)))
    stored, scales = zip(*(in_eight_bits(t, unit, generator) for t in (k, v)), strict=True)
    keys, values = (t.double() * scale.double() for t, scale in zip(stored, scales, strict=True))
    lens = torch.tensor([CAPACITY - 5, 130], device=DEVICE)
    options = {"kv_lens": lens}
    if page:
        (k, options["block_table"]), (v, _), *scales = (in_pages(t.float(), page) for t in (*stored, *scales))
        stored, scales = (k.to(E4M3), v.to(E4M3)), [scale for scale, _ in scales]
    k_scale, v_scale = (scale[..., 0] if unit == 1 else scale[:, :, 0, 0] for scale in scales)
    chosen = sf.topk_blocks(q, keys.float(), 3, every=1, block_size=block, share_group=share)
    given = {"k_scale": k_scale, "v_scale": v_scale, "return_lse": True, "backend": backend, **options}
    found = sf.attention_decode(q, *stored, chosen, **given)
    exact = sf.attention_decode(q.double(), keys, values, chosen, kv_lens=lens, return_lse=True, backend="torch")
    for ours, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), wanted, atol=1e-5, rtol=1e-5)


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


def example(page_size=None):
    generator = torch.Generator().manual_seed(0)
    q = tensor((2, 4, 2, 32), generator=generator)
    k, v = (tensor((2, 2, 128, 32), generator=generator).to(E4M3) for _ in "kv")
    scales = {name: torch.rand(2, 2, generator=generator).to(DEVICE) + 0.5 for name in ("k_scale", "v_scale")}
    return q, k, v, scales


def test_a_scale_of_size_1_serves_all():
    q, k, v, scales = example()
    for shape in ((1, 2), (2, 1), (1, 1), (1, 2, 1), (2, 1, 128), (1, 1, 128)):
        some = {name: torch.rand(shape, device=DEVICE) + 0.5 for name in scales}
        whole = {name: (t[..., None] if t.dim() == 2 else t).expand(2, 2, 128).contiguous() for name, t in some.items()}
        few, all_ = (sf.attention_decode(q, k, v, "causal", **given) for given in (some, whole))
        torch.testing.assert_close(few, all_, atol=1e-6, rtol=1e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_graph_replays_with_other_contents_and_no_call_waits_for_the_device():
    q, k, v, scales = example()
    call = [q.bfloat16(), k, v]
    lens = torch.tensor([128, 77], dtype=torch.int32, device=DEVICE)

    def step():
        return sf.attention_decode(*call, "causal & local(50)", kv_lens=lens, **scales)

    step()
    with no_host_synchronization():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for number in range(3):
        k.copy_(k.float().roll(1, 2))
        scales["v_scale"].mul_(1 + number)
        lens.sub_(number)
        graph.replay()
        assert torch.equal(out, step())


def test_an_empty_batch_or_cache_gives_zeros():
    q, k, v, scales = example()
    none = {name: scale[:0] for name, scale in scales.items()}
    assert sf.attention_decode(q[:0], k[:0], v[:0], **none).shape == (0, 4, 2, 32)
    out, lse = sf.attention_decode(q, k[:, :, :0], v[:, :, :0], **scales, return_lse=True)
    assert not out.any() and lse.isneginf().all() and out.dtype == q.dtype


@needs_triton
def test_an_odd_head_dim_is_left_to_other_back_ends():
    q, k, v, scales = example()
    with pytest.raises(ValueError, match="it reads e4m3 caches of an even head_dim; got 31 and 31 of v"):
        sf.attention_decode(q[..., :31], k[..., :31], v[..., :31], **scales, backend="triton")
    assert sf.attention_decode(q[..., :31], k[..., :31], v[..., :31], **scales).shape == (2, 4, 2, 31)


def test_a_gpu_without_e4m3_is_named():
    from sparse_flash.kernels.portable import configs

    with pytest.MonkeyPatch.context() as patch:
        for chip, named in (((8, 0), "8.0"), ((8, 6), "8.6"), ((8, 9), None), ((9, 0), None)):
            patch.setattr(configs, "detect_gpu", lambda device, chip=chip: configs.Gpu(chip, 232448))
            reason = configs.refusal(torch.device("cuda"), e4m3=True)
            assert reason is None if named is None else f"8.9 or newer; this GPU has {named}" in reason
