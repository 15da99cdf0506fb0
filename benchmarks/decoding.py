"""One step of decoding over caches of bfloat16 and of e4m3, contiguous and in pages, beside FlashAttention-3's.

    python -m sparse_flash.benchmarks.decoding --out runs/decoding

Each sequence has one query, and is as long as the cache. "e4m3" has a scale for each head and page or sequence, "e4m3 by token" one
for each token. A CUDA graph of several steps is timed; the median of its replays counts. A cache that fits the GPU's L2 cache stays
there. Errors are relative, of the first and the last sequence: "error" against float64 attention over what the cache holds, "total"
against float64 attention over the numbers before they became e4m3. What fails is a result, and the rest runs. Writes decoding.json
after every row.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

import sparse_flash as sf

from .baselines.flash import prepare_fa3_forward, quantize
from .measure.accuracy import relative_error
from .measure.noise import time_calls_us
from .measure.throughput import DTYPES, time_ms, try_measuring
from .program import RowFile, Table, add_device, create_parser, print_tables
from .results import environment, has_numbers, why_not

E4M3 = torch.float8_e4m3fn
WHAT = ("dense", "window", "picks")
_WINDOW, _BLOCK, _PICKS = 4096, 64, 16
_STEPS = 20


class KVCache(NamedTuple):
    """A cache. k, v: (batch, kv_heads, tokens, head_dim), or with a block_table (pages, kv_heads, page_size, head_dim); scales: of
    e4m3 ones, (batch or pages, kv_heads[, tokens])."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    block_table: torch.Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        given = {"k_scale": self.k_scale, "v_scale": self.v_scale, "block_table": self.block_table}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def sequence(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one sequence in float64, (1, kv_heads, tokens, head_dim)."""
        which = slice(number, number + 1) if self.block_table is None else self.block_table[number].long()
        found = []
        for stored, scale in ((self.k, self.k_scale), (self.v, self.v_scale)):
            x = stored[which].double()
            if scale is not None:
                some = scale[which].double()
                x *= some[..., None] if some.dim() == 3 else some[..., None, None]
            found.append(x if self.block_table is None else x.transpose(0, 1).flatten(1, 2)[None])
        return found[0], found[1]


def quantize_cache(cache: KVCache, by_token: bool) -> KVCache:
    (k, k_scale), (v, v_scale) = (quantize(x, by_token) for x in (cache.k, cache.v))
    return KVCache(k, v, k_scale, v_scale, cache.block_table)


def draw_cache(
    batch: int, kv_heads: int, tokens: int, head_dim: int, page: int, device: torch.device, dtype: torch.dtype
) -> KVCache:
    """Normal numbers, in pages of this size in any order, or contiguous (0)."""
    generator = torch.Generator(device).manual_seed(0)
    pages = batch * tokens // page if page else batch
    shape = pages, kv_heads, page or tokens, head_dim
    k, v = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in "kv")
    if not page:
        return KVCache(k, v)
    order = torch.randperm(pages, generator=generator, device=device).int()
    return KVCache(k, v, block_table=order.view(batch, -1))


def masks(what: str, batch: int, kv_heads: int, tokens: int, device: torch.device) -> Any:
    """The mask of a call, and a function of a sequence's number that returns the mask of a call on that sequence alone."""
    if what != "picks":
        mask = None if what == "dense" else f"causal & local({_WINDOW})"
        return mask, lambda _: mask
    blocks, generator = tokens // _BLOCK, torch.Generator(device).manual_seed(1)
    chosen = torch.rand(batch, kv_heads, 1, blocks - 1, generator=generator, device=device).topk(min(_PICKS, blocks) - 1).indices
    picks = torch.cat([chosen.sort().values, torch.full_like(chosen[..., :1], blocks - 1)], 3).int()
    make = partial(sf.BlockSelection.from_picks, block_size=_BLOCK, kv_len=tokens)
    return make(picks), lambda number: make(picks[number : number + 1])


def prepare_call(q: torch.Tensor, cache: KVCache, mask: Any) -> Callable:
    return partial(sf.attention_decode, q, cache.k, cache.v, mask, **cache.options)


def prepare_fa3(q: torch.Tensor, cache: KVCache, what: str) -> Callable:
    """FlashAttention-3's call. If the cache is e4m3, q is too, as it multiplies e4m3 only with e4m3."""
    batch, kv_heads = q.shape[0], cache.k.shape[1]
    tokens = cache.k.shape[2] * (1 if cache.block_table is None else cache.block_table.shape[1])
    options: dict[str, Any] = {"is_causal": what == "dense", "page_table": cache.block_table}
    options["seqused_k"] = torch.full((batch,), tokens, dtype=torch.int32, device=q.device)
    if what == "window":
        options |= {"window_size_left": _WINDOW - 1, "window_size_right": 0}
    if cache.k_scale is not None:
        # Its scales are of sequences and heads, also with pages: it is timed, and its numbers are others.
        one = torch.ones(batch, kv_heads, device=q.device)
        options |= {"q_descale": one, "k_descale": one / 100, "v_descale": one / 100}
        q = q.to(E4M3)
    return prepare_fa3_forward(q, cache.k, cache.v, **options)


