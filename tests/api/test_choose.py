"""choose_blocks keeps what an expression's words say; attention under an expression is attention under that mask."""

import copy
import math
from dataclasses import dataclass, replace
from unittest import mock

import chosen
import numpy as np
import pytest
import strategies
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from oracle import DEVICE, Watching, existing
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_flash as sf
from sparse_flash.api import call as api_call
from sparse_flash.choosers import choose
from sparse_flash.choosers.built_in import Sampled
from sparse_flash.core import backends, operators
from sparse_flash.masks.chooser import RULES, choices_of, chooser_block_size, is_causal
from sparse_flash.masks.grid import BlockGrid

parametrize = pytest.mark.parametrize
LENGTHS = st.tuples(st.integers(1, 300), st.integers(1, 300)) | st.integers(1, 300).map(lambda n: (n, n))
# Where rounding decides nothing: mass of 1 keeps all that is not 0.
clear = st.tuples(st.just("keep"), st.integers(1, 4)) | st.tuples(st.sampled_from(RULES), st.sampled_from([0.1, 0.3, 0.6]))
limits = st.none() | st.just(sf.causal()) | strategies.expressions
SPEC = "causal & (sampled(4, keep=3, block=64) | sinks(4))"
EVERYWHERE = "pooled(mass=0.5, block=64)"
BY_HEAD = "causal & per_head([pooled(keep=1, block=64), pooled(keep=2, block=64), sinks(3), pooled(keep=1, block=64)])"
EVERY = {
    "sampled": SPEC,
    "pooled": "causal & (pooled(mass=0.5, block=64) | local(70))",
    "everywhere": EVERYWHERE,
    "two": "causal & (pooled(budget=0.4, block=64) | antidiagonal(8, floor=0.2, block=64))",
    "by head": BY_HEAD,
}
every = parametrize("spec", EVERY.values(), ids=EVERY)
KERNELS = [False] if backends.get_backend("triton").why_unavailable() else [False, True]


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def inputs(q_len=200, kv_len=200, *, batch=2, heads=4, kv_heads=2, head_dim=16, seed=0, **options):
    q, k = chosen.tensors(q_len, kv_len, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=seed, **options)
    return q, k, chosen.tensors(1, kv_len, batch=batch, heads=1, kv_heads=kv_heads, head_dim=head_dim, seed=seed + 1, **options)[1]


def kept_by_choice(choice, size, q, k, scores=None, scale=None):
    """The pairs that one choice of all heads keeps, (batch, heads, q_len, kv_len)."""
    rules = []
    for chooser in choice.choosers:
        if chooser.name != "scored":
            found = chosen.scores_of(chooser, q, k, causal=is_causal(choice.within), scale=scale)
        else:
            found = scores
        rules.append((*chooser.rule, found))
    return chosen.kept_pairs(rules, choice.within, choice.always, size, (*q.shape[:3], k.shape[2]))


