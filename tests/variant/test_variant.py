"""Lengths, dropout and score terms: each matches its definition on every back end, and so do all together."""

import copy
import dataclasses
import functools
import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from accepted import fitted, needs_triton
from oracle import (
    BACKENDS,
    DEVICE,
    compared,
    dense_attention,
    existing,
    heavy_rows_split,
    make_call,
    no_host_synchronization,
    require,
)
from torch.utils.checkpoint import checkpoint

import sparse_flash as sf
from sparse_flash import backends
from sparse_flash.parallel.routes import LocalMask
from sparse_flash.variant import variant as variant_module
from sparse_flash.variant.definition import Pairs, kept_by_dropout, philox_2x32, philox_4x32
from sparse_flash.variant.variant import build_variant

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize
every_backend = parametrize("backend", BACKENDS)
HEADS, KV_HEADS, REACH = 2, 1, 20
MASKS = {"dense": None, "causal": "causal", "local": "local(30)", "bits": "causal & strided(7, block=1)"}
# Largest difference from the float64 definition, relative to the largest number.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

if triton:

    @triton.jit
    def own_in_triton(score, batch, head, q_pos, k_pos, params):
        weight = tl.load(params[0] + batch * 2 + head)
        return tl.where(k_pos % 5 == 0, -float("inf"), score + weight * score * score)

    @triton.jit
    def own_derivative(score, batch, head, q_pos, k_pos, params):
        weight = tl.load(params[0] + batch * 2 + head)
        return tl.where(k_pos % 5 == 0, 0.0, 1.0 + 2.0 * weight * score)

    @triton.jit
    def noting_in_triton(score, batch, head, q_pos, k_pos, params):
        tl.atomic_max(params[0], tl.maximum(tl.max(q_pos), tl.max(k_pos)))
        return score

    @triton.jit
    def noting_derivative(score, batch, head, q_pos, k_pos, params):
        tl.atomic_max(params[0], tl.maximum(tl.max(q_pos), tl.max(k_pos)))
        return 1.0

else:
    own_in_triton = own_derivative = noting_in_triton = noting_derivative = None


def own_in_torch(score, batch, head, q_pos, k_pos, params):
    return torch.where(k_pos % 5 == 0, -float("inf"), score + params[0][batch, head] * score * score)


OWN = sf.ScoreFunction(own_in_torch, own_in_triton, own_derivative)


def variant(name: str, device=DEVICE) -> dict:
    """Arguments of ``attention`` for two batch entries of 70 queries and 90 keys."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    def lens(*values):
        return torch.tensor(values, device=device)

    every = {
        "kv_lens": {"kv_lens": lens(41, 90)},
        "kv_lens of nothing": {"kv_lens": lens(0, 1000)},
        "q_lens": {"q_lens": lens(70, 33).int()},
        "starts": {"kv_starts": lens(50, -3), "q_starts": lens(33, 64).int()},
        "lengths": {"kv_starts": lens(10, 64), "kv_lens": lens(20, 75), "q_starts": lens(9, 0), "q_lens": lens(40, 0)},
        "dropout": {"dropout_p": 0.25},
        "softcap": {"softcap": 0.7},
        "alibi": {"alibi_slopes": normal(HEADS).abs()},
        "alibi of batch": {"alibi_slopes": normal(2, HEADS).abs()},
        "bias": {"rel_bias": normal(HEADS, 2 * REACH + 1).requires_grad_()},
        "short bias": {"rel_bias": normal(HEADS, 3).requires_grad_()},
        "own": {"score_mod": OWN, "score_params": (0.1 * normal(2, HEADS),)},
        "sinks": {"sinks": normal(HEADS).requires_grad_()},
    }
    every["all"] = {
        **every["q_lens"],
        **every["kv_lens"],
        **every["dropout"],
        "softcap": 3.0,
        "alibi_slopes": 0.01 * normal(HEADS).abs(),
        **every["bias"],
        **every["own"],
        **every["sinks"],
    }
    return every[name]


TERMS = ["kv_lens", "kv_lens of nothing", "q_lens", "starts", "lengths", "dropout", "softcap", "alibi", "alibi of batch"]
TERMS += ["bias", "short bias", "own", "sinks", "all"]


def inputs(dtype=torch.float32, q_len=70, kv_len=90, head_dim=16, batch=2, kv_heads=KV_HEADS, v_head_dim=None):
    generator = torch.Generator().manual_seed(0)
    queries, keys, of_values = (batch, HEADS, q_len), (batch, kv_heads, kv_len), v_head_dim or head_dim
    shapes = (*queries, head_dim), (*keys, head_dim), (*keys, of_values), (*queries, of_values)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def surviving(q, k, dropout_p: float, seed: int) -> torch.Tensor:
    """Returns the pairs that dropout keeps in the first call after manual_seed(seed): (batch, heads, q_len, kv_len) bool."""
    torch.manual_seed(seed)
    return kept_by_dropout(build_variant(q, k, dropout_p=dropout_p), Pairs.all(q, k))


def results(attend, tensors, given: dict, dout):
    """[out, lse, dq, dk, dv, gradients of what else is learned]; lse has a gradient too."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    learned = [t for t in given.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    out, lse = attend(*leaves)
    finite = lse.masked_fill(lse.isneginf(), 0.0)
    dlse = torch.linspace(-1, 1, lse.numel(), device=DEVICE, dtype=lse.dtype).view_as(lse)
    grads = torch.autograd.grad((out * dout.to(out.dtype)).sum() + (finite * dlse).sum(), [*leaves, *learned])
    return [t.detach() for t in (out, lse, *grads)]


