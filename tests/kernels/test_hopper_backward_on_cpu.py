"""Hopper's backward kernels, run on a CPU as in ``test_hopper_on_cpu``: those in which two warp groups have roles of their own, for
head_dim 65 to 256, and values narrower than keys. Out and lse are the reference's, so nothing here depends on a forward kernel."""

import fuzz_calls
import pytest
import torch
from oracle import heavy_rows_split

import sparse_flash as sf
from sparse_flash.backends import hopper, reference
from sparse_flash.backends import triton as triton_backend
from sparse_flash.variant.definition import find_existing_tokens
from sparse_flash.variant.variant import LENGTHS, Variant, build_variant

pytest.importorskip("triton.experimental.gluon")
import gluon_on_cpu as emulated

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernels run on this GPU"),
    pytest.mark.usefixtures("poison"),
]

NARROWER = (192, 128), (256, 72)
TO_128 = (128, 128), (96, 96)


def inputs(head_dim, v_head_dim, q_len, kv_len, heads=2, kv_heads=1, batch=1):
    """q, k, v and dout, with query heads that share keys by default, and dlse."""
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, v_head_dim), (heads, q_len, v_head_dim)
    tensors = [torch.randn((batch, *size), generator=generator).half() for size in sizes]
    return *tensors, torch.randn((batch, heads, q_len), generator=generator)


def wrong(tensors, mask, deterministic=False, seed=0, **terms):
    """Returns the errors of dq, dk and dv that are too large. Tokens that do not exist hold NaN."""
    q, k, v, dout, dlse = tensors
    scale = q.shape[3] ** -0.5
    torch.manual_seed(seed)  # of dropout
    variant = build_variant(q, k, **terms)
    exact = [t.double() for t in (q, k, v)]
    wanted = reference.backward(dout.double(), dlse.double(), *exact, None, None, mask, scale, True, variant)
    out, lse = reference.forward(q, k, v, mask, scale, False, variant)
    bounds = Variant(**{name: terms[name] for name in LENGTHS if name in terms})
    for tensor, side in zip((q, k, v, dout), ("q", "kv", "kv", "q"), strict=True):
        places = torch.arange(tensor.shape[0])[:, None], torch.arange(tensor.shape[2])[None]
        exist = find_existing_tokens(getattr(bounds, f"{side}_starts"), getattr(bounds, f"{side}_lens"), *places)
        if exist is not None:
            tensor.masked_fill_(~exist[:, None, :, None], float("nan"))
    with emulated.gluon_on_cpu(seed):
        found = hopper.backward(dout, dlse, q, k, v, out, lse, mask, scale, deterministic, variant)
    errors = {}
    for name, one, other in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        error = (one.double() - other).abs().max()
        if not error <= 4e-3 * max(1.0, other.abs().max()):
            errors[name] = float(error)
    return errors


@pytest.fixture(autouse=True)
def nothing_is_left_to_the_portable_kernels(monkeypatch):
    monkeypatch.setattr(triton_backend, "backward", None)


# Sums are repeatable, and heads share keys, under half of the masks for each head_dim, and in half of the head_dims for each mask.
# A kernel of its own has each mask, and the same kernel with columns that are not used has two.
HEAD_DIMS = enumerate([(256, 256), (192, 192), *NARROWER, *TO_128])
CALLS = [(*dims, name, (i + j) % 2 == 1) for i, dims in HEAD_DIMS for j, name in enumerate(emulated.MASKS)]
CALLS = [one for one in CALLS if one[:2] in ((256, 256), (192, 128), (128, 128)) or one[2] in ("causal", "bits")]


@pytest.mark.parametrize("head_dim, v_head_dim, name, deterministic", CALLS)
def test_gradients_are_right(head_dim, v_head_dim, name, deterministic):
    spec, q_len, kv_len, block_size = emulated.MASKS[name]
    mask = spec and sf.compile_mask(spec, q_len, kv_len, block_size)
    tensors = inputs(head_dim, v_head_dim, q_len, kv_len, kv_heads=1 if deterministic else 2)
    assert wrong(tensors, mask, deterministic, seed=len(name)) == {}


@pytest.mark.parametrize("head_dim", (136, 200))
def test_head_dims_between_are_padded(head_dim):
    assert wrong(inputs(head_dim, head_dim, 150, 150), sf.compile_mask("causal", 150, 150, 128)) == {}


@pytest.mark.parametrize("head_dim, v_head_dim, kv_heads", [(256, 256, 1), (192, 128, 2), (256, 72, 1), (128, 128, 2), (96, 96, 1)])
def test_splits_of_heavy_columns_are_combined(head_dim, v_head_dim, kv_heads):
    with heavy_rows_split():
        mask = sf.compile_mask("causal | sinks(130)", 512, 512, 128)
    assert mask.by_key.is_split
    assert wrong(inputs(head_dim, v_head_dim, 512, 512, kv_heads=kv_heads), mask) == {}


OWN = {"score_mod": fuzz_calls.OWN, "score_params": (torch.tensor([[0.1, -0.05], [0.0, 0.08]]), torch.tensor([2]).int())}
SCORES = {"softcap": 0.7, "alibi_slopes": torch.tensor([0.3, 0.05]), "rel_bias": torch.linspace(-2, 2, 82).view(2, 41)}
OF_LENGTHS = {"kv_starts": torch.tensor([10, 164]), "kv_lens": torch.tensor([20, 275])}
OF_LENGTHS |= {"q_starts": torch.tensor([9, 0]), "q_lens": torch.tensor([240, 0])}
TERMS = {
    "softcap": {"softcap": 0.7},
    "lengths": OF_LENGTHS,
    "dropout": {"dropout_p": 0.25},
    "all": SCORES | OWN | OF_LENGTHS,
    "all, dropout": SCORES | OWN | OF_LENGTHS | {"dropout_p": 0.25},
}


@pytest.mark.parametrize(
    "name, under", [*((name, "bits") for name in TERMS), ("all", "dense, ragged"), ("all, dropout", "blocks of 64")]
)
def test_terms_are_as_they_are_defined_in_wide_heads(name, under):
    spec, q_len, kv_len, block_size = emulated.MASKS[under]
    mask = spec and sf.compile_mask(spec, q_len, kv_len, block_size)
    head_dim, v_head_dim = (192, 128) if name == "all" else (256, 256)
    assert wrong(inputs(head_dim, v_head_dim, q_len, kv_len, batch=2), mask, seed=len(name), **TERMS[name]) == {}
