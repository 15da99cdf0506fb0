"""Every entry point as a call that a test can run in any mode and compare with its definition.

A new entry point is one function here: from ``Sizes`` to a ``Call``. ``test_modes.py`` and ``test_properties.py`` then cover it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from accepted import DEVICE, fitted
from hypothesis import currently_in_test_context, reject
from oracle import SEED, Call, dense_attention, existing, kept_pairs, no_host_synchronization, tensor
from oracle import assert_right as assert_right
from picked import drawn_picks, kept_by_picks
from torch.distributed.device_mesh import init_device_mesh

import sparse_flash as sf
from sparse_flash import backends
from sparse_flash.integrations import block_sparse_attn, flash_attn, sdpa
from sparse_flash.masks.pattern import PerBatch, PerHead
from sparse_flash.variant.definition import Pairs, kept_by_dropout
from sparse_flash.variant.variant import build_variant

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

SPEC = "causal & (local(20) | sinks(3))"


@dataclass(frozen=True)
class Sizes:
    """Of a call. backend: "auto", or the name of a back end, where the call takes one. layout: see ``oracle.tensor``. The rest
    matters to some calls. spec: of the mask, a Pattern or text. block_size: of a table. terms: names of ``terms_of``. lens, k_lens:
    tokens of each document, or of each sequence in a cache. queries: of a decoding call. page: tokens of a page."""

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
    spec: sf.Pattern | str | None = SPEC
    block_size: int = 64
    terms: tuple[str, ...] = ("kv_lens", "softcap", "alibi", "bias", "sinks")
    scale: float | None = None
    deterministic: bool | None = None
    lens: tuple[int, ...] | None = None
    k_lens: tuple[int, ...] | None = None
    queries: int = 3
    page: int | None = None

    def options(self) -> dict:
        return {"scale": self.scale, "backend": self.backend, "return_lse": True}


def is_interpreted(backend: str) -> bool:
    return backend == "triton" and DEVICE == "cpu"


def replayed(step: Callable[[], list], change: Callable[[], object]):
    """The results of a step in a CUDA graph that is captured before a change and replayed after it. Outside of a graph, the step
    must not wait for the GPU."""
    step()
    with no_host_synchronization():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    change()
    for _ in range(3):  # a replay leaves counters as it found them
        graph.replay()
    return captured


def name_of(row: dict) -> str:
    """The id of a test of some changed sizes."""
    return ", ".join(f"{name} {value}" for name, value in row.items()).replace("[", "(").replace("]", ")")


@dataclass(frozen=True)
class Counted(sf.Pattern):
    """A user's own window, which counts the evaluations of its rule."""

    evaluations: ClassVar[list] = []

    def token_rule(self, q, kv):
        self.evaluations.append(kv)
        return (abs(q - kv) < 64) & ((q + kv) % 3 > 0)


@contextmanager
def unless_refused():
    """Drops an example that the back end refuses; skips a test of one call, with the back end's reason."""
    try:
        yield
    except ValueError as error:
        if "cannot run this call" not in str(error):
            raise
        if currently_in_test_context():
            reject()
        pytest.skip(str(error))


def sizes_for(backend: str, **given) -> Sizes:
    """The usual sizes with changes, in the dtype, head dimensions and blocks that the back end accepts. Skips without it."""
    if backend != "auto" and (reason := backends.get_backend(backend).why_unavailable()):
        pytest.skip(f"{backend}: {reason}")
    asked = {name: given[name] for name in ("dtype", "head_dim", "v_head_dim", "block_size") if name in given}
    usual = {"dtype": torch.float32, "head_dim": 16, "block_size": 32}
    usual = {name: value for name, value in usual.items() if name not in asked}
    asked |= fitted("torch" if backend == "auto" else backend, usual, **asked)
    # Triton's interpreter takes a second where others take a millisecond.
    few = {"heads": 2, "kv_heads": 1, "q_len": 40, "kv_len": 40} if is_interpreted(backend) else {}
    return replace(Sizes(backend=backend), **{"v_head_dim": asked["head_dim"]} | few | given | asked)