def terms_in_call(q, k, given: dict):
    """Returns the variant that ``attention`` passes to a back end for these arguments; it applies sinks itself."""
    return build_variant(q, k, **{name: value for name, value in given.items() if name != "sinks"})


def usable(backend: str, q, k, given: dict, v=None, mask=None) -> None:
    call = make_call(q, k, mask, v=v, variant=terms_in_call(q, k, given))
    require(backend, call, lambda: sf.attention(q, k, k if v is None else v, mask, backend=backend, **given))


def accepted(backend, given: dict, **shape):
    """``inputs`` with float32 and head_dim 16, or the nearest that the back end accepts."""
    tensors = inputs(**fitted(backend, {"dtype": torch.float32, "head_dim": 16}), **shape)
    usable(backend, *tensors[:2], given)
    return tensors


def check(backend, name, mask="causal", dtype=None, block_size=None, seed=5, deterministic=False, head_dim=None, **shape):
    asked = {"dtype": dtype, "head_dim": head_dim, "block_size": block_size}
    asked = {of: value for of, value in asked.items() if value is not None}
    usual = {"dtype": torch.float32, "head_dim": 16, "block_size": 32}
    fields = asked | fitted(backend, {of: value for of, value in usual.items() if of not in asked}, **asked)
    block_size, dtype = fields.pop("block_size"), fields["dtype"]
    q, k, v, dout = inputs(**fields, **shape)
    given = variant(name)
    table = mask and sf.compile_mask(mask, q.shape[2], k.shape[2], block_size, device=DEVICE)
    usable(backend, q, k, given, v, table)
    kept = table.to_dense() if table else torch.ones((), dtype=torch.bool, device=DEVICE)
    survives = surviving(q, k, given["dropout_p"], seed) if "dropout_p" in given else None
    torch.manual_seed(seed)
    options = {"return_lse": True, "backend": backend, "deterministic": deterministic}
    ours = results(lambda *t: sf.attention(*t, table, **options, **given), (q, k, v), given, dout)
    exact = [t.double() for t in (q, k, v)]
    wanted = results(lambda *t: dense_attention(*t, kept, survives=survives, **given), exact, given, dout.double())
    for label, mine, right in zip(("out", "lse", "dq", "dk", "dv", "learned", "learned"), ours, wanted, strict=False):
        assert not mine.isnan().any(), label
        assert torch.equal(mine.isneginf(), right.isneginf()), label
        dtypes = {"lse": torch.promote_types(dtype, torch.float32), "learned": torch.float32}
        assert mine.dtype == dtypes.get(label, dtype), label
        finite = ~right.isneginf()
        error = (mine[finite].double() - right[finite]).abs().max().item() if finite.any() else 0.0
        size = max(1.0, right[finite].abs().max().item()) if finite.any() else 1.0
        assert error <= max(TOLERANCE[dtype], TOLERANCE[mine.dtype]) * size, f"{label} is off by {error:.2g} of {size:.2g}"
    compared[backend] += 1


# Each term, and all of them.


@every_backend
@parametrize("name", TERMS)
def test_each_term_is_as_it_is_defined(backend, name):
    check(backend, name)


@every_backend
@parametrize("softcap", [30.0, 1e4])
def test_a_soft_cap_loses_nothing_that_its_size_multiplies(backend, softcap):
    q, k, v, dout = accepted(backend, {"softcap": softcap})
    kept = torch.ones((), dtype=torch.bool, device=DEVICE)
    ours = results(lambda *t: sf.attention(*t, softcap=softcap, return_lse=True, backend=backend), (q, k, v), {}, dout)
    exact = [t.double() for t in (q, k, v)]
    wanted = results(lambda *t: dense_attention(*t, kept, softcap=softcap), exact, {}, dout.double())
    plain = results(lambda *t: sf.attention(*t, return_lse=True, backend=backend), (q, k, v), {}, dout)
    uncapped = results(lambda *t: dense_attention(*t, kept), exact, {}, dout.double())
    for mine, right, without, right_without in zip(ours, wanted, plain, uncapped, strict=True):
        of_plain = (without - right_without).abs().max()
        assert (mine - right).abs().max() <= 4 * of_plain + 1e-6 * right.abs().max()


@every_backend
@parametrize("mask, name", [("dense", "lengths"), ("local", "all"), ("bits", "lengths"), ("bits", "all")])
def test_terms_are_right_under_any_kind_of_mask(backend, mask, name):
    check(backend, name, MASKS[mask])


@every_backend
@parametrize("head_dim, v_head_dim, name", [(40, 72, "lengths"), (16, 64, "all")])
def test_terms_are_right_where_v_has_a_head_dim_of_its_own(backend, head_dim, v_head_dim, name):
    check(backend, name, MASKS["local"], head_dim=head_dim, v_head_dim=v_head_dim)


@parametrize("backend", ["torch", "reference"])
@parametrize("mask", MASKS)
@parametrize("name", TERMS)
def test_terms_are_right_in_float64(backend, name, mask):
    check(backend, name, MASKS[mask], torch.float64)


@parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@parametrize("name", ["lengths", "all"])
def test_terms_are_right_in_16_bits(name, dtype):
    check("triton", name, dtype=dtype)


# Each takes some seconds to compile, so not all combinations are tested.
ON_GPU = [(name, "causal", torch.bfloat16, 64) for name in TERMS]
ON_GPU += [
    (name, mask, dtype, head_dim)
    for name in ("lengths", "dropout", "bias", "all")
    for mask, dtype, head_dim in (("bits", torch.bfloat16, 128), ("local", torch.float16, 256), ("dense", torch.float32, 64))
]
ON_GPU += [
    (name, "local", torch.bfloat16, dims) for name in ("lengths", "dropout", "bias", "all") for dims in ((192, 128), (64, 128))
]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@parametrize("name, mask, dtype, head_dim", ON_GPU)
def test_terms_are_right_at_the_tile_sizes_of_a_gpu(name, mask, dtype, head_dim):
    of_keys, of_values = (head_dim, None) if isinstance(head_dim, int) else head_dim
    check("triton", name, MASKS[mask], dtype, block_size=128, head_dim=of_keys, v_head_dim=of_values, q_len=700, kv_len=900)


