"""Every entry point in every mode in which PyTorch runs code: a new mode is one test here, over all of ``calls.ENTRIES``."""

from dataclasses import replace

import pytest
import torch
from calls import ENTRIES, Call, Sizes, assert_right, replayed
from oracle import DEVICE, LAYOUTS, Watching
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.checkpoint import checkpoint

import sparse_flash as sf

every_entry = pytest.mark.parametrize("entry", ENTRIES)
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
SIZES = Sizes(v_head_dim=24) if DEVICE == "cpu" else Sizes(dtype=torch.float16, head_dim=64, v_head_dim=64)
# Beside the usual terms, what runs draw or compile functions for.
TERMS = (*SIZES.terms, "dropout", "own")
DECODE = " ".join(entry for entry in ENTRIES if entry.startswith("decode"))
SELECTIONS = " ".join(entry for entry in ENTRIES if "selection" in entry)
# Modes that some calls do not have: the modes, the calls, and why.
LACKS = (
    ("lengths exported", "model", "its compilation takes half a minute, and its weights are those of a seed"),
    ("lengths exported", "attention_under_a_table context_parallel", "tables are of one length"),
    ("lengths exported", "varlen_selection", "choices among packed documents are exported for one length"),
    ("compiled lengths exported fake graph", "block_sparse_call", "it reads lengths and head types on the host"),
    ("fake", "model", "Transformers reads numbers of its attention mask"),
    ("autocast", DECODE, "it takes tensors as they are"),
    ("no-q_len no-kv_len", "attention_under_a_table context_parallel blocks topk", "tables are of one token at least"),
    ("no-q_len no-kv_len", SELECTIONS, "picks are of one token at least"),
    ("no-kv_len", "choose decode_in_pages", "there is nothing to choose or no page"),
    ("no-batch", "blocks block_sparse_call model", "a batch has one entry at least"),
    (
        "vmap jvp forward traced",
        " ".join(entry for entry in ENTRIES if entry.startswith("decode_selection")),
        "on a CPU it is made of PyTorch's operations, which vmap takes",
    ),
    ("no-q_len", "model", "Transformers reads the last position"),
    ("graph", "model", "Transformers and the layer look for packed sequences in position_ids, on the host"),
    ("traced", "selection selection_masses blocks", "torch.jit makes tensors of lengths, which are refused first"),
    ("traced", "layer model", "torch.jit refuses their parameters"),
    (
        "meta",
        "attention_under_a_table attention_with_terms context_parallel block_sparse_call model",
        "tables and terms lie on a device, or values are read",
    ),
)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def make(entry: str, mode: str = "", **sizes) -> Call:
    for modes, entries, reason in LACKS:
        if {*mode.split()} & {*modes.split()} and entry in entries.split():
            pytest.skip(reason)
    return ENTRIES[entry](replace(SIZES, **sizes))


def assert_same(ours, wanted) -> None:
    """Bit for bit on a CPU. On a GPU some gradients are summed in any order, and calls without gradients run other kernels."""
    close = {"rtol": 0, "atol": 0} if DEVICE == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    for mine, right in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, right, **close)


@every_entry
def test_compiled_code_gives_what_eager_code_gives_in_one_graph(entry):
    call, counter = make(entry, "compiled", terms=TERMS), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call.run, fullgraph=True, backend=counter)
    again = replace(call, inputs=tuple(t.flip(0) * 0.5 for t in call.inputs))
    with torch.device(DEVICE):  # within which PyTorch cannot trace all of its functions
        assert_same(call.outcome(compiled), call.outcome())
        assert_same(again.outcome(compiled), again.outcome())
    assert counter.frame_count == 1


# What compiles anew for each length: a graph holds the table of one capacity of a cache, and of one number of blocks.
ANEW = ("varlen", "varlen_in_place", "decode", "decode_in_pages", "decode_in_eight_bits", "topk", "selection", "blocks")
# What is exported for one length, also because picks of symbolic lengths are refused.
OF_ONE_LENGTH = (*ANEW, "selection_masses", *(entry for entry in ENTRIES if entry.startswith("decode_selection")))


def of_length(entry: str, mode: str, tokens: int, seed: int = 0) -> Call:
    return make(entry, mode, q_len=tokens, kv_len=tokens, terms=(), seed=seed)


@every_entry
def test_compiled_code_takes_new_lengths_in_one_more_graph(entry):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(of_length(entry, "lengths", 70).run, fullgraph=True, backend=counter)
    for tokens in (150,) if entry in ANEW else (150, 333):
        call = of_length(entry, "lengths", tokens)
        assert_same(call.outcome(compiled), call.outcome())
    assert counter.frame_count <= 2


