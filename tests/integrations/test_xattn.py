"""``integrations.xattn`` against the definition of the choice, in float64, and against which blocks that package keeps."""

import inspect
import math
from unittest import mock

import pytest
import torch
from accepted import DEVICE

import sparse_flash as sf
from sparse_flash.integrations import xattn
from sparse_flash.integrations.xattn import Xattention_prefill

# Kernels have no float64, which the definition is computed in.
DTYPE, TOLERANCE = (torch.float64, 1e-9) if DEVICE == "cpu" else (torch.float16, 4e-3)
# Blocks this near to the threshold may be kept or not: weights by kernels are off by up to 0.27 % (kernels/choosers/log_sums.py).
NEAR = 1e-9 if DEVICE == "cpu" else 6e-3
HEADS = 4


def tensors(q_len, kv_len, kv_heads=HEADS, dim=16, batch=2):
    torch.manual_seed(q_len + kv_len)
    shapes = (HEADS, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
    return [(2 * torch.randn(batch, *shape, dim)).to(DEVICE, DTYPE).requires_grad_() for shape in shapes]


def squares(x, stride):
    """(batch, heads, squares, stride, dim), zeros past the end."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % stride)).unflatten(2, (-1, stride))


def shares(q, k, stride, norm, block, causal):
    """(batch, heads, q_blocks, kv_blocks): the weight of each block of keys, as a sum over a row's squares."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    ends = torch.arange(stride, q.shape[2] + stride, stride).clamp(max=q.shape[2]) + k.shape[2] - q.shape[2]
    # Token a of a square of keys meets token stride - 1 - a of a square of queries: they are on one antidiagonal.
    logits = torch.einsum("bhqad,bhkad->bhqk", squares(q, stride).flip(3), squares(k, stride))
    logits = logits / (stride * norm * math.sqrt(q.shape[3]))
    if causal:
        seen = (torch.arange(logits.shape[3]) + 1) * stride <= ends[:, None]
        seen |= ends[:, None] == k.shape[2]
        logits = logits.masked_fill(~seen, -math.inf)
    weights = logits.softmax(-1).nan_to_num()
    of_block = block // stride
    return torch.stack(
        [torch.stack([cols.sum((2, 3)) for cols in rows.split(of_block, 3)], 2) for rows in weights.split(of_block, 2)], 2
    )


def with_mass(scores, mass, first):
    """The fewest blocks that have the mass, after ``first``, which count already."""
    rest = scores.masked_fill(first, -1)
    values, order = rest.sort(dim=-1, descending=True, stable=True)
    before = (values.clamp(min=0).cumsum(-1) - values.clamp(min=0)) + (scores * first).sum(-1, keepdim=True)
    return first | torch.zeros_like(first).scatter(-1, order, before < mass * scores.sum(-1, keepdim=True))


def above(scores, margin):
    """The sum of the scores of a row that exceed each score by more than this part of it."""
    return ((scores[..., None, :] > scores[..., None] * (1 + margin)) * scores[..., None, :]).sum(-1)


CASES = {
    "the defaults": ((1024, 1024), {"stride": 16}),
    "cut blocks": ((500, 500), {"stride": 8, "threshold": 0.5}),
    "shared keys and earlier keys": ((256, 640), {"stride": 32, "threshold": 0.3, "kv_heads": 2}),
    "norm": ((512, 512), {"stride": 16, "threshold": 0.4, "norm": 0.25}),
    "blocks of 64": ((400, 400), {"stride": 64, "threshold": 0.4, "block_size": 64}),
    "not causal": ((512, 512), {"stride": 16, "threshold": 0.3, "causal": False}),
    "not causal, with the first block": ((512, 512), {"stride": 16, "threshold": 0.3, "causal": False, "keep_sink": True}),
    "without effect": ((1000, 1000), {"stride": 16, "use_triton": False, "chunk_size": 99, "keep_recent": True, "keep_sink": True}),
    "a share for each head": ((512, 512), {"stride": 16, "threshold": torch.tensor([0.2, 0.5, 0.5, 0.9])}),
}


@pytest.mark.parametrize("lengths, options", CASES.values(), ids=CASES)
def test_the_call_is_the_definition(lengths, options):
    options = dict(options)
    mine = tensors(*lengths, options.pop("kv_heads", HEADS))
    q, k, v = (x.detach().cpu().double().requires_grad_() for x in mine)
    block, causal = options.get("block_size", 128), options.get("causal", True)
    with torch.no_grad():
        scores = shares(q, k, options["stride"], options.get("norm", 1), block, causal)
        scores /= scores.sum(-1, keepdim=True)
    offset = lengths[1] - lengths[0]
    row = (torch.arange(scores.shape[2]) * block + offset)[:, None] // block
    col = torch.arange(scores.shape[3])
    forced = (col == row) | ((col == 0) & (causal or options.get("keep_sink", False)))
    mass = torch.as_tensor(options.get("threshold", 0.8)).double().reshape(-1, 1, 1)
    possible = ((col <= row) | (not causal)).expand_as(scores)
    # A block is kept if the larger ones lack the mass.
    surely = (above(scores, -NEAR) - scores < mass - NEAR) | forced
    perhaps = (above(scores, NEAR) < mass + NEAR) | forced
    assert (perhaps & ~surely & possible).sum() < 0.1 * possible.sum()

    with mock.patch.object(xattn, "attention", wraps=xattn.attention) as attention:
        out = Xattention_prefill(*mine, **options)
    chosen = attention.call_args.args[3].kept_blocks().cpu()
    assert not (surely & possible & ~chosen).any() and not (chosen & ~(perhaps & possible)).any()
    assert chosen.sum() < possible.sum()
    i, j = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    kept = chosen[:, :, i // block, j // block] & ((j <= i + offset) | (not causal))
    wide_k, wide_v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    logits = (q @ wide_k.mT / math.sqrt(q.shape[3])).masked_fill(~kept, -math.inf)
    right = logits.softmax(-1) @ wide_v
    assert out.dtype == DTYPE
    torch.testing.assert_close(out.double().cpu(), right, atol=TOLERANCE, rtol=TOLERANCE)
    wanted = torch.autograd.grad(right.sum(), (q, k, v))
    for ours, theirs in zip(torch.autograd.grad(out.sum(), mine), wanted, strict=True):
        torch.testing.assert_close(ours.double().cpu(), theirs, atol=10 * TOLERANCE, rtol=10 * TOLERANCE)


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8, 0.95])
def test_the_blocks_that_the_package_keeps_are_kept(threshold):
    q, k, _ = (x.detach() for x in tensors(1024, 1024))
    mask = sf.choose_blocks(f"causal & (antidiagonal(16, mass={threshold}) | sinks(128))", q, k)
    scores = shares(q.cpu().double(), k.cpu().double(), 16, 1, 128, True)
    col = torch.arange(8)
    theirs = with_mass(scores, threshold - NEAR, ((col == 0) | (col == col[:, None])).expand(scores.shape))
    assert not (theirs.tril() & ~mask.kept_blocks().cpu()).any()