ON_HOPPER = [(name, "causal", 128, 128) for name in TERMS]
ON_HOPPER += [
    (name, mask, head_dim, block_size)
    for name in ("lengths", "softcap", "alibi of batch", "own")
    for mask, head_dim, block_size in (("bits", 64, 128), ("local", 96, 256), ("dense", 128, None), ("causal", 128, 64))
]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@parametrize("name, mask, head_dim, block_size", ON_HOPPER)
def test_terms_are_right_in_the_kernels_for_hopper(name, mask, head_dim, block_size):
    check("hopper", name, MASKS[mask], torch.bfloat16, block_size=block_size, head_dim=head_dim, q_len=700, kv_len=900)


@parametrize("mask", ["causal", None])
def test_the_torch_back_end_is_right_where_a_row_takes_many_pieces(monkeypatch, mask):
    from sparse_flash.backends import torch as torch_backend

    for name in ("_CHUNK_CPU", "_CHUNK_GPU"):
        monkeypatch.setattr(torch_backend, name, 3 * 16 * 16)
    monkeypatch.setattr(torch_backend, "_DENSE_BLOCK", 32)
    check("torch", "all", mask, torch.float64, block_size=16)


@parametrize("name", ["bias", "own", "all"])
def test_terms_are_right_where_heads_have_masks_of_their_own(name):
    q, k, v, _ = inputs(torch.float64)
    given = variant(name)
    mask = sf.BlockMask.per_head(["causal", "local(9)"], q_len=70, kv_len=90, block_size=16).to(DEVICE)
    outs = []
    for backend in ("torch", "reference"):
        torch.manual_seed(0)
        outs.append(sf.attention(q, k, v, mask, backend=backend, **given))
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)


# Lengths.


