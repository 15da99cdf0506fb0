"""Documents packed one after another choose, attend and learn as each would alone."""

import pytest
import torch
from accepted import needs_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DEVICE, tensor

import sparse_flash as sf

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize
BLOCK, KEEP = 16, 3


def packed(lengths, after=0, heads=4):
    """(q, k, v), cu_seqlens. after: tokens of no document, which are NaN."""
    tokens, generator = sum(lengths) + after, torch.Generator().manual_seed(len(lengths))
    made = [tensor((1, h, tokens, 8), generator=generator)[0].transpose(0, 1).contiguous() for h in (heads, 2, 2)]
    ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    return made, ends


def alone(q, k, v, ends, **options):
    """Each document by a call of its own: out, lse, the pairs that it keeps."""
    found = []
    for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        if stop > start:
            one = [t[start:stop].transpose(0, 1)[None] for t in (q, k, v)]
            chosen = sf.topk_blocks(*one[:2], KEEP, every=1, block_size=BLOCK, **options)
            out, lse, block_lse = sf.attention(*one, chosen, return_lse=True, return_block_lse=True)
            found.append((out[0].transpose(0, 1), lse[0], chosen.to_dense()[0], block_lse[0]))
    return found


def loss(out, lse, block_lse, weight):
    return (out * weight).sum() + lse.sum() + (block_lse - lse[..., None]).exp().square().sum()


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=5).filter(any),
    after=st.sampled_from([0, 7]),
    always=st.sampled_from([None, "sinks(3) | local(20)"]),
    share_group=st.booleans(),
    score=st.sampled_from(["mean", "max"]),
)
def test_each_document_keeps_attends_to_and_learns_what_it_would_alone(lengths, after, always, share_group, score):
    (q, k, v), ends = packed(lengths, after)
    options = {"always": always, "share_group": share_group, "score": score}
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    chosen = sf.topk_blocks(*inputs[:2], KEEP, block_size=BLOCK, cu_seqlens_q=ends, **options)
    out, lse, block_lse = sf.attention_varlen(*inputs, ends, mask=chosen, return_lse=True, return_block_lse=True)
    each = [t.clone().requires_grad_() for t in (q, k, v)]
    documents = alone(*each, ends, **options)
    kept = [torch.block_diag(*(d[2][h].double() for d in documents)) for h in range(chosen.heads)]
    whole = int(ends[-1])
    assert torch.equal(chosen.to_dense()[:, :whole, :whole].double(), torch.stack(kept)) and not chosen.to_dense()[:, whole:].any()
    torch.testing.assert_close(out[:whole], torch.cat([d[0] for d in documents]))
    torch.testing.assert_close(lse[:, :whole], torch.cat([d[1] for d in documents], 1))
    assert not out[whole:].any() and lse[:, whole:].isneginf().all() and block_lse[:, whole:].isneginf().all()
    of_picks = [torch.nn.functional.pad(d[3], (0, block_lse.shape[2] - d[3].shape[2]), value=-torch.inf) for d in documents]
    torch.testing.assert_close(block_lse[:, :whole], torch.cat(of_picks, 1))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)[:whole]
    grads = torch.autograd.grad(loss(out[:whole], lse[:, :whole], block_lse[:, :whole], weights), inputs)
    weights = weights.split([len(d[0]) for d in documents])
    wanted = torch.autograd.grad(sum(loss(*d[:2], d[3], weight) for d, weight in zip(documents, weights, strict=True)), each)
    for ours, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_given_scores_are_of_a_documents_own_blocks():
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
def test_what_is_not_finite_in_one_document_reaches_no_other(backend):
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


def test_the_choice_and_attention_of_documents_compile_into_one_graph():
    options = {"block_size": BLOCK, "max_seqlen_q": 90, "always": "sinks(4)"}

    def attend(q, k, v, ends):
        return sf.attention_varlen(q, k, v, ends, mask=sf.topk_blocks(q, k, KEEP, cu_seqlens_q=ends, **options))

    torch._dynamo.reset()
    (q, k, v), ends = packed([40, 50])
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for lengths in ([40, 50], [88, 2]):
        ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        ours, theirs = (torch.autograd.grad(f(*inputs, ends).square().sum(), inputs) for f in (compiled, attend))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


def test_a_saved_selection_loads_as_plain_weights_do_and_its_text_is_one_line(tmp_path):
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