def normal(sizes: Sizes) -> list[torch.Tensor]:
    """q, k and v."""
    generator = torch.Generator().manual_seed(sizes.seed)
    keys = sizes.batch, sizes.kv_heads, sizes.kv_len
    shapes = (sizes.batch, sizes.heads, sizes.q_len, sizes.head_dim), (*keys, sizes.head_dim), (*keys, sizes.v_head_dim)
    return [tensor(shape, sizes.layout, dtype=sizes.dtype, generator=generator) for shape in shapes]


def kept_by(spec: sf.Pattern | str | None, q_len: int, kv_len: int) -> torch.Tensor:
    """(q_len, kv_len) bool; (heads, q_len, kv_len) for a mask of each head, (batch, 1, q_len, kv_len) of each sequence."""
    if not q_len or not kv_len:
        return torch.ones(q_len, kv_len, dtype=torch.bool, device=DEVICE)
    pattern = sf.parse(spec) if isinstance(spec, str) else spec
    if isinstance(pattern, PerHead | PerBatch):
        each = torch.stack([kept_by(one, q_len, kv_len) for one in pattern.patterns])
        return each if isinstance(pattern, PerHead) else each[:, None]
    return kept_pairs(pattern, None, q_len, kv_len).to(DEVICE)


def attention(sizes: Sizes) -> Call:
    def run(q, k, v):
        return sf.attention(q, k, v, sizes.spec, deterministic=sizes.deterministic, **sizes.options())

    kept = kept_by(sizes.spec, sizes.q_len, sizes.kv_len)
    return Call(tuple(normal(sizes)), run, lambda q, k, v: dense_attention(q, k, v, kept, sizes.scale))


def attention_under_a_table(sizes: Sizes) -> Call:
    mask = sf.compile_mask(
        sf.full() if sizes.spec is None else sizes.spec, sizes.q_len, sizes.kv_len, block_size=sizes.block_size, device=DEVICE
    )
    mask = replace(mask, coarse=None)  # else a GPU never sees small blocks
    options = {"deterministic": sizes.deterministic, **sizes.options()}
    return replace(attention(sizes), run=lambda *t: sf.attention(*t, mask, **options))


if triton:

    @triton.jit
    def own_in_triton(score, batch, head, q_pos, k_pos, params):
        weight = tl.load(params[0] + batch * tl.load(params[1]) + head)
        return tl.where((q_pos + 3 * k_pos) % 7 == 0, -float("inf"), score + weight * score * score)

    @triton.jit
    def own_derivative(score, batch, head, q_pos, k_pos, params):
        weight = tl.load(params[0] + batch * tl.load(params[1]) + head)
        return tl.where((q_pos + 3 * k_pos) % 7 == 0, 0.0, 1.0 + 2.0 * weight * score)

else:
    own_in_triton = own_derivative = None


def own_in_torch(score, batch, head, q_pos, k_pos, params):
    weight = params[0][batch, head].to(score.dtype)
    return torch.where((q_pos + 3 * k_pos) % 7 == 0, -float("inf"), score + weight * score * score)


OWN = sf.ScoreFunction(own_in_torch, own_in_triton, own_derivative)
LENGTHS = ("q_starts", "q_lens", "kv_starts", "kv_lens")


