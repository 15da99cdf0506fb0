"""choose_blocks keeps what an expression's words say; attention under an expression is attention under that mask."""

import copy
import math
import warnings
from dataclasses import dataclass, replace
from unittest import mock

import chosen
import numpy as np
import pytest
import strategies
import torch
from accepted import fitted, needs_triton
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import BACKENDS, DEVICE, check, dense_attention, gradients
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_flash as sf
from sparse_flash.api import call as api_call
from sparse_flash.choosers import choose
from sparse_flash.choosers.built_in import Sampled
from sparse_flash.dispatch import operators
from sparse_flash.masks.chooser import RULES, choices_of, chooser_block_size, is_causal

parametrize = pytest.mark.parametrize
LENGTHS = st.tuples(st.integers(1, 300), st.integers(1, 300)) | st.integers(1, 300).map(lambda n: (n, n))
# Where rounding decides nothing: mass and relative of 1 keep all that is not 0, or what equals the largest.
clear = st.tuples(st.just("keep"), st.integers(1, 4)) | st.tuples(st.sampled_from(RULES), st.sampled_from([0.1, 0.3, 0.6]))
limits = st.none() | st.just(sf.causal()) | strategies.expressions
SPEC = "causal & (sampled(4, keep=3, block=64) | sinks(4))"
EVERY = {
    "sampled": SPEC,
    "pooled": "causal & (pooled(mass=0.5, block=64) | local(70))",
    "shared": "pooled(relative=0.97, block=64, share_group=True)",
    "two": "causal & (pooled(budget=0.4, block=64) | antidiagonal(8, floor=0.2, block=64))",
    "by head": "causal & per_head([pooled(keep=1, block=64), pooled(keep=2, block=64), sinks(3), pooled(keep=1, block=64)])",
}
every = parametrize("spec", EVERY.values(), ids=EVERY)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def inputs(q_len=200, kv_len=200, *, batch=2, heads=4, kv_heads=2, head_dim=16, seed=0, **options):
    q, k = chosen.tensors(q_len, kv_len, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=seed, **options)
    return q, k, chosen.tensors(1, kv_len, batch=batch, heads=1, kv_heads=kv_heads, head_dim=head_dim, seed=seed + 1, **options)[1]


def pairs(pattern, q_len, kv_len):
    return np.ones((q_len, kv_len), bool) if pattern is None else strategies.dense(pattern, q_len, kv_len)


def blocks_of(kept, size):
    """Which blocks have a pair, (q_blocks, kv_blocks) of (q_len, kv_len) bool."""
    rows, columns = (chosen.groups_of(n, size) for n in kept.shape)
    return np.array([[kept[row, column].any() for column in columns] for row in rows])


