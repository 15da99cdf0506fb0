"""The shadow check: silent if attention is right, loud if anything about it is wrong, and otherwise without effect."""

import copy
import io
import logging
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sparse_flash as sf
from sparse_flash import backends
from sparse_flash.api import call as api_call
from sparse_flash.dispatch import observers


@dataclass(frozen=True)
class HeadsDerived(sf.DerivedPattern):
    @property
    def expression(self):
        return sf.per_head(["causal", "local(9)", "causal & last_tokens(20)", "sinks(2)"])


MASKS = {
    "dense": None,
    "text": "causal & (local(20) | sinks(2))",
    "pattern": sf.causal() & sf.dilated(9, 3, block=1),
    "table": sf.compile_mask("causal & local(30)", 150, block_size=32),
    "heads": sf.BlockMask.per_head(["causal", "causal & local(9)"] * 2, q_len=150),
    "pattern of each head": sf.per_head(["causal"] * 3 + ["causal & local(9)"]),
    "pattern of each head in a derived one": HeadsDerived(),
    "chooser": "causal & (sampled(4, keep=1, block=64) | sinks(4))",
    "choosers of heads": sf.per_head([f"causal & pooled(keep={n}, block=64)" for n in (1, 2, 1)] + ["causal & local(9)"]),
    "block map": sf.BlockMask.from_blocks(torch.rand(2, 4, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.5, 32, 150, 150),
}


def tensors(kv_heads: int = 2, dtype=torch.float32, v_head_dim: int = 24):
    generator, shapes = torch.Generator().manual_seed(0), ((4, 16), (kv_heads, 16), (kv_heads, v_head_dim))
    return [torch.randn(2, heads, 150, dim, generator=generator).to(dtype).requires_grad_() for heads, dim in shapes]


def step(mask, *qkv, backend: str = "auto", lse: bool = True) -> None:
    out, total = sf.attention(*qkv, mask, return_lse=True, backend=backend)
    (out.square().sum() + (total.nan_to_num(0, 0, 0).sum() if lse else 0)).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_right_results_and_gradients_pass_and_are_reported(name, dtype):
    checked = sf.check(step, every=1, rows=6)
    checked(MASKS[name], *tensors(dtype=dtype))
    forward, backward = checked.reports
    assert set(forward.errors) == {"out", "lse"} and set(backward.errors) == {"dq", "dk", "dv"}
    assert forward.call == backward.call == 1 and forward.shape == (2, 4, 150, 16)
    assert not observers.observers


TERMS = {
    "dropout": {"dropout_p": 0.3},
    "soft cap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "relative bias": {"rel_bias": torch.linspace(-1, 1, 4 * 21).view(4, 21).requires_grad_()},
    "own function": {"score_mod": sf.ScoreFunction(lambda score, batch, head, q_pos, k_pos, params: score.sin() * params[0])},
    "lengths": {name: torch.tensor(pair) for name, pair in (("kv_lens", (150, 97)), ("q_starts", (20, 0)), ("kv_starts", (3, 0)))},
    "sinks": {"sinks": torch.ones(4)},
}
TERMS["own function"]["score_params"] = (torch.tensor([1.5]),)
TERMS["all"] = {name: value for variant in TERMS.values() for name, value in variant.items()}


@pytest.mark.parametrize("mask", ["text", "heads", "chooser"])
@pytest.mark.parametrize("name", TERMS)
def test_terms_are_computed_again_as_well(name, mask):
    def run(*qkv):
        out, total = sf.attention(*qkv, MASKS[mask], **TERMS[name], return_lse=True)
        (out.square().sum() + total.nan_to_num(0, 0, 0).sum()).backward()

    checked = sf.check(run, every=1, rows=8)
    qkv = tensors(dtype=torch.float64)
    if "kv_lens" in TERMS[name]:
        qkv[1].data[1, :, 97:] = qkv[2].data[1, :, 97:] = float("nan")  # tokens that do not exist are never used
    checked(*qkv)
    forward, backward = checked.reports
    assert set(forward.errors) == {"out", "lse"} and set(backward.errors) == {"dq", "dk", "dv"}
    assert max(forward.worst, backward.worst) < 1e-6


@pytest.mark.parametrize("name", [name for name in TERMS if name != "sinks"])
def test_a_back_end_that_forgets_terms_is_found(name, monkeypatch):
    right = backends.get_backend("torch")
    wrong = SimpleNamespace(supports=right.supports, forward=lambda *call: right.forward(*call[:-1], None))
    monkeypatch.setitem(backends._MODULES, "torch", wrong)
    with pytest.raises(sf.CheckError, match=r"call 1.*out \d"), torch.no_grad():
        sf.check(sf.attention, every=1, rows=16)(*tensors(), "causal", **TERMS[name], backend="torch")


@pytest.mark.parametrize("place, name", list(enumerate(["out", "lse", "dq", "dk", "dv"])))
def test_a_wrong_result_raises_and_is_named_with_its_error(place, name, monkeypatch):
    right = backends.get_backend("torch")

    def off(results, first: int):
        return tuple(r + 0.3 * r.abs().max() if first + n == place else r for n, r in enumerate(results))

    wrong = SimpleNamespace(
        supports=right.supports,
        forward=lambda *args: off(right.forward(*args), 0),
        backward=lambda *args: off(right.backward(*args), 2),
    )
    monkeypatch.setitem(backends._MODULES, "torch", wrong)
    with pytest.raises(sf.CheckError, match=rf"\b{name} \d\.\d+[, ]"):
        sf.check(step, every=1)("causal", *tensors(), backend="torch", lse=False)
    assert not observers.observers


def test_a_table_that_is_not_its_patterns_is_found(monkeypatch):
    wrong = sf.compile_mask("causal & local(25)", 150)
    monkeypatch.setattr(api_call, "_table_or_text", lambda *args: wrong)
    with pytest.raises(sf.CheckError, match=r"\bout \d\.\d+"):
        sf.check(step, every=1)("causal & local(20)", *tensors())


@dataclass(frozen=True)
class EveryOtherFar(sf.RunPattern):
    ordered_runs = True  # they are not

    def row_runs(self, q):
        return np.where(q % 2 == 0, q - 5, 0)[..., None], q[..., None] + 1


@dataclass(frozen=True)
class UnitsBefore(sf.UnitPattern):
    block: int = 16

    def unit_rule(self, i, j):
        return i >= j

    def unit_pairs(self, first, stop, cols):
        return np.arange(first, stop), np.arange(first, stop)  # not all


@dataclass(frozen=True)
class Moody(sf.Pattern):
    def token_rule(self, q, kv):
        return np.random.default_rng().random(np.broadcast_shapes(q.shape, kv.shape)) < 0.5


@pytest.mark.parametrize("pattern", [EveryOtherFar(), UnitsBefore(), Moody()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("by_head", [False, True])
def test_a_pattern_whose_rules_contradict_each_other_is_told_so_by_name(pattern, by_head):
    mask = sf.per_head(["full", "full", pattern, "full"]) if by_head else sf.causal() & pattern
    with pytest.raises(sf.CheckError, match=rf"the table of .*{type(pattern).__name__}.* differs from its token rule at \w+ \d+: "):
        sf.check(step, every=1, rows=32)(mask, *tensors())


def test_every_so_many_calls_of_a_module_are_looked_at_until_it_is_removed():
    layer = sf.SparseAttention(32, 4, "causal & local(20)")
    x = torch.randn(1, 60, 32)
    checked = sf.check(layer, every=3)
    for _ in range(7):
        layer(x).sum().backward()
    assert [r.call for r in checked.reports] == [1, 1, 4, 4, 7, 7]
    checked.remove()
    layer(x)
    assert checked.calls == 7 and not observers.observers


def test_a_layer_with_a_chooser_is_checked_over_the_blocks_that_it_chose(monkeypatch):
    layer = sf.SparseAttention(32, 4, MASKS["chooser"])
    x = torch.randn(1, 200, 32)
    checked = sf.check(layer, every=1, rows=16)
    layer(x).sum().backward()
    assert len(checked.reports) == 2
    other = sf.compile_mask("causal", 200, block_size=64)
    monkeypatch.setattr(api_call.BlockMask, "kernel_table", lambda *args: other)  # which keeps more
    with pytest.raises(sf.CheckError, match=r"\bout \d\.\d+"):
        layer(x)


def test_a_module_that_is_checked_is_saved_and_copied_and_its_copies_are_not_checked():
    layer, x = sf.SparseAttention(32, 4, "causal & local(20)"), torch.randn(1, 60, 32)
    checked = sf.check(layer, every=1)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)
    for one in copies:
        assert torch.equal(one(x), one(x))
    assert checked.calls == 0
    layer(x)
    assert checked.calls == 1 and len(checked.reports) == 1


def test_errors_are_logged(caplog):
    with caplog.at_level(logging.INFO, "sparse_flash.check"):
        sf.check(step, every=1)("causal", *tensors())
    assert [r.message.partition(":")[0] for r in caplog.records] == ["call 1, q (2, 4, 150, 16)"] * 2


def test_a_check_changes_no_result():
    results = []
    for run in (step, sf.check(step, every=1)):
        qkv = tensors()
        run(MASKS["text"], *qkv)
        results.append([t.grad for t in qkv])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_one_tensor_used_twice_is_checked_by_each_use():
    q, k, v = tensors(kv_heads=4, v_head_dim=16)

    def twice():
        (sf.attention(q, k, v, "causal") + sf.attention(q, k, q, "causal & local(20)")).square().sum().backward()

    checked = sf.check(twice, every=1)
    checked()
    assert len(checked.reports) == 4


def test_a_failing_call_leaves_nobody_looking_on():
    def fails():
        raise KeyError("of its own")

    with pytest.raises(KeyError, match="of its own"):
        sf.check(fails, every=1)()
    layer = torch.nn.Linear(3, 3)
    sf.check(layer, every=1)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(2, 5))
    assert not observers.observers


@pytest.mark.parametrize(
    "name, wanted", [("every", "an integer of at least 1"), ("rows", "an integer of at least 1"), ("bound", "a positive number")]
)
@pytest.mark.parametrize("value", [0, "a"])
def test_arguments_that_mean_nothing_are_refused(name, wanted, value):
    with pytest.raises(ValueError, match=f"{name} must be {wanted}; got {value!r}"):
        sf.check(step, **{name: value})
    with pytest.raises(TypeError, match="got int"):
        sf.check(3)


@pytest.mark.parametrize("name", ["table", "heads", "block map"])
def test_the_keys_of_a_query_and_the_queries_of_a_key_are_those_of_the_whole_mask(name):
    mask = MASKS[name]
    dense = mask.to_dense()
    dense = dense if dense.dim() == 4 else dense[None, None]
    for b in range(dense.shape[0]):
        for h in range(dense.shape[1]):
            for token in (0, 31, 32, 77, 149):
                assert torch.equal(mask.kept_keys(token, b, h), dense[b, h, token])
                assert torch.equal(mask.kept_queries(token, b, h), dense[b, h, :, token])
    with pytest.raises(IndexError, match="0 to 149"):
        mask.kept_keys(150)