def every_term(sizes: Sizes) -> dict[str, dict]:
    """Arguments of ``attention`` by a name for them. What is learned requires a gradient."""
    generator, (batch, heads) = torch.Generator().manual_seed(sizes.seed + 1), (sizes.batch, sizes.heads)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    def shares(tokens, *shares):
        return torch.tensor([round(share * tokens) for share in (shares * batch)[:batch]], dtype=torch.int64, device=DEVICE)

    queries, keys = partial(shares, sizes.q_len), partial(shares, sizes.kv_len)
    ends = {"kv_lens": keys(0.2, 0.9), "q_lens": queries(0.8, 0.0)}
    return {
        "kv_lens": {"kv_lens": keys(0.46, 1.0)},
        "kv_lens of nothing": {"kv_lens": keys(0.0, 9.0)},
        "q_lens": {"q_lens": queries(1.0, 0.45).int()},
        "starts": {"kv_starts": keys(0.55, -0.05), "q_starts": queries(0.45, 0.9).int()},
        "lengths": {"kv_starts": keys(0.1, 0.55), "q_starts": queries(0.13, 0.0), **ends},
        "dropout": {"dropout_p": 0.25},
        "softcap": {"softcap": 5.0},
        "small softcap": {"softcap": 0.7},
        "large softcap": {"softcap": 1e4},  # which loses nothing that its size multiplies
        "alibi": {"alibi_slopes": 0.1 * normal(heads).abs()},
        "steep alibi": {"alibi_slopes": torch.ones(heads, device=DEVICE)},
        "alibi of batch": {"alibi_slopes": normal(batch, heads).abs()},
        "bias": {"rel_bias": normal(heads, 41).requires_grad_()},
        "short bias": {"rel_bias": normal(heads, 3).requires_grad_()},
        "frozen bias": {"rel_bias": normal(heads, 41)},
        "short frozen bias": {"rel_bias": normal(heads, 3)},
        "own": {
            "score_mod": OWN,
            "score_params": (0.1 * normal(batch, heads), torch.tensor([heads], dtype=torch.int32).to(DEVICE)),
        },
        "sinks": {"sinks": normal(heads).requires_grad_()},
        "no sinks": {"sinks": normal(heads).fill_(float("-inf")).requires_grad_()},
    }


TERMS = tuple(every_term(Sizes()))


def terms_of(sizes: Sizes) -> dict:
    """The arguments of ``attention`` for all terms of a call."""
    every, given = every_term(sizes), {}
    for name in sizes.terms:
        given |= every[name]
    return given


def surviving(q, k, dropout_p: float, seed: int = SEED) -> torch.Tensor:
    """Returns the pairs that dropout keeps in the first call after manual_seed(seed): (batch, heads, q_len, kv_len) bool."""
    torch.manual_seed(seed)
    return kept_by_dropout(build_variant(q, k, dropout_p=dropout_p), Pairs.all(q, k))


def attention_call(inputs, mask, kept: torch.Tensor, given: dict, scale: float | None, **options) -> Call:
    """Of q, k and v. kept: the mask by definition, broadcastable to the scores. given: terms; what of it requires a gradient is
    learned. options: of ``attention``."""
    q, k, v = inputs
    learned = [name for name in ("rel_bias", "sinks") if name in given and given[name].requires_grad]
    lens = {name: given[name] for name in LENGTHS if name in given}
    fixed = {name: value for name, value in given.items() if name not in (*learned, *lens)}
    survives = surviving(q, k, fixed["dropout_p"]) if "dropout_p" in fixed else None

    def run(q, k, v, *rest):
        of_rest = dict(zip((*learned, *lens), rest, strict=True))
        return sf.attention(q, k, v, mask, scale=scale, return_lse=True, **options, **fixed, **of_rest)

    def define(q, k, v, *rest):
        return dense_attention(q, k, v, kept, scale, survives=survives, **fixed, **lens, **dict(zip(learned, rest, strict=True)))

    queries = ~existing(q.shape[2], lens.get("q_starts"), lens.get("q_lens"))[:, None, :, None]
    keys = ~existing(k.shape[2], lens.get("kv_starts"), lens.get("kv_lens"))[:, None, :, None]
    of_terms = [given[name].detach() for name in learned]
    return Call((q, k, v, *of_terms), run, define, tuple(lens.values()), hidden=(queries, keys, keys) if lens else ())