def definition(spec, q, k, scores=None):
    """The kept pairs, (batch, heads, q_len, kv_len)."""
    (choice,), size = choices_of(spec), chooser_block_size(spec)
    q_len, kv_len, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    within = pairs(choice.within, q_len, kv_len)
    allowed = blocks_of(within, size)
    own = blocks_of(np.arange(q_len)[:, None] + kv_len - q_len == np.arange(kv_len), size)
    # The blocks in which positions of a row's queries fall, up to the last.
    first = np.array([rows.start + kv_len - q_len for rows in chosen.groups_of(q_len, size)]) // size
    last = np.array([rows.stop - 1 + kv_len - q_len for rows in chosen.groups_of(q_len, size)]) // size
    column = np.arange(allowed.shape[1])
    forced = (column >= first[:, None]) & (column <= last[:, None])
    assert (forced | ~own).all()
    if choice.always is not None:
        forced |= blocks_of(pairs(choice.always, q_len, kv_len), size)
    kept = np.broadcast_to(forced & allowed, (*q.shape[:2], *allowed.shape)).copy()
    for chooser in choice.choosers:
        found = scores if chooser.name == "scored" else chosen.scores_of(chooser, q, k, causal=is_causal(choice.within))
        if chooser.name == "scored" and chooser.share_group:
            found = found.reshape(len(q), -1, group, *allowed.shape).max(2)
        mine = np.array([chosen.kept_by(*chooser.rule, of_sequence, allowed, forced & allowed) for of_sequence in found])
        kept |= mine.repeat(kept.shape[1] // mine.shape[1], 1)
    return kept.repeat(size, 2).repeat(size, 3)[:, :, :q_len, :kv_len] & within


def dense(mask, q):
    return mask.to_dense().cpu().expand(*q.shape[:2], -1, -1).numpy()


def random_scores(q, k, size, seed, dtype=torch.float32):
    generator = np.random.default_rng(seed)
    shape = (*q.shape[:2], -(-q.shape[2] // size), -(-k.shape[2] // size))
    values = np.array([0.0, 0.25, 0.5, 1.0, -1.0, -np.inf, np.nan], np.float32)
    return torch.from_numpy(generator.choice(values, shape)).to(DEVICE, dtype)


@settings(max_examples=50)
@given(
    chooser=chosen.drawn(chosen.SCORING, rule=clear),
    other=st.none() | chosen.drawn(chosen.SCORING, rule=clear),
    within=limits,
    always=st.none() | strategies.expressions,
    lengths=LENGTHS,
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    as_text=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_is_kept_is_what_the_words_say(chooser, other, within, always, lengths, heads, as_text, seed):
    assume(chosen.fit(within, always))
    budgets = [one for one in (chooser, other) if one is not None and one.budget is not None]
    assume(not budgets or lengths[1] > chooser.block_size)  # of one block, all scores are 1 up to rounding
    spec = chooser
    for one in (None if other is None else replace(other, block=chooser.block), always):
        spec = spec if one is None else spec | one
    spec = spec if within is None else within & spec
    q, k = chosen.tensors(*lengths, batch=2, heads=heads[0], kv_heads=heads[1], dtype=torch.float64, seed=seed)
    mask = sf.choose_blocks(spec.to_spec() if as_text else spec, q, k)
    assert tuple(mask.mask_index.shape) == (2, heads[0]) and mask.block_size == chooser.block_size
    assert (mask.q_len, mask.kv_len, mask.device) == (*lengths, q.device)
    expected = definition(spec, q, k)
    np.testing.assert_array_equal(dense(mask, q), expected)
    np.testing.assert_array_equal(mask.transpose().to_dense().cpu().expand(*q.shape[:2], -1, -1), expected.swapaxes(2, 3))


@settings(max_examples=40)
@given(
    chooser=chosen.drawn(["scored"]),
    within=limits,
    always=st.none() | strategies.expressions,
    lengths=LENGTHS,
    heads=st.sampled_from([(1, 1), (4, 2)]),
    seed=st.integers(0, 99),
)
def test_given_scores_are_taken_and_none_nan_or_minus_infinity_is_kept(chooser, within, always, lengths, heads, seed):
    assume(chosen.fit(within, always))
    spec = chooser if always is None else chooser | always
    spec = spec if within is None else within & spec
    q, k = chosen.tensors(*lengths, batch=2, heads=heads[0], kv_heads=heads[1], seed=seed)
    scores = random_scores(q, k, chooser.block_size, seed)
    if chooser.share_group and heads[0] > heads[1]:
        scores = scores.nan_to_num(0.5, neginf=0.25)  # the largest of NaN and a number is no number, or the other
    mask = sf.choose_blocks(spec, q, k, scores=scores)
    np.testing.assert_array_equal(dense(mask, q), definition(spec, q, k, scores.cpu().numpy()))


@needs_triton
@settings(max_examples=8)
@given(
    some=st.lists(chosen.drawn(["scored"], block=st.just(64)), min_size=1, max_size=2),
    within=limits,
    always=st.none() | strategies.expressions,
    lengths=LENGTHS,
    seed=st.integers(0, 99),
)
def test_kernels_choose_what_operations_choose(some, within, always, lengths, seed):
    assume(chosen.fit(within, always))
    spec = some[0]
    for one in (*some[1:], *([] if always is None else [always])):
        spec = spec | one
    spec = spec if within is None else within & spec
    q, k = chosen.tensors(*lengths, batch=2, heads=4, kv_heads=2, seed=seed)
    scores = random_scores(q, k, 64, seed).nan_to_num(0.5, neginf=0.25)
    masks = []
    for kernels in (False, True):
        with mock.patch.object(choose, "_can_use_kernels", lambda q, kernels=kernels: kernels):
            masks.append(sf.choose_blocks(spec, q, k, scores=scores))
    assert torch.equal(*(mask.to_dense() for mask in masks))


@settings(max_examples=60)
@given(
    chooser=chosen.drawn(chosen.SCORING),
    always=st.none() | strategies.expressions,
    lengths=LENGTHS,
    block=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_no_key_or_query_after_a_block_of_queries_decides_what_it_keeps(chooser, always, lengths, block, seed):
    spec = sf.causal() & (chooser if always is None else chooser | always)
    q, k = chosen.tensors(*lengths, heads=4, kv_heads=2, seed=seed)
    end = min((block + 1) * chooser.block_size, lengths[0])
    later_q, later_k = q.clone(), k.clone()
    later_q[:, :, end:] = 100 * later_q[:, :, end:].flip(2) + 7
    later_k[:, :, max(0, end + lengths[1] - lengths[0]) :] = 50
    before, after = (sf.choose_blocks(spec, *pair).kept_blocks() for pair in ((q, k), (later_q, later_k)))
    assert torch.equal(before[:, :, : block + 1], after[:, :, : block + 1])


@parametrize("backend", BACKENDS)
def test_attention_under_a_chosen_mask_is_right(backend):
    size = fitted(backend, {"dtype": torch.float32, "head_dim": 16, "block_size": 64})["block_size"]
    if size not in (64, 128):
        pytest.skip(f"blocks of choosers are 64 and 128; {backend} takes {size}")
    q, k = chosen.tensors(3 * size - 20, 3 * size - 7, batch=2, heads=4, kv_heads=2)
    mask = sf.choose_blocks(f"causal & (sampled(4, keep=2, block={size}) | sinks(3))", q, k)
    check(backend, mask, q.shape[2], k.shape[2], batch=2, heads=4, kv_heads=2, usual={"head_dim": 16})


@every
def test_attention_under_an_expression_is_attention_under_its_mask(spec):
    q, k, v = inputs(170, 200)
    mask = sf.choose_blocks(spec, q, k)
    for way in (spec, sf.parse(spec)):
        out, lse = sf.attention(q, k, v, way, return_lse=True)
        wanted = sf.attention(q, k, v, mask, return_lse=True)
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    scaled = sf.attention(q, k, v, spec, scale=0.7, backend="reference")
    assert torch.equal(scaled, sf.attention(q, k, v, sf.choose_blocks(spec, q, k, scale=0.7), scale=0.7, backend="reference"))


@every
def test_gradients_are_those_of_dense_attention_under_the_mask_as_it_is(spec):
    q, k, v = inputs(150, 170, batch=1)
    mask = sf.choose_blocks(spec, q.requires_grad_(), k)
    assert not any(t.requires_grad for t in mask.tensors())
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[:3], device=DEVICE)
    ours = gradients(lambda *x: sf.attention(*x, spec, return_lse=True), (q, k, v), dout, dlse)
    kept = mask.to_dense()
    exact = [x.detach().double() for x in (q, k, v)]
    wanted = gradients(lambda *x: dense_attention(*x, kept, q.shape[3] ** -0.5), exact, dout.double(), dlse.double())
    for found, right in zip(ours, wanted, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=2e-3, atol=2e-4)


def test_a_scale_decides_as_it_does_in_attention():
    q, k, _ = inputs(64 * 4, 64 * 4)
    spec = "causal & sampled(4, floor=0.3, block=64)"
    default, same, steep = (sf.choose_blocks(spec, q, k, scale=scale).kept_blocks() for scale in (None, 0.25, 4.0))
    assert torch.equal(default, same) and not torch.equal(default, steep)


@parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_and_memory_order_chooses(dtype):
    q, k, v = inputs(200, 200, dtype=dtype)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    for spec in EVERY.values():
        mask = sf.choose_blocks(spec, q, k)
        assert torch.equal(mask.kept_blocks(), sf.choose_blocks(spec, *turned).kept_blocks())
        assert sf.attention(q, k, v, spec).isfinite().all()


def test_autocast_chooses_by_the_cast_tensors_and_rounds_no_product():
    q, k, v = inputs(64 * 5, 64 * 5, head_dim=64)
    rounded = [x.to(torch.bfloat16) for x in (q, k, v)]
    for spec in EVERY.values():
        wanted = sf.choose_blocks(spec, *rounded[:2]).kept_blocks()
        with torch.autocast(DEVICE, torch.bfloat16):
            for pair in ((q, k), (q, rounded[1]), rounded[:2]):
                assert torch.equal(sf.choose_blocks(spec, *pair).kept_blocks(), wanted)
            assert torch.equal(sf.attention(q, k, v, spec), sf.attention(*rounded, spec))


@parametrize(
    "within, compiled",
    [("window(70, 0)", False), ("window(70, 0)", True), ("local(100) & window(500, 0)", False), ("per_head", False)],
)
def test_training_warns_once_where_later_keys_decide_although_no_query_sees_them(within, compiled):
    api_call._warn_that_later_keys_decide.cache_clear()
    spec = f"{within} & (sampled(8, keep=1, block=64) | sinks(4))"
    if within == "per_head":
        spec = "window(9, 0) & per_head([pooled(keep=1), pooled(keep=2), sinks(3), pooled(keep=1)])"
    q, k, v = inputs()
    call = torch.compile(sf.attention, backend="eager") if compiled else sf.attention
    q.requires_grad_()
    with pytest.warns(
        UserWarning, match=r"no query sees a later key under .* so training sees the future; write causal & .*"
    ) as seen:
        for _ in range(2):
            call(q, k, v, spec)
    assert len(seen) == 1 and (compiled or seen[0].filename == __file__)


@parametrize(
    "spec",
    [
        SPEC,
        EVERY["shared"],
        "local(70) & pooled(keep=1)",
        "causal & window(70, 0) & pooled(keep=1)",
        "documents((0, 40, 200)) & pooled(keep=1)",
    ],
)
def test_training_gives_no_warning_under_causal_and_where_queries_see_later_keys(spec):
    api_call._warn_that_later_keys_decide.cache_clear()
    q, k, v = inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sf.attention(q.requires_grad_(), k, v, spec)
        with torch.no_grad():
            sf.attention(q, k, v, "window(70, 0) & pooled(keep=1)")


@parametrize("compiled", [False, True])
@parametrize(
    "spec, message",
    [("causal | sampled(8, keep=1)", "causal must stand before"), ("pooled(keep=1) & sampled(8, keep=1)", "joined by")],
)
def test_an_expression_that_cannot_be_is_an_error_without_data_too(spec, message, compiled):
    call = torch.compile(sf.attention, backend="eager", fullgraph=True) if compiled else sf.attention
    for shape in ((0, 4, 9, 16), (2, 0, 9, 16), (2, 4, 0, 16)):
        q = torch.zeros(shape, device=DEVICE)
        with pytest.raises(Exception, match=message):
            call(q, q, q, spec)


def compiled(spec):
    return torch.compile(lambda q, k, v: sf.attention(q, k, v, spec), backend="aot_eager", fullgraph=True)


@parametrize("spec", [EVERY["shared"], EVERY["by head"]], ids=["shared", "by head"])
def test_one_graph_serves_an_expression_at_all_lengths(spec):
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda q, k, v: sf.attention(q, k, v, spec), backend=counter, fullgraph=True)
    for tokens in range(65, 265, 20):  # more lengths than a function may be compiled for
        tensors = inputs(tokens, tokens, seed=tokens)
        torch.testing.assert_close(call(*tensors), sf.attention(*tensors, spec))
    assert counter.frame_count == 2  # for the first length, and for all others


OF_ONE_LENGTH = {
    "topk_blocks": lambda q, k: sf.topk_blocks(q, k, keep=1),
    "choose_blocks": lambda q, k: sf.choose_blocks(SPEC, q, k),
}


@parametrize("spec, strict", [(SPEC, False), (SPEC, True), (EVERY["shared"], False), *((one, False) for one in OF_ONE_LENGTH)])
def test_exported_programs_choose_from_other_inputs(spec, strict):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return sf.attention(q, k, v, OF_ONE_LENGTH[spec](q, k) if spec in OF_ONE_LENGTH else spec)

    tokens = None if spec in OF_ONE_LENGTH else {2: torch.export.Dim("tokens", min=2, max=4096)}
    shapes = {"q": tokens, "k": tokens, "v": tokens}
    program = torch.export.export(Model(), inputs(), dynamic_shapes=shapes, strict=strict)
    for other in (200,) if tokens is None else (200, 70, 333):
        tensors = inputs(other, other, seed=other)
        torch.testing.assert_close(program.module()(*tensors), Model()(*tensors))


@parametrize("choose_mask", OF_ONE_LENGTH.values(), ids=OF_ONE_LENGTH)
def test_a_mask_made_in_an_exported_program_is_of_one_length(choose_mask):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return sf.attention(q, k, v, choose_mask(q, k))

    tokens = {2: torch.export.Dim("tokens", min=2, max=4096)}
    with pytest.raises(Exception, match="your code specialized it to be a constant"):
        torch.export.export(Model(), inputs(), dynamic_shapes={"q": tokens, "k": tokens, "v": tokens})


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch before 2.13 traces no Pattern objects")
def test_compiled_code_takes_expressions_as_values():
    tensors, outside = inputs(), sf.parse(SPEC)
    wanted = sf.attention(*tensors, SPEC)
    torch.testing.assert_close(compiled(outside)(*tensors), wanted)

    def inside(q, k, v):
        spec = sf.causal() & (Sampled(4, keep=3, block=64) | sf.sinks(4))
        return sf.attention(q, k, v, sf.choose_blocks(spec, q, k)), sf.attention(q, k, v, spec)

    for out in torch.compile(inside, backend="eager", fullgraph=True)(*tensors):
        torch.testing.assert_close(out, wanted)


def test_masks_are_chosen_within_compiled_code_from_scores_too():
    def chosen_and_attended(q, k, v):
        scores = q.mean(3).sum(2)[..., None, None].expand(-1, -1, 4, 4).cumsum(3)
        mask = sf.choose_blocks("causal & scored(keep=2, block=64)", q, k, scores=scores)
        return sf.attention(q, k, v, mask)

    tensors = inputs(200, 200)
    call = torch.compile(chosen_and_attended, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(call(*tensors), chosen_and_attended(*tensors))


def test_the_operator_of_compiled_code_passes_opcheck():
    q, k, _ = inputs(150, 170)
    arguments = (q, k, "causal & sampled(4, keep=2, block=64)", 0.25, None, None, None)
    torch.library.opcheck(choose.chosen_bits, arguments, test_utils=("test_schema", "test_faketensor"))
    bits = choose.chosen_bits(*arguments)
    q, k, v = (x.requires_grad_() for x in inputs(150, 170))
    call = q, k, v, [bits], 64, "causal", None, True, "auto", [q], "", 0.0, 0.0
    torch.library.opcheck(operators._forward, call)


class NothingFromTheHost(TorchDispatchMode):
    """Raises where an operation reads values on the host, makes a shape of values, copies a list of numbers from the host, or on
    GPUs adds in no fixed order."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "bincount")
    FORBIDDEN += ("index_add", "scatter_add", "scatter_reduce")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[-1].split(".")[0]
        booleans = name in ("index", "index_put_") and any(x is not None and x.dtype == torch.bool for x in args[1])
        from_list = name == "lift_fresh" and args[0].dim() > 0
        assert not (booleans or from_list or name.startswith(self.FORBIDDEN)), func.name()
        return func(*args, **(kwargs or {}))


@every
def test_the_choice_reads_nothing_on_the_host(spec):
    q, k, _ = inputs()
    wanted = sf.choose_blocks(spec, q, k)
    with NothingFromTheHost():
        found = sf.choose_blocks(spec, q, k)
    assert torch.equal(found.to_dense(), wanted.to_dense())
    with FakeTensorMode() as mode:
        fake = sf.choose_blocks(spec, *(mode.from_tensor(x) for x in (q, k)))
    assert fake.sizes == wanted.sizes and fake.mask_index.shape == wanted.mask_index.shape


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


def padded(tokens=64 * 4 - 10):
    """(q, k, v, lengths), padded on both sides, differently in each sequence."""
    q, k, v = inputs(tokens, tokens)
    starts, ends = torch.tensor([0, 70], device=DEVICE), torch.tensor([tokens - 80, tokens - 3], device=DEVICE)
    return q, k, v, {"q_starts": starts, "kv_starts": starts, "q_lens": ends, "kv_lens": ends}


@every
def test_tokens_that_do_not_exist_decide_nothing(spec):
    q, k, v, lengths = padded()
    wanted = sf.attention(q, k, v, spec, **lengths)
    token = torch.arange(q.shape[2], device=DEVICE)
    gone = (token < lengths["kv_starts"][:, None]) | (token >= lengths["kv_lens"][:, None])
    others = [x.masked_fill(gone[:, None, :, None], math.nan) for x in (q, k, v)]
    assert torch.equal(sf.attention(*others, spec, **lengths), wanted)


NO_SHARES = chosen.rules.filter(lambda rule: rule[0] != "budget" and not (rule[0] == "keep" and isinstance(rule[1], float)))


@settings(max_examples=60)
@given(
    chooser=chosen.drawn(chosen.SCORING, rule=NO_SHARES),
    tokens=st.integers(2, 400),
    gone=st.integers(1, 300),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_sequence_padded_at_its_end_attends_as_it_does_alone(chooser, tokens, gone, causal, seed):
    q, k, v = inputs(tokens, tokens, batch=1, seed=seed)
    end = max(1, tokens - gone)
    lengths = dict.fromkeys(("kv_lens", "q_lens"), torch.tensor([end], device=DEVICE))
    spec = sf.causal() & chooser if causal else chooser
    last = end if not (causal and chooser.name == "sampled") else end // chooser.block_size * chooser.block_size
    found, alone = sf.attention(q, k, v, spec, **lengths), sf.attention(*(x[:, :, :end] for x in (q, k, v)), spec)
    torch.testing.assert_close(found[:, :, :last], alone[:, :, :last])


def test_a_sequence_padded_at_its_end_chooses_by_the_queries_that_exist():
    q, k, _ = inputs(256, 256, batch=1)
    for end in (130, 150, 190):
        lens, blocks = torch.tensor([end], device=DEVICE), -(-end // 64)
        found, alone = (sf.choose_blocks("sampled(4, mass=0.5, block=64)", *call, **lengths).kept_blocks() for call, lengths in (
            ((q, k), {"kv_lens": lens, "q_lens": lens}), ((q[:, :, :end], k[:, :, :end]), {})))  # fmt: skip
        assert torch.equal(found[..., :blocks, :blocks], alone)


def test_sampled_takes_the_largest_weight_and_antidiagonal_the_mean_unless_told():
    q, k, _ = inputs()
    for chooser, reduce in (("sampled(8", "max"), ("antidiagonal(16", "mean")):
        usual, told, other = (sf.choose_blocks(f"{chooser}{more}, keep=2, block=64)", q, k).kept_blocks() for more in (
            "", f", reduce='{reduce}'", f", reduce='{'mean' if reduce == 'max' else 'max'}'"))  # fmt: skip
        assert torch.equal(usual, told) and not torch.equal(usual, other)


def test_a_padded_sequence_keeps_the_blocks_that_it_keeps_alone():
    q, k, v = inputs(64 * 6, 64 * 6, batch=2)
    starts = torch.tensor([0, 64 * 2], device=DEVICE)
    for spec in list(EVERY.values())[:4]:
        together = sf.attention(q, k, v, spec, kv_starts=starts, q_starts=starts)
        for sequence, start in enumerate(starts.tolist()):
            alone = sf.attention(*(x[sequence : sequence + 1, :, start:] for x in (q, k, v)), spec)
            if "sinks" not in spec or not start:
                torch.testing.assert_close(together[sequence : sequence + 1, :, start:], alone)


@parametrize(
    "given, compiled",
    [
        ({"kv_lens": [130, 200], "q_lens": [130, 200]}, False),
        ({"kv_starts": [70, 0], "q_starts": [70, 0]}, False),
        ({"kv_starts": [70, 3], "q_starts": [70, 3], "kv_lens": [130, 200], "q_lens": [131, 190]}, True),
    ],
    ids=["at the end", "at the start", "both, compiled"],
)
@every
def test_the_mask_of_a_padded_batch_is_the_one_that_attention_chooses(spec, given, compiled):
    q, k, v = inputs()
    lengths = {name: torch.tensor(values, device=DEVICE) for name, values in given.items()}
    choose_mask = torch.compile(sf.choose_blocks, backend="aot_eager", fullgraph=True) if compiled else sf.choose_blocks
    mask = choose_mask(spec, q, k, **lengths)
    assert torch.equal(sf.attention(q, k, v, mask, **lengths), sf.attention(q, k, v, spec, **lengths))
    other = q.clone()
    if "q_lens" in given:
        other[0, :, given["q_lens"][0] :] = 99  # of nonexistent queries
        assert torch.equal(sf.choose_blocks(spec, other, k, **lengths).to_dense(), mask.to_dense())


HEADS = ["pooled(keep=1, block=64)", "sampled(4, mass=0.5, block=64) | sinks(4)", "local(70)", "full"]


@settings(max_examples=40)
@given(
    picks=st.lists(st.sampled_from(HEADS), min_size=4, max_size=4).filter(
        lambda picks: any("(keep" in p or "mass" in p for p in picks)
    ),
    causal=st.booleans(),
    lengths=LENGTHS,
)
def test_each_head_keeps_what_its_own_expression_keeps(picks, causal, lengths):
    within = "causal & " if causal else ""
    q, k = chosen.tensors(*lengths, batch=2, heads=4, kv_heads=2)
    mask = sf.choose_blocks(f"per_head([{', '.join(f'{within}({pick})' for pick in picks)}])", q, k)
    kept = mask.kept_blocks().expand(2, 4, -1, -1)
    for head, pick in enumerate(picks):
        if "block" in pick:
            wanted = sf.choose_blocks(f"{within}({pick})", q[:, head : head + 1], k[:, head // 2 : head // 2 + 1]).kept_blocks()[
                :, 0
            ]
        else:
            wanted = blocks_of(pairs(sf.parse(f"{within}({pick})"), *lengths), 64)
            own = sf.choose_blocks(f"{within}scored(keep=1, block=64)", q, k, scores=-math.inf + random_scores(q, k, 64, 0))
            wanted = torch.from_numpy(wanted).to(DEVICE) | own.kept_blocks()[0, 0]
        assert torch.equal(kept[:, head], wanted.expand_as(kept[:, head]))


def test_heads_of_a_group_choose_once_by_the_largest_of_their_scores():
    q, k, _ = inputs(64 * 6, 64 * 6)
    text = "causal & sampled(4, keep=2, block=64, share_group={})"
    shared, apart = (sf.choose_blocks(text.format(value), q, k).kept_blocks() for value in (True, False))
    assert torch.equal(shared[:, 0], shared[:, 1]) and torch.equal(shared[:, 2], shared[:, 3])
    assert not torch.equal(apart[:, 0], apart[:, 1])
    # Also where another expression has the other group's heads.
    by_head = [text.format(True)] * 2 + ["causal & local(5)"] * 2
    assert torch.equal(sf.choose_blocks(sf.per_head(by_head), q, k).kept_blocks()[:, :2], shared[:, :2])


@dataclass(frozen=True)
class Nearest(sf.Chooser):
    """Scores fall with the distance."""

    far: bool = False

    def scores(self, q, k, grid):
        row = torch.arange(grid.q_blocks, device=q.device)[:, None]
        distance = (row - torch.arange(grid.kv_blocks, device=q.device)).abs().to(q.dtype)
        return (distance if self.far else -distance).expand(*q.shape[:2], -1, -1)


def test_a_users_own_chooser_goes_wherever_expressions_go():
    q, k, v = inputs(64 * 6, 64 * 6)
    spec = sf.causal() & (Nearest(keep=3, block=64) | sf.sinks(2))
    kept = sf.choose_blocks(spec, q, k).kept_blocks()
    block = torch.arange(6, device=DEVICE)
    distance = block[:, None] - block
    assert torch.equal(kept, ((distance >= 0) & ((distance < 2) | (block == 0))).expand_as(kept))  # a sink counts first
    assert torch.equal(sf.attention(q, k, v, spec), sf.attention(q, k, v, sf.choose_blocks(spec, q, k)))
    assert copy.deepcopy(spec) == spec
    refusal = "takes choosers that have spec text" if torch.__version__ >= "2.13" else "does not trace Pattern objects"
    with pytest.raises(Exception, match=refusal):
        compiled(spec)(q, k, v)


@parametrize(
    "scores, message",
    [
        (lambda q, k, grid: torch.zeros(grid.shape), r"must be a floating-point tensor of shape \(2, 4, 2, 2\)"),
        (lambda q, k, grid: torch.zeros(2, 4, *grid.shape, dtype=torch.int64), r"got torch.int64 of \(2, 4, 2, 2\)"),
        (lambda q, k, grid: None, "got NoneType"),
        (lambda q, k, grid: torch.zeros(2, 4, *grid.shape, device="meta"), "must be on .*; got meta"),
    ],
)
def test_wrong_scores_of_a_users_own_chooser_are_named(scores, message):
    @dataclass(frozen=True)
    class Wrong(sf.Chooser):
        def scores(self, q, k, grid):
            return scores(q, k, grid)

    with pytest.raises(ValueError, match=rf"the scores of .*Wrong\(keep=1.*{message}"):
        sf.choose_blocks(Wrong(keep=1), *inputs()[:2])


def test_a_layer_takes_an_expression_for_whole_sequences():
    torch.manual_seed(0)
    layer = sf.SparseAttention(64, 4, SPEC, kv_heads=2, rotary_base=None).to(DEVICE)
    x = torch.randn(2, 200, 64, device=DEVICE)
    q, k, v = (p(x).unflatten(2, (-1, 16)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    wanted = layer.out_proj(sf.attention(q, k, v, sf.choose_blocks(SPEC, q, k)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), wanted)
    assert "sampled(4, keep=3, block=64)" in repr(layer)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), wanted)