def definition(spec, q, k, *args):
    choices, size, group = choices_of(spec), chooser_block_size(spec), q.shape[1] // k.shape[1]
    if len(choices) == 1:
        return kept_by_choice(choices[0], size, q, k, *args)
    of_heads = [(q[:, head : head + 1], k[:, head // group : head // group + 1]) for head in range(len(choices))]
    return np.concatenate([kept_by_choice(one, size, *pair) for one, pair in zip(choices, of_heads, strict=True)], 1)


def dense(mask, q):
    return mask.to_dense().cpu().expand(*q.shape[:2], -1, -1).numpy()


def random_scores(q, k, size, seed):
    generator = np.random.default_rng(seed)
    shape = (*q.shape[:2], -(-q.shape[2] // size), -(-k.shape[2] // size))
    values = np.array([0.0, 0.25, 0.5, 1.0, -1.0, -np.inf, np.nan], np.float32)
    return torch.from_numpy(generator.choice(values, shape)).to(DEVICE)


@settings(max_examples=50)
@given(
    chooser=chosen.drawn(chosen.SCORING, rule=clear),
    other=st.none() | chosen.drawn(chosen.SCORING, rule=clear),
    within=limits,
    always=st.none() | strategies.expressions,
    lengths=LENGTHS,
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    as_text=st.booleans(),
    tokens_first=st.booleans(),
    scale=st.sampled_from([None, 0.1, 2.0]),
    seed=st.integers(0, 99),
)
# What later keys decide shows in shares of the weights.
@example(sf.parse("sampled(4, floor=0.3, block=64)"), None, sf.causal(), None, (256, 256), (4, 2), True, True, 2.0, 0)
@example(sf.parse("pooled(floor=0.3, block=64)"), None, sf.causal(), None, (256, 256), (4, 2), True, False, None, 0)
@example(sf.parse("antidiagonal(16, floor=0.3, block=64)"), None, sf.causal(), None, (256, 256), (4, 2), True, False, None, 0)
def test_kept_blocks_are_those_of_the_docstring(chooser, other, within, always, lengths, heads, as_text, tokens_first, scale, seed):
    assume(chosen.fit(within, always))
    some = [chooser] if other is None else [chooser, replace(other, block=chooser.block)]
    assume(all(one.budget is None for one in some) or lengths[1] > chooser.block_size)  # of one block, all scores are 1
    spec = chosen.joined(within, some, always)
    q, k = chosen.tensors(*lengths, batch=2, heads=heads[0], kv_heads=heads[1], dtype=torch.float64, seed=seed)
    if tokens_first:
        q, k = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k))
    mask = sf.choose_blocks(spec.to_spec() if as_text else spec, q, k, scale=scale)
    assert tuple(mask.mask_index.shape) == (2, heads[0]) and mask.block_size == chooser.block_size
    assert (mask.q_len, mask.kv_len, mask.device) == (*lengths, q.device)
    expected = definition(spec, q, k, None, scale)
    np.testing.assert_array_equal(dense(mask, q), expected)
    np.testing.assert_array_equal(dense(mask.transpose(), q), expected.swapaxes(2, 3))


@settings(max_examples=50)
@given(
    some=st.lists(chosen.drawn(["scored"], block=st.just(64)), min_size=1, max_size=2),
    within=limits,
    always=st.none() | strategies.expressions,
    lengths=LENGTHS,
    heads=st.sampled_from([(1, 1), (4, 2)]),
    by_kernels=st.sampled_from(KERNELS),
    seed=st.integers(0, 99),
)
def test_given_scores_are_taken_and_none_nan_or_minus_infinity_is_kept(some, within, always, lengths, heads, by_kernels, seed):
    assume(chosen.fit(within, always))
    spec = chosen.joined(within, some, always)
    if by_kernels:  # which the interpreter takes long for
        lengths = lengths[0] % 130 + 1, lengths[1] % 130 + 1
    q, k = chosen.tensors(*lengths, batch=2, heads=heads[0], kv_heads=heads[1], seed=seed)
    scores = random_scores(q, k, 64, seed)
    with mock.patch.object(choose, "_can_use_kernels", lambda q: by_kernels):
        mask = sf.choose_blocks(spec, q, k, scores=scores)
    np.testing.assert_array_equal(dense(mask, q), definition(spec, q, k, scores.cpu().numpy()))


@parametrize(
    "spec, compiles",
    [
        ("window(70, 0) & (sampled(8, keep=1, block=64) | sinks(4))", False),
        ("window(70, 0) & (sampled(8, keep=1, block=64) | sinks(4))", True),
        ("local(100) & window(500, 0) & pooled(keep=1)", False),
        ("window(9, 0) & per_head([pooled(keep=1), pooled(keep=2), sinks(3), pooled(keep=1)])", False),
    ],
)
def test_training_warns_once_where_later_keys_decide_although_no_query_sees_them(spec, compiles):
    api_call._warn_of_later_keys.__wrapped__.cache_clear()
    q, k, v = inputs()
    call = torch.compile(sf.attention, backend="eager") if compiles else sf.attention
    message = r"no query sees a later key under .* so training sees the future; write causal & .*"
    with pytest.warns(UserWarning, match=message) as seen:
        for _ in range(2):
            call(q.requires_grad_(), k, v, spec)
    assert len(seen) == 1 and (compiles or seen[0].filename == __file__)


@pytest.mark.filterwarnings("error")
def test_training_gives_no_warning_under_causal_and_where_queries_see_later_keys():
    api_call._warn_of_later_keys.__wrapped__.cache_clear()
    q, k, v = inputs()
    for spec in (SPEC, EVERYWHERE, *(f"{within} & pooled(keep=1)" for within in ("local(70)", "causal & window(70, 0)"))):
        sf.attention(q.requires_grad_(), k, v, spec)
    sf.attention(q, k, v, "documents((0, 40, 200)) & pooled(keep=1)")
    with torch.no_grad():
        sf.attention(q, k, v, "window(70, 0) & pooled(keep=1)")


# Compiled code and programs.


@parametrize("spec", [EVERYWHERE, BY_HEAD], ids=["everywhere", "by head"])
def test_one_graph_serves_an_expression_at_all_lengths(spec):
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda q, k, v: sf.attention(q, k, v, spec), backend=counter, fullgraph=True)
    for tokens in (65, 85, 130, 205):
        tensors = inputs(tokens, tokens, seed=tokens)
        torch.testing.assert_close(call(*tensors), sf.attention(*tensors, spec))
    assert counter.frame_count == 2  # for the first length, and for all others


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch before 2.13 traces no Pattern objects")
def test_compiled_code_takes_expressions_as_values():
    tensors, outside = inputs(), sf.parse(SPEC)

    def attend(q, k, v):
        spec = sf.causal() & (Sampled(4, keep=3, block=64) | sf.sinks(4))
        return sf.attention(q, k, v, sf.choose_blocks(spec, q, k)), sf.attention(q, k, v, spec), sf.attention(q, k, v, outside)

    for out in torch.compile(attend, backend="eager", fullgraph=True)(*tensors):
        torch.testing.assert_close(out, sf.attention(*tensors, SPEC))


def test_masks_are_chosen_within_compiled_code_from_scores_and_lengths_too():
    lengths = {"kv_starts": torch.tensor([70, 3], device=DEVICE), "q_lens": torch.tensor([131, 190], device=DEVICE)}

    def attend(q, k, v):
        scores = q.mean(3).sum(2)[..., None, None].expand(-1, -1, 4, 4).cumsum(3)
        given_scores = sf.choose_blocks("causal & scored(keep=2, block=64)", q, k, scores=scores)
        masks = given_scores, sf.choose_blocks(SPEC, q, k, **lengths)
        return [sf.attention(q, k, v, mask) for mask in masks]

    tensors = inputs()
    torch.testing.assert_close(torch.compile(attend, backend="aot_eager", fullgraph=True)(*tensors), attend(*tensors))


def test_the_operators_of_compiled_code_pass_opcheck():
    q, k, v = inputs(150, 170)
    arguments = (q, k, "causal & sampled(4, keep=2, block=64)", 0.25, None, None, None, None)
    torch.library.opcheck(choose.chosen_bits, arguments, test_utils=("test_schema", "test_faketensor"))
    bits = choose.chosen_bits(*arguments)
    call = *(x.requires_grad_() for x in (q, k, v)), [bits], 64, "causal", None, True, "auto", [q], "", 0.0, 0.0
    torch.library.opcheck(operators._forward, call)


# What reads values on the host or makes a shape of values, and on GPUs adds in no fixed order.
FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "bincount")
FORBIDDEN += ("index_add", "scatter_add", "scatter_reduce")


def see_nothing_from_the_host(function, args, results):
    name = function.name().split("::")[-1].split(".")[0]
    booleans = name in ("index", "index_put_") and any(x is not None and x.dtype == torch.bool for x in args[1])
    from_list = name == "lift_fresh" and args[0].dim() > 0
    assert not (booleans or from_list or name.startswith(FORBIDDEN)), function.name()


@every
def test_the_choice_reads_nothing_on_the_host(spec):
    q, k, _ = inputs()
    wanted = sf.choose_blocks(spec, q, k)
    with Watching(see_nothing_from_the_host):
        found = sf.choose_blocks(spec, q, k)
    assert torch.equal(found.to_dense(), wanted.to_dense())


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@parametrize("name", chosen.COMPARING)
def test_a_gpu_makes_no_tensor_of_queries_by_keys(name):
    spec = sf.causal() & sf.parse(chosen.SPECIMENS[name].replace("keep=3, block=64", "keep=8"))
    q, k = chosen.tensors(1 << 16, 1 << 16, heads=4, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    sf.choose_blocks(spec, q, k)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sf.choose_blocks(spec, q, k)
    assert torch.cuda.max_memory_allocated() - before < 1 << 30  # one head's scores in float32 are 16 times as much


# Padding.

PADDED = {
    "nowhere": {},
    "at the end": {"kv_lens": [130, 200], "q_lens": [130, 200]},
    "at the start": {"kv_starts": [70, 0], "q_starts": [70, 0]},
    "both": {"kv_starts": [70, 3], "q_starts": [70, 3], "kv_lens": [130, 200], "q_lens": [131, 190]},
}


@parametrize("where", PADDED)
@every
def test_attention_under_an_expression_is_that_under_its_mask_and_padding_decides_nothing(spec, where):
    lengths = {name: torch.tensor(values, device=DEVICE) for name, values in PADDED[where].items()}
    q, k, v = inputs()
    exist = [existing(200, lengths.get(f"{of}_starts"), lengths.get(f"{of}_lens"))[:, None, :, None] for of in ("q", "kv", "kv")]
    mask, wanted = sf.choose_blocks(spec, q, k, scale=0.7, **lengths), sf.attention(q, k, v, spec, scale=0.7, **lengths)
    assert torch.equal(sf.attention(q, k, v, mask, scale=0.7, **lengths), wanted)
    spoiled = [t.masked_fill(~which, math.nan) for t, which in zip((q, k, v), exist, strict=True)]
    assert torch.equal(sf.choose_blocks(spec, *spoiled[:2], scale=0.7, **lengths).to_dense(), mask.to_dense())
    assert torch.equal(sf.attention(*spoiled, spec, scale=0.7, **lengths), wanted)


NO_SHARES = chosen.rules.filter(lambda rule: rule[0] != "budget" and not (rule[0] == "keep" and isinstance(rule[1], float)))
BY_MASS = sf.parse("sampled(4, mass=0.5, block=64)")


@settings(max_examples=40)
@given(
    chooser=chosen.drawn(chosen.SCORING, rule=NO_SHARES),
    tokens=st.integers(2, 400),
    gone=st.integers(1, 300),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
@example(BY_MASS, 256, 126, False, 0)
@example(BY_MASS, 256, 66, False, 0)
@example(sf.parse("pooled(keep=2, block=64)"), 256, 120, False, 0)  # whose last block has few keys
def test_padding_at_the_end_is_ignored(chooser, tokens, gone, causal, seed):
    q, k, v = inputs(tokens, tokens, batch=1, seed=seed)
    end = max(1, tokens - gone)
    lengths = dict.fromkeys(("kv_lens", "q_lens"), torch.tensor([end], device=DEVICE))
    spec = sf.causal() & chooser if causal else chooser
    last = end if not (causal and chooser.name == "sampled") else end // chooser.block_size * chooser.block_size
    found, alone = sf.attention(q, k, v, spec, **lengths), sf.attention(*(x[:, :, :end] for x in (q, k, v)), spec)
    torch.testing.assert_close(found[:, :, :last], alone[:, :, :last])


@parametrize("name", ["pooled", "everywhere", "two"])
def test_padding_at_the_start_is_ignored(name):
    q, k, v = inputs(64 * 6, 64 * 6, batch=1)
    start = torch.tensor([64 * 2], device=DEVICE)
    found = sf.attention(q, k, v, EVERY[name], kv_starts=start, q_starts=start)
    alone = sf.attention(*(x[:, :, 64 * 2 :] for x in (q, k, v)), EVERY[name])
    torch.testing.assert_close(found[:, :, 64 * 2 :], alone)


# Heads, and users' choosers.

HEADS = ["pooled(keep=1, block=64)", "sampled(4, mass=0.5, block=64) | sinks(4)", "local(70)", "full"]


@settings(max_examples=30)
@given(
    picks=st.lists(st.sampled_from(HEADS), min_size=4, max_size=4).filter(lambda picks: {*picks} & {*HEADS[:2]}),
    within=st.sampled_from(["", "causal & "]),
    lengths=LENGTHS,
)
def test_each_head_keeps_what_its_expression_keeps(picks, within, lengths):
    q, k = chosen.tensors(*lengths, batch=2, heads=4, kv_heads=2, dtype=torch.float64)
    spec = f"per_head([{', '.join(f'{within}({pick})' for pick in picks)}])"
    np.testing.assert_array_equal(dense(sf.choose_blocks(spec, q, k), q), definition(spec, q, k))


@dataclass(frozen=True)
class Nearest(sf.Chooser):
    """Scores fall with the distance from a block of each head. They are not contiguous, and not in float32."""

    def scores(self, q, k, grid):
        assert q.shape[2:] == (grid.q_len, q.shape[3]) and k.shape[2] == grid.kv_len
        distance = torch.arange(grid.kv_blocks, device=q.device)[:, None] - 3 * torch.arange(q.shape[1], device=q.device)
        return -distance.abs().double().T[None, :, None].expand(len(q), -1, grid.q_blocks, -1)


def test_a_user_defined_chooser_works_in_expressions():
    q, k, v = inputs(64 * 6, 64 * 6)
    spec = sf.causal() & (Nearest(keep=3, block=64) | sf.sinks(2))
    scores = Nearest(keep=3).scores(q, k, BlockGrid(64 * 6, 64 * 6, 64)).cpu()
    kept = chosen.kept_pairs([("keep", 3, scores.numpy())], sf.causal(), sf.sinks(2), 64, (2, 4, 64 * 6, 64 * 6))
    np.testing.assert_array_equal(dense(sf.choose_blocks(spec, q, k), q), kept)
    assert torch.equal(sf.attention(q, k, v, spec), sf.attention(q, k, v, sf.choose_blocks(spec, q, k)))
    assert copy.deepcopy(spec) == spec
    refusal = "takes choosers that have spec text" if torch.__version__ >= "2.13" else "does not trace Pattern objects"
    with pytest.raises(Exception, match=refusal):
        torch.compile(lambda q, k, v: sf.attention(q, k, v, spec), backend="aot_eager", fullgraph=True)(q, k, v)