class Program(torch.nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, *tensors):
        return self.run(*tensors)


@every_entry
def test_exported_programs_hold_operators_and_take_new_values_and_lengths(entry):
    lengths = (70, 70) if entry in OF_ONE_LENGTH else (200, 33)
    call, *others = (of_length(entry, "exported", *of) for of in ((70, 0), *zip(lengths, (12, 24), strict=True)))
    tensors, other = ((*each.inputs, *each.others) for each in (call, others[0]))
    dynamic = [{d: torch.export.Dim.AUTO for d in range(t.dim()) if t.shape[d] != o.shape[d]} for t, o in zip(tensors, other)]
    program = torch.export.export(Program(call.run), tensors, dynamic_shapes=(tuple(dynamic),))
    assert any("sparse_flash." in str(node.target) for node in program.graph.nodes)
    for each in (call, *others):
        assert_same(program.module()(*each.inputs, *each.others), each())


CHECKED: set[tuple] = set()  # operators, with the kinds of their arguments


def kind_of(argument):
    return (argument.dtype, argument.dim()) if isinstance(argument, torch.Tensor) else type(argument)


@every_entry
def test_operators_pass_opcheck(entry):
    calls = {}

    def see(function, args, results):
        if function.namespace == "sparse_flash":
            # Backward passes are not differentiable again.
            args = tree_map_only(torch.Tensor, torch.Tensor.detach, args) if "backward" in str(function) else args
            calls.setdefault(function, args)

    with Watching(see):
        make(entry).outcome()
    assert calls
    for operator, args in calls.items():
        kinds = operator, str(tree_map(kind_of, args))
        if kinds in CHECKED:
            continue
        CHECKED.add(kinds)
        checks = ["test_autograd_registration", "test_faketensor"]
        if DEVICE == "cpu":  # on a GPU, the unused part of a table holds arbitrary values
            checks.append("test_aot_dispatch_dynamic")
        if not any(isinstance(t, torch.Tensor) and t.dtype == torch.float8_e4m3fn for t in args):  # which it multiplies
            checks.append("test_schema")
        torch.library.opcheck(operator, args, test_utils=checks)


@every_entry
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(entry, layout):
    call, mode = make(entry, "fake", layout=layout), FakeTensorMode(allow_non_fake_inputs=True)
    fake = replace(call, inputs=tuple(map(mode.from_tensor, call.inputs)), others=tuple(map(mode.from_tensor, call.others)))
    sf.clear_caches()  # so that tables would be made of fake tensors
    with mode:
        told = fake.outcome()
    for mine, right in zip(told, call.outcome(), strict=True):
        assert (mine.shape, mine.stride(), mine.dtype, mine.device) == (right.shape, right.stride(), right.dtype, right.device)


@every_entry
@needs_gpu
def test_a_graph_replays_with_new_values_and_lengths_and_no_call_waits_for_the_gpu(entry):
    of_many = {"q_len": 1024, "kv_len": 1024}  # keys that several programs share
    lens = (700, 9) if "decode" in entry else (300, 5, 0, 700)
    call, other = (make(entry, "graph", **of_many, **changed) for changed in ({}, {"seed": 12, "lens": lens}))

    def change():
        for mine, new in zip((*call.inputs, *call.others), (*other.inputs, *other.others), strict=True):
            mine.copy_(new)

    with torch.no_grad():
        assert_same(replayed(call, change), call())


@every_entry
def test_autocast_casts_as_for_pytorchs_attention(entry):
    call = make(entry, "autocast", dtype=torch.float32)
    mixed = tuple(t.bfloat16() if number == 1 else t for number, t in enumerate(call.inputs))
    with torch.autocast(DEVICE, torch.bfloat16):
        ours = call()[0]
        if entry != "block_sparse_call":  # which refuses unlike dtypes
            assert_same(replace(call, inputs=mixed)()[:1], [ours])
        assert all(t.dtype == of.dtype for t, of in zip(call.outcome()[-len(call.inputs) :], call.inputs, strict=True))
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), call()[0], rtol=0.1, atol=0.1)


@every_entry
def test_only_the_inputs_that_ask_get_gradients(entry):
    call = make(entry)
    for asks in range(len(call.inputs)) if call.differentiable else ():
        leaves = [t.detach().requires_grad_(number == asks) for number, t in enumerate(call.inputs)]
        call.run(*leaves, *call.others)[0].sum().backward()
        assert [t.grad is not None for t in leaves] == [t.requires_grad for t in leaves]
    with torch.no_grad():
        assert not any(t.requires_grad for t in call())


