"""One step of decoding over caches of bfloat16 and of e4m3, contiguous and in pages, beside FlashAttention-3's.

    python -m sparse_flash.benchmarks.decoding --out runs/decoding
    python -m sparse_flash.benchmarks.decoding --what dense --batch 8 --config 16,128,8,3 --config 16,64,4,4,4  # tile sizes

Each sequence has one query, and is as long as the cache. "e4m3" has a scale for each head and page or sequence, "e4m3 by token" one
for each token. A CUDA graph of several steps is timed; the median of its replays counts. A cache that fits the GPU's L2 cache stays
there. Errors are relative, of the first and the last sequence: "error" against float64 attention over what the cache holds, "total"
against float64 attention over the numbers before they became e4m3. --config adds rows of e4m3 in dense attention with other tiles:
tile_m, tile_n, warps, stages, and optionally programs for each multiprocessor. What fails is a result, and the rest runs. Writes
decoding.json after every row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.console import Console
from rich.table import Table

import sparse_flash as sf

from .baselines.flash import why_no_fa3
from .measure.throughput import OverLimit, failure_text, time_limit
from .results import environment

E4M3 = torch.float8_e4m3fn
WHAT = ("dense", "window", "picks")
_WINDOW, _BLOCK, _PICKS = 4096, 64, 16
_STEPS, _REPLAYS = 20, 25


class KVCache(NamedTuple):
    """A cache. k, v: (batch, kv_heads, tokens, head_dim), or with a block_table (pages, kv_heads, page_size, head_dim); scales: of
    e4m3 ones, (batch or pages, kv_heads[, tokens])."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    block_table: torch.Tensor | None = None

    @property
    def options(self) -> dict[str, torch.Tensor]:
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


def quantize(x: torch.Tensor, by_token: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(x in e4m3, scales): for each token, or for all tokens of the third dimension."""
    stored = torch.empty_like(x, dtype=E4M3)
    scales = torch.empty(x.shape[:3] if by_token else x.shape[:2], dtype=torch.float32, device=x.device)
    for one, held, scale in zip(x, stored, scales, strict=True):  # the float32 copy of all may not fit
        scale.copy_(one.float().abs().amax((-1,) if by_token else (-2, -1)) / 448)
        held.copy_(one.float() / (scale[..., None] if by_token else scale[..., None, None]))
    return stored, scales


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
    make = partial(sf.BlockSelection.from_picks, block_size=_BLOCK, q_len=1, kv_len=tokens)
    return make(picks), lambda number: make(picks[number : number + 1])


def prepare_fa3(q: torch.Tensor, cache: KVCache, what: str, library: str | None) -> Callable[[], torch.Tensor]:
    """FlashAttention-3's call. If the cache is e4m3, q is too, as it multiplies e4m3 only with e4m3. library: as for
    ``why_no_fa3``, whose reason a RuntimeError has."""
    if reason := why_no_fa3(library):
        raise RuntimeError(reason)
    batch, head_dim = q.shape[0], q.shape[3]
    kv_heads, tokens = cache.k.shape[1], cache.k.shape[2] * (1 if cache.block_table is None else cache.block_table.shape[1])
    options: dict[str, Any] = {"softmax_scale": head_dim**-0.5, "is_causal": what == "dense", "page_table": cache.block_table}
    options["seqused_k"] = torch.full((batch,), tokens, dtype=torch.int32, device=q.device)
    if what == "window":
        options |= {"window_size_left": _WINDOW - 1, "window_size_right": 0}
    if cache.k_scale is not None:
        # Its scales are of sequences and heads, also with pages: it is timed, and its numbers are others.
        one = torch.ones(batch, kv_heads, device=q.device)
        options |= {"q_descale": one, "k_descale": one / 100, "v_descale": one / 100}
        q = q.to(E4M3)
    q, k, v = (t.transpose(1, 2) for t in (q, cache.k, cache.v))
    return lambda: torch.ops.flash_attn_3.fwd(q, k, v, **options)[0].transpose(1, 2)


def prepare_config(q: torch.Tensor, cache: KVCache, text: str) -> Callable[[], torch.Tensor]:
    """The kernel in dense attention with tiles of one's own."""
    from sparse_flash.kernels.common.config import Config
    from sparse_flash.kernels.launch.launch import multiprocessors
    from sparse_flash.kernels.portable.decode import attention_decode

    tile_m, tile_n, warps, stages, *programs = map(int, text.split(","))
    options: dict[str, Any] = {"config": Config(tile_m, tile_n, warps, stages), "block_table": cache.block_table}
    tiles = q.shape[0] * cache.k.shape[1]
    options["splits"] = max(1, (programs or [2])[0] * multiprocessors(q.device) // tiles)
    whole = cache.k.shape[:3]
    scales = (x if x is None else (x if x.dim() == 3 else x[..., None]).expand(whole) for x in (cache.k_scale, cache.v_scale))
    options |= dict(zip(("k_scale", "v_scale"), scales, strict=True))
    return lambda: attention_decode(q, cache.k, cache.v, None, q.shape[3] ** -0.5, **options)[0]


def time_step_us(step: Callable[[], torch.Tensor], device: torch.device) -> float:
    if device.type != "cuda":
        step()
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        return 1e6 * statistics.median(times)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_STEPS):
            step()
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(_REPLAYS)]
    for start, stop in events:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events) * 1e3 / _STEPS


