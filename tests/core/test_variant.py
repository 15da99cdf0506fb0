"""Lengths, dropout and score terms: each matches its definition on every back end, and so do all together."""

import copy
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from accepted import needs_triton
from calls import (
    OWN,
    SEED,
    TERMS,
    Call,
    Sizes,
    assert_right,
    attention_with_terms,
    every_term,
    own_in_torch,
    surviving,
)
from oracle import BACKENDS, DEVICE, inputs_of, make_call, normal, sizes_for

import sparse_flash as sf
from sparse_flash.core import backends
from sparse_flash.core import variant as variant_module
from sparse_flash.core.definition import philox_2x32, philox_4x32
from sparse_flash.core.variant import build_variant

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize
every_backend = parametrize("backend", BACKENDS)
HEADS, KV_HEADS = 2, 1


def plain(score, batch, head, q_pos, k_pos, params):
    return own_in_torch(score, batch, head, q_pos, k_pos, params)


PLAIN = sf.ScoreFunction(plain)
SIZES = Sizes(heads=HEADS, kv_heads=KV_HEADS, kv_len=90)
ALL_TERMS = ("q_lens", "kv_lens", "dropout", "softcap", "alibi", "bias", "own", "sinks")

if triton:

    @triton.jit
    def noting_in_triton(score, batch, head, q_pos, k_pos, params):
        tl.atomic_max(params[0], tl.maximum(tl.max(q_pos), tl.max(k_pos)))
        tl.atomic_add(params[1], 1)
        return score

    @triton.jit
    def noting_derivative(score, batch, head, q_pos, k_pos, params):
        tl.atomic_max(params[0], tl.maximum(tl.max(q_pos), tl.max(k_pos)))
        tl.atomic_add(params[1], 1)
        return 1.0

else:
    noting_in_triton = noting_derivative = None


@parametrize("mask", ["causal", None])
def test_the_torch_back_end_is_right_where_a_row_takes_many_pieces(monkeypatch, mask):
    from sparse_flash.core import torch as torch_backend

    for name in ("_CHUNK_CPU", "_CHUNK_GPU"):
        monkeypatch.setattr(torch_backend, name, 3 * 16 * 16)
    monkeypatch.setattr(torch_backend, "_DENSE_BLOCK", 32)
    table = mask and sf.compile_mask(mask, 70, 90, 16, device=DEVICE)
    sizes = replace(SIZES, backend="torch", dtype=torch.float64, spec=mask, terms=ALL_TERMS)
    assert_right(attention_with_terms(sizes, table), "torch")


def inputs(dtype=torch.float32, head_dim=16, **lengths):
    """q, k, v and an incoming gradient, for two batch entries."""
    return inputs_of(replace(SIZES, dtype=dtype, head_dim=head_dim, v_head_dim=head_dim, **lengths))


