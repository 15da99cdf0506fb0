"""SparseAttention equals a layer built from PyTorch's own parts, token by token or all at once."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_flash as sf

TOKENS, DIM = 150, 48


def layer(**options) -> sf.SparseAttention:
    torch.manual_seed(0)
    return sf.SparseAttention(DIM, 4, **{"mask": "causal & (local(20) | sinks(2))"} | options)


def inputs(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(2, tokens, DIM, generator=torch.Generator().manual_seed(1))


def turned(x: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary embedding by its definition: pairs as complex numbers, turned by position / base^(2 i / head_dim)."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    speed = base ** -(torch.arange(half).double() * 2 / x.shape[-1])
    pairs = pairs * torch.polar(torch.ones(1).double(), torch.arange(x.shape[2]).double()[:, None] * speed)
    return torch.cat([pairs.real, pairs.imag], -1).float()


def by_hand(attn: sf.SparseAttention, x: torch.Tensor, pattern: str | None) -> torch.Tensor:
    widths = attn.head_dim, attn.head_dim, attn.v_head_dim
    projected = zip((attn.q_proj, attn.k_proj, attn.v_proj), widths, strict=True)
    q, k, v = (p(x).unflatten(2, (-1, width)).transpose(1, 2) for p, width in projected)
    if attn.rotary_base:
        q, k = turned(q, attn.rotary_base), turned(k, attn.rotary_base)
    kept = None if pattern is None else sf.compile_mask(pattern, x.shape[1]).to_dense()
    out = F.scaled_dot_product_attention(q, k, v, kept, enable_gqa=True)
    return attn.out_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("rotary_base", [None, 10000.0, 500.0])
@pytest.mark.parametrize("kv_heads, v_head_dim", [(4, None), (2, None), (1, None), (2, 20)])
@pytest.mark.parametrize("pattern", [None, "causal", "causal & (local(20) | sinks(2))"])
def test_results_and_gradients_are_those_of_pytorchs_parts(pattern, kv_heads, v_head_dim, rotary_base):
    attn = layer(mask=pattern, kv_heads=kv_heads, v_head_dim=v_head_dim, rotary_base=rotary_base, bias=True)
    x = inputs().requires_grad_()
    results = []
    for make in (attn, lambda x: by_hand(attn, x, pattern)):
        attn.zero_grad()
        x.grad = None
        out = make(x)
        out.square().sum().backward()
        results.append([out.detach(), x.grad.clone(), *(p.grad.clone() for p in attn.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


WINDOW = "causal & local(20)"
CHOSEN = "causal & (sampled(4, keep=1, block=64) | sinks(2))"


@pytest.mark.parametrize("pieces, v_head_dim", [([1] * 20, None), ([7, 1, 12], None), ([20], None), ([7, 1, 12], 20)])
def test_tokens_in_pieces_through_the_cache_give_what_they_give_at_once(pieces, v_head_dim):
    attn = layer(kv_heads=2, v_head_dim=v_head_dim)
    x = inputs(sum(pieces) + 30)
    cache = attn.new_cache(2, length=64)
    with torch.no_grad():
        parts = [attn(piece, cache) for piece in x.split([30, *pieces], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), attn(x), atol=1e-5, rtol=1e-4)
        assert cache.tokens == x.shape[1] and cache.keys.shape == (2, 2, x.shape[1], attn.head_dim)
        assert cache.values.shape == (2, 2, x.shape[1], v_head_dim or attn.head_dim)
        cache.reset()
        torch.testing.assert_close(attn(x[:, :30], cache), parts[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@given(st.data())
@settings(max_examples=30)
def test_an_e4m3_cache_holds_each_token_to_a_sixteenth_whatever_came_before_it(dtype, data):
    batch, kv_heads, head_dim, v_head_dim = (data.draw(st.integers(1, 9)) for _ in range(4))
    pieces = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    cache = sf.KeyValueCache(batch, kv_heads, sum(pieces) + 2, head_dim, v_head_dim=v_head_dim, dtype=torch.float8_e4m3fn)
    assert all(room.dtype == torch.float8_e4m3fn for room in cache.room)
    k, v = (torch.randn(batch, kv_heads, sum(pieces), width, generator=generator) for width in (head_dim, v_head_dim))
    sizes = 2.0 ** torch.randint(-12, 12, (2, batch, kv_heads, sum(pieces), 1), generator=generator)
    k, v = (k * sizes[0]).to(dtype), (v * sizes[1]).to(dtype)
    v[:, :, ::3] = 0
    for some in zip(k.split(pieces, 2), v.split(pieces, 2), strict=True):
        found = cache.append(*some)
    assert all(t.dtype == dtype for t in found) and cache.keys.dtype == torch.float32
    for ours, wanted in ((cache.keys, k.float()), (cache.values, v.float())):
        # Small numbers of a token are multiples of 2^-9 times its scale.
        least = wanted.abs().amax(-1, keepdim=True) / 448 / 1024
        assert bool(((ours - wanted).abs() <= 1.01 * (wanted.abs() / 16 + least)).all())


@pytest.mark.parametrize("options", [{"mask": WINDOW}, {"mask": "causal"}, {"select": {"keep": 2, "block_size": 16}}], ids=str)
def test_tokens_in_pieces_through_an_e4m3_cache_give_what_they_give_at_once(options):
    torch.manual_seed(0)
    attn, x = sf.SparseAttention(DIM, 4, **options, kv_heads=2, v_head_dim=20), inputs(90)
    with torch.no_grad():
        at_once, one_by_one = (attn.new_cache(2, 128, torch.float8_e4m3fn) for _ in range(2))
        whole = attn(x, at_once)
        parts = torch.cat([attn(piece, one_by_one) for piece in x.split([70, 1, 1, 7, 10, 1], 1)], 1)
        exact = attn(x, attn.new_cache(2, 128))
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-4)
    if "select" not in options:  # other keys may choose other blocks
        assert 1e-4 < (whole - exact).norm() / exact.norm() < 0.06


def test_a_compiled_layer_with_an_e4m3_cache_gives_what_it_gives_eagerly():
    torch._dynamo.reset()
    attn, counter = layer(mask=WINDOW, kv_heads=2), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attn, backend=counter, fullgraph=True)
    with torch.no_grad():
        caches = [attn.new_cache(2, 160, torch.float8_e4m3fn) for _ in range(2)]
        pieces = inputs(90).split([80] + 10 * [1], 1)
        for number, piece in enumerate(pieces):
            torch.testing.assert_close(compiled(piece, caches[0]), attn(piece, caches[1]), atol=1e-5, rtol=1e-4)
            if number == 3:
                first = counter.frame_count
    assert counter.frame_count == first


PIECES = [70, 1, 1, 7, 65, 1]


@pytest.mark.parametrize("room, v_head_dim", [(sum(PIECES), None), (200, None), (200, 20)])
def test_a_table_that_covers_the_cache_gives_what_its_pattern_does(room, v_head_dim):
    attn = layer(mask=sf.compile_mask(WINDOW, 200), kv_heads=2, v_head_dim=v_head_dim)
    x = inputs(sum(PIECES))
    cache = attn.new_cache(2, room)
    with torch.no_grad():
        parts = torch.cat([attn(piece, cache) for piece in x.split(PIECES, 1)], 1)
        attn.mask = WINDOW
        torch.testing.assert_close(parts, attn(x), atol=1e-5, rtol=1e-4)


def test_a_table_with_a_cache_gives_the_gradients_of_its_pattern():
    x, gradients = inputs(90), []
    for mask in (sf.compile_mask(WINDOW, 128), WINDOW):
        attn = layer(mask=mask)
        attn.k_proj.requires_grad_(False), attn.v_proj.requires_grad_(False)
        cache = attn.new_cache(2, 128)
        attn(x[:, :80], cache)
        attn(x[:, 80:], cache).square().sum().backward()
        gradients.append([p.grad for p in (attn.q_proj.weight, attn.out_proj.weight)])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"mask": CHOSEN}, {"mask": None, "kv_heads": 1}, {"select": {"keep": 2}}])
@pytest.mark.parametrize("part", ["k_proj", "v_proj", "x"])
def test_a_cache_is_refused_where_keys_or_values_would_lose_their_gradients(part, options):
    attn, x = layer(**{"mask": "causal"} | options).requires_grad_(False), inputs(70)
    attn.q_proj.requires_grad_(True)
    cache = attn.new_cache(2, 200)
    (x if part == "x" else getattr(attn, part)).requires_grad_(True)
    with pytest.raises(ValueError, match=r"a layer with a cache gives no gradients.*under torch.no_grad\(\), or without a cache"):
        attn(x, cache)
    assert cache.tokens == 0
    with torch.no_grad():
        attn(x, cache)
    assert cache.tokens == 70


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    "spec, limit",
    [
        ("causal & (sampled(4, keep=1, block=64) | sinks(2))", "causal"),
        ("causal & local(150) & sampled(4, keep=1, block=64)", "causal & local(150)"),
        ("sampled(4, keep=1, block=64)", None),
        ("per_head([causal & pooled(keep=1), causal & pooled(keep=2), causal & local(9), causal & pooled(keep=1)])", "by head"),
    ],
)
def test_a_prompt_chooses_and_few_tokens_after_it_attend_to_all_before_the_choosers(spec, limit, as_text, compiled):
    torch._dynamo.reset()
    limit = "per_head([causal, causal, causal & local(9), causal])" if limit == "by head" else limit
    attn, dense, x = layer(mask=spec if as_text else sf.parse(spec)), layer(mask=limit), inputs(200)
    call = torch.compile(attn, backend="aot_eager", fullgraph=True) if compiled else attn
    with torch.no_grad():
        cache, of_dense = attn.new_cache(2, 200), dense.new_cache(2, 200)
        torch.testing.assert_close(call(x[:, :130], cache), attn(x[:, :130]))
        dense(x[:, :130], of_dense)
        for piece in x[:, 130:].split([1, 1, 64, 4], 1):
            torch.testing.assert_close(call(piece, cache), dense(piece, of_dense), atol=1e-5, rtol=1e-4)
        cache.reset(), of_dense.reset()
        torch.testing.assert_close(call(x[:, :20], cache), dense(x[:, :20], of_dense), atol=1e-5, rtol=1e-4)  # a short prompt
    assert cache.tokens == 20


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mask": "scored(keep=1)"}, "scored needs the scores"),
        ({"mask": "per_head([causal, full])"}, "the mask's heads must be q's, 4"),
        ({"mask": "causal & documents((0, 40, 75))"}, "it names 75"),
        ({"mask": "causal", "select": lambda q, k: 1 / 0}, "division by zero"),
        ({"mask": "causal", "backend": "hopper"}, "hopper"),
    ],
)
def test_a_call_that_fails_leaves_the_cache_as_it_was(options, message):
    attn, x = layer(), inputs(150)
    failing = layer(**options)
    failing.load_state_dict({name: p for name, p in attn.state_dict().items() if name != "mask_spec"}, strict=False)
    with torch.no_grad():
        cache, alone = attn.new_cache(2, 150), attn.new_cache(2, 150)
        for piece in x.split([70, 80], 1):
            with pytest.raises(Exception, match=message):
                failing(piece, cache)
            assert torch.equal(attn(piece, cache), attn(piece, alone))
    assert torch.equal(cache.keys, alone.keys) and torch.equal(cache.values, alone.values)


def test_a_table_that_does_not_cover_the_cache_is_refused_before_the_cache_takes_tokens():
    attn = layer(mask=sf.compile_mask(WINDOW, 40)).requires_grad_(False)
    cache = attn.new_cache(2, 41)
    with pytest.raises(ValueError, match="cover the cache's room of 41 tokens; got q_len=40, kv_len=40; compile it for 41"):
        attn(inputs(5), cache)
    assert cache.tokens == 0
    assert attn(inputs(40), cache).shape == (2, 40, DIM)  # the mask is for exactly these tokens
    attn.mask = sf.compile_mask(WINDOW, 1, 41)
    assert attn(inputs(1), cache).shape == (2, 1, DIM)


@pytest.mark.parametrize("mask", [WINDOW, sf.compile_mask(WINDOW, 160), "causal", None], ids=["text", "table", "causal", "dense"])
def test_a_compiled_layer_with_a_cache_compiles_nothing_with_each_token(mask):
    torch._dynamo.reset()
    attn = layer(mask=mask, kv_heads=2)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attn, backend=counter, fullgraph=True)
    pieces = inputs(100).split([80] + 20 * [1], 1)
    with torch.no_grad():
        cache, ours = attn.new_cache(2, 160), []
        for number, piece in enumerate(pieces):
            ours.append(compiled(piece, cache))
            if number == 3:
                first = counter.frame_count
        assert counter.frame_count == first and cache.tokens == 100
        cache.reset()
        theirs = [attn(piece, cache) for piece in pieces]
    torch.testing.assert_close(torch.cat(ours, 1), torch.cat(theirs, 1), atol=1e-5, rtol=1e-4)


MASKS = {"text": "causal & local(9)", "pattern": sf.causal() & sf.local(9), "table": sf.compile_mask("causal & local(9)", TOKENS)}


@pytest.mark.parametrize("name", [*MASKS, "dense"])
def test_a_mask_that_is_set_later_is_that_of_every_use(name):
    torch._dynamo.reset()
    mask, x = MASKS.get(name), inputs()
    attn, other = layer(), layer(mask=mask)
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    before = compiled(x)
    attn.mask = mask
    wanted = other(x)
    assert not torch.allclose(before, wanted)
    for one in (attn, compiled, copy.deepcopy(attn), pickle.loads(pickle.dumps(attn))):
        torch.testing.assert_close(one(x), wanted)
        assert repr(getattr(one, "_orig_mod", one)) == repr(other)
    assert attn.state_dict().keys() == other.state_dict().keys()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_one_call_is_that_of_this_call_alone(name, compiled):
    if compiled and name == "pattern" and torch.__version__ < "2.13":
        pytest.skip("PyTorch before 2.13 traces no Pattern objects")
    torch._dynamo.reset()
    attn, other, x = layer().eval(), layer(mask=MASKS[name]).eval(), inputs()
    call = torch.compile(attn, fullgraph=True, backend="aot_eager") if compiled else attn
    own, wanted, saved = attn(x), other(x), attn.state_dict()
    for mask, expected in ((MASKS[name], wanted), (None, own)):
        torch.testing.assert_close(call(x, mask=mask), expected)
    assert all(torch.equal(saved[one], tensor) for one, tensor in attn.state_dict().items())
    cache = attn.new_cache(2, TOKENS)
    with torch.no_grad():
        parts = [call(part, cache, mask=MASKS[name]) for part in x.split([100, 1, 49], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), wanted)


def test_a_mask_of_a_wrong_type_is_refused_when_it_is_set():
    attn = layer()
    before = attn.mask
    with pytest.raises(TypeError, match="or a BlockMask; got int"):
        attn.mask = 3
    with pytest.raises(ValueError, match="did you mean 'causal'"):
        attn.mask = "causl"
    assert attn.mask is before


def test_a_layer_survives_saving_and_moves_between_dtypes():
    attn, other = layer(), layer()
    torch.nn.init.normal_(other.q_proj.weight)
    other.load_state_dict(attn.state_dict())
    assert torch.equal(attn(inputs()), other(inputs()))
    assert attn.to(torch.bfloat16)(inputs().bfloat16()).dtype == torch.bfloat16
    assert attn.new_cache(1, 4).keys.dtype == torch.bfloat16


SPEC = "causal & (sinks(2) | local(20))"
TEXTLESS = {
    "a function": {"mask": sf.causal() & sf.from_mask_fn(lambda q, kv: (q - kv) % 3 == 0)},
    "a table": {"mask": sf.compile_mask("causal & local(3)", TOKENS)},
    "a selection": {"mask": "causal", "select": {"keep": 2, "block_size": 16}},
}


def test_a_saved_mask_is_its_text_and_goes_through_safetensors():
    save, load = (getattr(pytest.importorskip("safetensors.torch"), name) for name in ("save", "load"))
    model = torch.nn.Sequential(layer(), layer(mask=None), *(layer(**options) for options in TEXTLESS.values()))
    state = load(save(model.half().state_dict()))
    specs = {name: bytes(value.tolist()).decode() for name, value in state.items() if name.endswith("mask_spec")}
    assert specs == {"0.mask_spec": SPEC, "1.mask_spec": "full"}
    for saved in (state, {name: value.bfloat16() for name, value in state.items()}):
        assert str(model.load_state_dict(saved)) == "<All keys matched successfully>"


@pytest.mark.parametrize("here, there", [(SPEC, "causal"), (None, SPEC), ("causal", None), (SPEC, "causal & windmill(3)")])
def test_a_layer_under_another_mask_than_the_saved_one_warns_once_and_names_both(here, there):
    model, state = torch.nn.Sequential(*(layer(mask=here) for _ in range(2))), {}
    for name, value in torch.nn.Sequential(layer(), layer()).state_dict().items():
        state[name] = torch.tensor(list((there or "full").encode()), dtype=torch.uint8) if "mask_spec" in name else value
    said = f"under the mask '{there or 'full'}', and the layer that loads it keeps its own, '{here or 'full'}'; set layer.mask"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model.load_state_dict(state)
    assert [said in str(one.message) for one in caught] == [True]
    assert torch.equal(model(inputs()), torch.nn.Sequential(*(layer(mask=here) for _ in range(2)))(inputs()))


@pytest.mark.parametrize("saved", [f"{SPEC}\n0123456789ab", "(local(20) | sinks(2)) & causal\n", None])
@pytest.mark.filterwarnings("error")
def test_states_of_earlier_versions_and_text_in_another_order_load(saved):
    attn, state = layer(), layer().state_dict()
    del state["mask_spec"]
    if saved is not None:
        state["mask_spec"] = torch.tensor(list(saved.encode()), dtype=torch.uint8)
    assert str(attn.load_state_dict(state)) == "<All keys matched successfully>"
    assert bytes(attn.state_dict()["mask_spec"].tolist()).decode() == SPEC


@pytest.mark.parametrize("name", TEXTLESS)
def test_a_mask_without_text_is_neither_saved_nor_compared(name):
    attn = layer(**TEXTLESS[name])
    assert "mask_spec" not in attn.state_dict()
    attn.load_state_dict(layer().state_dict())
    layer().load_state_dict(attn.state_dict())


def test_a_layer_made_without_memory_saves_its_mask_and_loads():
    saved = layer().state_dict()
    with torch.device("meta"):
        one, *others = layer(), layer(), layer()
    one.to_empty(device="cpu").mask_spec.zero_()
    assert torch.equal(one.state_dict()["mask_spec"], saved["mask_spec"])
    for other, state in zip(others, (saved, {name: x for name, x in saved.items() if name != "mask_spec"}), strict=True):
        other.load_state_dict(state, assign=True)
        assert torch.equal(other.to("cpu").mask_spec, saved["mask_spec"])
        assert torch.equal(other(inputs()), layer()(inputs()))


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "options", [{}, {"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}], ids=str
)
def test_sharded_layers_keep_their_mask_and_check_it(options, one_rank, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states
    from torch.distributed.fsdp import fully_shard

    def made():
        return fully_shard(torch.nn.Sequential(fully_shard(layer(), mesh=one_rank)), mesh=one_rank)

    one, other, options = made(), made(), states.StateDictOptions(**options)
    with torch.no_grad():
        one[0].q_proj.weight.mul_(2)
    dcp.save(states.get_model_state_dict(one, options=options), checkpoint_id=tmp_path)
    state = states.get_model_state_dict(other, options=options)
    state["0.mask_spec"].zero_()
    dcp.load(state, checkpoint_id=tmp_path)
    states.set_model_state_dict(other, dict(state), options=options)
    assert torch.equal(one(inputs()), other(inputs())) and state["0.mask_spec"].dtype == torch.uint8
    other[0].mask = "causal"
    with pytest.warns(UserWarning, match="saved under the mask"):
        states.set_model_state_dict(other, dict(state), options=options)


def test_weights_are_dropped_out_in_training_alone():
    attn, plain, x = layer(dropout_p=0.3), layer(), inputs()
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attn(x))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    with pytest.raises(ValueError, match=r"with dropout_p=0.3 takes no cache; call layer.eval\(\)"):
        attn(x, attn.new_cache(2, TOKENS))
    assert torch.equal(attn.eval()(x), plain(x))
    with torch.no_grad():
        attn(x, attn.new_cache(2, TOKENS))


def test_what_the_layer_shows_names_its_mask():
    assert f"mask={sf.parse('causal & (local(20) | sinks(2))')}" in repr(layer())


@torch.no_grad()
def test_caches_that_do_not_fit_are_refused():
    attn = layer()
    cache = attn.new_cache(2, length=160)
    with pytest.raises(TypeError, match="k must be a tensor; got NoneType"):
        cache.append(None, None)
    attn(inputs(), cache)
    with pytest.raises(ValueError, match="room for 160 tokens and holds 150; 150 more"):
        attn(inputs(), cache)
    with pytest.raises(ValueError, match="as the cache was made for"):
        attn(inputs(5)[:1], cache)
    with pytest.raises(ValueError, match=r"shapes \(2, 4, 'tokens', 12\) .* as the cache was made for; got \(2, 12\)"):
        cache.append(torch.ones(2, 12), torch.ones(2, 12))
    for sizes, message in (((1, 0), "length .*; got 0"), ((1.5, 9), r"batch .*; got 1\.5"), (("1", 9), "batch .*; got '1'")):
        with pytest.raises(ValueError, match=message.replace(".*", "must be an integer of at least 1")):
            attn.new_cache(*sizes)


def test_a_layers_tables_follow_it_to_a_device_and_are_never_cast():
    mask = sf.compile_mask("causal & local(20)", TOKENS, block_size=32)
    attn, other = (layer(mask=mask) for _ in range(2))
    choosing = sf.SparseAttention(
        DIM, 4, select={"keep": 2, "block_size": 16, "always": sf.compile_mask("sinks(4)", TOKENS, block_size=16)}
    )
    before = attn(inputs())
    for cast in (attn.half, attn.bfloat16, attn.float, attn.cpu, lambda: attn.to("cpu", torch.float32)):
        cast()
        assert attn.mask is mask
    assert all(name.endswith("_proj.weight") for name in attn.state_dict())
    twin = copy.deepcopy(attn)
    assert twin.mask.equal(mask) and not twin.mask.mask_index.is_meta
    torch.testing.assert_close(twin(inputs()), before, rtol=1e-2, atol=1e-2)
    for module in (attn, other, choosing):
        module.to("meta")
    assert {t.device.type for t in (*attn.mask.tensors(), *choosing.select.always.tensors())} == {"meta"}
    assert [t.dtype for t in attn.mask.tensors()] == [t.dtype for t in mask.tensors()]
    assert attn.mask is other.mask, "layers that share a table share its copy"
    assert attn(inputs().to("meta")).shape == before.shape and not mask.mask_index.is_meta


def test_a_layer_made_without_memory_takes_its_tables_along():
    with torch.device("meta"):
        attn = sf.SparseAttention(DIM, 4)
    attn.mask = sf.compile_mask("causal", TOKENS)
    attn.to_empty(device="cpu").load_state_dict(layer().state_dict())
    torch.testing.assert_close(attn(inputs()), layer(mask="causal")(inputs()))


def test_a_cache_keeps_no_graph_of_its_tokens():
    cache = sf.KeyValueCache(2, 2, 8, 16)
    keys, values = cache.append(*torch.randn(2, 2, 2, 3, 16, requires_grad=True))
    assert not keys.requires_grad and not values.requires_grad