@every_backend
@parametrize("name", ["kv_lens", "q_lens", "starts", "lengths", "all"])
@parametrize("mask", ["causal", None, "local(9)"])
def test_what_lies_in_tokens_that_do_not_exist_does_not_matter(backend, name, mask):
    given = variant(name)
    q, k, v, dout = accepted(backend, given)
    if (
        backend == "triton"
        and DEVICE == "cpu"
        and (name, mask) not in (("lengths", None), ("lengths", "local(9)"), ("all", "causal"))
    ):
        pytest.skip("Triton's interpreter is slow")
    queries = existing(70, given.get("q_starts"), given.get("q_lens"))[:, None, :, None]
    keys = existing(90, given.get("kv_starts"), given.get("kv_lens"))[:, None, :, None]

    def run(filling):
        spoiled = [torch.where(exist, t, filling) for t, exist in ((q, queries), (k, keys), (v, keys))]
        leaves = [t.requires_grad_() for t in spoiled]
        torch.manual_seed(0)
        # Otherwise PyTorch's additions on a GPU come in any order.
        options = {"deterministic": True} if backend in ("torch", "hopper") else {}
        out, lse = sf.attention(*leaves, mask, return_lse=True, backend=backend, **given, **options)
        learned = [t for t in given.values() if isinstance(t, torch.Tensor) and t.requires_grad]
        return [out, lse, *torch.autograd.grad(out, [*leaves, *learned], torch.where(queries, dout, filling))]

    clean, spoiled = run(1.0), run(float("nan"))
    for a, b in zip(clean, spoiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    out, lse, dq, dk, dv = spoiled[:5]
    assert (out.masked_select(~queries) == 0).all() and lse.masked_select(~queries[..., 0]).isneginf().all()
    assert (dq.masked_select(~queries) == 0).all()
    assert all((grad.masked_select(~keys) == 0).all() for grad in (dk, dv))


@every_backend
def test_a_padded_batch_is_each_of_its_sequences_alone(backend):
    q, k, v, _ = accepted(backend, {"kv_lens": torch.tensor([1, 1], device=DEVICE)}, q_len=90)
    for begin, end in ((0, 37), (53, 90)):
        side = {"lens": end} if begin == 0 else {"starts": begin}
        given = {f"{of}_{name}": torch.tensor([n, n], device=DEVICE) for name, n in side.items() for of in ("q", "kv")}
        out = sf.attention(q, k, v, "causal & local(20)", backend=backend, **given)[:, :, begin:end]
        alone = sf.attention(*(t[:, :, begin:end] for t in (q, k, v)), "causal & local(20)", backend=backend)
        # In other tiles, sums have another order: in 16 bits a result may differ in its last one.
        close = 2 * torch.finfo(out.dtype).eps if out.element_size() == 2 else 1e-5
        torch.testing.assert_close(out, alone, rtol=close, atol=close)


if triton:
    from sparse_flash.kernels.common.tiles import TableEntries
    from sparse_flash.kernels.portable.lengths import ValidRange, find_valid_entries

    @triton.jit
    def entries_kernel(index, found, begin, end, first, last, length, BLOCK: tl.constexpr, SPARSE: tl.constexpr):
        entries = find_valid_entries(
            TableEntries(index, None, None, None, BLOCK, SPARSE), begin, end, ValidRange(first, last), length, BLOCK
        )
        low, whole_begin, whole_end, high = entries
        tl.store(found, low)
        tl.store(found + 1, whole_begin)
        tl.store(found + 2, whole_end)
        tl.store(found + 3, high)


@needs_triton
@parametrize("sparse", [True, False])
def test_entries_beyond_a_length_are_not_visited_and_cut_ones_are_known(sparse):
    generator = torch.Generator().manual_seed(0)
    for count in (0, 1, 5, 40, 300, 600):
        blocks = torch.randperm(700, generator=generator)[:count].sort().values if sparse else torch.arange(count)
        begin = 3 if sparse else 0
        index = torch.cat([torch.full((begin,), 999), blocks, torch.full((5,), -1)]).int().to(DEVICE)
        length = 700 * 16 - 5 if sparse else count * 16 - 5
        for _ in range(6):
            first, last = sorted(torch.randint(-1, max(2, length), (2,), generator=generator).clamp(0, max(length, 0)).tolist())
            found = torch.zeros(4, dtype=torch.int32, device=DEVICE)
            entries_kernel[(1,)](index, found, begin, begin + count, first, last, max(length, 0), BLOCK=16, SPARSE=sparse)
            low, whole_begin, whole_end, high = found.tolist()
            starts = blocks * 16
            held = ((starts < last) & (starts + 16 > first)).nonzero().flatten().tolist() if first < last else []
            whole = [e for e in held if starts[e] >= first and min(int(starts[e]) + 16, max(length, 0)) <= last]
            assert list(range(low - begin, high - begin)) == held
            visited_whole = list(range(whole_begin - begin, whole_end - begin))
            assert set(visited_whole) <= set(whole)
            assert low <= whole_begin <= whole_end <= high or not held
            # A dense walk masks its ragged end; no other whole tile is masked.
            assert set(whole) - set(visited_whole) <= (set() if sparse else {count - 1})


# Dropout.


def revealed(backend, dropout_p=0.4, *, block_size=None, seed=3, mask=None, tokens=64):
    """Which pairs a back end's dropout keeps, (batch, heads, tokens, tokens) bool, shown by values that name their keys."""
    mask = mask and sf.compile_mask(mask, tokens, block_size=block_size, device=DEVICE)
    given = {"head_dim": tokens, "block_size": block_size if mask else None}
    q, k, _, _ = inputs(**fitted(backend, {"dtype": torch.float32}, **given), q_len=tokens, kv_len=tokens, head_dim=tokens)
    usable(backend, q, k, {"dropout_p": dropout_p}, mask=mask)
    v = torch.eye(tokens, device=DEVICE, dtype=q.dtype).expand(*k.shape).contiguous()
    torch.manual_seed(seed)
    return sf.attention(q, k, v, mask, dropout_p=dropout_p, backend=backend) != 0


@every_backend
@parametrize("block_size", [16, 32, 64, 128])
def test_every_back_end_and_block_size_drops_the_same_pairs(backend, block_size):
    q, k, _, _ = inputs(torch.float32, 64, 64, 64)
    kept = surviving(q, k, 0.4, 3)
    assert torch.equal(revealed(backend), kept)
    mask = "causal & local(40)"
    assert torch.equal(revealed(backend, block_size=block_size, mask=mask), kept & sf.compile_mask(mask, 64).to_dense().to(DEVICE))


def test_philox_gives_the_words_that_its_authors_give():
    def words_of_four(counter, key):
        return [int(word) for word in philox_4x32(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(w) for w in key))]

    def words_of_two(counter, key):
        return [int(word) for word in philox_2x32(tuple(torch.tensor(c) for c in counter), torch.tensor(key))]

    ones = 0xFFFFFFFF
    assert words_of_four([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words_of_four([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    digits_of_pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    assert words_of_four(*digits_of_pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    assert words_of_two([0] * 2, 0) == [0x257A3673, 0xCD26BE2A]
    assert words_of_two([ones] * 2, ones) == [0xAB302C4D, 0x3DC9D239]
    assert words_of_two([0x243F6A88, 0x85A308D3], 0x13198A2E) == [0xBEDBBE6B, 0xE4C770B3]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@parametrize("block_size", [128, 256])
@parametrize("mask", [*MASKS, "wide"])
@parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@parametrize("head_dim", [64, 128])
@parametrize("backend", ["triton", "hopper"])
def test_pairs_are_dropped_as_defined_at_the_tile_sizes_of_a_gpu(backend, head_dim, dtype, mask, block_size):
    # Values name keys in out, and the gradient of out names queries in dV; as many at a time as head_dim.
    q_len, kv_len = 300, 420
    q, k, _, _ = inputs(dtype, q_len, kv_len, head_dim)
    q, k = 0.2 * q, 0.2 * k  # no weight rounds to 0
    usable(backend, q, k, {"dropout_p": 0.3})
    with heavy_rows_split():
        spec = {**MASKS, "wide": "local(40) | global_tokens(140)"}[mask]
        table = spec and sf.compile_mask(spec, q_len, kv_len, block_size, device=DEVICE)

    def names(like, first):
        named = torch.zeros_like(like)
        torch.diagonal(named, first, -1, -2).fill_(1.0)
        return named

    for turn, first in enumerate(range(0, kv_len, head_dim)):  # also repeats launches, under another seed
        v = names(torch.empty(2, KV_HEADS, kv_len, head_dim, device=DEVICE, dtype=dtype), first).requires_grad_()
        dout = names(torch.empty_like(q), first)
        wanted = surviving(q, k, 0.3, turn)
        wanted = wanted if table is None else wanted & table.to_dense().to(DEVICE)
        torch.manual_seed(turn)
        out = sf.attention(q, k, v, table, dropout_p=0.3, backend=backend)
        (dv,) = torch.autograd.grad(out, v, dout)
        keys = wanted[..., first : first + head_dim]
        assert torch.equal(out[..., : keys.shape[-1]] != 0, keys)
        queries = wanted[:, :, first : first + head_dim].any(1, keepdim=True).mT
        assert torch.equal(dv[..., : queries.shape[-1]] != 0, queries)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@parametrize("parts", [False, True], ids=["whole", "parts"])
@parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@parametrize("kv_heads", [1, 2])
@parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@parametrize("head_dim", [64, 128])
@parametrize("mask", [*MASKS, "wide"])
def test_dropout_is_right_on_hopper(mask, head_dim, dtype, kv_heads, deterministic, parts):
    spec = {**MASKS, "wide": "local(40) | global_tokens(140)"}[mask]
    shape = {"q_len": 700, "kv_len": 900, "head_dim": head_dim, "kv_heads": kv_heads}
    with heavy_rows_split() if parts else nullcontext():
        check("hopper", "dropout", spec, dtype, block_size=128, deterministic=deterministic, **shape)


@parametrize("dropout_p", [0.001, 0.1, 0.5, 0.9])
def test_dropout_drops_its_share(dropout_p):
    q = torch.zeros(2, 8, 400, 1, device=DEVICE)
    kept = surviving(q, q, dropout_p, 0)
    pairs = kept.numel()
    assert abs(kept.sum().item() - pairs * (1 - dropout_p)) < 5 * (pairs * dropout_p * (1 - dropout_p)) ** 0.5
    # No two heads, batch entries or calls, no neighbours, and none of the four pairs of a draw agree more often than by chance.
    agree = dropout_p**2 + (1 - dropout_p) ** 2
    drawn = kept.view(2, 8, 25, 2, 8, 25, 2, 8)
    others = [(kept[:, 0], kept[:, 1]), (kept[0], kept[1]), (kept[0, 0], kept[1, 1]), (kept, surviving(q, q, dropout_p, 1))]
    others += [(kept[..., 1:], kept[..., :-1]), (kept[..., 1:, :], kept[..., :-1, :])]
    others += [(drawn[:, :, :, 0], drawn[:, :, :, 1]), (drawn[..., 0, :], drawn[..., 1, :])]
    others += [(drawn[:, :, :, 0, :, :, a], drawn[:, :, :, 1, :, :, 1 - a]) for a in (0, 1)]
    for a, b in others:
        assert (a == b).float().mean().item() == pytest.approx(agree, abs=5 * (0.25 / a.numel()) ** 0.5)


@every_backend
def test_the_smallest_and_the_largest_share_are_those_of_sixteen_bits(backend):
    q, k, v, _ = accepted(backend, {"dropout_p": 0.5}, q_len=64, kv_len=64)
    assert build_variant(q, k, dropout_p=2**-18) is None and build_variant(q, k, dropout_p=2**-17 * 1.01).dropout_p == 2**-16
    assert build_variant(q, k, dropout_p=1 - 2**-30).dropout_p == 1 - 2**-16
    for dropout_p in (2**-16, 1 - 2**-16):
        kept = revealed(backend, dropout_p)
        assert torch.equal(kept, surviving(q, k, dropout_p, 3))
        assert kept.float().mean().item() == pytest.approx(1 - dropout_p, abs=1e-3)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = sf.attention(*leaves, dropout_p=1 - 2**-30, backend=backend)
    assert all(t.isfinite().all() for t in (out, *torch.autograd.grad(out.sum(), leaves)))


@every_backend
@parametrize("block", [16, 32])
def test_a_part_of_a_sequence_drops_what_the_whole_drops(backend, block):
    q, k, v, dout = inputs(q_len=96, kv_len=96)
    whole, survives = sf.compile_mask("causal & strided(7, block=1)", 96, 96, block), surviving(q, k, 0.3, 3)
    rows, cols = np.array([2, 0]), np.array([1, 2, -1, 0])  # blocks; -1 keeps nothing
    part = LocalMask.from_blocks(whole, rows, cols).to(torch.device(DEVICE))
    torch.manual_seed(3)
    given = build_variant(q, k, dropout_p=0.3)
    batch_heads = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32, device=DEVICE)  # with its two heads the other way round
    given = dataclasses.replace(given, q_positions=part.q_positions, kv_positions=part.kv_positions, batch_heads=batch_heads)
    if backend == "hopper":
        refusal = backends.get_backend(backend).supports(make_call(q, k, part.mask, variant=given))
        assert refusal == "it does not support dropout of a part of a sequence"
        return
    usable(backend, q, k, {"dropout_p": 0.3})
    of_rows, of_cols = ((blocks[:, None].clip(0) * block + np.arange(block)).ravel() for blocks in (rows, cols))
    q, k, v, dout = q[:, :, of_rows], k[:, :, of_cols], v[:, :, of_cols], dout[:, :, of_rows]
    run, scale = backends.get_backend(backend), 0.25
    out, lse = run.forward(q, k, v, part.mask, scale, False, given)
    grads = run.backward(dout, None, q, k, v, out, lse, part.mask, scale, False, given)
    kept = part.mask.to_dense()
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    wanted, _ = dense_attention(*exact, kept, dropout_p=given.dropout_p, survives=survives.flip(1)[:, :, of_rows][..., of_cols])
    wanted_grads = torch.autograd.grad(wanted, exact, dout.double())
    for mine, right in zip((out, *grads), (wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)
    compared[backend] += 1


def test_dropout_follows_manual_seed():
    q, k, v, _ = inputs()

    def run():
        return sf.attention(q, k, v, "causal", dropout_p=0.2)

    torch.manual_seed(1)
    first, second = run(), run()
    torch.manual_seed(1)
    assert torch.equal(run(), first) and torch.equal(run(), second)
    assert not torch.equal(first, second)


def test_without_dropout_the_generator_is_left_alone():
    q, k, v, _ = inputs()
    before = torch.get_rng_state() if DEVICE == "cpu" else torch.cuda.get_rng_state()
    sf.attention(q, k, v, "causal", dropout_p=0.0, softcap=1.0)
    assert torch.equal(before, torch.get_rng_state() if DEVICE == "cpu" else torch.cuda.get_rng_state())


@every_backend
def test_dropped_pairs_are_the_same_under_activation_checkpointing(backend):
    q, k, v, _ = (t.requires_grad_() for t in accepted(backend, {"dropout_p": 0.3}))

    def attend(*qkv):
        return sf.attention(*qkv, "causal", dropout_p=0.3, backend=backend, deterministic=True).square().sum()

    torch.manual_seed(0)
    plain = torch.autograd.grad(attend(q, k, v), (q, k, v))
    torch.manual_seed(0)
    again = torch.autograd.grad(checkpoint(attend, q, k, v, use_reentrant=False), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_terms_wait_for_nothing_and_each_replay_of_a_graph_drops_other_pairs():
    q, k, v, _ = inputs(torch.float16, head_dim=64)
    given = variant("all")
    mask = sf.compile_mask("causal", 70, 90, device=DEVICE)
    sf.attention(q, k, v, mask, **given)
    with no_host_synchronization():
        sf.attention(q, k, v, mask, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sf.attention(q, k, v, mask, **given)
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append(out.clone())
    assert not torch.equal(*replays)
    given["kv_lens"].fill_(0)
    graph.replay()
    assert (out == 0).all()


# Sinks.


@every_backend
def test_a_query_that_keeps_nothing_leaves_all_weight_to_its_sink(backend):
    sinks = torch.randn(HEADS, device=DEVICE).requires_grad_()
    q, k, v, _ = accepted(backend, {"sinks": sinks}, kv_len=40)
    q.requires_grad_()
    out, lse = sf.attention(q, k, v, "causal", sinks=sinks, return_lse=True, backend=backend)
    assert (out[:, :, :30] == 0).all() and torch.equal(lse[:, :, :30], sinks[:, None].expand(2, HEADS, 30))
    dq, dsinks = torch.autograd.grad(out.sum() + lse.sum(), (q, sinks))
    assert (dq[:, :, :30] == 0).all() and dq.isfinite().all() and dsinks.isfinite().all()


@every_backend
def test_a_sink_of_minus_infinity_is_no_sink_even_beside_queries_that_keep_nothing(backend):
    sinks = torch.full((HEADS,), float("-inf"), device=DEVICE).requires_grad_()
    q, k, v, _ = accepted(backend, {"sinks": sinks}, kv_len=40)
    q.requires_grad_()
    plain = sf.attention(q, k, v, "causal", return_lse=True, backend=backend)
    out, lse = sf.attention(q, k, v, "causal", sinks=sinks, return_lse=True, backend=backend)
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
    dq, dsinks = torch.autograd.grad(out.sum() + lse[:, :, 30:].sum(), (q, sinks))
    assert (dq[:, :, :30] == 0).all() and dq.isfinite().all() and (dsinks == 0).all()


# Functions of scores.


@every_backend
@parametrize("q_len, kv_len", [(1, 90), (40, 90)])
def test_scores_that_overflow_past_the_last_token_do_not_reach_gradients(backend, q_len, kv_len):
    """A query past the last one would be far from all keys, and OWN squares its large negative score."""
    given = variant("own") | variant("bias") | {"alibi_slopes": torch.ones(HEADS, device=DEVICE)}
    given["score_params"] = (torch.full((2, HEADS), 0.1, device=DEVICE),)
    q, k, v, dout = accepted(backend, given, q_len=q_len, kv_len=kv_len)
    kept = torch.ones((), dtype=torch.bool, device=DEVICE)
    ours = results(lambda *t: sf.attention(*t, return_lse=True, backend=backend, **given), (q, k, v), given, dout)
    exact = [t.double() for t in (q, k, v)]
    wanted = results(lambda *t: dense_attention(*t, kept, **given), exact, given, dout.double())
    for mine, right in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine.double(), right.double(), rtol=1e-3, atol=1e-3)


def of_documents(score, batch, head, q_pos, k_pos, params):
    return torch.where(params[0][q_pos] == params[0][k_pos], score, -float("inf"))


def logarithm_of_distance(score, batch, head, q_pos, k_pos, params):
    return score - torch.log(1.0 + q_pos - k_pos)


def root_of_distance(score, batch, head, q_pos, k_pos, params):
    return score * torch.sqrt((q_pos - k_pos).to(score.dtype))


IN_TORCH = [sf.ScoreFunction(function) for function in (of_documents, logarithm_of_distance, root_of_distance)]


@parametrize("backend", ["torch", "reference"])
@parametrize("mask", ["causal", "causal & strided(7, block=1)", "local(30) & causal"])
@parametrize("function", IN_TORCH, ids=lambda function: function.torch.__name__)
def test_a_score_function_is_asked_for_tokens_that_exist_and_its_nan_stays_with_dropped_pairs(backend, mask, function):
    given = {"score_mod": function, "score_params": (torch.arange(90, device=DEVICE) // 25,)}
    q, k, v, dout = inputs()
    kept = sf.compile_mask(mask, 70, 90, 32, device=DEVICE)
    ours = results(lambda *t: sf.attention(*t, kept, return_lse=True, backend=backend, **given), (q, k, v), given, dout)

    def whole(q, k, v):
        pairs = Pairs.all(q, k)
        # The masks are causal: dropped pairs get the score of another, so that nothing is NaN.
        near = torch.minimum(pairs.key, pairs.q_pos)
        scores = function.torch(0.25 * q @ k.mT, None, None, pairs.q_pos, near, given["score_params"])
        scores = scores.masked_fill(~kept.to_dense(), float("-inf"))
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    wanted = results(whole, [t.double() for t in (q, k, v)], given, dout.double())
    for mine, right in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-4)


@needs_triton
@parametrize("mask", ["causal", None])
def test_the_portable_kernels_ask_a_score_function_for_positions_that_exist(mask):
    noting = sf.ScoreFunction(lambda score, *_: score, noting_in_triton, noting_derivative)
    largest = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    q, k, v, _ = inputs()
    sf.attention(q.requires_grad_(), k, v, mask, score_mod=noting, score_params=(largest,), backend="triton").sum().backward()
    assert largest.item() == 89


def test_a_score_function_without_triton_runs_on_pytorch_and_says_so_elsewhere(monkeypatch):
    plain = sf.ScoreFunction(lambda score, batch, head, q_pos, k_pos, params: score * 2)
    q, k, v, _ = inputs()
    out = sf.attention(q, k, v, score_mod=plain, backend="torch")
    torch.testing.assert_close(out, sf.attention(q, k, v, scale=0.5, backend="torch"))
    call = make_call(q, k, variant=build_variant(q, k, score_mod=plain))
    monkeypatch.setattr(backends.get_backend("triton"), "why_unavailable", lambda: None)
    monkeypatch.setattr(backends.get_backend("triton"), "is_interpreted", lambda: DEVICE == "cpu")
    assert "has no triton function" in backends.get_backend("triton").supports(call)


def test_copies_of_a_score_function_are_itself_and_one_unpickled_elsewhere_compiles(monkeypatch):
    assert copy.deepcopy({"of a layer": OWN})["of a layer"] is OWN and copy.copy(OWN) is OWN
    plain = sf.ScoreFunction(own_in_torch)
    for one in (plain, OWN):
        assert pickle.loads(pickle.dumps(one)) is one
    q, k, v, _ = inputs()
    options = {"score_params": (torch.ones(2, HEADS, device=DEVICE),), "backend": "torch"}
    wanted = sf.attention(q, k, v, score_mod=plain, **options)
    monkeypatch.setattr(variant_module, "_score_functions", {})  # as in a process that has not made it
    again = pickle.loads(pickle.dumps(plain))
    torch._dynamo.reset()
    attend = torch.compile(lambda q: sf.attention(q, k, v, score_mod=again, **options), backend="aot_eager")
    assert again is not plain and torch.equal(attend(q), wanted)


def test_a_score_function_whose_triton_functions_have_no_place_says_where_they_can_be_pickled():
    def hidden(score, batch, head, q_pos, k_pos, params):
        return score

    with pytest.raises(pickle.PicklingError, match="hidden is not this one; define it at the top of a module"):
        pickle.dumps(sf.ScoreFunction(own_in_torch, hidden, hidden))


class Halved(torch.nn.Module):
    def forward(self, score, batch, head, q_pos, k_pos, params):
        return score / 2


@parametrize("function", [Halved(), functools.partial(Halved().forward)], ids=["module", "partial"])
def test_what_can_be_called_is_a_score_function(function):
    q, k, v, _ = inputs()
    halved = sf.ScoreFunction(function)
    torch._dynamo.reset()
    attend = torch.compile(lambda q: sf.attention(q, k, v, score_mod=halved, backend="torch"), fullgraph=True, backend="aot_eager")
    for out in (attend(q), sf.attention(q, k, v, score_mod=halved, backend="torch")):
        torch.testing.assert_close(out, sf.attention(q, k, v, scale=0.125, backend="torch"))


def test_functions_of_one_name_are_kept_apart_under_compile():
    def made(factor):
        def score_mod(score, batch, head, q_pos, k_pos, params):
            return score * factor

        return sf.ScoreFunction(score_mod)

    q, k, v, _ = inputs()
    two, three = made(2.0), made(3.0)
    torch._dynamo.reset()
    attend = torch.compile(lambda f: sf.attention(q, k, v, score_mod=f, backend="torch"), fullgraph=True, backend="aot_eager")
    for function, factor in ((two, 2.0), (three, 3.0), (two, 2.0)):
        torch.testing.assert_close(attend(function), sf.attention(q, k, v, scale=0.25 * factor, backend="torch"))


# Compilers.


OF_AUTO = [(name, "auto") for name in ("lengths", "dropout", "softcap", "bias", "own", "sinks", "all")]


@parametrize("name, named", [*OF_AUTO, ("own", "reference")])
def test_a_compiled_function_computes_terms_in_one_graph(name, named):
    from torch._dynamo.testing import CompileCounterWithBackend

    q, k, v, dout = inputs()
    given = variant(name)

    def attend(*tensors):
        return sf.attention(*tensors, "causal", return_lse=True, backend=named, **given)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for seed in (0, 1):
        torch.manual_seed(seed)
        mine = results(compiled, (q, k, v), given, dout)
        torch.manual_seed(seed)
        for a, b in zip(mine, results(attend, (q, k, v), given, dout), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


# Calls that cannot run, and arguments that do not fit.


@parametrize("deterministic", (False, True))
@parametrize("name", [name for name in TERMS if name != "sinks"])
def test_hopper_names_what_it_lacks_and_nothing_else(name, deterministic):
    hopper = backends.get_backend("hopper")
    q, k, *_ = inputs()
    given = {n: t for n, t in variant(name).items() if n != "sinks"}
    reason = hopper.supports(make_call(q, k, variant=build_variant(q, k, **given), deterministic=deterministic))
    if "rel_bias" in given:
        assert reason == "it computes no gradient of rel_bias"
    elif "score_mod" in given and deterministic:
        assert "score_mod" in reason and "deterministic" in reason
    else:
        assert reason == hopper.supports(make_call(q, k))


def test_hopper_refuses_a_soft_cap_that_its_tanh_is_too_coarse_for():
    hopper = backends.get_backend("hopper")
    q, k, *_ = inputs()
    usual, large = (make_call(q, k, variant=build_variant(q, k, softcap=cap)) for cap in (256.0, 1e4))
    assert hopper.supports(usual) == hopper.supports(make_call(q, k))
    assert hopper.supports(large) == "it runs softcap up to 256, as its tanh is less exact near 0; got 10000"


@needs_triton
def test_triton_refuses_a_repeatable_gradient_of_the_bias_and_torch_has_one():
    q, k, v, _ = inputs()
    bias = variant("bias")["rel_bias"]
    with pytest.raises(ValueError, match=r"'triton' cannot run this call: .*gradient of rel_bias.*deterministic"):
        sf.attention(q, k, v, rel_bias=bias, deterministic=True, backend="triton")
    sf.attention(q, k, v, rel_bias=bias.detach(), deterministic=True, backend="triton")
    grads = [
        torch.autograd.grad(sf.attention(q, k, v, rel_bias=bias, deterministic=True).square().sum(), bias)[0] for _ in range(2)
    ]
    assert torch.equal(*grads)


def test_a_frozen_bias_gets_no_gradient():
    q, k, v, _ = inputs()
    q.requires_grad_()
    bias = variant("bias")["rel_bias"].detach()
    sf.attention(q, k, v, "causal", rel_bias=bias).sum().backward()
    assert bias.grad is None and q.grad is not None


def zeros(*shape, **kwargs):
    return torch.zeros(shape, device=DEVICE, **kwargs)


class _Reading:
    """Functions of scores that read a tensor in all ways but as an argument."""

    def __init__(self, bias):
        self.bias, self.other, self.linear = bias, zeros(2).requires_grad_(), torch.nn.Linear(1, 1, device=bias.device)
        self.linear.requires_grad_(bias.requires_grad)
        self.listed = torch.nn.ParameterList([torch.nn.Parameter(bias.detach(), bias.requires_grad)])

    def method(self, score, batch, head, q_pos, k_pos, params):
        return score + self.bias[head]

    def __call__(self, score, batch, head, q_pos, k_pos, params):
        return self.linear(score[..., None])[..., 0]

    def functions(self):
        bias, holder, shift = self.bias, self, lambda head: self.bias[head]
        global _GLOBAL_BIAS
        _GLOBAL_BIAS = bias
        return {
            "a closure": lambda s, b, h, i, j, p: s * bias[h],
            "a global": lambda s, b, h, i, j, p: s * _GLOBAL_BIAS[h],
            "a default": lambda s, b, h, i, j, p, bias=bias: s * bias[h],
            "an attribute": lambda s, b, h, i, j, p: s * holder.bias[h],
            "a list": lambda s, b, h, i, j, p: s * holder.listed[0][h],
            "a function called": lambda s, b, h, i, j, p: s + shift(h),
            "a function within": lambda s, b, h, i, j, p: (lambda: s + bias[h])(),
            "a method": self.method,
            "a callable": self,
            "a partial": functools.partial(lambda bias, s, b, h, i, j, p: s * bias[h], bias),
        }


@parametrize("way", _Reading(torch.zeros(2)).functions())
def test_a_score_function_that_reads_a_learned_tensor_is_refused_where_its_gradient_would_be_missing(way):
    q, k, v, _ = inputs()
    learned = sf.ScoreFunction(_Reading(zeros(2).requires_grad_()).functions()[way])
    compiled = torch.compile(lambda *qkv: sf.attention(*qkv, score_mod=learned, backend="torch"), backend="eager", fullgraph=True)
    for call in (lambda *qkv: sf.attention(*qkv, score_mod=learned), compiled):
        with pytest.raises(Exception, match=r"score_mod must read no tensor that requires a gradient.*rel_bias"):
            call(q, k, v)
    with torch.no_grad():
        sf.attention(q, k, v, score_mod=learned, backend="torch")
    frozen = sf.ScoreFunction(_Reading(zeros(2)).functions()[way])
    sf.attention(q, k, v, score_mod=frozen, backend="torch")


# Values beyond int32, and its own ends. None of them is -1 or below 90 in its lower 32 bits by chance alone.
FAR = (2**31 - 1, 2**31, 2**32 + 5, 2**40, 2**63 - 1)


@parametrize("far", FAR)
@parametrize("backend", ["torch", "triton", "reference"])
def test_lengths_past_all_tokens_are_all_tokens_and_starts_past_them_leave_none(backend, far, monkeypatch):
    monkeypatch.setattr(variant_module, "is_plain_eager", lambda *_: False)  # as where lengths are not read
    q, k, v = (torch.randn(2, 1, 40, 16, device=DEVICE, requires_grad=True) for _ in range(3))

    def results(**lengths):
        out = sf.attention(q, k, v, "causal", backend=backend, **lengths)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    def of(*values):
        return torch.tensor(values, device=DEVICE)

    whole = results(kv_lens=of(40, 9), q_lens=of(40, 33), kv_starts=of(0, 2), q_starts=of(3, 0))
    cut = results(
        kv_lens=of(far, 9), q_lens=of(far, 33), kv_starts=of(-far, 2), q_starts=of(3, -far - 1 if far < 2**63 - 1 else -far)
    )
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))
    for nothing in ({"kv_lens": of(-far, -far)}, {"q_starts": of(far, far)}, {"kv_starts": of(far, far)}, {"q_lens": of(-far, 0)}):
        assert all((t == 0).all() for t in results(**nothing))