def attention_with_terms(sizes: Sizes, mask: sf.BlockMask | None = None) -> Call:
    """Lengths, dropout, a soft cap, slopes, a function of scores, a bias and sinks; bias and sinks are learned. mask: the table, if
    it is not the usual one."""
    kept, options = kept_by(sizes.spec, sizes.q_len, sizes.kv_len), {"deterministic": sizes.deterministic, "backend": sizes.backend}
    return attention_call(normal(sizes), mask or sizes.spec, kept, terms_of(sizes), sizes.scale, **options)


def one_rank(device: str = DEVICE):
    """A mesh of this process. Its group ends with the plan that is made of it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device, (1,))


def context_parallel(sizes: Sizes) -> Call:
    """A plan of several ranks, on one."""
    try:
        options = {"heads": sizes.heads, "kv_heads": sizes.kv_heads, "block_size": sizes.block_size}
        plan = sf.context_parallel(sf.full() if sizes.spec is None else sizes.spec, sizes.q_len, one_rank(), **options)
    finally:
        dist.destroy_process_group()
    past = torch.arange(plan.tokens, device=DEVICE)[None, None, :, None] >= sizes.q_len

    def run(q, k, v):
        return plan.attention(q, k, v, deterministic=sizes.deterministic, **sizes.options())

    kept = torch.nn.functional.pad(kept_by(sizes.spec, sizes.q_len, sizes.q_len), (0, plan.tokens - sizes.q_len) * 2)
    inputs = normal(replace(sizes, q_len=plan.tokens, kv_len=plan.tokens))
    return Call(tuple(inputs), run, lambda *t: dense_attention(*t, kept, sizes.scale), hidden=(past, past, past))


def bounds_of(lens: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=dtype)


def documents_of(tokens: int) -> tuple[int, ...]:
    """Documents of a fourth, none, one token, and the rest but three tokens, which are of no document."""
    return tokens // 4, 0, min(1, tokens - tokens // 4), max(0, tokens - tokens // 4 - 4)


def varlen(sizes: Sizes) -> Call:
    """Packed documents; a batch of one has all. Tokens past them are of no document."""
    lens = sizes.lens or documents_of(sizes.q_len)
    bounds = [bounds_of(lens)] if sizes.k_lens is None else [bounds_of(lens), bounds_of(sizes.k_lens, torch.int64)]
    q_len, kv_len = sizes.q_len, sizes.q_len if sizes.k_lens is None else sizes.kv_len

    def run(q, k, v, *bounds):
        packed = (t.squeeze(0).transpose(0, 1) for t in (q, k, v))
        options = {"deterministic": sizes.deterministic, **sizes.options()}
        out, lse = sf.attention_varlen(*packed, *bounds, mask=sizes.spec, **options)
        return out.transpose(0, 1)[None], lse[None]

    kept = torch.zeros(q_len, kv_len, dtype=torch.bool, device=DEVICE)
    for (start, stop), (first, last) in zip(pairwise(bounds[0].tolist()), pairwise(bounds[-1].tolist()), strict=True):
        if start < stop and first < last:
            kept[start:stop, first:last] = kept_by(sizes.spec, stop - start, last - first)
    inputs = normal(replace(sizes, batch=1, kv_len=kv_len))
    others = tuple(t.to(DEVICE) for t in bounds)
    # What blocks without a document hold is never read, but by the reference, which multiplies whole matrices.
    past = [
        (torch.arange(t.shape[2], device=DEVICE) >= -(-int(ends[-1]) // 128) * 128)[:, None]
        for t, ends in zip(inputs, (bounds[0], bounds[-1], bounds[-1]), strict=True)
    ]
    hidden = tuple(past) if any(t.any() for t in past) and sizes.backend != "reference" else ()
    return Call(tuple(inputs), run, lambda *t: dense_attention(*t, kept, sizes.scale), others, hidden=hidden)


def varlen_in_place(sizes: Sizes) -> Call:
    """A mask of one run of keys a query, under which documents are attended to where they lie."""
    return varlen(replace(sizes, spec="causal & local(20)"))


def in_pages(t: torch.Tensor, size: int, unused: float | bool = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, kv_heads, tokens, head_dim) -> (pages, kv_heads, size, head_dim) in any order, and the block table, (batch, pages of
    one). Three pages are of no sequence."""
    t = torch.nn.functional.pad(t, (0, 0, 0, -t.shape[2] % size), value=unused)
    batch, heads, tokens, dim = t.shape
    count = batch * (tokens // size)
    order = torch.randperm(count + 3, generator=torch.Generator().manual_seed(1))[:count].to(t.device)
    stored = t.new_full((count + 3, size, heads, dim), unused).transpose(1, 2)  # as other libraries keep them
    stored[order] = t.unflatten(2, (tokens // size, size)).transpose(1, 2).flatten(0, 1)
    return stored, order.view(batch, tokens // size).int()


def decode(sizes: Sizes, mask: sf.BlockMask | None = None) -> Call:
    """The last queries of sequences of different lengths, over a cache in one piece, or in pages if there is a size of them. mask:
    the table, if the call gets one."""
    sizes = replace(sizes, batch=len(sizes.lens)) if sizes.lens else sizes
    q, k, v = normal(replace(sizes, q_len=min(sizes.q_len, sizes.queries)))
    lens = torch.arange(sizes.batch, dtype=torch.int32, device=DEVICE) * 7 + sizes.kv_len - 7 * (sizes.batch - 1)
    lens = torch.tensor(sizes.lens, dtype=torch.int32, device=DEVICE) if sizes.lens else lens.clamp(min=0)
    held, hidden = cache_of(sizes, lens, k, v)

    def run(q, k, v, lens, table=None):
        return sf.attention_decode(q, k, v, mask or sizes.spec, kv_lens=lens, block_table=table, **sizes.options())

    return replace(decode_of(sizes, q, k, v, lens), run=run, others=(*held[:2], lens, *held[2:]), hidden=hidden)


def cache_of(sizes: Sizes, lens: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[list[torch.Tensor], tuple]:
    """([k, v], or pages of both and the block table; what is hidden of a call's q, of these and of its lengths)"""
    past = (torch.arange(k.shape[2], device=DEVICE) >= lens[:, None])[:, None, :, None]
    if sizes.page is None:
        return [k, v], (None, past, past)
    pages, table = in_pages(past, sizes.page, True)
    unread = torch.arange(table.shape[1], device=DEVICE) >= -(-lens[:, None] // sizes.page)
    return [*(in_pages(t, sizes.page)[0] for t in (k, v)), table], (None, pages, pages, None, unread)


def decode_of(sizes: Sizes, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor) -> Call:
    """A call without ``run``: the definition of the last queries of sequences of these lengths."""

    def define(q):
        if not len(q):
            return torch.cat([q, q], 3)[..., : v.shape[3]] * 1.0, q[..., 0] * float("-inf")
        results = []
        for row, length in enumerate(lens.tolist()):
            one = q[row : row + 1], *(t[row : row + 1, :, :length].to(q.dtype) for t in (k, v))
            exist = torch.arange(length - q.shape[2], length, device=DEVICE)[:, None] >= 0
            results.append(dense_attention(*one, kept_by(sizes.spec, q.shape[2], length) & exist, sizes.scale))
        return tuple(torch.cat(each) for each in zip(*results, strict=True))

    return Call((q,), define, define, differentiable=False)


def decode_in_pages(sizes: Sizes) -> Call:
    return decode(replace(sizes, page=sizes.page or 16))


def in_eight_bits(t: torch.Tensor, unit: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """t, (batch, kv_heads, tokens, head_dim), in e4m3, and the scale of each token, (batch, kv_heads, tokens, 1), the same for
    ``unit`` tokens. What they hold is t times a number for each unit, so that scales of neighbours differ by up to 2^8."""
    whole = torch.nn.functional.pad(t.float(), (0, 0, 0, -t.shape[2] % unit)).unflatten(2, (-1, unit))
    whole = whole * 2.0 ** -(8 * torch.rand((*whole.shape[:3], 1, 1), generator=generator).to(t.device))
    scale = whole.abs().amax((3, 4), keepdim=True).clamp(min=1e-6) / 448
    held = (whole / scale).clamp(-448, 448).flatten(2, 3)[:, :, : t.shape[2]]
    return held.to(torch.float8_e4m3fn), scale.expand(*whole.shape[:4], 1).flatten(2, 3)[:, :, : t.shape[2]]


def decode_in_eight_bits(sizes: Sizes) -> Call:
    """A cache in e4m3, in pages if there is a size of them. A scale for each token, or where the seed is odd for each page."""
    whole = decode(replace(sizes, page=None))
    (q,), (k, v, lens), generator = whole.inputs, whole.others, torch.Generator().manual_seed(sizes.seed)
    unit = (sizes.page or max(1, k.shape[2])) if sizes.seed % 2 else 1
    stored, scales = zip(*(in_eight_bits(t, unit, generator) for t in (k, v)), strict=True)
    exact = [t.double() * scale.double() for t, scale in zip(stored, scales, strict=True)]
    held, hidden = cache_of(sizes, lens, stored[0].float(), stored[1].float())
    units, _ = cache_of(sizes, lens, *scales)
    k_scale, v_scale = (t[:, :, 0, 0] if sizes.seed % 2 else t[..., 0] for t in units[:2])
    v_scale = v_scale.transpose(0, 1).clone().transpose(0, 1)  # in another memory order than those of k
    of_scales = None if sizes.seed % 2 else hidden[1][..., 0]

    def run(q, k, v, lens, k_scale, v_scale, table=None):
        given = {"k_scale": k_scale, "v_scale": v_scale, "kv_lens": lens, "block_table": table}
        return sf.attention_decode(q, k, v, sizes.spec, **given, **sizes.options())

    others = *(t.to(torch.float8_e4m3fn) for t in held[:2]), lens, k_scale, v_scale, *held[2:]
    hidden = None, *hidden[1:3], None, of_scales, of_scales, *hidden[4:]
    return replace(decode_of(sizes, q, *exact, lens), run=run, others=others, hidden=hidden)


def topk(sizes: Sizes) -> Call:
    """Blocks of keys with the largest means for each block of queries, within a mask."""

    def mask_of(q, k):
        return sf.topk_blocks(q, k, 2, block_size=sizes.block_size, within="causal", always="sinks(3)")

    def run(q, k, v):
        return sf.attention(q, k, v, mask_of(q, k), return_lse=True, backend=sizes.backend)

    q, k, v = normal(sizes)
    kept = mask_of(q, k).to_dense()
    return Call((q, k, v), run, lambda *t: dense_attention(*t, kept))


# every, block, picks of a choice, whether each head picks, what is always kept: which of them a seed takes.
SELECTIONS = (
    (1, 16, 2, False, "sinks(3)"),
    (1, 16, 3, True, None),
    (1, 64, 2, False, "sinks(4) | local(20)"),
    (4, 16, 3, False, None),
    (40, 16, 3, True, "strided(7)"),
    (1, 512, 2, False, None),
)


def selection(sizes: Sizes) -> Call:
    """Blocks of keys that each query or group of queries picked, and what is always kept. All of some queries' picks are -1."""
    every, block, count, by_head, always = SELECTIONS[sizes.seed % len(SELECTIONS)]
    pickers, q_len, kv_len = sizes.heads if by_head else sizes.kv_heads, sizes.q_len, sizes.kv_len
    picks = drawn_picks((sizes.batch, pickers, -(-q_len // every), count), every, block, q_len, kv_len, sizes.seed)
    picks[:, :, 10:20] = -1

    def run(q, k, v, picks):
        options = {"every": every, "q_len": q.shape[2], "kv_len": k.shape[2], "own": False, "always": always, "check": False}
        chosen = sf.BlockSelection.from_picks(picks, block, **options)
        return sf.attention(q, k, v, chosen, **sizes.options())

    kept = kept_by_picks(picks, every, block, q_len, kv_len).any(3).repeat_interleave(sizes.heads // pickers, 1).to(DEVICE)
    kept = kept if always is None else kept | kept_by(f"causal & ({always})", q_len, kv_len)
    return Call(tuple(normal(sizes)), run, lambda *t: dense_attention(*t, kept, sizes.scale), (picks,))


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
    every, block, count, by_head, _ = SELECTIONS[sizes.seed % len(SELECTIONS)]
    pickers = sizes.heads if by_head else sizes.kv_heads
    picks = drawn_picks(
        (sizes.batch, pickers, -(-sizes.q_len // every), count), every, block, sizes.q_len, sizes.kv_len, sizes.seed
    )
    kept = kept_by_picks(picks, every, block, sizes.q_len, sizes.kv_len).repeat_interleave(sizes.heads // pickers, 1).to(DEVICE)

    def run(q, k, v, picks):
        options = {"every": every, "q_len": q.shape[2], "kv_len": k.shape[2], "own": False, "check": False}
        chosen = sf.BlockSelection.from_picks(picks, block, **options)
        return sf.attention(q, k, v, chosen, return_block_lse=True, scale=sizes.scale, backend=sizes.backend)

    def define(q, k, v):
        scores = ((sizes.scale or q.shape[3] ** -0.5) * q @ k.repeat_interleave(sizes.heads // sizes.kv_heads, 1).mT)[:, :, :, None]
        some = kept.any(-1)
        masses = scores.masked_fill(~kept & some[..., None], float("-inf")).logsumexp(-1).masked_fill(~some, float("-inf"))
        return dense_attention(q, k, v, kept.any(3), sizes.scale)[0], masses

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

    return Call((q,), run, lambda q: dense_attention(q, k.to(q.dtype), v.to(q.dtype), kept), (k, v, picks), differentiable=False)


def choose(sizes: Sizes) -> Call:
    """Blocks that a chooser keeps for blocks of queries: its own definition is tested where choosers are."""
    spec = "causal & (pooled(keep=1, block=64) | sinks(3))"

    def run(q, k, v):
        return sf.attention(q, k, v, spec, return_lse=True, backend=sizes.backend)

    q, k, v = normal(sizes)
    kept = sf.choose_blocks(spec, q, k).to_dense() if q.numel() else torch.ones((), dtype=torch.bool, device=DEVICE)
    return Call((q, k, v), run, lambda *t: dense_attention(*t, kept))


def blocks(sizes: Sizes) -> Call:
    """A map of blocks made at run time: for each sequence and head, or by the seed for all of them."""
    size, (batch, heads) = (
        sizes.block_size,
        ((sizes.batch, sizes.heads), (1, sizes.heads), (sizes.batch, 1), (1, 1))[sizes.seed % 4],
    )
    shape = batch, heads, -(-sizes.q_len // size), -(-sizes.kv_len // size)
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(sizes.seed)).to(DEVICE) < 0.5

    def run(q, k, v, kept):
        mask = sf.BlockMask.from_blocks(kept, size, q.shape[2], k.shape[2])
        return sf.attention(q, k, v, mask, return_lse=True, backend=sizes.backend)

    pairs = kept.repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, : sizes.q_len, : sizes.kv_len]
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

    return Call((x,), run, lambda x: (theirs(inputs_embeds=x.double(), attention_mask=kept, use_cache=False).logits,))


ENTRIES: dict[str, Callable[[Sizes], Call]] = {
    entry.__name__: entry
    for entry in (
        attention,
        attention_under_a_table,
        attention_with_terms,
        context_parallel,
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
