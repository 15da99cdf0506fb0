"""Documents packed one after another choose, attend and learn as each would alone."""

import pytest
import torch
from accepted import needs_triton
from oracle import DEVICE, tensor

import sparse_flash as sf

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize
BLOCK, KEEP = 16, 3


def packed(lengths, after=0, heads=4):
    """(q, k, v), cu_seqlens. after: tokens of no document."""
    tokens, generator = sum(lengths) + after, torch.Generator().manual_seed(len(lengths))
    made = [tensor((1, h, tokens, 8), generator=generator)[0].transpose(0, 1).contiguous() for h in (heads, 2, 2)]
    return made, torch.tensor([0, *lengths], device=DEVICE).cumsum(0)


@parametrize("share_group", [False, True])
@parametrize("score", ["mean", "max"])
def test_masses_of_picked_blocks_equal_those_of_separate_documents(score, share_group):
    lengths, options = [50, 1, 0, 70], {"block_size": BLOCK, "score": score, "share_group": share_group, "always": "sinks(3)"}
    inputs, ends = packed(lengths, after=7)
    q, k, v = (t.requires_grad_() for t in inputs)
    chosen = sf.topk_blocks(q, k, KEEP, cu_seqlens_q=ends, **options)
    masses = sf.attention_varlen(q, k, v, ends, mask=chosen, return_block_lse=True)[1]
    assert masses[:, sum(lengths) :].isneginf().all()
    for start, length in zip(ends.tolist(), lengths, strict=False):
        if length:
            one = [t[start : start + length].transpose(0, 1)[None] for t in (q, k, v)]
            alone = sf.attention(*one, sf.topk_blocks(*one[:2], KEEP, every=1, **options), return_block_lse=True)[1][0]
            found, most = masses[:, start : start + length], alone.shape[2]
            torch.testing.assert_close(found[..., :most], alone)
            assert found[..., most:].isneginf().all()
            grads = [torch.autograd.grad(of.exp().square().sum(), (q, k), retain_graph=True) for of in (found, alone)]
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_given_scores_are_of_the_blocks_of_each_document():
    lengths = [50, 1, 70]
    (q, k, v), ends = packed(lengths)
    scores = tensor((1, 2, sum(lengths), 5), generator=torch.Generator().manual_seed(3))
    chosen = sf.topk_blocks(scores=scores[0], keep=KEEP, block_size=BLOCK, cu_seqlens_q=ends, max_seqlen_q=80)
    out = sf.attention_varlen(q, k, v, ends, mask=chosen, max_seqlen_q=80)
    for start, length in zip(ends.tolist(), lengths, strict=False):
        some = slice(start, start + length)
        of_one = scores[:, :, some, : -(-length // BLOCK)]
        one = sf.topk_blocks(scores=of_one, keep=KEEP, block_size=BLOCK)
        wanted = sf.attention(*(t[some].transpose(0, 1)[None] for t in (q, k, v)), one)
        torch.testing.assert_close(out[some], wanted[0].transpose(0, 1))


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
def test_nan_and_infinity_stay_in_their_document(backend):
    made, ends = packed([5, 20, 3], after=5, heads=2)
    q, k, v = (t[:, :1].contiguous() for t in made)  # Triton's interpreter takes long
    others = torch.cat([torch.arange(5), torch.arange(25, 28)]).to(DEVICE)

    def of_others():
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        chosen = sf.topk_blocks(q, k, KEEP, block_size=BLOCK, cu_seqlens_q=ends)
        out = sf.attention_varlen(*inputs, ends, mask=chosen, backend=backend)[others]
        return [out, *(gradient[others] for gradient in torch.autograd.grad(out.square().sum(), inputs))]

    wanted = of_others()
    for t in (q, k, v):
        t[5:25] = t[28:] = float("nan")
    for found, right in zip(of_others(), wanted, strict=True):
        torch.testing.assert_close(found, right)


def test_documents_longer_than_the_longest_lose_their_end_where_the_host_cannot_check():
    (q, k, v), ends = packed([60, 30])
    chosen = sf.topk_blocks(q, k, KEEP, block_size=BLOCK, cu_seqlens_q=ends)
    short = sf.PackedSelection(chosen.picks, ends, 40, BLOCK)
    out = sf.attention_varlen(q, k, v, ends, mask=short)
    torch.testing.assert_close(out[:40], sf.attention_varlen(q, k, v, ends, mask=chosen)[:40])
    assert not out[40:60].any() and not short.to_dense()[:, 40:60].any() and out[60:].any()


def test_a_saved_selection_loads_as_plain_weights_do_and_its_text_is_short(tmp_path):
    q = torch.randn(40, 2, 16, device=DEVICE)
    cu_seqlens = torch.tensor([0, 15, 40], device=DEVICE)
    sel = sf.topk_blocks(q, q, keep=2, every=1, block_size=16, always="sinks(1)", cu_seqlens_q=cu_seqlens)
    torch.save(sel, tmp_path / "selection.pt")
    again = torch.load(tmp_path / "selection.pt")
    assert torch.equal(again.to_dense(), sel.to_dense()) and repr(again) == repr(sel)
    assert repr(sel).startswith("PackedSelection(documents=2, longest=40, block_size=16, always='sinks(1)', picks=(2, 40, ")


def test_a_selection_goes_with_equal_documents_in_another_tensor():
    (q, k, v), ends = packed([40, 50])
    chosen = sf.topk_blocks(q, k, KEEP, block_size=BLOCK, cu_seqlens_q=ends)
    assert sf.attention_varlen(q, k, v, ends.int(), mask=chosen).shape == q.shape