def time_step_us(step: Callable[[], Any], device: torch.device, steps: int = _STEPS) -> float:
    """steps: in a graph."""
    if device.type != "cuda":
        step()
        return 1e3 * time_ms(step, device, 0.05).median
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            step()
    return time_calls_us(graph.replay, device)[0].median / steps


class DecodePeer(NamedTuple):
    """prepare: returns the step for q and the cache."""

    name: str
    cache: KVCache
    prepare: Callable[[torch.Tensor, KVCache], Callable[[], torch.Tensor]]


def list_peers(what: str, cache: KVCache, mask: Any) -> list[DecodePeer]:
    """The calls of a row; the first is ours over the cache itself, with which the others are compared."""
    plain = str(cache.k.dtype).removeprefix("torch.")
    caches = {plain: cache, "e4m3": quantize_cache(cache, False), "e4m3 by token": quantize_cache(cache, True)}
    peers = [DecodePeer(name, held, partial(prepare_call, mask=mask)) for name, held in caches.items()]
    if what != "picks" and cache.k.is_cuda:
        peers += [DecodePeer(f"FA3 {name}", caches[name], partial(prepare_fa3, what=what)) for name in (plain, "e4m3")]
    return peers


def measure_rows(
    what: str, batch: int, page: int, heads: tuple[int, int], tokens: int, head_dim: int, device: torch.device, limit: int
) -> dict[str, dict]:
    """Results by peer: {"us", "gb_s", "error", "total"}, or why there are none."""
    dtype = DTYPES[device.type]
    cache = draw_cache(batch, heads[1], tokens, head_dim, page, device, dtype)
    q = torch.randn(batch, heads[0], 1, head_dim, generator=torch.Generator(device).manual_seed(2), device=device, dtype=dtype)
    mask, mask_of = masks(what, batch, heads[1], tokens, device)
    checked = sorted({0, batch - 1})

    def attend_exactly(held: KVCache) -> torch.Tensor:
        """Returns the results of the checked sequences."""
        each = ((q[n : n + 1].double(), *held.sequence(n), mask_of(n)) for n in checked)
        return torch.cat([torch.as_tensor(sf.attention_decode(*call, backend="torch")) for call in each])

    original = attend_exactly(cache)
    keys_read = {"dense": tokens, "window": min(tokens, _WINDOW), "picks": min(tokens, _PICKS * _BLOCK)}[what]

    def measure(peer: DecodePeer) -> dict:
        with torch.no_grad():
            step = peer.prepare(q, peer.cache)
            out = step()[checked]
            us = time_step_us(step, device)
        size = 2 * batch * heads[1] * keys_read * head_dim * peer.cache.k.element_size()
        result = {"us": us, "gb_s": size / us / 1e3}
        if peer.name.startswith("FA3") and peer.cache.k_scale is not None:
            return result
        return result | {"error": relative_error(out, attend_exactly(peer.cache)), "total": relative_error(out, original)}

    return {peer.name: try_measuring(partial(measure, peer), limit) for peer in list_peers(what, cache, mask)}


def main(arguments: list[str] | None = None) -> int:
    parser = create_parser("decoding", __doc__)
    parser.add_argument("--tokens", type=int, default=65_536, help="of each sequence (default %(default)s)")
    parser.add_argument("--batch", type=int, action="append", help="(default 1, 8, 32)")
    parser.add_argument("--page", type=int, action="append", help="tokens of a page, 0 for none (default 0, 64)")
    parser.add_argument("--what", action="append", choices=WHAT, help="(default: all)")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("HEADS", "KV_HEADS"), help="(default 32 8)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default %(default)s)")
    parser.add_argument("--limit", type=int, default=60, help="seconds for a row (default %(default)s)")
    add_device(parser)
    options = parser.parse_args(arguments)
    facts = {"environment": environment(options.device), "tokens": options.tokens, "heads": list(options.heads)}
    file = RowFile(options.out / "decoding.json", facts | {"head_dim": options.head_dim}, "rows")
    table = Table("what", "batch", "page", "cache", "us", "GB/s", "times as fast", "error", "total")
    for what, batch, page in product(options.what or WHAT, options.batch or (1, 8, 32), options.page or (0, 64)):
        sizes = batch, page, tuple(options.heads), options.tokens, options.head_dim
        found = try_measuring(partial(measure_rows, what, *sizes, options.device, options.limit))
        found = found if has_numbers(found) else {"all": found}
        base = next(iter(found.values()))
        for name, result in found.items():
            row = {"what": what, "batch": batch, "page": page, "cache": name} | result
            if not has_numbers(result):
                file.add("rows", row)
                print(f"{what} batch {batch} page {page} {name}: {why_not(result)}", file=sys.stderr, flush=True)
                continue
            faster = f"{base['us'] / result['us']:.2f}" if "us" in base else ""
            errors = [f"{result[each]:.1e}" if each in result else "" for each in ("error", "total")]
            cells = [what, str(batch), str(page), name, f"{result['us']:.1f}", f"{result['gb_s']:.0f}", faster, *errors]
            table.add_row(*cells)
            file.add("rows", row, *cells)
    print_tables(table, folder=options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