@pytest.mark.parametrize(
    "changed, error",
    [
        ({"kdb": 2}, "kdb must be 1, .* got 2; raise stride"),
        ({"norm": 0}, "norm must be above 0; got 0"),
        ({"stride": 24}, "stride must divide blocks of 64"),
        ({"block_size": 32}, "block must be one of 64, 128; got 32"),
        ({"threshold": torch.ones(3)}, r"threshold must be a number, or a tensor of one for each of the 4 heads; .* \(3,\)"),
        ({"threshold": 1.5}, "mass must be"),
        ({"query_states": torch.zeros(4, 8, 16)}, "query_states must have shape"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused(changed, error):
    names = "query_states", "key_states", "value_states"
    with pytest.raises(ValueError, match=error):
        Xattention_prefill(**dict(zip(names, tensors(64, 64), strict=True)) | {"stride": 16} | changed)


def test_arguments_have_that_packages_names_and_order():
    names = "query_states key_states value_states stride norm threshold block_size use_triton causal kdb chunk_size keep_sink"
    parameters = inspect.signature(Xattention_prefill).parameters
    assert [*parameters] == [*names.split(), "keep_recent", "backend"]
    defaults = [p.default for name, p in parameters.items() if p.default is not p.empty and name != "backend"]
    assert defaults == [1, 0.8, 128, True, True, 1, None, False, False]
