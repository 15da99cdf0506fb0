"""Every entry point as a call that a test can run in any mode and compare with its definition.

A new entry point is one function here: from ``Sizes`` to a ``Call``. ``test_modes.py`` and ``test_properties.py`` then cover it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from accepted import DEVICE
from oracle import dense_attention, kept_pairs, tensor
from picked import drawn_picks, kept_by_picks

import sparse_flash as sf
from sparse_flash.integrations import block_sparse_attn, flash_attn, sdpa

Results = tuple[torch.Tensor, ...]
SPEC = "causal & (local(20) | sinks(3))"


@dataclass(frozen=True)
class Sizes:
    """Of a call. backend: "auto", or the name of a back end, where the call takes one. layout: see ``oracle.tensor``."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 70
    kv_len: int = 70
    head_dim: int = 16
    v_head_dim: int = 16
    dtype: torch.dtype = torch.float32
    layout: str = "heads first"
    backend: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class Call:
    """inputs: the tensors that the call differentiates. others: those that it only reads, such as lengths. run: from both to
    (out,) or (out, lse). define: the same in float64, from inputs in float64. differentiable: whether run gives gradients. packed:
    whether tokens come before heads. lacks: names of the modes that do not apply, each with its reason."""

    inputs: Results
    run: Callable[..., Results]
    define: Callable[..., Results]
    others: Results = ()
    differentiable: bool = True
    lacks: dict[str, str] = field(default_factory=dict)

    def __call__(self) -> Results:
        return self.run(*self.inputs, *self.others)


def normal(sizes: Sizes) -> list[torch.Tensor]:
    """q, k and v."""
    generator = torch.Generator().manual_seed(sizes.seed)
    keys = sizes.batch, sizes.kv_heads, sizes.kv_len
    shapes = (sizes.batch, sizes.heads, sizes.q_len, sizes.head_dim), (*keys, sizes.head_dim), (*keys, sizes.v_head_dim)
    return [tensor(shape, sizes.layout, dtype=sizes.dtype, generator=generator) for shape in shapes]


def kept_by(spec: str | None, q_len: int, kv_len: int) -> torch.Tensor:
    if not q_len or not kv_len:
        return torch.ones(q_len, kv_len, dtype=torch.bool, device=DEVICE)
    return kept_pairs(spec and sf.parse(spec), None, q_len, kv_len).to(DEVICE)


def attention(sizes: Sizes, spec: str | None = SPEC, **terms) -> Call:
    """terms: of ``attention``, other than tensors that are differentiated."""

    def run(q, k, v):
        return sf.attention(q, k, v, spec, return_lse=True, backend=sizes.backend, **terms)

    kept = kept_by(spec, sizes.q_len, sizes.kv_len)
    return Call(tuple(normal(sizes)), run, lambda q, k, v: dense_attention(q, k, v, kept, **terms))


def attention_under_a_table(sizes: Sizes) -> Call:
    mask = sf.compile_mask(SPEC, sizes.q_len, sizes.kv_len, block_size=64, device=DEVICE)
    call = attention(sizes)
    return replace(call, run=lambda *t: sf.attention(*t, mask, return_lse=True, backend=sizes.backend))


def attention_with_terms(sizes: Sizes) -> Call:
    """Lengths, a soft cap, slopes, a bias and sinks; bias and sinks are learned."""
    generator = torch.Generator().manual_seed(sizes.seed + 1)
    slopes, bias, sinks = (
        torch.randn(shape, generator=generator).to(DEVICE) for shape in (sizes.heads, (sizes.heads, 41), sizes.heads)
    )
    lens = torch.randint(1, sizes.kv_len + 1, (sizes.batch,), generator=generator).to(DEVICE) if sizes.kv_len else None

    def terms(bias, sinks, lens):
        return {"softcap": 5.0, "alibi_slopes": 0.1 * slopes.abs(), "rel_bias": bias, "sinks": sinks, "kv_lens": lens}

    def run(q, k, v, bias, sinks, lens=None):
        return sf.attention(q, k, v, SPEC, return_lse=True, backend=sizes.backend, **terms(bias, sinks, lens))

    kept = kept_by(SPEC, sizes.q_len, sizes.kv_len)

    def define(q, k, v, bias, sinks):
        return dense_attention(q, k, v, kept, **terms(bias, sinks, lens))

    return Call((*normal(sizes), bias, sinks), run, define, () if lens is None else (lens,))