def call_decode(*tensors: Any, **options: Any) -> torch.Tensor:
    return cast(torch.Tensor, sf.attention_decode(*tensors, **options))


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def measure_rows(
    what: str, batch: int, page: int, heads: tuple[int, int], tokens: int, head_dim: int, device: torch.device, configs: list[str],
    library: str | None, limit: int,
) -> dict[str, dict]:  # fmt: skip
    """Results by peer: {"us", "gb_s", "error", "total"}, or {"failed": why}. library: see ``why_no_fa3``."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cache = draw_cache(batch, heads[1], tokens, head_dim, page, device, dtype)
    q = torch.randn(batch, heads[0], 1, head_dim, generator=torch.Generator(device).manual_seed(2), device=device, dtype=dtype)
    mask, mask_of = masks(what, batch, heads[1], tokens, device)
    sequences = sorted({0, batch - 1})

    def exact(held: KVCache) -> torch.Tensor:
        """Returns the results of the checked sequences."""
        return torch.cat([call_decode(q[n : n + 1].double(), *held.sequence(n), mask_of(n), backend="torch") for n in sequences])

    original = exact(cache)
    plain = str(dtype).removeprefix("torch.")
    caches = {plain: cache, "e4m3": quantize_cache(cache, False), "e4m3 by token": quantize_cache(cache, True)}
    peers: dict[str, tuple[KVCache, Callable[[], Callable[[], torch.Tensor]]]] = {}
    for name, held in caches.items():
        peers[name] = held, partial(partial, call_decode, q, held.k, held.v, mask, **held.options)
    if what == "dense":
        for name, text in product(("e4m3", "e4m3 by token"), configs):
            peers[f"{name} {text}"] = caches[name], partial(prepare_config, q, caches[name], text)
    if what != "picks" and device.type == "cuda":
        for name in (plain, "e4m3"):
            peers[f"FA3 {name}"] = caches[name], partial(prepare_fa3, q, caches[name], what, library)
    read = {"dense": tokens, "window": min(tokens, _WINDOW), "picks": min(tokens, _PICKS * _BLOCK)}[what]
    found: dict[str, dict] = {}
    for name, (held, prepare) in peers.items():
        try:
            with time_limit(limit), torch.no_grad():
                step = prepare()
                out = step()[sequences]
                us = time_step_us(step, device)
            size = 2 * batch * heads[1] * read * head_dim * held.k.element_size()
            found[name] = {"us": us, "gb_s": size / us / 1e3}
            if not (name.startswith("FA3") and held.k_scale is not None):
                found[name] |= {"error": relative_error(out, exact(held)), "total": relative_error(out, original)}
        except OverLimit:
            found[name] = {"failed": f"over {limit} s"}
        except Exception as error:  # a peer that fails is a result: the others still can
            found[name] = {"failed": failure_text(error)}
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog="python -m sparse_flash.benchmarks.decoding")
    parser.add_argument("--out", type=Path, default=Path("runs/decoding"), help="folder (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=65_536, help="of each sequence (default %(default)s)")
    parser.add_argument("--batch", type=int, action="append", help="(default 1, 8, 32)")
    parser.add_argument("--page", type=int, action="append", help="tokens of a page, 0 for none (default 0, 64)")
    parser.add_argument("--what", action="append", choices=WHAT, help="(default: all)")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("HEADS", "KV_HEADS"), help="(default 32 8)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default %(default)s)")
    parser.add_argument("--config", action="append", default=[], help="see above")
    parser.add_argument("--fa3", metavar="FILE", help="FlashAttention-3's library, where no package brings it")
    parser.add_argument("--limit", type=int, default=60, help="seconds for a row (default %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default %(default)s)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    data: dict = {"format": 1, "environment": environment(device), "tokens": options.tokens, "heads": list(options.heads)}
    data |= {"head_dim": options.head_dim, "rows": []}
    options.out.mkdir(parents=True, exist_ok=True)
    table = Table("what", "batch", "page", "cache", "us", "GB/s", "times as fast", "error", "total")
    for what, batch, page in product(options.what or WHAT, options.batch or (1, 8, 32), options.page or (0, 64)):
        sizes = batch, page, tuple(options.heads), options.tokens, options.head_dim
        try:
            found = measure_rows(what, *sizes, device, options.config, options.fa3, options.limit)
        except Exception as error:  # as for a cache that does not fit: the other rows may
            found = {"all": {"failed": failure_text(error)}}
        base = next(iter(found.values()))
        for name, result in found.items():
            data["rows"].append({"what": what, "batch": batch, "page": page, "cache": name} | result)
            if why := result.get("failed"):
                print(f"{what} batch {batch} page {page} {name}: {why}", file=sys.stderr, flush=True)
                continue
            faster = f"{base['us'] / result['us']:.2f}" if "us" in base else ""
            errors = [f"{result[each]:.1e}" if each in result else "" for each in ("error", "total")]
            cells = [what, str(batch), str(page), name, f"{result['us']:.1f}", f"{result['gb_s']:.0f}", faster, *errors]
            table.add_row(*cells)
            print(*cells, sep="; ", flush=True)
        # After each one, so that a run that is stopped keeps what it has.
        (options.out / "decoding.json").write_text(json.dumps(data, indent=1) + "\n")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    Console(width=160 if not sys.stdout.isatty() else None).print(table)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