@needs_triton
def test_the_portable_kernels_ask_for_positions_that_exist_and_visit_no_tile_without_any():
    noting = sf.ScoreFunction(lambda score, *_: score, noting_in_triton, noting_derivative)
    mask = replace(sf.compile_mask("causal", 20, 60, 16, device=DEVICE), coarse=None)
    q, k, v = normal(replace(SIZES, batch=1, heads=1, q_len=20, kv_len=60))
    visited, seen = mask.block_states() > 0, []
    for start, stop in ((0, 60), (0, 30), (33, 60), (16, 33)):
        largest, tiles = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
        lengths = {name: torch.tensor([at], device=DEVICE) for name, at in (("kv_starts", start), ("kv_lens", stop))}
        options = {"score_mod": noting, "score_params": (largest, tiles), "backend": "triton"}
        sf.attention(q.requires_grad_(), k, v, mask, **options, **lengths).sum().backward()
        seen.append(tiles.item() / visited[:, start // 16 : -(-stop // 16)].sum().item())
        assert largest.item() < 60
    assert len(set(seen)) == 1 and seen[0] > 0


ONES, PI = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
PHILOX = [  # the counter, the key, and the words that its authors give
    (philox_4x32, [0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (philox_4x32, [ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (philox_4x32, PI[:4], PI[4:], [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    (philox_2x32, [0] * 2, 0, [0x257A3673, 0xCD26BE2A]),
    (philox_2x32, [ONES] * 2, ONES, [0xAB302C4D, 0x3DC9D239]),
    (philox_2x32, PI[:2], PI[2], [0xBEDBBE6B, 0xE4C770B3]),
]


@parametrize("philox, counter, key, words", PHILOX)
def test_philox_gives_the_words_that_its_authors_give(philox, counter, key, words):
    key = torch.tensor(key) if isinstance(key, int) else tuple(map(torch.tensor, key))
    assert list(map(int, philox(tuple(map(torch.tensor, counter)), key))) == words


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
    v = torch.eye(64, v.shape[3]).to(v).expand(v.shape).contiguous().requires_grad_()  # which names the keys that are kept
    for dropout_p in (2**-16, 1 - 2**-30):
        kept = surviving(q, k, dropout_p)
        torch.manual_seed(SEED)
        out = sf.attention(q, k, v, dropout_p=dropout_p, backend=backend)
        assert torch.equal(out != 0, kept[..., : v.shape[3]]) and abs(kept.float().mean() - (1 - dropout_p)) < 1e-3
        assert all(t.isfinite().all() for t in (out, *torch.autograd.grad(out.sum(), v)))


def test_dropout_follows_manual_seed_and_without_dropout_the_generator_is_unchanged():
    q, k, v, _ = inputs()

    def run(dropout_p=0.2):
        return sf.attention(q, k, v, "causal", dropout_p=dropout_p, softcap=1.0)

    torch.manual_seed(1)
    first, second = run(), run()
    torch.manual_seed(1)
    run(0.0)
    assert torch.equal(run(), first) and torch.equal(run(), second)
    assert not torch.equal(first, second)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_each_replay_of_a_graph_drops_new_pairs_and_reads_lengths_again():
    q, k, v, _ = inputs(torch.float16, head_dim=64)
    lens, mask = torch.tensor([41, 90], device=DEVICE), sf.compile_mask("causal", 70, 90, device=DEVICE)
    sf.attention(q, k, v, mask, kv_lens=lens, dropout_p=0.25)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sf.attention(q, k, v, mask, kv_lens=lens, dropout_p=0.25)
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append(out.clone())
    lens.fill_(0)
    graph.replay()
    assert not torch.equal(*replays) and (out == 0).all()


def of_documents(score, batch, head, q_pos, k_pos, params):
    return torch.where(params[0][q_pos] == params[0][k_pos], score, -float("inf"))


def logarithm_of_distance(score, batch, head, q_pos, k_pos, params):
    return score - torch.log(1.0 + q_pos - k_pos)


def root_of_distance(score, batch, head, q_pos, k_pos, params):
    return score * torch.sqrt((q_pos - k_pos).to(score.dtype))


@parametrize("backend", ["torch", "reference"])
@parametrize("mask", ["causal", "causal & strided(7, block=1)", "local(30) & causal"])
@parametrize("function", [of_documents, logarithm_of_distance, root_of_distance])
def test_a_score_function_is_asked_for_tokens_that_exist_and_its_nan_stays_with_dropped_pairs(backend, mask, function):
    def without_nan(score, batch, head, q_pos, k_pos, params):
        return function(score, batch, head, q_pos, torch.minimum(q_pos, k_pos), params)  # the masks are causal

    mask, outcomes = sf.compile_mask(mask, 70, 90, 32, device=DEVICE), []
    for one in (function, without_nan):
        given = {"score_mod": sf.ScoreFunction(one), "score_params": (torch.arange(90, device=DEVICE) // 25,), "backend": backend}
        outcomes.append(Call(inputs()[:3], partial(sf.attention, mask=mask, return_lse=True, **given), None).outcome())
    assert not any(t.isnan().any() for t in outcomes[0])
    torch.testing.assert_close(*outcomes)


def test_copies_of_a_score_function_are_itself_and_one_unpickled_elsewhere_compiles(monkeypatch):
    assert copy.deepcopy({"of a layer": OWN})["of a layer"] is OWN
    q, k, v, _ = inputs()
    options = {"score_params": (torch.ones(2, HEADS, device=DEVICE),), "backend": "torch"}
    wanted = sf.attention(q, k, v, score_mod=PLAIN, **options)
    monkeypatch.setattr(variant_module, "_score_functions", {})  # as in a process that has not made it
    again = pickle.loads(pickle.dumps(PLAIN))
    attend = torch.compile(lambda q: sf.attention(q, k, v, score_mod=again, **options), backend="aot_eager")
    assert torch.equal(attend(q), wanted)


class Times(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, score, batch, head, q_pos, k_pos, params):
        return score * self.factor


CALLED = {
    "module": Times,
    "partial": lambda factor: partial(Times(factor).forward),
    "closure": lambda factor: lambda score, batch, head, q_pos, k_pos, params: score * factor,
}


@parametrize("make", CALLED.values(), ids=CALLED)
def test_what_can_be_called_is_a_score_function_and_two_of_one_name_are_kept_apart_under_compile(make):
    q, k, v, _ = inputs()
    two, three = (sf.ScoreFunction(make(factor)) for factor in (2.0, 3.0))
    torch._dynamo.reset()
    attend = torch.compile(lambda f: sf.attention(q, k, v, score_mod=f, backend="torch"), fullgraph=True, backend="aot_eager")
    for function, factor in ((two, 2.0), (three, 3.0), (two, 2.0)):
        wanted = sf.attention(q, k, v, scale=0.25 * factor, backend="torch")
        torch.testing.assert_close((attend(function), sf.attention(q, k, v, score_mod=function, backend="torch")), (wanted, wanted))


@parametrize("deterministic", (False, True))
@parametrize("name", [name for name in TERMS if "sinks" not in name])
def test_hopper_names_what_it_lacks_and_nothing_else(name, deterministic):
    q, k, *_ = inputs()
    given, supports = every_term(SIZES)[name], backends.get_backend("hopper").supports
    reason = supports(make_call(q, k, variant=build_variant(q, k, **given), deterministic=deterministic))
    if "rel_bias" in given and given["rel_bias"].requires_grad:
        assert reason == "it computes no gradient of rel_bias"
    elif "score_mod" in given and deterministic:
        assert "score_mod" in reason and "deterministic" in reason
    elif name == "large softcap":
        assert reason == "it runs softcap up to 256, as its tanh is less exact near 0; got 10000"
    else:
        assert reason == supports(make_call(q, k))


def test_a_score_function_that_reads_a_learned_tensor_is_refused_where_its_gradient_would_be_missing():
    (q, k, v, _), bias = inputs(), torch.zeros(HEADS, device=DEVICE, requires_grad=True)
    learned, frozen = (sf.ScoreFunction(lambda s, b, h, i, j, p, bias=bias: s + bias[h]) for bias in (bias, bias.detach()))

    def attend(q, score_mod=learned):
        return sf.attention(q, k, v, score_mod=score_mod, backend="torch")

    for call in (attend, torch.compile(attend, backend="eager", fullgraph=True)):
        with pytest.raises(Exception, match=r"score_mod must read no tensor that requires a gradient.*rel_bias"):
            call(q)
    with torch.no_grad():
        attend(q)
    attend(q, frozen)


@parametrize("far", [2**31 - 1, 2**31, 2**32 + 5, 2**63 - 1])
@parametrize("backend", ["torch", "triton", "reference"])
def test_lengths_far_below_zero_and_starts_far_past_all_tokens_leave_none(backend, far, monkeypatch):
    monkeypatch.setattr(variant_module, "is_plain_eager", lambda *_: False)  # as where lengths are not read
    q, k, v = normal(sizes_for(backend, heads=1, kv_heads=1))
    leaves, far = [t.requires_grad_() for t in (q, k, v)], torch.tensor([far, far], device=DEVICE)
    for nothing in ({"kv_lens": -far}, {"q_starts": far}, {"kv_starts": far}, {"q_lens": -far}):
        out = sf.attention(q, k, v, "causal", backend=backend, **nothing)
        assert not any(t.any() for t in (out, *torch.autograd.grad(out.sum(), leaves)))