@every_entry
@pytest.mark.parametrize("missing", ["batch", "q_len", "kv_len"])
def test_empty_tensors_have_empty_results_and_gradients_of_zero(entry, missing):
    assert_right(make(entry, f"no-{missing}", **{missing: 0}), "auto")


def forward_mode(function, *tensors):
    with torch.autograd.forward_ad.dual_level():
        return function(*(torch.autograd.forward_ad.make_dual(t, t) for t in tensors))


TRANSFORMS = {
    "vmap": lambda function, *tensors: torch.vmap(function)(*(t[None] for t in tensors)),
    "grad": lambda function, *tensors: torch.func.grad(lambda *t: function(*t).sum())(*tensors),
    "jvp": lambda function, *tensors: torch.func.jvp(function, tensors, tensors),
    "forward": forward_mode,
}


@every_entry
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_functions_are_refused(entry, transform):
    call = make(entry, transform)
    with pytest.raises(Exception, match=r"vmap|torch\.func|transform|reverse-mode autograd|gives no gradients"):
        TRANSFORMS[transform](lambda *t: call.run(*t, *call.others)[0], *call.inputs)


@every_entry
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_tracing_by_torch_jit_names_what_traces_instead(entry):
    call = make(entry, "traced")
    with pytest.raises(NotImplementedError, match=r"torch.jit.trace turns into constants; use torch.export.export"):
        torch.jit.trace(call.run, (*call.inputs, *call.others))


@every_entry
def test_batches_of_gradients_are_refused(entry):
    call = make(entry, "batched", terms=TERMS)
    leaves = [t.detach().requires_grad_(call.differentiable) for t in call.inputs]
    for result in call.run(*leaves, *call.others) if call.differentiable else ():
        gradients = torch.ones(3, *result.shape, device=DEVICE, dtype=result.dtype)
        with pytest.raises(NotImplementedError, match=r"not under .*is_grads_batched=True.*; .*loop over the gradients"):
            torch.autograd.grad(result, leaves[0], gradients, is_grads_batched=True, retain_graph=True)


@every_entry
def test_meta_tensors_have_the_shapes_of_real_ones(entry):
    call = make(entry, "meta")
    meta = replace(call, inputs=tuple(t.to("meta") for t in call.inputs), others=tuple(t.to("meta") for t in call.others))
    for mine, right in zip(meta.outcome(), call.outcome(), strict=True):
        assert (mine.shape, mine.dtype, mine.device.type) == (right.shape, right.dtype, "meta")


@every_entry
def test_inference_mode_changes_no_result(entry):
    call = make(entry)
    sf.clear_caches()
    with torch.inference_mode():
        inside = call()
    assert_same(inside, call.outcome()[: len(inside)])  # with tables that were made within


@every_entry
def test_activation_checkpointing_changes_no_gradient(entry):
    call = make(entry, terms=TERMS)
    if call.differentiable:
        assert_same(call.outcome(lambda *t: checkpoint(call.run, *t, use_reentrant=False)), call.outcome())


@every_entry
def test_inputs_stay_as_they_are(entry):
    call = make(entry)
    before = [(t.clone(), t._version) for t in (*call.inputs, *call.others)]
    call.outcome()
    for t, (numbers, version) in zip((*call.inputs, *call.others), before, strict=True):
        assert torch.equal(t, numbers) and t._version == version


@every_entry
def test_second_derivatives_raise_though_the_gradient_that_arrives_is_constant(entry):
    call = make(entry)
    if not call.differentiable:
        return
    leaves = [t.detach().requires_grad_() for t in call.inputs]
    result = call.run(*leaves, *call.others)[0].sum()
    # Not by sinks, nor by weights of projections, which attention's gradients do not depend on alone.
    through_attention = leaves[:1] if entry in ("layer", "model") else leaves[:4]
    close = {} if DEVICE == "cpu" else {"atol": 1e-3, "rtol": 1e-3}  # where gradients are summed in any order
    for leaf in through_attention:
        (gradient,) = torch.autograd.grad(result, leaf, create_graph=True)
        torch.testing.assert_close(gradient, *torch.autograd.grad(result, leaf, retain_graph=True), **close)
        for other in through_attention:
            with pytest.raises(RuntimeError, match=r"differentiable once|not currently support double backward"):
                torch.autograd.grad(gradient.sum(), other, allow_unused=True, retain_graph=True)
