"""Lengths, dropout and score terms: each matches its definition on every back end, and so do all together."""

import copy
import dataclasses
import functools
import pickle
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from accepted import fitted, needs_triton
from calls import (
    OWN,
    TERMS,
    Call,
    Sizes,
    assert_right,
    attention_with_terms,
    every_term,
    normal,
    own_in_torch,
    sizes_for,
    surviving,
    unless_refused,
)
from oracle import BACKENDS, DEVICE, compared, dense_attention, heavy_rows_split, make_call, no_host_synchronization

import sparse_flash as sf
from sparse_flash import backends
from sparse_flash.parallel.routes import LocalMask
from sparse_flash.variant import variant as variant_module
from sparse_flash.variant.definition import Pairs, philox_2x32, philox_4x32
from sparse_flash.variant.variant import build_variant

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize
every_backend = parametrize("backend", BACKENDS)
HEADS, KV_HEADS = 2, 1
SIZES = Sizes(heads=HEADS, kv_heads=KV_HEADS, kv_len=90)
ALL_TERMS = ("q_lens", "kv_lens", "dropout", "softcap", "alibi", "bias", "own", "sinks")
MASKS = {"dense": None, "causal": "causal", "local": "local(30)", "bits": "causal & strided(7, block=1)"}

if triton:

    @triton.jit
    def noting_in_triton(score, batch, head, q_pos, k_pos, params):
        tl.atomic_max(params[0], tl.maximum(tl.max(q_pos), tl.max(k_pos)))
        return score

    @triton.jit
    def noting_derivative(score, batch, head, q_pos, k_pos, params):
        tl.atomic_max(params[0], tl.maximum(tl.max(q_pos), tl.max(k_pos)))
        return 1.0

else:
    noting_in_triton = noting_derivative = None


# Each term, and all of them.


@parametrize("mask", ["causal", None])
def test_the_torch_back_end_is_right_where_a_row_takes_many_pieces(monkeypatch, mask):
    from sparse_flash.backends import torch as torch_backend

    for name in ("_CHUNK_CPU", "_CHUNK_GPU"):
        monkeypatch.setattr(torch_backend, name, 3 * 16 * 16)
    monkeypatch.setattr(torch_backend, "_DENSE_BLOCK", 32)
    table = mask and sf.compile_mask(mask, 70, 90, 16)
    sizes = replace(SIZES, backend="torch", dtype=torch.float64, spec=mask, terms=ALL_TERMS)
    assert_right(attention_with_terms(sizes, table), "torch")


def inputs(dtype=torch.float32, q_len=70, kv_len=90, head_dim=16, kv_heads=KV_HEADS):
    """q, k, v and an incoming gradient, for two batch entries."""
    shape = {"q_len": q_len, "kv_len": kv_len, "head_dim": head_dim, "v_head_dim": head_dim, "kv_heads": kv_heads}
    q, k, v = normal(replace(SIZES, dtype=dtype, **shape))
    return q, k, v, torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)


# Lengths.


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
    v = torch.eye(tokens, device=DEVICE, dtype=q.dtype).expand(*k.shape).contiguous()
    torch.manual_seed(seed)
    with unless_refused():
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
@parametrize("parts", [False, True], ids=["whole", "parts"])
@parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@parametrize("kv_heads", [1, 2])
@parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@parametrize("head_dim", [64, 128])
@parametrize("mask", [*MASKS, "wide"])
def test_dropout_is_right_on_hopper(mask, head_dim, dtype, kv_heads, deterministic, parts):
    spec = {**MASKS, "wide": "local(40) | global_tokens(140)"}[mask]
    shape = {"q_len": 700, "kv_len": 900, "head_dim": head_dim, "heads": HEADS, "kv_heads": kv_heads, "dtype": dtype}
    sizes = sizes_for("hopper", spec=spec, terms=("dropout",), deterministic=deterministic, **shape)
    with heavy_rows_split() if parts else nullcontext(), unless_refused():
        table = spec and sf.compile_mask(spec, 700, 900, 128, device=DEVICE)
        assert_right(attention_with_terms(sizes, table), "hopper")


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
    q, k, v = normal(sizes_for(backend, q_len=64, kv_len=64, heads=HEADS, kv_heads=KV_HEADS))
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
    with unless_refused():
        sf.attention(q, k, v, dropout_p=0.3, backend=backend)
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


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_terms_wait_for_nothing_and_each_replay_of_a_graph_drops_other_pairs():
    q, k, v, _ = inputs(torch.float16, head_dim=64)
    given = every_term(SIZES)
    given = {name: value for term in ALL_TERMS for name, value in given[term].items()}
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


# Functions of scores.


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
    kept = sf.compile_mask(mask, 70, 90, 32, device=DEVICE)

    def whole(q, k, v):
        pairs = Pairs.all(q, k)
        # The masks are causal: dropped pairs get the score of another, so that nothing is NaN.
        near = torch.minimum(pairs.key, pairs.q_pos)
        scores = function.torch(0.25 * q @ k.mT, None, None, pairs.q_pos, near, given["score_params"])
        scores = scores.masked_fill(~kept.to_dense(), float("-inf"))
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    call = Call(inputs()[:3], lambda *t: sf.attention(*t, kept, return_lse=True, backend=backend, **given), whole)
    assert_right(call, backend)


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


# Calls that cannot run, and arguments that do not fit.


@parametrize("deterministic", (False, True))
@parametrize("name", [name for name in TERMS if "sinks" not in name and name != "large softcap"])
def test_hopper_names_what_it_lacks_and_nothing_else(name, deterministic):
    hopper = backends.get_backend("hopper")
    q, k, *_ = inputs()
    given = every_term(SIZES)[name]
    reason = hopper.supports(make_call(q, k, variant=build_variant(q, k, **given), deterministic=deterministic))
    if "rel_bias" in given and given["rel_bias"].requires_grad:
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
    bias = every_term(SIZES)["bias"]["rel_bias"]
    with pytest.raises(ValueError, match=r"'triton' cannot run this call: .*gradient of rel_bias.*deterministic"):
        sf.attention(q, k, v, rel_bias=bias, deterministic=True, backend="triton")
    sf.attention(q, k, v, rel_bias=bias.detach(), deterministic=True, backend="triton")
    grads = [
        torch.autograd.grad(sf.attention(q, k, v, rel_bias=bias, deterministic=True).square().sum(), bias)[0] for _ in range(2)
    ]
    assert torch.equal(*grads)


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
