"""Bad input of every entry point: one table of calls, what is changed in a plain call, and the error that says what is wrong.

A new call is one line of ``CALLS``, with plain arguments by name. Everything lies on the CPU, where lengths are read.
"""

import copy
import re
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain

import numpy as np
import pytest
import torch
from calls import DEVICE, ENTRIES, one_rank
from torch import ones, zeros

import sparse_flash as sf
from sparse_flash.integrations import block_sparse_attn, flash_attn
from sparse_flash.masks.spec import write_call

T, V, NAN = TypeError, ValueError, float("nan")
compiled, of_heads = sf.compile_mask, sf.BlockMask.per_head


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


def learned(tensor):
    return tensor.clone().requires_grad_()


def called_layer(x, cache=None, under=None, **options):
    return sf.SparseAttention(48, 4, **options)(x, cache, mask=under)


def called_plan(mask, q_len, q, k, v, mesh=None, heads=None, **options):
    """The attention of a plan of one rank."""
    mesh = one_rank("cpu") if mesh is None else mesh
    try:
        plan = sf.context_parallel(mask, q_len, mesh, heads=heads)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return plan.attention(q, k, v, **options)


@cache
def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 11}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


@dataclass(frozen=True, eq=False)
class Scored(sf.Chooser):
    """A user's own chooser, of scores that it has."""

    scored: object

    def scores(self, q, k, grid):
        return self.scored


SCORED = Scored(None, keep=1)


def switched(mask=None, model=None, **options):
    """A model under a mask; one that is refused stays as it was."""
    model, before = model or llama(), str(llama().config)
    from sparse_flash.integrations.transformers import use_sparse_flash

    try:
        return use_sparse_flash(model, mask, **options)
    finally:
        assert model is not llama() or str(model.config) == before


@cache
def wan():
    diffusers = pytest.importorskip("diffusers", minversion="0.42")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "text_dim": 8}
    return diffusers.WanTransformer3DModel(**sizes, freq_dim=16, ffn_dim=32, num_layers=2)


def switched_video(spec, layout="auto", model=None, **options):
    """A video transformer under a spec; one that is refused stays as it was."""
    from sparse_flash.integrations.diffusers import restore, use_sparse_flash

    try:
        restore(use_sparse_flash(model or wan(), spec, layout, **options))
    finally:
        assert "sparse_flash" not in str(wan())


def called_model(mask="causal & local(20)", **inputs):
    return switched(mask, copy.deepcopy(llama()))(zeros(2, 150, dtype=torch.int64), **{"use_cache": False} | inputs)


# (batch, heads, tokens, head_dim), and what belongs to them.
Q, K = zeros(2, 4, 64, 16), zeros(2, 2, 64, 16)
NONE = {"q": Q[:0], "k": K[:0], "v": K[:0]}
HEADS, BATCH = sf.per_head(["causal", "full"] * 2), sf.per_batch(["causal", "full"] * 2)
OWN = sf.ScoreFunction(lambda score, batch, head, q_pos, k_pos, params: score)
HALF, E4M3, E5M2 = zeros(1, 2, 64, 64).half(), K.to(torch.float8_e4m3fn), K.to(torch.float8_e5m2)
CHOOSER, SCORES = "causal & (pooled(keep=1) | sinks(2))", zeros(2, 4, 1, 1)
NESTED, JAGGED = (torch.nested.nested_tensor(list(Q.transpose(1, 2)), layout=layout) for layout in (torch.strided, torch.jagged))
NESTED, JAGGED = NESTED.transpose(1, 2), JAGGED.transpose(1, 2)
# One query over a cache, in one piece and in pages.
QUERY, PAGES, TABLE = Q[:, :, :1], zeros(3, 2, 16, 16), zeros(2, 3, dtype=torch.int32)
# Tokens packed one after another, and their documents; flash-attn's layout.
P, PK, ENDS = zeros(64, 4, 16), zeros(64, 2, 16), ints(0, 40, 64)
F, FK, CACHE, NEW, FPAGES = zeros(2, 64, 4, 16), zeros(2, 64, 2, 16), zeros(2, 16, 2, 16), ones(2, 1, 2, 16), zeros(3, 8, 2, 16)
# Selections.
PICKS = zeros(2, 2, 64, 2, dtype=torch.int32)
SELECTION = sf.BlockSelection.from_picks(PICKS, 16)
TWO, ALWAYS = (sf.topk_blocks(Q[:, :, :2], K, 2, every=1, block_size=16, always=always) for always in (None, "sinks(4)"))
PACKED = sf.topk_blocks(P, PK, 2, block_size=16, cu_seqlens_q=ENDS)
# Kept blocks as lists and as compressed rows.