def bounds_of(tokens: int) -> torch.Tensor:
    """Documents of a fourth, none, one token, and the rest but three tokens, which are of no document."""
    return torch.tensor([0, tokens // 4, tokens // 4, tokens // 4 + 1, max(tokens // 4 + 1, tokens - 3)], dtype=torch.int32).clamp(
        max=tokens
    )


def varlen(sizes: Sizes, spec: str | None = SPEC) -> Call:
    """Packed documents; a batch of one has all."""
    bounds = bounds_of(sizes.q_len)

    def run(q, k, v, bounds):
        packed = (t.squeeze(0).transpose(0, 1) for t in (q, k, v))
        out, lse = sf.attention_varlen(*packed, bounds, mask=spec, return_lse=True, backend=sizes.backend)
        return out.transpose(0, 1)[None], lse[None]

    kept = torch.zeros(sizes.q_len, sizes.q_len, dtype=torch.bool, device=DEVICE)
    for start, stop in pairwise(bounds.tolist()):
        if start < stop:
            kept[start:stop, start:stop] = kept_by(spec, stop - start, stop - start)
    inputs = normal(replace(sizes, batch=1, kv_len=sizes.q_len, layout="tokens first"))
    return Call(tuple(inputs), run, lambda *t: dense_attention(*t, kept), (bounds.to(DEVICE),))


def varlen_in_place(sizes: Sizes) -> Call:
    """A mask of one run of keys a query, under which documents are attended to where they lie."""
    return varlen(sizes, "causal & local(20)")


def decode(sizes: Sizes, pages: int = 0) -> Call:
    """The last queries of sequences of different lengths. pages: tokens of a page, 0 for a cache in one piece."""
    queries = min(sizes.q_len, 3)
    q, k, v = normal(replace(sizes, q_len=queries))
    lens = torch.arange(sizes.batch, dtype=torch.int32, device=DEVICE) * 7 + sizes.kv_len - 7 * (sizes.batch - 1)
    others: Results = (k, v, lens.clamp(min=0))
    if pages:
        count = -(-sizes.kv_len // pages)
        table = torch.randperm(sizes.batch * count, generator=torch.Generator().manual_seed(1)).view(sizes.batch, count)
        padded = [torch.nn.functional.pad(t, (0, 0, 0, -t.shape[2] % pages)) for t in (k, v)]
        stored = [torch.empty(sizes.batch * count, t.shape[1], pages, t.shape[3], dtype=t.dtype, device=DEVICE) for t in padded]
        for pool, t in zip(stored, padded, strict=True):
            pool[table.flatten().to(DEVICE)] = torch.unflatten(t, 2, (count, pages)).transpose(1, 2).flatten(0, 1)
        others = (*stored, lens.clamp(min=0), table.to(DEVICE, torch.int32))

    def run(q, k, v, lens, table=None):
        return sf.attention_decode(q, k, v, SPEC, kv_lens=lens, block_table=table, return_lse=True, backend=sizes.backend)

    return replace(decode_of(q, k, v, others[2]), run=run, others=others)


def decode_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor) -> Call:
    """A call without ``run``: the definition of the last queries of sequences of these lengths."""

    def define(q):
        if not len(q):
            return q * 1.0, q[..., 0] * float("-inf")
        results = []
        for row, length in enumerate(lens.tolist()):
            one = q[row : row + 1], *(t[row : row + 1, :, :length].double() for t in (k, v))
            results.append(dense_attention(*one, kept_by(SPEC, q.shape[2], length)))
        return tuple(torch.cat(each) for each in zip(*results, strict=True))

    return Call((q,), define, define, differentiable=False)


def decode_in_pages(sizes: Sizes) -> Call:
    return decode(sizes, 16)


def decode_in_eight_bits(sizes: Sizes) -> Call:
    """A cache in e4m3, with a scale for each token."""
    call = decode(sizes)
    k, v, lens = call.others
    scales = [t.float().abs().amax(-1).clamp(min=1e-6) / 448 for t in (k, v)]
    stored = [(t.float() / scale[..., None]).to(torch.float8_e4m3fn) for t, scale in zip((k, v), scales, strict=True)]
    exact = [t.double() * scale[..., None].double() for t, scale in zip(stored, scales, strict=True)]

    def run(q, k, v, lens, k_scale, v_scale):
        given = {"k_scale": k_scale, "v_scale": v_scale, "kv_lens": lens}
        return sf.attention_decode(q, k, v, SPEC, return_lse=True, backend=sizes.backend, **given)

    return replace(decode_of(call.inputs[0], *exact, lens), run=run, others=(*stored, lens, *scales))


def topk(sizes: Sizes) -> Call:
    """Blocks of 16 keys with the largest means for each block of queries, within a mask."""

    def mask_of(q, k):
        return sf.topk_blocks(q, k, 2, block_size=16, within="causal", always="sinks(3)")

    def run(q, k, v):
        return sf.attention(q, k, v, mask_of(q, k), return_lse=True, backend=sizes.backend)

    q, k, v = normal(sizes)
    kept = mask_of(q, k).to_dense()
    return Call((q, k, v), run, lambda *t: dense_attention(*t, kept))


def selection(sizes: Sizes) -> Call:
    """Blocks of 16 keys that each query picked, and the first three keys."""
    shape = sizes.batch, sizes.kv_heads, sizes.q_len, 2
    picks = drawn_picks(shape, 1, 16, sizes.q_len, sizes.kv_len, sizes.seed)

    def run(q, k, v, picks):
        chosen = sf.BlockSelection.from_picks(
            picks, 16, q_len=q.shape[2], kv_len=k.shape[2], own=False, always="sinks(3)", check=False
        )
        return sf.attention(q, k, v, chosen, return_lse=True, backend=sizes.backend)

    kept = (
        kept_by_picks(picks, 1, 16, sizes.q_len, sizes.kv_len).any(3)
        | kept_by("causal & sinks(3)", sizes.q_len, sizes.kv_len).cpu()
    )
    kept = kept.repeat_interleave(sizes.heads // sizes.kv_heads, 1).to(DEVICE)
    return Call(tuple(normal(sizes)), run, lambda *t: dense_attention(*t, kept), (picks,))


def selection_by_query(sizes: Sizes) -> Call:
    """Two blocks of 16 keys that each query chooses by its largest products; their definition is tested where choices are."""

    def chosen(q, k):
        return sf.topk_blocks(q, k, 2, every=1, block_size=16)

    def run(q, k, v):
        return sf.attention(q, k, v, chosen(q, k), return_lse=True, backend=sizes.backend)

    q, k, v = normal(sizes)
    kept = chosen(q, k).to_dense() if q.numel() and k.numel() else torch.ones((), dtype=torch.bool, device=DEVICE)
    return Call((q, k, v), run, lambda *t: dense_attention(*t, kept))


def selection_masses(sizes: Sizes) -> Call:
    """Attention over picked blocks, and the log-sum of the scores in each."""
    picks = drawn_picks((sizes.batch, sizes.kv_heads, sizes.q_len, 2), 1, 16, sizes.q_len, sizes.kv_len, sizes.seed)
    group = sizes.heads // sizes.kv_heads
    kept = kept_by_picks(picks, 1, 16, sizes.q_len, sizes.kv_len).repeat_interleave(group, 1).to(DEVICE)

    def run(q, k, v, picks):
        chosen = sf.BlockSelection.from_picks(picks, 16, q_len=q.shape[2], kv_len=k.shape[2], own=False, check=False)
        return sf.attention(q, k, v, chosen, return_block_lse=True, backend=sizes.backend)

    def define(q, k, v):
        scores = (q.shape[3] ** -0.5 * q @ k.repeat_interleave(group, 1).mT)[:, :, :, None]
        some = kept.any(-1)
        masses = scores.masked_fill(~kept & some[..., None], float("-inf")).logsumexp(-1).masked_fill(~some, float("-inf"))
        return dense_attention(q, k, v, kept.any(3))[0], masses

    return Call(tuple(normal(sizes)), run, define, (picks,))


def decode_selection(sizes: Sizes) -> Call:
    """The last two queries of full caches, over the blocks that they picked."""
    queries = min(sizes.q_len, 2)
    q, k, v = normal(replace(sizes, q_len=queries))
    picks = drawn_picks((sizes.batch, sizes.kv_heads, queries, 2), 1, 16, queries, sizes.kv_len, sizes.seed)
    kept = kept_by_picks(picks, 1, 16, queries, sizes.kv_len).any(3).repeat_interleave(sizes.heads // sizes.kv_heads, 1).to(DEVICE)

    def run(q, k, v, picks):
        chosen = sf.BlockSelection.from_picks(picks, 16, q_len=q.shape[2], kv_len=k.shape[2], own=False, check=False)
        return sf.attention_decode(q, k, v, chosen, return_lse=True, backend=sizes.backend)

    return Call((q,), run, lambda q: dense_attention(q, k.double(), v.double(), kept), (k, v, picks), differentiable=False)


def choose(sizes: Sizes) -> Call:
    """Blocks that a chooser keeps for blocks of queries: its own definition is tested where choosers are."""
    spec = "causal & (pooled(keep=1, block=64) | sinks(3))"

    def run(q, k, v):
        return sf.attention(q, k, v, spec, return_lse=True, backend=sizes.backend)

    q, k, v = normal(sizes)
    kept = sf.choose_blocks(spec, q, k).to_dense() if q.numel() else torch.ones((), dtype=torch.bool, device=DEVICE)
    return Call((q, k, v), run, lambda *t: dense_attention(*t, kept))


def blocks(sizes: Sizes) -> Call:
    """A map of blocks made at run time."""
    shape = sizes.batch, sizes.heads, -(-sizes.q_len // 16), -(-sizes.kv_len // 16)
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(sizes.seed)).to(DEVICE) < 0.5

    def run(q, k, v, kept):
        mask = sf.BlockMask.from_blocks(kept, 16, q.shape[2], k.shape[2])
        return sf.attention(q, k, v, mask, return_lse=True, backend=sizes.backend)

    pairs = kept.repeat_interleave(16, 2).repeat_interleave(16, 3)[:, :, : sizes.q_len, : sizes.kv_len]
    return Call(tuple(normal(sizes)), run, lambda *t: dense_attention(*t, pairs), (kept,))


def layer(sizes: Sizes) -> Call:
    """``SparseAttention``: from x and the weights of its projections."""
    generator = torch.Generator().manual_seed(sizes.seed)
    width = 3 * sizes.heads * 4
    module = sf.SparseAttention(width, sizes.heads, kv_heads=sizes.kv_heads, mask=SPEC, rotary_base=None, backend=sizes.backend).to(
        DEVICE, sizes.dtype
    )
    names, weights = zip(*module.named_parameters(), strict=True)
    x = torch.randn(sizes.batch, sizes.q_len, width, generator=generator).to(DEVICE, sizes.dtype)
    weights = tuple(torch.randn(w.shape, generator=generator).to(w) * width**-0.5 for w in weights)
    kept = kept_by(SPEC, sizes.q_len, sizes.q_len)

    def run(x, *weights):
        return (torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,)),)

    def define(x, *weights):
        of = dict(zip(names, weights, strict=True))
        q, k, v = (torch.unflatten(x @ of[f"{name}_proj.weight"].mT, 2, (-1, module.head_dim)).transpose(1, 2) for name in "qkv")
        return (dense_attention(q, k, v, kept)[0].transpose(1, 2).flatten(2) @ of["out_proj.weight"].mT,)

    return Call((x, *weights), run, define)


def flash_attn_call(sizes: Sizes) -> Call:
    """``flash_attn_func``, whose tensors are (batch, tokens, heads, head_dim); this one's heads come first."""

    def run(q, k, v):
        swapped = (t.transpose(1, 2) for t in (q, k, v))
        out, lse, _ = flash_attn.flash_attn_func(*swapped, causal=True, window_size=(19, 0), return_attn_probs=True)
        return out.transpose(1, 2), lse

    kept = kept_by("causal & local(20)", sizes.q_len, sizes.kv_len)
    return Call(tuple(normal(sizes)), run, lambda *t: dense_attention(*t, kept))


def block_sparse_call(sizes: Sizes) -> Call:
    """``block_sparse_attn_func`` of packed sequences of one length, blocks of 128."""
    shape = sizes.batch, sizes.heads, -(-sizes.q_len // 128), -(-sizes.q_len // 128)
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(sizes.seed)).to(DEVICE) < 0.5
    starts = (torch.arange(sizes.batch + 1, dtype=torch.int32) * sizes.q_len).to(DEVICE)

    def run(q, k, v, starts, kept):
        packed = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        types = torch.ones(q.shape[1], dtype=torch.int32, device=q.device)
        longest = q.shape[2]
        out = block_sparse_attn.block_sparse_attn_func(
            *packed, starts, starts, types, None, kept, longest, longest, 0.0, is_causal=True
        )
        return (torch.unflatten(out, 0, (q.shape[0], q.shape[2])).transpose(1, 2),)

    pairs = kept.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, : sizes.q_len, : sizes.q_len]
    pairs = pairs & kept_by("causal", sizes.q_len, sizes.q_len)
    inputs = normal(replace(sizes, kv_len=sizes.q_len))
    return Call(tuple(inputs), run, lambda *t: dense_attention(*t, pairs)[:1], (starts, kept))


