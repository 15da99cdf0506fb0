"""Every entry point as a call that a test can run in any mode and compare with its definition.

A new entry point is one function here: from ``Sizes`` to a ``Call``. ``test_modes.py`` and ``test_properties.py`` then cover it.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
import torch.distributed as dist
from accepted import DEVICE
from oracle import SEED, SPEC, Call, Sizes, dense_attention, existing, inputs_of, kept_by, no_host_synchronization, normal, table_of
from oracle import assert_right as assert_right
from oracle import sizes_for as sizes_for
from picked import drawn_picks, kept_by_picks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import linear

import sparse_flash as sf
from sparse_flash.core.definition import Pairs, kept_by_dropout
from sparse_flash.core.variant import build_variant
from sparse_flash.integrations import block_sparse_attn, flash_attn

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


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

    def drawn(tokens, past=0):
        """Often where something begins or ends."""
        ends = torch.tensor([0, 1, tokens // 2, tokens - 1, tokens, tokens + past]).clamp(0, tokens + past)
        at_ends = ends[torch.randint(6, (batch,), generator=generator)]
        anywhere = torch.randint(tokens + 1, (batch,), generator=generator)
        return torch.where(torch.rand(batch, generator=generator) < 0.3, at_ends, anywhere).to(DEVICE)

    queries, keys = partial(shares, sizes.q_len), partial(shares, sizes.kv_len)
    ends = {"kv_lens": keys(0.2, 0.9), "q_lens": queries(0.8, 0.0)}
    far = torch.tensor([2**32 + 5, 2**31 - 1] * batch, device=DEVICE)[:batch]  # in int32, these are past the tokens no more
    return {
        "kv_lens": {"kv_lens": keys(0.46, 1.0)},
        "kv_lens of nothing": {"kv_lens": keys(0.0, 9.0)},
        "q_lens": {"q_lens": queries(1.0, 0.45).int()},
        "starts": {"kv_starts": keys(0.55, -0.05), "q_starts": queries(0.45, 0.9).int()},
        "lengths": {"kv_starts": keys(0.1, 0.55), "q_starts": queries(0.13, 0.0), **ends},
        "far lengths": {"kv_lens": far, "q_lens": far + 1, "kv_starts": -far, "q_starts": -far - 1},
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
        "drawn q_starts": {"q_starts": drawn(sizes.q_len)},
        "drawn q_lens": {"q_lens": drawn(sizes.q_len, past=9)},
        "drawn kv_starts": {"kv_starts": drawn(sizes.kv_len)},
        "drawn kv_lens": {"kv_lens": drawn(sizes.kv_len, past=9)},
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


def attention_call(sizes: Sizes, mask, kept: torch.Tensor) -> Call:
    """Of q, k and v under a mask, with terms; what of these requires a gradient is learned. kept: the mask by definition,
    broadcastable to the scores."""
    (q, k, v, dout), given = inputs_of(sizes), terms_of(sizes)
    learned = [name for name in ("rel_bias", "sinks") if name in given and given[name].requires_grad]
    lens = {name: given[name] for name in LENGTHS if name in given}
    fixed = {name: value for name, value in given.items() if name not in (*learned, *lens)}
    survives = surviving(q, k, fixed["dropout_p"]) if "dropout_p" in fixed else None
    options = {"deterministic": sizes.deterministic, **sizes.options()}

    def run(q, k, v, *rest):
        return sf.attention(q, k, v, mask, **options, **fixed, **dict(zip((*learned, *lens), rest, strict=True)))

    def define(q, k, v, *rest):
        of_rest = dict(zip(learned, rest, strict=True))
        return dense_attention(q, k, v, kept, sizes.scale, survives=survives, **fixed, **lens, **of_rest)

    queries = ~existing(q.shape[2], lens.get("q_starts"), lens.get("q_lens"))[:, None, :, None]
    keys = ~existing(k.shape[2], lens.get("kv_starts"), lens.get("kv_lens"))[:, None, :, None]
    of_terms, hidden = [given[name].detach() for name in learned], (queries, keys, keys) if lens else ()
    return Call((q, k, v, *of_terms), run, define, tuple(lens.values()), hidden=hidden, dout=dout)


def attention_with_terms(sizes: Sizes, mask: sf.BlockMask | None = None) -> Call:
    """Lengths, dropout, a soft cap, slopes, a function of scores, a bias and sinks; bias and sinks are learned. mask: the table, if
    it is not the usual one."""
    return attention_call(sizes, mask or sizes.spec, kept_by(sizes.spec, sizes.q_len, sizes.kv_len))


def attention(sizes: Sizes) -> Call:
    return attention_with_terms(replace(sizes, terms=()))


def attention_under_a_table(sizes: Sizes) -> Call:
    return attention_with_terms(replace(sizes, terms=()), table_of(sizes))


def beside_empty_blocks(sizes: Sizes) -> Call:
    """Causal attention of the blocks in the middle. No pair of the first and the last block of queries or keys is kept."""
    size = sizes.block_size
    kept = torch.ones(4 * size, 4 * size, dtype=torch.bool, device=DEVICE).tril()
    outside = torch.arange(4 * size, device=DEVICE) // size % 3 == 0
    kept &= ~(outside | outside[:, None])
    call = attention_call(replace(sizes, q_len=4 * size, kv_len=4 * size), sf.BlockMask.from_dense(kept, size), kept)
    return replace(call, hidden=(outside[:, None],) * 3)


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


@dataclass(frozen=True)
class Cache:
    """Of a decoding call. sizes: of the call. q: the last queries of each sequence. k, v: whole. starts, lens: of each sequence, in
    k and v. held: the arguments that hold these. hidden: what of each no result depends on."""

    sizes: Sizes
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor
    held: dict[str, torch.Tensor]
    hidden: dict[str, torch.Tensor]

    def call(self, mask_of: Callable, define: Callable, *others: torch.Tensor) -> Call:
        """mask_of: from the cache's capacity and the others to the mask."""

        def run(q, *tensors):
            given = dict(zip(self.held, tensors, strict=False))
            table = given.get("block_table")
            capacity = given["k"].shape[2] * (1 if table is None else table.shape[1])
            mask = mask_of(capacity, *tensors[len(given) :])
            return sf.attention_decode(q, mask=mask, **given, **self.sizes.options())

        hidden = None, *(self.hidden.get(name) for name in self.held)
        return Call((self.q,), run, define, (*self.held.values(), *others), differentiable=False, hidden=hidden)