VIDEO = sf.VideoLayout(3, 5, 7, (2, 4, 4), prefix=6, suffix=3)
TILES, RADIAL = sf.tile_window(VIDEO, 1), sf.radial(sf.VideoLayout(8, 8, 16))
FLASH_LENGTHS = {"cu_seqlens_q": ints(0, 5, 12), "cu_seqlens_k": ints(0, 5, 12), "max_seqlen_q": 12, "max_seqlen_k": 12}
FLASH_PACKED = {"q": P[:12], "k": PK[:12], "v": PK[:12], **FLASH_LENGTHS}
PAGES_LENGTHS = {"cu_seqlens_q": ints(0, 1, 2), "cu_seqlens_k": ints(0, 8, 10), "max_seqlen_q": 1, "max_seqlen_k": 8}
FLASH_PAGES = {"q": P[:2], "k": FPAGES, "v": FPAGES, **PAGES_LENGTHS}
FLASH_CACHE = {"q": F[:, :1], "k_cache": CACHE, "v_cache": CACHE.clone(), "k": NEW, "v": NEW, "cache_seqlens": 5}
DOCUMENT = zeros(200, 2, 16)
TYPES = {"head_mask_type": ints(1, -1), "streaming_info": ints(1, 1, 1, 1), "base_blockmask": bools(1, 1, 2, 2)}
TYPES |= {"cu_seqlens_q": ints(0, 200), "cu_seqlens_k": ints(0, 200), "max_seqlen_q_": 200, "max_seqlen_k_": 200}
SIZES = {"batch": 2, "kv_heads": 4, "length": 60, "head_dim": 16}
CALLS = {
    "attention": (sf.attention, {"q": Q, "k": K, "v": K}),
    "fp8": (sf.attention, {"q": HALF, "k": HALF, "v": HALF, "precision": "fp8"}),
    "fp8_reference": (sf.attention, {"q": HALF, "k": HALF, "v": HALF, "precision": "fp8", "backend": "reference"}),
    "context_parallel": (called_plan, {"mask": "causal", "q_len": 64, "q": Q, "k": K, "v": K}),
    "varlen": (sf.attention_varlen, {"q": P, "k": PK, "v": PK, "cu_seqlens_q": ENDS, "mask": "causal"}),
    "varlen_selection": (sf.attention_varlen, {"q": P, "k": PK, "v": PK, "cu_seqlens_q": ENDS, "mask": PACKED}),
    "decode": (sf.attention_decode, {"q": QUERY, "k": K, "v": K}),
    "decode_in_pages": (sf.attention_decode, {"q": QUERY, "k": PAGES, "v": PAGES, "block_table": TABLE}),
    "decode_in_eight_bits": (sf.attention_decode, {"q": QUERY, "k": E4M3, "v": E4M3, "k_scale": ones(2, 2), "v_scale": ones(2, 2)}),
    "decode_selection": (sf.attention_decode, {"q": Q[:, :, :2], "k": K, "v": K, "mask": TWO}),
    "topk": (sf.topk_blocks, {"q": Q, "k": K, "keep": 2}),
    "topk_by_query": (sf.topk_blocks, {"q": Q, "k": K, "keep": 2, "every": 1}),
    "topk_by_scores": (sf.topk_blocks, {"scores": zeros(2, 4, 64, 8), "keep": 2, "block_size": 16, "kv_len": 128}),
    "topk_of_documents": (sf.topk_blocks, {"q": P, "k": PK, "keep": 2, "block_size": 16, "cu_seqlens_q": ENDS}),
    "selection": (sf.attention, {"q": Q, "k": K, "v": K, "mask": SELECTION}),
    "picks": (sf.BlockSelection.from_picks, {"picks": PICKS, "block_size": 16}),
    "attention_choose": (sf.attention, {"q": Q, "k": K, "v": K, "mask": CHOOSER}),
    "choose": (sf.choose_blocks, {"spec": CHOOSER, "q": Q, "k": K}),
    "blocks": (sf.BlockMask.from_blocks, {"blocks": bools(2, 2), "block_size": 128}),
    "compile": (sf.compile_mask, {"pattern": "causal", "q_len": 64}),
    "layer": (sf.SparseAttention, {"dim": 48, "heads": 4}),
    "layer_call": (called_layer, {"x": zeros(2, 64, 48)}),
    "flash_attn_call": (flash_attn.flash_attn_func, {"q": F, "k": FK, "v": FK}),
    "flash_packed": (flash_attn.flash_attn_varlen_func, FLASH_PACKED),
    "flash_packed_softcap": (flash_attn.flash_attn_varlen_func, FLASH_PACKED | {"softcap": 5.0}),
    "flash_pages": (flash_attn.flash_attn_varlen_func, FLASH_PAGES | {"block_table": ints([0], [1])}),
    "flash_cache": (flash_attn.flash_attn_with_kvcache, FLASH_CACHE),
    "flash_cache_softcap": (flash_attn.flash_attn_with_kvcache, FLASH_CACHE | {"softcap": 5.0}),  # which copies the cache
    "block_sparse_call": (block_sparse_attn.block_sparse_attn_func, dict.fromkeys("qkv", DOCUMENT) | TYPES | {"p_dropout": 0.0}),
    "draw": (sf.draw, {"mask": "causal", "q_len": 128}),
    "explain": (sf.explain, {"mask": "causal", "q_len": 128}),
    "bench": (sf.bench, {"masks": "causal", "q_len": 256, "head_dim": 16, "device": "cpu", "quick": True}),
    "model": (switched, {}),
    "model_call": (called_model, {}),
    "video": (switched_video, {"spec": "layout"}),
}


def row(calls, error, message, /, **change):
    """A row for each of calls: names of ``CALLS``, or a function, of which ``change`` has all arguments. message: a pattern."""
    return [(call, change, error, message) for call in (calls.split() if isinstance(calls, str) else [calls])]


def each(calls, error, message, /, **values):
    """A row for each of the values of an argument. {} in the message stands for the value, {type} for the name of its type."""
    ((name, values),) = values.items()
    rows = []
    for value in values:
        said = message.replace("{type}", type(value).__name__).replace("{}", re.escape(str(value)))
        rows += row(calls, error, said, **{name: value})
    return rows


def alike(calls, error, message, value, /, *names):
    """Rows of arguments that are refused the same value. {} in the message stands for the name."""
    return list(chain.from_iterable(row(calls, error, message.replace("{}", name), **{name: value}) for name in names))


def foreign(calls, **hints):
    """Rows of keywords of other libraries and misspelt ones. hints: what the error says of each."""
    said = {keyword: rf"unexpected keyword argument '{keyword}'; .*{re.escape(hint)}" for keyword, hint in hints.items()}
    return list(chain.from_iterable(row(calls, T, message, **{keyword: None}) for keyword, message in said.items()))


def choosers_without_queries(spec):
    """Rows of calls that have no q and k for a chooser."""
    said, shifted = r"chooses blocks from q and k.*choose_blocks\(spec, q, k\)", sf.shifted(spec, 3)
    return (
        row("decode varlen", V, said, mask=spec),
        row("compile", V, said, pattern=spec),
        row("topk blocks", V, said, within=spec),
        row("attention", V, said, mask=shifted),
        row(sf.draw, V, said, mask=spec, q_len=100),
        row(shifted.token_rule, V, said, q=np.arange(100)[:, None], kv=np.arange(100)),
    )