def pytorch_call(sizes: Sizes) -> Call:
    """The drop-in for PyTorch's ``scaled_dot_product_attention``."""

    def run(q, k, v):
        return (sdpa.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),)

    # PyTorch aligns the first query with the first key.
    kept = torch.ones(sizes.q_len, sizes.kv_len, dtype=torch.bool, device=DEVICE).tril()
    return Call(tuple(normal(sizes)), run, lambda *t: dense_attention(*t, kept)[:1])


def model(sizes: Sizes) -> Call:
    """A tiny model of Transformers under a mask, from embeddings to logits."""
    import transformers

    from sparse_flash.integrations.transformers import use_sparse_flash

    torch.manual_seed(sizes.seed)
    width = sizes.heads * sizes.head_dim
    shape = {
        "hidden_size": width,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "intermediate_size": 8,
    }
    config = transformers.LlamaConfig(**shape, num_hidden_layers=1, vocab_size=11)
    ours = transformers.LlamaForCausalLM(config).to(DEVICE, sizes.dtype).eval()
    theirs = (
        transformers.LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="sdpa")
        .to(DEVICE, torch.float64)
        .eval()
    )
    theirs.load_state_dict(ours.state_dict())
    use_sparse_flash(ours, SPEC)
    x = torch.randn(sizes.batch, sizes.q_len, width).to(DEVICE, sizes.dtype)
    kept = kept_by(SPEC, sizes.q_len, sizes.q_len).expand(sizes.batch, 1, -1, -1)

    def run(x):
        return (ours(inputs_embeds=x, use_cache=False).logits,)

    return Call((x,), run, lambda x: (theirs(inputs_embeds=x, attention_mask=kept, use_cache=False).logits,))


ENTRIES: dict[str, Callable[[Sizes], Call]] = {
    entry.__name__: entry
    for entry in (
        attention,
        attention_under_a_table,
        attention_with_terms,
        varlen,
        varlen_in_place,
        decode,
        decode_in_pages,
        decode_in_eight_bits,
        topk,
        selection,
        selection_by_query,
        selection_masses,
        decode_selection,
        choose,
        blocks,
        layer,
        flash_attn_call,
        block_sparse_call,
        pytorch_call,
        model,
    )
}