def cache_of(sizes: Sizes, eight_bits: bool = False) -> Cache:
    """Sequences of different lengths, in pages if there is a size of them, and else with padding before them if that is a term.
    eight_bits: in e4m3, with a scale for each token, or where the seed is odd for each page."""
    sizes = replace(sizes, batch=len(sizes.lens or [*range(sizes.batch)]), q_len=min(sizes.q_len, sizes.queries))
    (q, k, v), generator = normal(sizes), torch.Generator().manual_seed(sizes.seed)
    lens = torch.arange(sizes.batch, dtype=torch.int32, device=DEVICE) * 7 + sizes.kv_len - 7 * (sizes.batch - 1)
    lens = torch.tensor(sizes.lens, dtype=torch.int32, device=DEVICE) if sizes.lens else lens.clamp(min=0)
    starts, token = torch.zeros_like(lens), torch.arange(sizes.kv_len, device=DEVICE)
    held, unit = {"k": k, "v": v}, 1
    if eight_bits:
        unit = (sizes.page or max(1, sizes.kv_len)) if sizes.seed % 2 else 1
        stored, scales = zip(*(in_eight_bits(t, unit, generator) for t in (k, v)), strict=True)
        k, v = (t.double() * scale.double() for t, scale in zip(stored, scales, strict=True))
        held = dict(zip(("k", "v", "k_scale", "v_scale"), (*(t.float() for t in stored), *scales), strict=True))
    if sizes.page is None and "starts" in sizes.terms:
        starts = torch.stack([lens // 3, lens, lens // 3 - 99])[torch.arange(sizes.batch) % 3, torch.arange(sizes.batch)]
    unread = ((token < starts[:, None]) | (token >= lens[:, None]))[:, None, :, None]
    hidden = dict.fromkeys(held, unread)
    if sizes.page:
        held = {name: in_pages(t, sizes.page)[0] for name, t in held.items()}
        pages, held["block_table"] = in_pages(unread, sizes.page, True)
        past = torch.arange(held["block_table"].shape[1], device=DEVICE) >= -(-lens[:, None] // sizes.page)
        hidden = {**dict.fromkeys(hidden, pages), "block_table": past}
    elif "starts" in sizes.terms:
        held["kv_starts"] = starts
    if eight_bits:
        held |= {name: held[name].to(torch.float8_e4m3fn) for name in "kv"}
        for name in ("k_scale", "v_scale"):
            held[name], hidden[name] = (t[..., 0] if unit == 1 else t[:, :, 0, 0] for t in (held[name], hidden[name]))
            hidden[name] = hidden[name] if unit == 1 else None
        held["v_scale"] = held["v_scale"].transpose(0, 1).clone().transpose(0, 1)  # in another memory order than those of k
    return Cache(sizes, q, k, v, starts.clamp(min=0), lens, {"kv_lens": lens, **held}, hidden)


def in_eight_bits(t: torch.Tensor, unit: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """t, (batch, kv_heads, tokens, head_dim), in e4m3, and the scale of each token, (batch, kv_heads, tokens, 1), the same for
    ``unit`` tokens. What they hold is t times a number for each unit, so that scales of neighbours differ by up to 2^8."""
    whole = torch.nn.functional.pad(t.float(), (0, 0, 0, -t.shape[2] % unit)).unflatten(2, (-1, unit))
    whole = whole * 2.0 ** -(8 * torch.rand((*whole.shape[:3], 1, 1), generator=generator).to(t.device))
    scale = whole.abs().amax((3, 4), keepdim=True).clamp(min=1e-6) / 448
    held = (whole / scale).clamp(-448, 448).flatten(2, 3)[:, :, : t.shape[2]]
    return held.to(torch.float8_e4m3fn), scale.expand(*whole.shape[:4], 1).flatten(2, 3)[:, :, : t.shape[2]]


def decode(sizes: Sizes, mask: sf.BlockMask | None = None, *, eight_bits: bool = False) -> Call:
    """The last queries of sequences in a cache. mask: the table, if the call gets one."""
    cache = cache_of(sizes, eight_bits)

    def define(q):
        if not len(q):
            return torch.cat([q, q], 3)[..., : sizes.v_head_dim] * 1.0, q[..., 0] * float("-inf")
        results = []
        for row, (start, stop) in enumerate(zip(cache.starts.tolist(), cache.lens.tolist(), strict=True)):
            one = q[row : row + 1], *(t[row : row + 1, :, start:stop].to(q.dtype) for t in (cache.k, cache.v))
            exist = torch.arange(stop - start - q.shape[2], stop - start, device=DEVICE)[:, None] >= 0
            results.append(dense_attention(*one, kept_by(sizes.spec, q.shape[2], stop - start) & exist, sizes.scale))
        return tuple(torch.cat(each) for each in zip(*results, strict=True))

    return cache.call(lambda capacity: mask or sizes.spec, define)


def decode_in_pages(sizes: Sizes) -> Call:
    return decode(replace(sizes, page=sizes.page or 16))


def decode_in_eight_bits(sizes: Sizes) -> Call:
    return decode(sizes, eight_bits=True)


def decode_selection(sizes: Sizes, *, eight_bits: bool = False) -> Call:
    """The last queries of sequences in a cache, over the blocks of 16 keys that they picked, some of them past the end."""
    cache = cache_of(replace(sizes, terms=()), eight_bits)
    (batch, _, queries, _), tokens = cache.q.shape, sizes.kv_len
    picks = drawn_picks((batch, sizes.kv_heads, queries, 2), 16, tokens, sizes.seed)
    key, query = (torch.arange(n, device=DEVICE) for n in (tokens, queries))
    kept = (picks[..., None] == key // 16).any(3) & (key <= (cache.lens[:, None] - queries + query)[:, None, :, None])
    kept = kept.repeat_interleave(sizes.heads // sizes.kv_heads, 1)

    def chosen(capacity, picks):
        return sf.BlockSelection.from_picks(picks, 16, kv_len=capacity, own=False)

    def define(q):
        return dense_attention(q, cache.k.to(q.dtype), cache.v.to(q.dtype), kept, sizes.scale)

    return cache.call(chosen, define, picks)


def decode_selection_in_pages(sizes: Sizes) -> Call:
    return decode_selection(replace(sizes, page=sizes.page or 16))


def decode_selection_in_eight_bits(sizes: Sizes) -> Call:
    return decode_selection(sizes, eight_bits=True)


def topk(sizes: Sizes) -> Call:
    """Blocks of keys with the largest means for each block of queries, within a mask."""

    def mask_of(q, k):
        return sf.topk_blocks(q, k, 2, block_size=sizes.block_size, within="causal", always="sinks(3)")

    def run(q, k, v):
        return sf.attention(q, k, v, mask_of(q, k), return_lse=True, backend=sizes.backend)

    q, k, v = normal(sizes)
    kept = mask_of(q, k).to_dense()
    return Call((q, k, v), run, lambda *t: dense_attention(*t, kept))


# block, picks of a query, whether each head picks, what is always kept: which of them a seed takes.
SELECTIONS = (
    (16, 2, False, "sinks(3)"),
    (16, 3, True, None),
    (64, 2, False, "sinks(4) | local(20)"),
    (16, 3, False, None),
    (16, 3, True, "strided(7)"),
    (512, 2, False, None),
)


def picked(sizes: Sizes, always: bool) -> tuple[torch.Tensor, Callable, torch.Tensor]:
    """Picks of queries, some of which pick nothing; what makes a selection of q, k and picks; and the pairs of
    each pick, (batch, heads, q_len, picks, kv_len). always: the selection keeps more besides."""
    block, count, by_head, more = SELECTIONS[sizes.seed % len(SELECTIONS)]
    pickers = sizes.heads if by_head else sizes.kv_heads
    picks = drawn_picks((sizes.batch, pickers, sizes.q_len, count), block, sizes.kv_len, sizes.seed)
    picks[:, :, 10:20] = -1

    def chosen(q, k, picks):
        return sf.BlockSelection.from_picks(picks, block, kv_len=k.shape[2], own=False, always=more if always else None)

    kept = kept_by_picks(picks, block, sizes.kv_len).repeat_interleave(sizes.heads // pickers, 1).to(DEVICE)
    return picks, chosen, kept


def selection(sizes: Sizes) -> Call:
    """Blocks of keys that each query picked, and what is always kept."""
    picks, chosen, kept = picked(sizes, True)
    always, kept = SELECTIONS[sizes.seed % len(SELECTIONS)][3], kept.any(3)
    kept = kept if always is None else kept | kept_by(f"causal & ({always})", sizes.q_len, sizes.kv_len)

    def run(q, k, v, picks):
        return sf.attention(q, k, v, chosen(q, k, picks), **sizes.options())

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
    picks, chosen, kept = picked(sizes, False)

    def run(q, k, v, picks):
        return sf.attention(q, k, v, chosen(q, k, picks), return_block_lse=True, scale=sizes.scale, backend=sizes.backend)

    def define(q, k, v):
        scores = ((sizes.scale or q.shape[3] ** -0.5) * q @ k.repeat_interleave(sizes.heads // sizes.kv_heads, 1).mT)[:, :, :, None]
        some = kept.any(-1)
        masses = scores.masked_fill(~kept & some[..., None], float("-inf")).logsumexp(-1).masked_fill(~some, float("-inf"))
        return dense_attention(q, k, v, kept.any(3), sizes.scale)[0], masses

    return Call(tuple(normal(sizes)), run, define, (picks,))


def varlen_selection(sizes: Sizes) -> Call:
    """Packed documents whose tokens choose blocks of their own document, each as it would alone; tokens past them are of none."""
    lens, of_seed = sizes.lens or documents_of(sizes.q_len), sizes.seed % 4
    options = {"block_size": 16, "always": (None, "sinks(3) | local(20)")[of_seed // 2], "share_group": of_seed % 2 == 1}

    def packed(*tensors):
        return [t.squeeze(0).transpose(0, 1) for t in tensors]

    def run(q, k, v, bounds):
        chosen = sf.topk_blocks(*packed(q, k), 3, cu_seqlens_q=bounds, **options)
        out, lse = sf.attention_varlen(*packed(q, k, v), bounds, mask=chosen, **sizes.options())
        return out.transpose(0, 1)[None], lse[None]

    q, k, v = normal(replace(sizes, batch=1, kv_len=sizes.q_len))
    bounds = bounds_of(lens)
    kept = torch.zeros(sizes.heads, sizes.q_len, sizes.q_len, dtype=torch.bool, device=DEVICE)
    if sizes.q_len:
        chosen = sf.topk_blocks(*packed(q, k), 3, cu_seqlens_q=bounds.to(DEVICE), **options)
        kept = chosen.to_dense().repeat_interleave(sizes.heads // chosen.heads, 0)
    for start, stop in pairwise(bounds.tolist()):
        if DEVICE == "cpu" and start < stop:  # a GPU rounds scores otherwise in documents of other lengths
            alone = sf.topk_blocks(q[:, :, start:stop], k[:, :, start:stop], 3, every=1, **options).to_dense()[0]
            assert torch.equal(kept[:, start:stop, start:stop], alone.repeat_interleave(sizes.heads // len(alone), 0))
    past = (torch.arange(sizes.q_len, device=DEVICE) >= int(bounds[-1]))[:, None]
    hidden = () if sizes.backend == "reference" else (past, past, past)
    return Call((q, k, v), run, lambda *t: dense_attention(*t, kept, sizes.scale), (bounds.to(DEVICE),), hidden=hidden)


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


def turned(x: torch.Tensor, base: float | None) -> torch.Tensor:
    """Rotary embedding by its definition: pairs as complex numbers, turned by position / base^(2 i / head_dim)."""
    if base is None:
        return x
    half = x.shape[3] // 2
    position, pair = (torch.arange(n, device=x.device).double() for n in (x.shape[2], half))
    angle = position[:, None] * base ** (-2 * pair / x.shape[3])
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], 3).to(x.dtype)


# Options of a layer: which of them a seed takes. Those that choose turn nothing, so that rounding decides nothing.
LAYERS = (
    {"mask": SPEC, "rotary_base": None},
    {"mask": None, "bias": True},
    {"mask": "causal", "rotary_base": 500.0, "v_head_dim": 20},
    {"mask": SPEC, "bias": True, "v_head_dim": 8},
    {"mask": "causal & (sampled(4, keep=1, block=64) | sinks(2))", "rotary_base": None},
    {"select": {"keep": 3, "block_size": 16, "share_group": True, "always": "sinks(2)"}, "rotary_base": None},
)


def layer(sizes: Sizes) -> Call:
    """``SparseAttention``: from x and the weights of its projections."""
    generator, options = torch.Generator().manual_seed(sizes.seed), LAYERS[sizes.seed % len(LAYERS)]
    width = 3 * sizes.heads * 4
    module = sf.SparseAttention(width, sizes.heads, kv_heads=sizes.kv_heads, backend=sizes.backend, **options)
    module = module.to(DEVICE, sizes.dtype)
    names, weights = zip(*module.named_parameters(), strict=True)
    x = torch.randn(sizes.batch, sizes.q_len, width, generator=generator).to(DEVICE, sizes.dtype)
    weights = tuple(torch.randn(w.shape, generator=generator).to(w) * width**-0.5 for w in weights)

    def projected(x, of):
        dims = {"q": module.head_dim, "k": module.head_dim, "v": module.v_head_dim}
        applied = {name: linear(x, of[f"{name}_proj.weight"], of.get(f"{name}_proj.bias")) for name in dims}
        q, k, v = (applied[name].unflatten(2, (-1, dim)).transpose(1, 2) for name, dim in dims.items())
        return turned(q, module.rotary_base), turned(k, module.rotary_base), v

    q, k, _ = projected(x, dict(zip(names, weights, strict=True)))
    if "select" in options:
        kept = sf.topk_blocks(q, k, every=1, **options["select"]).to_dense().repeat_interleave(sizes.heads // sizes.kv_heads, 1)
    elif "sampled" in str(options["mask"]):
        kept = sf.choose_blocks(options["mask"], q, k).to_dense()
    else:
        kept = kept_by(options["mask"], sizes.q_len, sizes.q_len)

    def run(x, *weights):
        return (torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,)),)

    def define(x, *weights):
        of = dict(zip(names, weights, strict=True))
        out, _ = dense_attention(*projected(x, of), kept)
        return (linear(out.transpose(1, 2).flatten(2), of["out_proj.weight"], of.get("out_proj.bias")),)

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
        varlen_selection,
        decode_selection_in_pages,
        decode_selection_in_eight_bits,
        choose,
        blocks,
        layer,
        flash_attn_call,
        block_sparse_call,
        model,
    )
}