KINDS = "a mask must be a Pattern, its spec text or a BlockMask; got "
TYPO = r"did you mean 'causal' or 'local'\?.* \(column 1\)\n  cusal\n  \^$"
UNNAMED = r"must name the \d+ tokens .*; it names 30; .* shifted\(pattern, n\).*global_tokens\(n\)"
LAST = r"last_tokens\(9.*\) counts from the end of the sequence, .*pass it to attention without"
CAPPED, PACKS = "flash_cache flash_cache_softcap", "flash_packed flash_packed_softcap"
TABLES = (
    # Tensors.
    row("attention", V, "it runs head_dim up to 256; got 272", v=zeros(2, 2, 64, 272), backend="triton"),
    row("attention", T, r"k must be a tensor of shape \(batch, heads, tokens, head_dim\); got list", k=[1.0]),
    row("attention choose topk", V, r"q must have shape \(batch, heads, tokens, head_dim\); got \(4, 64, 16\)", q=Q[0]),
    row("decode", V, r"\(batch, heads, q_len, head_dim\)", q=QUERY[0]),
    row("decode_in_pages", V, r"k must have shape \(pages, kv_heads, page_size, head_dim\)", k=PAGES[0]),
    row("varlen", V, r"q must have shape \(tokens of all documents", q=Q),
    each("layer_call", V, r"\(batch, tokens, 48\); got (\(2, 64\)|NoneType)", x=(zeros(2, 64), None)),
    row("attention choose topk", V, "q must be a floating-point tensor, .*; got torch.int32", q=Q.int()),
    row("attention fp8", V, r"must be .*float16.*; got torch\.float8_e4m3fn", q=E4M3, k=E4M3, v=E4M3),
    row("decode decode_in_eight_bits", V, "q must be a floating-point tensor, of float16, .*; got torch.float8_e4m3fn; multiply it",
        q=QUERY.to(torch.float8_e4m3fn), k=E4M3, v=E4M3),
    row("attention choose decode", V, "must have one dtype; q is torch.float32, k is torch.float16; cast", k=K.half()),
    *(row("attention", V, "q must be a tensor of layout torch.strided; got (torch|a nested).*attention_varlen", q=q)
      for q in (Q.to_sparse(), NESTED, JAGGED)),
    row("attention", V, "one device; q is on cpu, .*v on meta", v=K.to("meta")),
    row("attention decode", V, r"q must .*(not be empty|head_dim not 0); got \(?.*\(2, 4, 64, 0\)", q=Q[..., :0]),
    row("choose topk_by_query", V, "q must not be empty", q=Q[:, :, :0]),
    row("selection", V, "backend must be 'auto' or one of", **NONE, mask=sf.topk_blocks(Q[:0], K[:0], 2, every=1), backend="flash"),
    row("decode", V, "capacity of 64", **NONE, mask=compiled("causal", 63)),
    row("varlen", V, r"q must have a head_dim of at least 1; got shape \(64, 4, 0\)", q=P[..., :0]),
    row("attention", V, "must divide that of query heads; got 4 query heads and 0 key heads", k=K[:, :0], v=K[:, :0]),
    row("attention selection choose topk topk_by_query decode", V, "key heads.* 3 query heads and 2", q=Q[:, :3]),
    row("attention decode", V, r"k and v must agree in (batch, heads and tokens|all but head_dim); got", v=K[:, :, :60]),
    row("varlen", V, r"agree in tokens and heads; got \(64, 2, 16\) and \(60, 2, 16\)", v=PK[:60]),
    row("attention choose topk", V, r"agree in batch and head_dim; got \(2, 4, 64, 8\) and \(2, 2, 64, 16\)", q=Q[..., :8]),
    row("decode", V, "agree in batch.*block_table", k=K[:1], v=K[:1]),
    row("varlen", V, r"head_dim.*; got \(64, 4, 8\) and \(64, 2, 16\)", q=P[..., :8]),
    # Numbers and back ends.
    each("attention choose decode varlen selection", V, "scale must be positive and finite; got {}", scale=(0.0, -1.0, NAN)),
    each("attention choose", T, "scale must be a number; got {type}", scale=("x", True, np.float32(0.5))),
    each("attention layer", V, r"dropout_p must be in \[0, 1\); got {}", dropout_p=(-0.1, 1.0, 1.5)),
    each("attention", T, r"dropout_p must be a number, .*; got {type}", dropout_p=(ones(()), zeros(2), "")),
    each("attention", V, "softcap must be positive and finite; got {}; None is for no cap", softcap=(0.0, float("inf"))),
    each("attention", T, "softcap must be a number, .*; got {type}", softcap=("x", True)),
    each("attention selection layer", T, "deterministic must be True, False or None; got .*; None", deterministic=(1, 0, "yes")),
    row("attention decode varlen selection layer model", V, "backend must be 'auto' or one of 'hopper', .* got 'no'", backend="no"),
    each("attention selection", V, "backend must be 'auto' or one of .*; got {}", backend=(["torch"], None)),
    row("attention", V, r"backend 'triton' cannot run this call: .*; pass backend='auto'",
        **dict.fromkeys("qkv", K.double()), backend="triton"),
    row("selection", V, "backend 'hopper' cannot run this call: ", backend="hopper"),
    row("decode_selection", V, "over picked blocks it does not decode", backend="reference"),
    row("decode_selection", V, r"float16, bfloat16 and float32; got torch\.float64", backend="triton",
        q=Q[:, :, :2].double(), k=K.double(), v=K.double()),
    # Keywords of other libraries.
    foreign("attention", is_causal='pass mask="causal"', enable_gqa="leave it out", window_size="window(left, right)",
        softmax_scale="scale=", attn_mask="BlockMask.from_dense", block_mask="mask=", cu_seqlens_q="attention_varlen"),
    foreign("attention decode varlen", zzz="it takes q, k, v,"),
    row("compile", V, r"make a mask for it by choose_blocks\(spec, q, k\)", pattern=CHOOSER, block_size=64),
    # Masks.
    row("attention", V, "causal &", mask="causal &"),
    row("attention decode varlen layer", V, TYPO, mask="cusal"),
    row("topk_by_query topk_by_scores topk_of_documents picks", V, TYPO, always="cusal"),
    row("compile", T, r"must be a Pattern or its spec text; got list; use per_head", pattern=[1]),
    row("attention decode", T, KINDS + "int", mask=3),
    row("topk blocks", T, KINDS + "int", within=3),
    row("topk picks", T, KINDS + "list", always=["causal"]),
    row("attention model", T, KINDS + "Tensor; use BlockMask.from_dense", mask=ones(64, 64)),
    row("attention", T, KINDS + "list; use per_head for a pattern of each head", mask=["causal"]),
    row("attention model", T, KINDS + "type Causal itself; call it", mask=sf.causal),
    row("attention model", T, KINDS + "function; use from_mask_fn", mask=lambda q, kv: q > kv),
    row("attention", V, "compiled for q_len=128, kv_len=128; q and k have 64 and 64 tokens", mask=compiled("causal", 128)),
    row("decode", V, "square and cover the cache's capacity of 64", mask=compiled("causal", 1, 64)),
    row("attention decode layer_call", V, "the mask's heads must be q's, 4, or 1 .*; got 2", mask=sf.per_head(["causal", "full"])),
    row("attention decode layer_call", V, "the mask's batch must be q's, 2, or 1 for a mask of all; got 4", mask=BATCH),
    row("attention", V, r"the mask is on meta and q on .*; use mask.to\('.*'\)", mask=compiled("causal", 64, device="meta")),
    row("varlen", T, "pass the pattern that it was compiled from", mask=compiled("causal", 64)),
    row("attention decode varlen explain draw", V, UNNAMED, mask="documents((0, 20, 30))"),
    row("compile", V, UNNAMED, pattern="causal & documents((0, 20, 30))"),
    row("topk blocks", V, UNNAMED, within="documents((0, 20, 30))"),
    row(of_heads, V, UNNAMED, masks=["documents((0, 20, 30))", "full"], q_len=64),
    row("decode varlen", V, LAST, mask="~(local(3) | last_tokens(9))"),
    *(row("attention", V, LAST, mask=mask, **{name: ints(30, 30)}) for name in ("q_lens", "kv_lens")
      for mask in ("causal & last_tokens(9)", "local(3) | shifted(last_tokens(9), 2)", "per_head([last_tokens(9)])")),
    row("varlen", V, "packed documents take one pattern for all; got per_head", mask=HEADS),
    # Lengths.
    row("attention decode", T, r"kv_lens must be a tensor of shape \(batch,\) on q's device; got list", kv_lens=[3, 4]),
    row("attention decode", V, r"kv_lens must be int32 or int64 of shape \(batch,\), here \(2,\); got", kv_lens=ints(3, 3, 3)),
    row("attention", V, "q_starts must be on q's device; .* on meta", q_starts=ints(0, 0).to("meta")),
    alike("attention", V, "{} must be at least 0; got -1; a seq", ints(3, -1), "q_lens", "kv_lens"),
    row("attention", V, "q_starts must be at most 60, the number of tokens; got 61; a seq", q=Q[:, :, :60], q_starts=ints(3, 61)),
    row("decode", V, "kv_starts must be at most .*; got 9000", kv_starts=ints(9000, 9000)),
    row("decode_in_pages", V, "kv_starts must be None with a block_table", kv_starts=ints(3, 4)),
    each("decode_in_pages", V, r"block_table must be int32 .*\(2, pages of a sequence\)", block_table=(TABLE.short(), TABLE[0])),
    row("decode_in_pages", V, "power of two; got 48", k=zeros(3, 2, 48, 16), v=zeros(3, 2, 48, 16)),
    row("decode_in_pages", V, "at least one page", k=PAGES[:0], v=PAGES[:0]),
    alike("choose attention_choose", V, r"{} must be int32 .* of shape \(batch,\), here \(2,\)", ints(1), "kv_starts", "kv_lens"),
    row("attention", V, "counts from the end of the", mask="causal & (pooled(keep=1) | last_tokens(4))", kv_lens=ints(9, 20)),
    row("varlen", T, r"cu_seqlens_q must be a tensor.*torch\.tensor", cu_seqlens_q=[0, 10]),
    each("varlen", V, "cu_seqlens_q must be int32 or int64", cu_seqlens_q=(zeros(3), ints(0))),
    row("varlen", V, "of as many documents", cu_seqlens_k=ints(0, 3, 6, 10)),
    row("varlen", V, "pass cu_seqlens_k", q=P[:60]),
    each("varlen", V, "max_seqlen_q must be", max_seqlen_q=(2.5, True, torch.tensor(6), np.array([6, 6]))),
    row("varlen", V, "a document of q has 40 tokens, more than max_seqlen_q=9", max_seqlen_q=9),
    *(row("varlen", V, "must start with 0, not decrease, and end with at most the 64 tokens of q",
          cu_seqlens_q=ints(*ends, dtype=torch.int64))
      for ends in ((0, 5, 4, 10), (1, 10), (0, 65), (0, -1, 10), (0, 2**32), (0, 2**32 + 5, 10), (2**40, 10))),
    # Terms of scores.
    row("attention", V, r"\(heads,\) or \(batch, heads\), for 4 heads; got .* \(3,\)", alibi_slopes=zeros(3)),
    row("attention", V, "alibi_slopes requires a gradient, and has none; detach", alibi_slopes=learned(zeros(4))),
    row("attention", V, "alibi_slopes must be of a floating-point type .*; got torch.int64", alibi_slopes=zeros(4).long()),
    alike("attention", T, "{} must be a tensor on q's device; got float", 0.5, "alibi_slopes", "rel_bias", "sinks"),
    each("attention", V, r"\(heads, 2 \* max_distance \+ 1\), for 4 heads; got", rel_bias=(zeros(4, 8), zeros(3, 9))),
    *(row("attention", V, message, backend="triton", **change)
      for message, change in (
          ("gradient of rel_bias.*deterministic", {"rel_bias": learned(zeros(4, 9)), "deterministic": True}),
          ("has no triton function", {"score_mod": OWN}),
      ) if DEVICE == "cpu"),  # elsewhere triton refuses tokens on a CPU first
    row("attention", T, "score_mod must be a sparse_flash.ScoreFunction; got function; wrap", score_mod=lambda score: score),
    row("attention", V, "score_params are the tensors of a score_mod; pass that too", score_params=(zeros(3),)),
    row("attention", T, r"score_params must be a tuple of tensors; got Tensor; write \(tensor,\) for one", score_params=ones(3)),
    row("attention selection", V, r"shape \(heads,\), for 4 heads; got torch.float32 of shape \(3,\)", sinks=zeros(3)),
    row(sf.ScoreFunction, T, "needs a function as torch; got int", torch=3),
    row(sf.ScoreFunction, V, "triton and derivative both, or neither", torch=OWN.torch, triton=OWN.torch),
    row(sf.ScoreFunction, T, r"q_pos, k_pos, params\); got one of \(score, b, h, i, j\)", torch=lambda score, b, h, i, j: score),
    *(row("attention", T, f"must return scores, a floating-point tensor; got {got}", backend=backend,
          score_mod=sf.ScoreFunction(lambda score, batch, head, q_pos, k_pos, params, result=result: result))
      for backend in ("torch", "reference") for result, got in ((None, "NoneType"), (ones((), dtype=torch.bool), "torch.bool"))),
    # Eight bits.
    row("decode decode_in_eight_bits", V, "gives no gradients.*sparse_flash.attention", q=learned(QUERY)),
    row("decode", V, "up to 64 queries of a sequence; got 65", q=zeros(2, 4, 65, 16)),
    row("decode_in_eight_bits", T, r"k_scale of an e4m3 cache must be a float32 tensor of shape \(batch, kv_heads\); got NoneType",
        k_scale=None, v_scale=None),
    row("decode_in_pages", T, r"of shape \(pages, kv_heads\)", **dict.fromkeys("kv", PAGES.to(torch.float8_e4m3fn))),
    row("decode_in_eight_bits", V, r"float32 of shape \(batch, kv_heads\), or \(batch, kv_heads, capacity\).* of shape \(4, 2\)",
        k_scale=ones(4, 2), v_scale=ones(4, 2)),
    row("decode_in_eight_bits", V, "it reads e4m3 caches of an even head_dim; got 15 and 15 of v", backend="triton",
        q=QUERY[..., :15].to(DEVICE), **dict.fromkeys("kv", E4M3[..., :15].to(DEVICE)),
        **dict.fromkeys(("k_scale", "v_scale"), ones(2, 2, device=DEVICE))),
    row("decode_in_eight_bits", V, "belong to a cache of torch.float8_e4m3fn; got k of torch.float32; leave", k=K, v=K),
    row("decode_in_eight_bits", V, "holds both keys and values so.* and v of torch.float32; quantize the other", v=K),
    *(row("fp8 fp8_reference", V, f"in precision='fp8' it does not support {name}", **{name: value}) for name, value in (
        ("softcap", 2.0), ("dropout_p", 0.5), ("alibi_slopes", ones(2)), ("kv_lens", ints(30)), ("rel_bias", ones(2, 9)))),
    *(row("fp8", V, f"backend '{name}' cannot run this call: .*precision='fp8'", backend=name) for name in ("torch", "triton")),
    row("fp8_reference", V, "gives no gradients, and k requires one", k=learned(zeros(1, 2, 64, 64).half())),
    row("attention", V, "precision must be None or 'fp8'; got 'fp4'", precision="fp4"),
    row("attention", V, r"must be float16 or bfloat16; got torch\.float32", precision="fp8"),
    row("selection", V, "does not take a BlockSelection", precision="fp8"),
    # Blocks with the largest means.
    row("topk", V, "at least one block a row.*; got 0", keep=0),
    row("topk", V, r"share in \(0, 1\], a float; got 0.0", keep=0.0),
    row("topk", T, "int, blocks a row, or a float.* got True", keep=True),
    row("topk", V, r"within must have .* \(64, 64, 128\); got \(60, 60, 128\)", within=compiled("causal", 60)),
    row("topk", V, r"within must be one mask for all heads; got .*\(1, 4\)", within=HEADS),
    # Blocks chosen by each query.
    row("topk_by_query", T, "topk_blocks needs q and k, or scores=", k=None),
    row("topk_by_query topk_of_documents", T, r"keep of a selection must be an int, how many blocks; got 0\.5", keep=0.5),
    row("topk_by_query", V, "every must be 1, each query chooses, or None, blocks of queries choose; got 16", every=16),
    each("topk_by_query picks", V, "one of 16, 32, 64, 128, 256, 512 keys; got {}; try", block_size=(48, 100, 64.0)),
    row("topk_by_query", V, "a selection is causal; within is for every=None", within=None),
    row("topk_by_query", V, "score must be one of 'mean', 'max', 'softmax'; got 'median'; pass scores=", score="median"),
    row("topk_by_query", V, "kv_len follows from k", kv_len=64),
    row("topk", V, "score and kv_len need a choice .* pass every=1", score="max", kv_len=3),
    row("topk_by_query", V, "compression and lse are of compressed keys; pass score='softmax'", compression=(32, 16)),
    row("topk_by_query", V, "64 tokens have 4 compressed keys of 16 tokens, 16 from .*; got k of 64.*pass kv_len= and compr",
        score="softmax", block_size=16),
    row("topk_by_query", V, r"stride must divide length .* got \(24, 16\)", score="softmax", compression=(24, 16)),
    row("topk_by_query", V, r"needs the lse .* of shape \(2, 4, 64\) .* got .* of \(2, 4, 64, 16\); pass lse=", k=K[:, :, :1],
        score="softmax", block_size=64, lse=Q),
    row("topk_by_query", V, "needs the lse .* got NoneType", k=K[:, :, :1], score="softmax", block_size=64),
    row("topk_by_scores", V, "scores take the place of q, k", q=Q),
    row("topk_by_scores", V, "scores must be a floating-point tensor of shape .*; got list", scores=[1.0]),
    row("topk_by_scores", V, "scores must be a floating-point tensor.*; got torch.int32", scores=zeros(2, 4, 64, 8).int()),
    row("topk_by_scores", V, "64 tokens are 1 blocks of 64 keys; got scores of 8.*pass a kv_len=", block_size=64, kv_len=None),
    row("topk_by_scores", V, "kv_len must be an integer of at least 1; got '64'", kv_len="64"),
    row("topk_of_documents", T, "of packed documents must be a Pattern or its spec text", always=compiled("causal", 64)),
    row("topk_of_documents", V, "have up to 128 keys; got block_size=256; leave always out", always="sinks(4)", block_size=256),
    alike("topk_of_documents", V, "within and kv_len are of one seq", 64, "within", "kv_len"),
    row("topk_by_query", V, "max_seqlen_q is of packed documents; pass cu_seqlens_q as", max_seqlen_q=9),
    row("topk_of_documents", V, "and of no tokens none chooses; got 64 queries and 60 keys", k=PK[:60]),
    row("topk_of_documents", V, "blocks of 16 keys; got scores of 16, .*; pass a max_seqlen_q=", q=None, k=None, scores=Q[0]),
    row("topk_of_documents", V, r"scores of packed documents must be .*, none of it 0; got .*(4, 16)", q=None, k=None, scores=P[0]),
    row("picks", T, "picks must be an int32 tensor; got list", picks=[[0]]),
    row("picks", V, r"int32 or int64, numbers of blocks; got torch.float32; use .to\(torch.int32\)", picks=PICKS.float()),
    row("picks", V, r"picks must have shape \(batch, kv_heads or heads.*got \(2, 64, 2\)", picks=PICKS[0]),
    row("picks", V, r"none but the batch 0; got \(2, 2, 64, 0\)", picks=PICKS[..., :0], own=False),
    row("picks", V, r"always must have the lengths.*\(64, 64, 128\).*got \(32, 32, 128\)", always=compiled("causal", 32)),
    # Attention over them.
    row("selection", V, "a BlockSelection does not take dropout_p; leave it out, or pass a BlockMask", dropout_p=0.1),
    row("selection", V, "does not take kv_lens and softcap", softcap=3.0, kv_lens=ints(3, 3)),
    row("selection", V, "the selection is of q_len=64, kv_len=64; q and k have 60 and 64", q=Q[:, :, :60]),
    row("selection", V, "picks must be of batch 1 and of 2 key heads or 4", q=Q[:1], k=K[:1], v=K[:1]),
    row("attention", V, "return_block_lse needs a BlockSelection as mask; got NoneType", return_block_lse=True),
    row("decode_selection", V, "takes no selection with always=; choose without it", mask=ALWAYS),
    row("decode_selection", V, "q_len=2 and a cache of 64 tokens; got 1 queries", q=QUERY),
    row("decode_selection", V, "a cache of 32, without kv_lens; choose again", k=K[:, :, :32], v=K[:, :, :32]),
    row("varlen_selection", T, "a BlockSelection is of one sequence; pass cu_seqlens_q= to topk_blocks", mask=SELECTION),
    alike("varlen_selection", V, "{} must be the selection's, 64; got 50", 50, "max_seqlen_q", "max_seqlen_k"),
    row("varlen", V, "return_block_lse needs a PackedSelection as mask; got str", return_block_lse=True),
    row("varlen_selection", V, "leave cu_seqlens_k out", cu_seqlens_k=ENDS.clone()),
    row("varlen_selection", V, "of 64 tokens in 2 documents on .* got 64 in 1", cu_seqlens_q=ENDS[:2]),
    row("varlen_selection", V, "picks must be of 1 key heads or 2 query heads", q=P[:, :2], k=PK[:, :1], v=PK[:, :1]),
    row("varlen_selection", V, "the documents that the selection was made for; got others", cu_seqlens_q=ints(0, 41, 64)),
    row("attention", T, "selection of packed documents goes to attention_varlen", mask=PACKED),
    row(of_heads, T, "got BlockSelection; a selection by query goes to attention, or as", masks=[SELECTION]),
    row("layer", T, "got BlockSelection; a selection by query goes to attention, or as select=", mask=SELECTION),
    # Choosers.
    row("choose", V, "spec must have a chooser, such as .*; got causal; compile_mask takes patterns", spec="causal"),
    each("choose", T, "spec must be an expression with choosers, .*; got {type}", spec=(None, compiled("causal", 64))),
    row("choose", T, "got list; use per_head for an expression of each head", spec=[CHOOSER]),
    row("choose", V, "did you mean 'pooled'", spec="causal & poled(keep=1)"),
    row("choose", V, r"scored needs the scores; call choose_blocks\(spec, q, k, scores=...\)", spec="causal & scored(keep=1)"),
    row("choose", V, "scores= needs the chooser scored, which is not in the expression", scores=SCORES),
    row("choose", V, r"scores must be .* of shape \(2, 4, 1, 1\)", spec="scored(keep=1)", scores=SCORES[:, :2]),
    row("choose", V, "got list", q=Q[:0], k=K[:0], spec="scored(keep=1)", scores=[1.0]),
    row("choose", V, "scores must be on cpu, as q is; got meta", spec="scored(keep=1)", scores=SCORES.to("meta")),
    row("choose", V, r"choosers .* are joined by \|", spec="pooled(keep=1) & sampled(8, keep=1)"),
    *(row("attention", V, said, **dict.fromkeys("qkv", q), mask=mask) for q in (Q[:0], Q[:, :0], Q[:, :, :0]) for mask, said in (
        ("causal | pooled(keep=1)", "causal must stand before"), ("pooled(keep=1) & scored(keep=1)", r"joined by \|"))),
    *(row("choose", V, rf"(?s)the scores of .*Scored\(.*{said}", spec=Scored(scores, keep=1)) for scores, said in (
        (zeros(2, 2), r"must be a floating-point tensor of shape \(2, 4, 1, 1\)"), (None, "got NoneType"),
        (SCORES.long(), r"got torch.int64 of \(2, 4, 1, 1\)"), (SCORES.to("meta"), "must be on .*; got meta"))),
    *(row("choose", V, f"per_head must have an expression for each of q's 4 heads, or one for all; got {n}",
          spec=sf.per_head([one, *["causal & pooled(keep=1)"] * (n - 1)])) for n in (2, 3, 5) for one in ("causal", CHOOSER)),
    row("choose", V, "per_batch takes patterns without choosers", spec=BATCH & "pooled(keep=1)"),
    row("choose", V, "a report must be of whole sequences; got lengths", kv_lens=ints(9, 20), report=True),
    row("choose", V, "v is read only by the report, .*; pass report=True", v=K),
    row("choose", V, "q must have a sequence to report on; got a batch of 0", q=Q[:0], k=K[:0], report=True),
    *(row(sf.register_chooser("other"), T, r"@register_chooser\('other'\) must decorate a subclass of sparse_flash.Chooser; got",
          cls=cls) for cls in (sf.causal, SCORED, len, 3, None)),
    row(sf.register_chooser("other"), T, r"Scored must be a frozen dataclass; put .* under @register_chooser$",
        cls=type("Scored", (Scored,), {})),
    row(sf.register_chooser, V, "name must be an identifier", name=Scored),  # without a name the class would become a function
    *choosers_without_queries(CHOOSER),
    # Maps and lists of blocks, dense masks, masks of heads.
    each("blocks", V, r"bool tensor of shape .* got torch\.(float32.*use \.bool|bool of)", blocks=(ones(2, 2), bools(1, 2, 2))),
    row("blocks", T, "blocks must be a bool tensor; got list", blocks=[[True]]),
    alike("blocks", V, "2 x 2 blocks, but 300 x 300 tokens in .* are 3 x 3", 300, "q_len", "kv_len"),
    row("blocks", V, r"within is on meta, .* on cpu; use within\.to\('cpu'\)", within=compiled("causal", 256).to("meta")),
    *(row(call, V, re.escape(str(shape)), **{name: bools(*shape)}) for shape in ((0, 1, 2, 2), (1, 0, 2, 2), (2, 0), (0, 2))
      for call, name in (("blocks", "blocks"), (sf.BlockMask.from_dense, "kept"))),
    each(sf.BlockMask.from_dense, V, "must be a bool tensor of shape", kept=(ones(3, 3), bools(3, 3, 3))),
    row(sf.BlockMask.from_dense, T, "kept must be a bool tensor; got list", kept=[[True]]),
    each(sf.BlockMask.from_flex, T, "got sparse_flash.*{type}", mask=(compiled("causal", 20), sf.causal())),
    each("compile", V, "q_len must be a positive integer number of tokens; got {}", q_len=(0, 64.0, True)),
    each("compile", V, r"power of two in 16\.\.256; got {}; try", block_size=(48, 8, 512, 64.0)),
    row(of_heads, V, "got an empty list", masks=[]),
    *(row(call, error, f"{name} must be .*0 to {last}; got {number}|cannot be interpreted as an integer", **{field: number})
      for masks in (of_heads(["causal", "full"], 64), SELECTION)
      for name, field, last, call in (("head", "head", 1, masks.select), ("query", "query", 63, masks.kept_keys),
                                      ("head", "head", 1, partial(masks.kept_keys, 0)))
      for error, number in ((IndexError, 9999), (IndexError, -1), (T, None), (T, 0.5), (T, "0"))),
    row(of_heads, V, r"mask 0 has \(9, 9, 128\), mask 1 has \(8, 8, 128\)", masks=[compiled("causal", 9), compiled("causal", 8)]),
    row(of_heads, V, r"one head each; mask 1 has \(1, 2\)", masks=[compiled("causal", 9), of_heads(["causal", "full"], 9)]),
    row(of_heads, V, "q_len is needed", masks=["causal"]),
    row(of_heads, T, r"got list; use per_head for a pattern of each head, BlockMask\.per_head for", masks=[["causal"]], q_len=9),
    row(of_heads, V, "got q_len=8 and a mask of 9; leave q_len out, or compile", masks=["full", compiled("causal", 9)], q_len=8),
    row(of_heads, T, "per_head needs a list of patterns or masks; got str", masks="causal", q_len=32),
    row(of_heads, T, "got NoneType; use 'full' to keep every pair", masks=[None, "causal"], q_len=32),
    each(sf.per_head, T, "must be a list of patterns or spec texts, one for each head; got", patterns=([], "causal")),
    row(sf.per_head, T, r"patterns\[0\] .*; got BlockMask; BlockMask\.per_head takes", patterns=[compiled("causal", 64)]),
    row(sf.per_head, T, r"patterns\[0\] must be a Pattern of one head", patterns=[HEADS]),
    row(lambda: HEADS & sf.per_head(["causal", "full"]), V, r"as many heads to combine; got \[2, 4\]"),
    row(lambda: HEADS & BATCH, V, "per_head and per_batch do not combine"),
    *(row(combine, V, r"over one layout to combine.*; got video_layout\(.* and video_layout\(") for combine in (
        lambda: ~TILES | RADIAL, lambda: TILES & "local(3)" & RADIAL, lambda: sf.per_head([TILES, RADIAL]))),
    row(lambda: HEADS.token_rule(0, 0), V, "has several token rules"),
    row(sf.draw, V, r"must be one; got 2; take them one by one, as mask.select\(head, batch\)", mask=compiled(BATCH, 70)),
    row(lambda: sf.bench(BATCH, q_len=64), V, "the benchmark's mask must be that of all sequences"),
    # Patterns, their text and their functions.
    *(row(use, T, r"combine patterns with & \| ~ instead of and, or, not", p=pattern)
      for use in (lambda p: bool(p), lambda p: p and p, lambda p: not p, lambda p: p or p) for pattern in (HEADS, ~sf.causal())),
    *(row(combine, T, "unsupported operand") for combine in (
        lambda: sf.causal() & ("local(3)",), lambda: sf.causal() | 3, lambda: None & sf.causal())),
    *(row(combine, T, "causal is a class of patterns; call it for a pattern") for combine in (
        lambda: HEADS & sf.causal, lambda: sf.causal & sf.local(3), lambda: sf.local(3) | sf.causal)),
    row(sf.parse, T, "must be a string; got int", text=3),
    row(write_call, V, "a set has no spec text", name="local", positional=[{1}], keyword={}),
    row(sf.from_mask_fn, T, "must be a function", fn=3),
    row(sf.from_mask_fn, T, r"of \(q, kv\); got one of \(b, h, q, kv\).*create_block_mask takes", fn=lambda b, h, q, kv: q >= kv),
    row("compile", T, "must return booleans; got int64", pattern=sf.from_mask_fn(lambda q, kv: q - kv)),
    row("compile", V, r"a shape that broadcasts to \(1, 128, 128\); got", pattern=sf.from_mask_fn(lambda q, kv: (q > kv)[..., :3])),
    *(row("compile", T, "must take whole arrays of positions.*instead of and, or", pattern=sf.from_mask_fn(rule)) for rule in (
        max, lambda q, kv: q > kv and q > 3, lambda q, kv: torch.abs(q) > kv or q > 3)),
    *(row(sf.parse, V, rf"got '{word}'; write '{sign}'", text=text) for word, sign, text in (
        ("and", "&", "causal and local(3)"), ("or", r"\|", "causal or local(3)"), ("not", "~", "not causal"))),
    *(row(sf.parse, V, said, text=text) for said, text in (
        (r"local takes \(window\): missing", "local"), (r"local takes \(window\): too many", "local(1, 2)"),
        (r"takes \(stride, block=128\): got an unexpected keyword argument 'blok'", "strided(4, blok=2)"))),
    *(row(combine, T, "compiled masks do not combine with .*combine their patterns") for combine in (
        lambda: compiled("full", 20) & sf.causal(), lambda: "causal" | compiled("full", 20), lambda: ~compiled("full", 20))),
    # Videos in tile order.
    row(VIDEO.to_tiles, V, r"114 tokens in dimension 1 before .* tile order.*got shape \(2, 192\)", x=zeros(2, 192), dim=1),
    row(VIDEO.to_raster, V, rf"x must have {VIDEO.length} tokens in dimension 0 in tile order", x=zeros(114), dim=0),
    row("compile", V, rf"in tile order, with {VIDEO.length} tokens; got 114.*pass layout.to_tiles", pattern=VIDEO, q_len=114),
    row(sf.radial, T, r"radial: layout must be a VideoLayout or its text; got Causal", layout="causal"),
    # Plans. Most of their bad input needs several ranks: see parallel/on_ranks.py.
    row("context_parallel", T, r"mesh must be a DeviceMesh; got str; use init_device_mesh", mesh="cp"),
    row("context_parallel", V, "mask must name at least one mask, or be one; got an empty list", mask=[]),
    row("context_parallel", V, "heads must be", heads=0),
    row("context_parallel", T, r"unexpected keyword argument 'softcap'", softcap=1.0),
    row("draw", V, r"must be a \.png or \.svg file; got .*gif", path="mask.gif"),
    row("draw", T, "name of a picture to write; got 4096; lengths are q_len= and kv_len=", path=4096),
    row("draw", V, "level must be one of auto, tokens, blocks; got 'pairs'", level="pairs"),
    row("draw explain", V, "must come with a pattern to compile; got a mask of 64 x 64 tokens; leave", mask=compiled("causal", 64)),
    each("explain bench", V, "heads must be an integer of at least 1; got {}", heads=(0, 4.5)),
    row("draw explain", V, "one head or sequence; got 2 different ones; pass one, such as 'causal'$", mask=HEADS),
    row("explain bench", T, "dtype must be a torch.dtype, such as torch.bfloat16; got 'bf16'", dtype="bf16"),
    # The benchmark: mistakes are said before anything is measured.
    row("bench", V, "heads must be a multiple of kv_heads; got 3 and 2", heads=3, kv_heads=2),
    row("bench", V, "masks must be patterns or spec texts; got none", masks=[]),
    row("bench", T, "got BlockMask; pass what it was compiled from", masks=compiled("causal", 256)),
    row("bench", V, "device must be 'cpu' or 'cuda'", device="meta"),
    # The layer.
    row("layer", V, "heads must divide dim", dim=50),
    row("layer", V, "kv_heads must divide heads; got 3 and 4", kv_heads=3),
    row("layer", V, "even head_dim", head_dim=5),
    *(row("layer", V, f"positive, finite base; got 12 and {base!r}; rotary", rotary_base=base) for base in (-1, NAN)),
    each("layer", T, "rotary_base must be a number; got {type}", rotary_base=(True, "1")),
    row("layer", V, "select takes no dropout; got dropout_p=0.1", dropout_p=0.1, select=len),
    row("layer", V, "select takes the place of mask; leave mask out", mask="causal & local(20)", select=len),
    row("layer", T, r"select must be a dict of topk_blocks' arguments, or a function .* got int", select=16),
    row("layer", T, "unexpected keyword argument 'within'", select={"keep": 3, "within": None}),
    row("layer", T, "missing 1 required positional argument: 'keep'", select={"block_size": 16}),
    row("layer_call", T, "must return a BlockSelection; got BlockMask; pass every=1", select=lambda q, k: sf.topk_blocks(q, k, 3)),
    row("layer_call", V, "mask must be None for a layer with a select; got a str; leave it out", select={"keep": 1}, under="full"),
    row("layer_call", T, "cache must be a KeyValueCache; got bool; layer.new_cache makes one", cache=True),
    *(row(sf.KeyValueCache, V, f"{name} must be an integer of at least 1; got {re.escape(repr(size))}", **SIZES | {name: size})
      for name, size in (("length", 0), ("batch", 1.5), ("batch", "1"))),
    row(sf.KeyValueCache(**SIZES).append, T, "k must be a tensor; got NoneType", k=None, v=None),
    row(sf.KeyValueCache(**SIZES).append, V, "room for 60 tokens and holds 0; 64 more", k=Q, v=Q),
    *(row(sf.KeyValueCache(**SIZES).append, V, r"shapes \(2, 4, .*, 16\) .* as the cache was made for; got", k=k, v=k)
      for k in (Q[:1, :, :5], Q[0, :, 0])),
    # flash-attn's calls.
    row("flash_attn_call", V, "S_dmask", dropout_p=0.1, return_attn_probs=True),
    row("flash_attn_call", V, "compile it from a pattern that says these, such as", causal=True, mask=compiled("local(3)", 64)),
    row("flash_packed_softcap", V, "pattern of distances", mask="sinks(4)"),
    row("flash_cache", V, "pattern of distances", cache_leftpad=ints(0, 8), mask="sinks(4)"),
    each("flash_attn_call flash_cache", V, r"must be \(left, right\), .*; got ", window_size=(3, (3,), (1, 2, 3), "3", None)),
    each(CAPPED, V, "cache_seqlens must be 0 to 15, for 1 new .* of 16; got (-1|-2|16) to", cache_seqlens=(-1, ints(3, -2), 16)),
    each(CAPPED, V, r"block_table must .* \(batch=2, pages_of_one\); got \(2,\)|\(1, 2\)", block_table=(ints(0, 1), ints([0, 1]))),
    each(CAPPED, V, r"k_cache must .* \((batch=3, .*=16|batch=2, .*=24)\); got", q=(zeros(3, 1, 4, 16), zeros(2, 1, 4, 24))),
    alike(CAPPED, V, "k, v and cache_seqlens go together", None, "k", "cache_seqlens"),
    each(CAPPED, V, r"v must .* \(batch=2, seqlen_new=1, .*v_head_dim=16\); got", v=(ones(2, 4, 2, 16), ones(2, 1, 2, 15))),
    row(CAPPED, V, "rotate q and k before", rotary_cos=ones(8, 4), rotary_sin=ones(8, 4)),
    row(CAPPED, V, "torch.no_grad", q=learned(F[:, :1])),
    row(PACKS, V, "7 tokens, more than max_seqlen_q=6", max_seqlen_q=6, max_seqlen_k=6),
    row(PACKS, V, "cu_seqlens_k must start with 0, not decrease, and end with at most the 12 tokens", cu_seqlens_k=ints(0, 5, 20)),
    row(PACKS, V, r"cu_seqlens_k must .* .sequences.1=3.; got .4,.", cu_seqlens_k=ints(0, 3, 5, 12)),
    row("flash_pages", V, "9 tokens, more than max_seqlen_k=8", cu_seqlens_k=ints(0, 9, 10), max_seqlen_k=24),
    row("flash_pages", V, "cu_seqlens_k must .*; got .4,.", cu_seqlens_k=ints(0, 5, 9, 12)),
    # block-sparse-attn's call.
    row("block_sparse_call", V, "exact_streaming needs is_causal=True and no .*; got False and 1 heads", exact_streaming=True),
    alike("block_sparse_call", V, "{} must be given", None, "streaming_info", "base_blockmask"),
    row("block_sparse_call", V, "streaming_info must not be negative .* got .* .-1, 1.", streaming_info=ints(1, 1, -1, 1)),
    row("block_sparse_call", V, "head_mask_type must be at most 1", head_mask_type=ints(1, 2)),
    row("block_sparse_call", V, r"a tensor of shape \(1, 1, 2, 2\); got \(1, 2, 2, 2\)", base_blockmask=ones(1, 2, 2, 2)),
    row("block_sparse_call", V, "a document of q has 200 tokens, more than max_seqlen_q=150", max_seqlen_q_=150, max_seqlen_k_=150),
    # Transformers.
    row("model", T, "got str, which holds none; load one by from_pretrained", model="llama"),
    row("model", T, "model must be a PreTrainedModel, or hold one.*got Linear, which holds none", model=torch.nn.Linear(2, 2)),
    each("model", V, r"mask must name layers of the model, 0 to 1; got \[(7|True)", mask=({7: "causal"}, {True: "causal"})),
    row("model", T, "mask must be one for all layers; got a list of 0", mask=[]),
    each("model", T, r"got a {type} of .*per_layer=\[.*per_head", mask=(["causal", "causal & local(9)"], ("causal",) * 4)),
    row("model", V, "mask and per_layer were both given", mask="causal", per_layer=["causal", "causal"]),
    row("model", V, "2 masks.*got 1", per_layer=["causal"]),
    row("model", T, "per_layer must be a list.*got str", per_layer="causal"),
    each("model", V, "dense_below must be a number of tokens, 0 or more; got '?{}", dense_below=("4k", -1)),
    each("model", V, "dense_last must be a number of tokens, 0 or more; got {}", dense_last=(True,)),
    row("model", V, r"dense_layers must name layers of the model, 0 to 1; got \[2\]", mask="causal & local(9)", dense_layers=[2]),
    row("model", V, "must be within causal and say so", mask="sampled(8, keep=2)"),
    row("model", V, "must choose by itself, as no model passes scores", mask="causal & scored(keep=2)"),
    row("model_call", V, r"must be 2-D, .*got shape \(2, 1, 150, 150\); .*from_dense", attention_mask=bools(2, 1, 150, 150)),
    row("model_call", V, r"must be of all 150 tokens so far.*got shape \(2, 149\)", attention_mask=ones(2, 149), use_cache=True),
    row("model_call", V, "cu_seq_lens_k must be equal to cu_seq_lens_q", cu_seq_lens_q=ints(0, 300), cu_seq_lens_k=ints(0, 200)),
    row("model_call", V, "got packed .*pass the pattern", mask=compiled("causal", 150), position_ids=zeros(1, 150).int()),
    row("model_call", V, "a layer's BlockMask must fit .* 100 queries.*pass the pattern itself", mask=compiled("causal", 100)),
    row("model_call", V, "output_attentions", output_attentions=True),
    # diffusers.
    row("video", T, "such as pipe.transformer", model=object()),
    row("video", V, "must be one of Wan.*pass grid=", model=torch.nn.Linear(1, 1)),
    row("video", V, "integrations.transf",
        model=torch.nn.Sequential(type("LlamaModel", (torch.nn.Module,), {"__module__": "transformers.models"})())),
    row("video", V, "where the layout of the video goes", spec="local(64)"),
    *(row("video", T, "spec must be text or a function", spec=spec) for spec in (None, ["layout", 3], lambda step: 3)),
    row("video", V, "an entry for each step", spec=[]),
    row("video", V, "where the layout of the video goes", spec=[None, "local(64)"]),
    row("video", V, "model that is not known; got .* for WanT", grid=(3, 5, 7)),
    row("video", V, "power of two", layout=(3, 3, 3)),
    *(row("video", V, "'auto', a tile", layout=layout) for layout in ("raster", VIDEO)),
    row("video", V, r"0 to 1; got \[2\]", dense_layers=[2]),
    *(row("video", V, "counted from 0", dense_steps=steps) for steps in ([-1], -1, True)),
)  # fmt: skip
ROWS = list(chain(*TABLES))
WITHOUT_TOKENS = {"attention", "attention_choose", "choose", "decode", "topk", "topk_by_query", "layer_call", "flash_attn_call"}
NUMBERS = {"scale", "dropout_p", "softcap", "deterministic", "backend", "keep", "every", "block_size", "within", "always"}


