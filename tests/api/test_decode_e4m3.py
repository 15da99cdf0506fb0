"""attention_decode over e4m3 caches equals float64 attention over what they hold times its scales."""

import pytest
import torch
from accepted import needs_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DEVICE, LAYOUTS, dense_attention, no_host_synchronization, tensor
from test_decode import PATTERNS, TOLERANCE, in_pages, kept_by_definition

import sparse_flash as sf

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize
E4M3 = torch.float8_e4m3fn
on_each = parametrize("backend", ["torch", "reference", pytest.param("triton", marks=needs_triton)])
CAPACITY = 384
NAMES = ("dense", "causal", "window and sinks", "two-sided window", "bits", "nothing")


def stored(x: torch.Tensor, unit: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """x, (batch, kv_heads, tokens, head_dim), in e4m3, and a scale of each token, (batch, kv_heads, tokens), the same for ``unit``
    tokens. Scales of neighbours differ by up to 2^8."""
    whole = x.double().unflatten(2, (-1, unit))
    shrunk = 2.0 ** -(8 * torch.rand((*whole.shape[:3], 1, 1), generator=generator).to(x.device))
    scale = (whole * shrunk).abs().amax((3, 4), keepdim=True) / 448
    held = (whole * shrunk / scale).clamp(-448, 448).flatten(2, 3)
    return torch.empty_like(x, dtype=E4M3).copy_(held), scale.expand(*whole.shape[:4], 1).flatten(2).float()


def of_units(scale: torch.Tensor, by: str) -> torch.Tensor:
    """Scales of each token as a call gets them."""
    return scale if by == "token" else scale[..., 0]


@on_each
@given(st.data())
@settings(max_examples=25)
def test_every_kind_of_cache_is_read_as_its_numbers_times_their_scales(backend, data):
    draw = data.draw
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    q_len, (heads, kv_heads) = draw(st.sampled_from([1, 3, 20])), draw(st.sampled_from([(4, 2), (3, 1), (2, 2)]))
    head_dim, v_head_dim = (draw(st.sampled_from([16, 22, 32, 128])) for _ in "kv")
    page_size, by = draw(st.sampled_from([None, 16, 64, 128])), draw(st.sampled_from(["token", "page"]))
    name, layout = draw(st.sampled_from(NAMES)), draw(st.sampled_from(LAYOUTS))
    lengths = draw(st.lists(st.integers(0, CAPACITY), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    q = tensor((len(lengths), heads, q_len, head_dim), layout, dtype=dtype, generator=generator)
    unit = 1 if by == "token" else page_size or CAPACITY
    shape = len(lengths), kv_heads, CAPACITY
    (k, k_scale), (v, v_scale) = (
        stored(tensor((*shape, width), layout, generator=generator), unit, generator) for width in (head_dim, v_head_dim)
    )
    values = [t.double() * scale[..., None].double() for t, scale in ((k, k_scale), (v, v_scale))]
    past = torch.arange(CAPACITY, device=DEVICE) >= torch.tensor(lengths, device=DEVICE)[:, None, None]
    k, v = (t.masked_fill(past[..., None], float("nan")) for t in (k.float(), v.float()))
    k, v = k.to(E4M3), v.to(E4M3)
    if by == "token":
        k_scale, v_scale = (scale.masked_fill(past, float("nan")) for scale in (k_scale, v_scale))
    options = {"kv_lens": torch.tensor(lengths, device=DEVICE)}
    if page_size:
        cache = [t.float() for t in (k, v)] + [scale[..., None] for scale in (k_scale, v_scale)]
        (k, table), (v, _), (k_scale, _), (v_scale, _) = (in_pages(t, page_size, torch.Generator().manual_seed(1)) for t in cache)
        k, v, k_scale, v_scale = k.to(E4M3), v.to(E4M3), k_scale[..., 0], v_scale[..., 0]
        options["block_table"] = table
    scales = {"k_scale": of_units(k_scale, by), "v_scale": of_units(v_scale, by)}
    pattern = PATTERNS[name]
    out, lse = sf.attention_decode(q, k, v, pattern, **options, **scales, return_lse=True, backend=backend)
    assert out.dtype == dtype and out.shape == (*q.shape[:3], v_head_dim)
    for sequence, length in enumerate(lengths):
        if not length:
            assert not out[sequence].any() and lse[sequence].isneginf().all()
            continue
        kept = kept_by_definition(pattern, None, length, q_len, CAPACITY).to(DEVICE)
        one = (t[sequence : sequence + 1] for t in (q.double(), values[0][:, :, :length], values[1][:, :, :length]))
        wanted, wanted_lse = (t[0] for t in dense_attention(*one, kept, head_dim**-0.5))
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out[sequence].double(), wanted, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[sequence].double(), wanted_lse, atol=1e-5, rtol=1e-5)


@parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
@given(st.data())
@settings(max_examples=20)
def test_picked_blocks_are_read_as_their_numbers_times_their_scales(backend, data):
    draw = data.draw
    block, q_len, page_size = draw(st.sampled_from([16, 64])), draw(st.sampled_from([1, 3])), draw(st.sampled_from([None, 16, 128]))
    share, by = draw(st.booleans()), draw(st.sampled_from(["token", "page"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    q = tensor((2, 4, q_len, 32), generator=generator)
    unit = 1 if by == "token" else page_size or CAPACITY
    (k, k_scale), (v, v_scale) = (stored(tensor((2, 2, CAPACITY, 32), generator=generator), unit, generator) for _ in "kv")
    keys, values = (t.double() * scale[..., None].double() for t, scale in ((k, k_scale), (v, v_scale)))
    lens = torch.tensor([CAPACITY - 5, draw(st.integers(q_len, CAPACITY))], device=DEVICE)
    options = {"kv_lens": lens}
    scales = {"k_scale": of_units(k_scale, by), "v_scale": of_units(v_scale, by)}
    if page_size:
        cache = [k.float(), v.float(), k_scale[..., None], v_scale[..., None]]
        (k, table), (v, _), (k_scale, _), (v_scale, _) = (in_pages(t, page_size, torch.Generator().manual_seed(1)) for t in cache)
        k, v, options["block_table"] = k.to(E4M3), v.to(E4M3), table
        scales = {"k_scale": of_units(k_scale[..., 0], by), "v_scale": of_units(v_scale[..., 0], by)}
    chosen = sf.topk_blocks(q, keys.float(), 3, every=1, block_size=block, share_group=share)
    found = sf.attention_decode(q, k, v, chosen, **options, **scales, return_lse=True, backend=backend)
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
    torch.testing.assert_close(out.float(), wanted.expand_as(out), atol=0, rtol=TOLERANCE[dtype])


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
