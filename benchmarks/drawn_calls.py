"""Calls other than ``attention`` under a mask, drawn at random and timed: decoding, choosers, and selections.

Each class is a kind of call: how it is drawn, how a GPU takes it, and the row that remains of it. ``fit_factors`` reads the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch

import sparse_flash as sf

from .decoding import KVCache, draw_cache, quantize_cache, time_step_us
from .measure.throughput import CPU_SECONDS, DTYPES, time_ms, time_passes
from .selection import PicksCase, draw_picks

_READ_BETWEEN = 2e8  # bytes that are read before a step reads the same again, so that no cache holds them
_MOST_CACHE, _MOST_FLOPS = 2e9, 1.5e13


def _size(rng: np.random.Generator, least: int, most: int, unit: int = 1) -> int:
    """Evenly on a logarithmic scale, a multiple of ``unit``."""
    return max(unit, int(least * (most / least) ** rng.random()) // unit * unit)


def _heads(rng: np.random.Generator, kv_heads: tuple[int, ...], groups: tuple[int, ...]) -> tuple[int, int]:
    """(heads of queries, of keys and values)."""
    kv = int(rng.choice(kv_heads))
    return kv * int(rng.choice(groups)), kv


@dataclass(frozen=True)
class DecodeCall:
    """queries: new tokens of a sequence. what: "dense", a pattern, or "picks". picks, block: how many blocks a query picked, of how
    many keys; 0 without. cache: "bfloat16", "e4m3" or "e4m3 by token". page: tokens of a page, 0 for none."""

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int = 128
    queries: int = 1
    what: str = "dense"
    picks: int = 0
    block: int = 0
    cache: str = "bfloat16"
    page: int = 0

    @classmethod
    def draw(cls, rng: np.random.Generator) -> DecodeCall:
        while True:
            batch, tokens = _size(rng, 1, 129), _size(rng, 2048, 1 << 18, 1024)
            heads, kv_heads = _heads(rng, (1, 2, 4, 8, 8, 16), (1, 4, 4, 8, 16))
            what, picks, block = "dense", 0, 0
            kind, head_dim = rng.random(), int(rng.choice((128, 128, 128, 64)))
            if kind < 0.3:
                what = f"causal & local({_size(rng, 256, tokens // 2)})"
            elif kind < 0.6:
                what, block = "picks", int(rng.choice((64, 128)))
                picks = _size(rng, 4, min(65, tokens // block))
            cache, page = str(rng.choice(("bfloat16", "bfloat16", "e4m3", "e4m3 by token"))), int(rng.choice((0, 0, 16, 64, 128)))
            queries = 1 if rng.random() < 0.8 else int(rng.choice((2, 4)))
            if batch * kv_heads * tokens * head_dim * 4 <= _MOST_CACHE:
                return cls(batch, heads, kv_heads, tokens, head_dim, queries, what, picks, block, cache, page)

    @property
    def keys(self) -> int:
        """Returns how many keys a step reads of each head, about."""
        if self.what == "picks":
            return self.queries * self.picks * self.block
        return self.tokens if self.what == "dense" else min(self.tokens, int(self.what[self.what.rindex("(") + 1 : -1]))

    def measure(self, device: torch.device) -> dict:
        generator, dtype = torch.Generator(device).manual_seed(0), DTYPES[device.type]
        read = 4 * self.batch * self.kv_heads * self.keys * self.head_dim
        steps = []
        for _ in range(min(20, 1 + int(_READ_BETWEEN / read)) if device.type == "cuda" else 1):
            cache: KVCache = draw_cache(self.batch, self.kv_heads, self.tokens, self.head_dim, self.page, device, dtype)
            if self.cache != "bfloat16":
                cache = quantize_cache(cache, self.cache == "e4m3 by token")
            q = torch.randn(self.batch, self.heads, self.queries, self.head_dim, device=device, dtype=dtype)
            steps.append(partial(sf.attention_decode, q, cache.k, cache.v, self._mask(generator), **cache.options))
        turns = cycle(steps)
        with torch.no_grad():
            for step in steps:
                step()
            return {"us": time_step_us(lambda: next(turns)(), device)}

    def _mask(self, generator: torch.Generator) -> sf.BlockSelection | str | None:
        if self.what != "picks":
            return None if self.what == "dense" else self.what
        shape, device = (self.batch, self.kv_heads, self.queries, self.tokens // self.block - 1), generator.device
        picks = torch.rand(shape, generator=generator, device=device).topk(self.picks - 1).indices
        return sf.BlockSelection.from_picks(picks.int(), self.block, q_len=self.queries, kv_len=self.tokens)


@dataclass(frozen=True)
class SelectionCall(PicksCase):
    """every: queries that share a choice."""

    every: int = 1

    @classmethod
    def draw(cls, rng: np.random.Generator) -> SelectionCall:
        while True:
            heads, kv_heads = _heads(rng, (1, 2, 4, 8), (1, 4, 4, 8, 16))
            alike, every = float(rng.choice((0.0, 0.5, 0.8, 0.95))), int(rng.choice((1, 1, 1, 16)))
            sizes = _size(rng, 1 << 14, 1 << 17, 1024), heads, kv_heads, int(rng.choice((64, 128, 128)))
            call = cls(*sizes, int(rng.choice((64, 64, 128, 256))), _size(rng, 4, 33), alike, every)
            if 2e11 < 4 * call.tokens * call.heads * call.head_dim * call.picks * call.block_size < _MOST_FLOPS:
                return call

    def draw_picks(self, device: torch.device, kv_heads: int) -> torch.Tensor:
        """(1, kv_heads, choices, picks). A choice is a query of a sequence that is shorter by ``every``."""
        short = self.tokens // self.every, self.heads, kv_heads, self.head_dim, self.block_size // self.every
        return draw_picks(PicksCase(*short, self.picks, self.alike), device)

    def measure(self, device: torch.device) -> dict:
        picks = self.draw_picks(device, self.kv_heads)
        selection = sf.BlockSelection.from_picks(picks, self.block_size, every=self.every)
        options: dict[str, Any] = {"device": device, "dtype": DTYPES[device.type], "requires_grad": True}
        q, k, v = (torch.randn(1, n, self.tokens, self.head_dim, **options) for n in (self.heads, *[self.kv_heads] * 2))
        return _passes_of((q, k, v), partial(sf.attention, q, k, v, selection), device)


@dataclass(frozen=True)
class ChooserCall:
    """chooser: with its rule and its block."""

    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    chooser: str

    @property
    def spec(self) -> str:
        return f"causal & ({self.chooser} | sinks(64))"

    @classmethod
    def draw(cls, rng: np.random.Generator) -> ChooserCall:
        tokens, (heads, kv_heads) = _size(rng, 1 << 14, 3 << 16, 128), _heads(rng, (1, 2, 4, 8), (1, 4, 4, 8))
        names = (
            "sampled(4",
            "sampled(8",
            "sampled(8",
            "sampled(16",
            "antidiagonal(8",
            "antidiagonal(16",
            "pooled(",
            "sub_blocks(16",
        )
        share = 0.05 * 10 ** rng.random()
        rules = f"keep={share:.3f}", f"budget={share:.3f}", f"mass={0.5 + 0.45 * rng.random():.3f}"
        name, rule = str(rng.choice(names)), str(rng.choice(rules))
        comma = "" if name.endswith("(") else ", "
        chooser = f"{name}{comma}{rule}, block={rng.choice((64, 128))})"
        return cls(heads, kv_heads, tokens, int(rng.choice((64, 128, 128))), chooser)

    def measure(self, device: torch.device) -> dict:
        """Returns the microseconds of the choice and of attention, in graphs, and milliseconds of both, call by call."""
        generator = torch.Generator(device).manual_seed(0)
        options: dict[str, Any] = {"device": device, "dtype": DTYPES[device.type]}
        topics = torch.nn.functional.normalize(torch.randn(64, self.head_dim, generator=generator, device=device), dim=1)
        topic = topics[torch.randint(64, (-(-self.tokens // 256),), generator=generator, device=device)]
        topic = 6 * topic.repeat_interleave(256, 0)[: self.tokens].to(options["dtype"])
        q, k, v = (torch.randn(1, n, self.tokens, self.head_dim, **options) for n in (self.heads, *[self.kv_heads] * 2))
        q, k = q + topic, k + topic
        with torch.no_grad():
            mask = sf.choose_blocks(self.spec, q, k)
            within = sf.compile_mask("causal", self.tokens, block_size=mask.block_size)
            kept = (mask.by_query.row_ptr[:, -1] - mask.by_query.row_ptr[:, 0]).double().mean()
            found = {"density": float(kept) / len(within.by_query.col_idx)}
            found["choose_us"] = time_step_us(lambda: sf.choose_blocks(self.spec, q, k), device, 3)
            found["attend_us"] = time_step_us(lambda: sf.attention(q, k, v, mask), device, 3)
            return found | time_ms(lambda: sf.attention(q, k, v, self.spec), device, CPU_SECONDS).as_result("both_ms")


def _passes_of(leaves: tuple[torch.Tensor, ...], call: Callable, device: torch.device) -> dict:
    found: dict = {}
    for name, timing in time_passes(leaves, call, device, CPU_SECONDS, backward=True):
        found |= timing.as_result(name)
    return found


KINDS: dict[str, Any] = {"decode": DecodeCall, "selection": SelectionCall, "chooser": ChooserCall}


def draw_calls(kind: str, seed: int) -> Iterator:
    """Yields calls of a kind without end, the same for the same seed."""
    rng = np.random.default_rng([seed, list(KINDS).index(kind)])
    while True:
        yield KINDS[kind].draw(rng)