def parametrize(rows):
    ids = [f"{getattr(getattr(call, 'func', call), '__name__', call)}-{'-'.join(change)}" for call, change, *_ in rows]
    return pytest.mark.parametrize("call, change, error, message", rows, ids=ids)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "fp8"])  # which needs a GPU
def test_plain_calls_run(name):
    call, plain = CALLS[name]
    call(**copy.deepcopy(plain))


@parametrize(ROWS)
def test_bad_input_is_one_clear_error_and_changes_nothing(call, change, error, message):
    if call == "attention":
        for deterministic in (None, True, False):  # what is remembered of these calls spares others no check
            sf.attention(**CALLS[call][1], deterministic=deterministic)
    call, plain = CALLS[call] if isinstance(call, str) else (call, {})
    arguments = plain | change
    versions = [t._version for t in arguments.values() if type(t) is torch.Tensor]
    with pytest.raises(error, match=message):
        call(**arguments)
    assert versions == [t._version for t in arguments.values() if type(t) is torch.Tensor]


@parametrize([row for row in ROWS if row[0] in WITHOUT_TOKENS and (set(row[1]) <= NUMBERS or row[3].startswith((TYPO, KINDS)))])
def test_bad_input_is_refused_also_without_tokens(call, change, error, message):
    call, plain = CALLS[call]
    with pytest.raises(error, match=message):
        call(**{name: value[:0] if isinstance(value, torch.Tensor) else value for name, value in plain.items()} | change)


def test_every_entry_point_has_rows():
    assert set(CALLS) == {call for call, *_ in ROWS if isinstance(call, str)}
    assert [entry for entry in ENTRIES if not entry.startswith(tuple(CALLS))] == []
