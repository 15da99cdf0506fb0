"""Searches for masks within a budget of pairs, or of time, that connect all tokens in few layers.

A unit is a token in short sequences, and a block of the table in others. One unit reaches another if *every* pair between them is
kept, so what is counted as reached is reached by each of its tokens. ``explain`` counts units with any pair, so it says at most
what is reached; a design says at least that.

1. Patterns that name ranges (``Pattern.design_ranges``) are compiled once, each together with ``keep``.
2. Unions of two are compared by the maximum of their units' pairs; few rows bound the layers. The best are tried with a third.
3. The candidates in order of that bound are compiled, and counted exactly, until there are enough.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np

from ..masks.block_mask import BlockMask
from ..masks.compiler import compile_mask, head_patterns
from ..masks.costs import Counts
from ..masks.grid import BlockGrid
from ..masks.parsing import parse
from ..masks.pattern import And, Or, Pattern, PerHead
from ..masks.progress import Progress
from ..masks.registry import list_registered, pattern_class
from ..variant.variant import check_counts
from .explain import MOST_UNITS
from .figures import share_text
from .subject import require_one_head

_MOST_LAYERS = 64  # reach is not followed any further
_MOST_PARTS = 3  # patterns of a union, and groups of heads
_PAIRS_EXTENDED = 32  # the unions of two that are tried with a third
_UNCONNECTED = _MOST_LAYERS + 1
_BOUND_ROWS = 4  # rows of units that bound the layers of a candidate


@dataclass(frozen=True, eq=False)
class Design:
    """A mask that ``design`` found: ``print`` it. ``pattern`` goes to calls and models; ``layers``, if they differ, to
    ``use_sparse_flash(model, per_layer=)``. Calls compile patterns in blocks of 128: of a design for other blocks, pass ``masks``.

    patterns: one for all layers, or one for each layer of the model, in their order. A pattern may differ between heads.
    kept_pairs: pairs of a head, mean over heads and layers. density: their share of the causal pairs, or of all pairs. time: the
    predicted share of dense attention's time, forward and backward, of many heads; mean over heads and layers.
    reach: the share of the pairs (i, j), j <= i if causal, such that token i has received from token j after 1, 2, ... layers, by
    kept pairs and residual connections. It ends when all are, or when a further layer adds nothing. unit: tokens on a side of a
    unit; with 1 the shares are exact, else at least these.
    """

    patterns: tuple[Pattern, ...]
    q_len: int
    block_size: int
    kept_pairs: float
    density: float
    time: float
    reach: tuple[float, ...]
    unit: int

    @property
    def connected_in(self) -> int | None:
        """After how many layers every token has received from all that it may; None if that is never seen."""
        return len(self.reach) if self.reach[-1] == 1 else None

    @property
    def layers(self) -> tuple[str, ...]:
        """Spec text for all layers, or for each."""
        return tuple(map(str, self.patterns))

    @property
    def pattern(self) -> Pattern:
        """The pattern of all layers. Raises ValueError if layers differ."""
        if len(self.patterns) > 1:
            raise ValueError("pattern must be read where all layers have one; this design differs between layers; take .patterns")
        return self.patterns[0]

    @cached_property
    def masks(self) -> tuple[BlockMask, ...]:
        """The compiled mask of all layers, or of each; made at first use. Equal layers share one."""
        made = {one: compile_mask(one, self.q_len, block_size=self.block_size) for one in dict.fromkeys(self.patterns)}
        return tuple(made[one] for one in self.patterns)

    @property
    def summary(self) -> str:
        """The spec text, with equal heads and equal layers counted."""
        return _count_text(self.patterns, "layer", lambda layer: _count_text(getattr(layer, "patterns", (layer,)), "head", str))

    def __str__(self) -> str:
        connected = f"connected in {self.connected_in}" if self.connected_in else "not connected"
        shares = ", ".join(f"{layer}: {share_text(share)}" for layer, share in enumerate(self.reach, 1))
        bound = "" if self.unit == 1 else f" (at least, in units of {self.unit} tokens)"
        return f"{self.summary}\n  keeps {self.density:.2%}, takes {self.time:.1%}; {connected}; reach after layers {shares}{bound}"


def design(
    q_len: int,
    budget: float | str,
    *,
    of: str = "pairs",
    connected_in: int | None = None,
    heads: int | None = None,
    layers: int | None = None,
    keep: Pattern | str | None = None,
    causal: bool = True,
    block_size: int = 128,
    count: int = 5,
    progress: bool = False,
) -> list[Design]:
    """Returns masks within a budget that connect all tokens in few layers: fewest layers first, then least cost.

    q_len: tokens of the sequence, at most 1,024 blocks. budget: the share of the causal pairs (of all pairs if not causal) that a
    design keeps, mean over heads and layers: 0.1 or "10%". of: what the budget is a share of: "pairs", or "time", which is that of
    dense attention, as predicted for H100 and many heads. connected_in: the most layers, up to 64, after which every query must
    have received from every earlier token (from every token if not causal). heads: of the model; they may then differ, in two or
    three even groups or by one dense head. layers: of the model; the first may then be dense. keep: what every head of every layer
    keeps, a Pattern or its spec text. block_size: as for ``compile_mask``. count: how many designs at most. progress: shows a bar.

    A design is a union of keep and of up to three registered patterns that name ranges (``Pattern.design_ranges``), your own
    included. Of each set of patterns (local, local with sinks, ...) the best values are listed. A design is left out if it adds
    patterns to a better one. Equal calls return equal designs. Not every union of three is tried, and no value outside the
    ranges. The search knows positions only: neither content, nor what training makes of a mask.

    Raises ValueError for arguments out of range, and if no mask that the search knows meets them; the error names the nearest.
    """
    check_counts(q_len=q_len, count=count)
    if of not in ("pairs", "time"):
        raise ValueError(f"of must be 'pairs' or 'time'; got {of!r}")
    given = {"connected_in": connected_in, "heads": heads, "layers": layers}
    check_counts(**{name: number for name, number in given.items() if number is not None})
    if connected_in and layers and connected_in > layers:
        raise ValueError(f"connected_in must be at most layers={layers}; got {connected_in}; leave one of them out")
    if (connected_in or 0) > _MOST_LAYERS:
        raise ValueError(f"connected_in must be at most {_MOST_LAYERS}, as reach is not followed further; got {connected_in}")
    grid, share = BlockGrid(q_len, q_len, block_size), parse_budget(budget)
    if grid.q_blocks > MOST_UNITS:
        most = f"{MOST_UNITS * block_size:,} tokens in blocks of {block_size}"
        way_out = "pass block_size=256, or design for a shorter sequence and scale the lengths in the spec"
        raise ValueError(f"q_len must be at most {most}; got {q_len:,}; {way_out}")
    kept = () if keep is None else (require_one_head(parse(keep) if isinstance(keep, str) else keep),)
    search = _DesignSearch(grid, kept, causal, heads or 1, layers or 1, progress, of == "time")
    candidates = search.candidates(share)
    found = search.find_best(candidates, share, count, connected_in or _UNCONNECTED)
    if connected_in and not found:
        raise search.unmet_error(candidates, share, connected_in)
    return found


def parse_budget(budget: float | str) -> float:
    """The share that a budget such as 0.1 or "10%" names. Raises ValueError."""
    try:
        share = float(budget[:-1]) / 100 if isinstance(budget, str) and budget.endswith("%") else float(budget)
    except (TypeError, ValueError):
        share = math.nan
    if isinstance(budget, bool) or not 0 < share <= 1:
        raise ValueError(f"budget must be a share, 0 < budget <= 1, or text such as '10%'; got {budget!r}")
    return share


class _PricedPattern(NamedTuple):
    """A pattern that unions are made of. pairs: of ``causal & (keep | pattern)``, (units, units) float32, how many pairs of two
    units are kept. cost: what budgets limit."""

    pattern: Pattern
    pairs: np.ndarray
    cost: float


class _Candidate(NamedTuple):
    """Ordered as designs are. layers, unreached (a share of the pairs): bounds from few rows, or exact. cost: what budgets limit.
    size: how many patterns. kind: "alike", "by head", "dense head" or "dense layer". parts: numbers of ``_DesignSearch.parts``."""

    layers: int
    unreached: float
    cost: float
    size: int
    kind: str
    parts: tuple[int, ...]


class _DesignSearch:
    """Designs of one sequence. parts: the patterns that differ and that some mixture within the budget can hold; keep alone, if it
    is given, is the last."""

    def __init__(
        self, grid: BlockGrid, keep: tuple[Pattern, ...], causal: bool, heads: int, layers: int, progress: bool, timed: bool = False
    ):
        self.grid, self.keep, self.causal, self.heads, self.layers, self.progress = grid, keep, causal, heads, layers, progress
        self.timed = timed
        self.dense = parse("causal" if causal else "full")
        self.unit = 1 if grid.q_len <= MOST_UNITS else grid.block_size
        self.possible = self.pairs_of(self.dense)
        self.visible, self.total = self.possible > 0, _total(self.possible)
        self.dense_us = Counts.dense(grid.q_len, grid.kv_len, grid.offset if causal else None).both_passes_us
        self.rows = np.unique(np.linspace(len(self.possible) // _BOUND_ROWS, len(self.possible) - 1, _BOUND_ROWS).astype(int))
        self.parts: list[_PricedPattern] = []
        self.bounds: dict[tuple[int, ...], tuple[int, float]] = {}

    def pairs_of(self, pattern: Pattern) -> np.ndarray:
        mask = compile_mask(pattern, self.grid.q_len, block_size=self.grid.block_size, progress=False)
        if self.unit == 1:
            return mask.to_dense().numpy().astype(np.float32)
        full, partial = mask.kept()
        kept = (full.count_by_square(1) * self.grid.block_size**2).astype(np.float32)
        kept[partial.rows, partial.cols] = mask.pairs_of(partial.kinds, partial.tiles)
        return kept

    def cost_of(self, pairs: np.ndarray) -> float:
        """Returns what the budget limits: the share of the pairs, or of the time."""
        return self.microseconds(pairs) / self.dense_us if self.timed else _total(pairs) / self.total

    def microseconds(self, pairs: np.ndarray) -> float:
        """The predicted time of both passes of a head."""
        size = self.grid.block_size
        if self.unit == 1:
            pairs = np.pad(pairs, [(0, -length % size) for length in pairs.shape])
            pairs = pairs.reshape(len(pairs) // size, size, -1, size).sum((1, 3))
        full, visited = int(np.count_nonzero(pairs == size**2)), int(np.count_nonzero(pairs))
        return Counts(size, len(pairs), full, visited - full).both_passes_us

    def whole_units(self, pairs: np.ndarray) -> np.ndarray:
        """Which units see all that they may of which, bool. A token has its own by the residual connection."""
        whole = (pairs == self.possible) & self.visible
        return whole | np.eye(len(whole), dtype=bool) if self.unit == 1 else whole

    def join(self, *patterns: Pattern) -> Pattern:
        """Returns ``causal & (keep | patterns)``."""
        union = Or.of(*self.keep, *patterns)
        return And.of(self.dense, union) if self.causal else union

    def pattern_of(self, *parts: int) -> Pattern:
        return self.join(*(self.parts[part].pattern for part in parts))

    def collect_parts(self, budget: float) -> None:
        """Finds ``parts``. Raises ValueError if there are none."""
        alone = self.cost_of(base := self.pairs_of(self.join())) if self.keep else 0.0
        if alone > budget:
            raise ValueError(
                f"budget must be at least {_rounded_up_text(alone)}, what keep={self.keep[0]} takes; got "
                f"{_in_percent(budget)}; raise it, or keep less"
            )
        most = budget + (min(_MOST_PARTS, self.heads) - 1) * (budget - alone)
        patterns = sorted(dict.fromkeys(_all_parts(self.grid)), key=lambda one: (len(str(one)), str(one)))
        seen = {self.possible.tobytes(), *([base.tobytes()] if self.keep else [])}
        cheapest = 1.0, self.dense
        with Progress("compiling patterns", len(patterns), self.progress) as bar:
            for pattern in patterns:
                pairs = self.pairs_of(self.join(pattern))
                cost, key = self.cost_of(pairs), pairs.tobytes()
                bar.advance(1)
                if cost and key not in seen:
                    seen.add(key)
                    cheapest = min(cheapest, (cost, self.join(pattern)), key=lambda one: one[0])
                    if cost <= most:
                        self.parts.append(_PricedPattern(pattern, pairs, cost))
        if self.keep:
            self.parts.append(_PricedPattern(self.keep[0], base, alone))
        elif cheapest[0] > budget:
            raise ValueError(
                f"budget must be at least {_rounded_up_text(cheapest[0])}, what {cheapest[1]} takes, the least that the search "
                f"knows; got {_in_percent(budget)}; raise it, or register a pattern that keeps less and names ranges"
            )

    def candidates(self, budget: float) -> list[_Candidate]:
        """All within the budget, as far as the parts of a union tell before it is compiled."""
        found, numbers = self.single_candidates(budget), range(len(self.parts))
        pairs = list(itertools.combinations(numbers, 2))
        with Progress("comparing unions", len(pairs) + _PAIRS_EXTENDED * len(numbers), self.progress) as bar:
            found += (twos := self.compare_unions(pairs, budget, bar))
            best = list(dict.fromkeys(one.parts for one in sorted(twos)))[:_PAIRS_EXTENDED]
            threes = {tuple(sorted((*two, number))) for two in best for number in numbers if number not in two}
            return found + self.compare_unions(sorted(threes), budget, bar)

    def single_candidates(self, budget: float) -> list[_Candidate]:
        """``candidates`` that are no unions."""
        self.collect_parts(budget)
        numbers = range(len(self.parts))
        found = [one for number in numbers for one in self.candidates_of((number,), budget)]
        # Other heads and layers than the dense ones need not reach far. They keep as little as can be, and each token's own block.
        own = [number for number in numbers if np.array_equal(self.parts[number].pairs.diagonal(), self.possible.diagonal())]
        rest = len(numbers) - 1 if self.keep else min(own, key=lambda number: self.parts[number].cost, default=None)
        for kind, count in (("dense head", self.heads), ("dense layer", self.layers)):
            if rest is not None and count > 1 and (cost := (1 + (count - 1) * self.parts[rest].cost) / count) <= budget:
                found.append(_Candidate(1, 0.0, cost, 1, kind, (rest,)))
        return found if budget < 1 else [*found, _Candidate(1, 0.0, 1.0, 0, "alike", ())]

    def compare_unions(self, unions: Sequence[tuple[int, ...]], budget: float, bar: Progress) -> list[_Candidate]:
        found = []
        for parts in unions:
            found += self.candidates_of(parts, budget)
            bar.advance(1)
        return found

    def candidates_of(self, parts: tuple[int, ...], budget: float) -> list[_Candidate]:
        """The union of some patterns in all heads, and one of them in each group of heads: both reach equally far. Nothing if they
        reach as far without one of them."""
        beside = self.beside_keep(parts)
        costs = {}
        if beside == parts or len(parts) == 1:
            costs["alike"] = self.parts[parts[0]].cost if len(parts) == 1 else self.cost_of(self.union(parts))
        if 1 < len(parts) <= self.heads:
            costs["by head"] = sum(size * self.parts[part].cost for part, size in self.groups(parts)) / self.heads
        costs = {kind: cost for kind, cost in costs.items() if cost <= budget}
        fewer = [less for less in itertools.combinations(beside, len(beside) - 1) if less or self.keep] if beside else []
        if not costs or any(self.bound_layers(less) <= self.bound_layers(beside) for less in fewer):
            return []
        return [_Candidate(*self.bound_layers(beside), cost, len(parts), kind, parts) for kind, cost in costs.items()]

    def beside_keep(self, parts: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(part for part in parts if self.parts[part].pattern not in self.keep)

    def union(self, parts: tuple[int, ...]) -> np.ndarray:
        """At least so many pairs are in the union of keep and these patterns."""
        return reduce(np.maximum, (self.parts[part].pairs for part in parts or (-1,)))

    def groups(self, parts: tuple[int, ...]) -> list[tuple[int, int]]:
        """(part, heads) of even groups; the cheapest part has the most heads."""
        each, left_over = divmod(self.heads, len(parts))
        ordered = sorted(parts, key=lambda part: (self.parts[part].cost, part))
        return [(part, each + (number < left_over)) for number, part in enumerate(ordered)]

    def bound_layers(self, parts: tuple[int, ...]) -> tuple[int, float]:
        """(layers, unreached) of a few rows of units under keep and these patterns; all rows need as many layers at least."""
        if parts in self.bounds:
            return self.bounds[parts]
        step, visible = self.whole_units(self.union(parts)).astype(np.float32), self.visible[self.rows]
        reached, result = step[self.rows], (_UNCONNECTED, 1.0)
        for layer in range(1, _UNCONNECTED):
            unreached = 1 - float(reached.sum() / visible.sum())
            result = (_UNCONNECTED, round(unreached, 6)) if unreached else (layer, 0.0)
            further = np.maximum(reached, (reached @ step > 0).astype(np.float32))
            if not unreached or np.array_equal(further, reached):
                break
            reached = further
        self.bounds[parts] = result
        return result

    def find_best(self, candidates: Sequence[_Candidate], budget: float, count: int, most: int) -> list[Design]:
        """The first ``count`` designs of at most ``most`` layers, in order, but none that adds patterns to a better one."""
        left, found = sorted(candidates), list[Design]()
        built, listed = dict[tuple, Design](), list[tuple[str, set]]()
        while left and len(found) < count:
            one = heapq.heappop(left)
            if one.layers > most:
                break
            names, key = {self.parts[part].pattern.name for part in self.beside_keep(one.parts)}, (one.kind, one.parts)
            if any(kind == one.kind and others <= names for kind, others in listed):
                continue
            if key not in built:
                built[key] = result = self.build_design(one)
                cost = self.budget_share(result)
                exact = one._replace(layers=result.connected_in or _UNCONNECTED, unreached=1 - result.reach[-1], cost=cost)
                if cost > budget:
                    continue
                if exact > one:  # others may now be better
                    heapq.heappush(left, exact)
                    continue
            found.append(built[key])
            listed.append((one.kind, names))
        return sorted(found, key=lambda one: (one.connected_in or _UNCONNECTED, -one.reach[-1], self.budget_share(one)))

    def budget_share(self, one: Design) -> float:
        return one.time if self.timed else one.density

    def layers_of(self, one: _Candidate) -> tuple[Pattern, ...]:
        """The patterns of a candidate: one for all layers, or one for each."""
        if one.kind == "by head":
            return (PerHead(tuple(self.pattern_of(part) for part, heads in self.groups(one.parts) for _ in range(heads))),)
        if one.kind == "alike":
            return (self.pattern_of(*one.parts) if one.parts else self.dense,)
        rest = self.pattern_of(*one.parts)
        if one.kind == "dense head":
            return (PerHead((self.dense, *[rest] * (self.heads - 1))),)
        return (self.dense, *[rest] * (self.layers - 1))

    def build_design(self, one: _Candidate) -> Design:
        """The design of a candidate, compiled and counted."""
        layers = self.layers_of(one)
        by_layer = [head_patterns(layer) for layer in layers]
        pairs = {head: self.pairs_of(head) for head in dict.fromkeys(itertools.chain.from_iterable(by_layer))}

        def mean(measure: Callable[[np.ndarray], float]) -> float:
            of_head = {head: measure(kept) for head, kept in pairs.items()}
            return sum(sum(of_head[head] for head in heads) / len(heads) for heads in by_layer) / len(layers)

        kept, time = mean(_total), mean(self.microseconds) / self.dense_us
        steps = {
            heads: self.whole_units(reduce(np.maximum, (pairs[head] for head in set(heads)))) for heads in dict.fromkeys(by_layer)
        }
        reach = self.reach([steps[heads] for heads in by_layer])
        return Design(layers, self.grid.q_len, self.grid.block_size, kept, kept / self.total, time, reach, self.unit)

    def reach(self, steps: Sequence[np.ndarray]) -> tuple[float, ...]:
        """``Design.reach`` of layers that see these units whole; one stands for all layers."""
        reached, shares = np.zeros_like(steps[0]), []
        for layer in range(_MOST_LAYERS if len(steps) == 1 else len(steps)):
            step = steps[layer % len(steps)]
            # From a unit that is seen whole, all that each of its tokens had received; by the residual, what was there before.
            further = reached | step | (step.astype(np.float32) @ reached.astype(np.float32) > 0)
            if layer and len(steps) == 1 and np.array_equal(further, reached):
                break
            reached = further
            shares.append(float(self.possible[reached].sum(dtype=np.float64)) / self.total)
            if shares[-1] == 1:
                break
        return tuple(shares)

    def unmet_error(self, candidates: Sequence[_Candidate], budget: float, connected_in: int) -> ValueError:
        """The error for a budget at which nothing connects in so few layers: it names the nearest that do."""
        nearest = self.find_best(candidates, budget, 1, _UNCONNECTED)[0]
        wide = _DesignSearch(self.grid, self.keep, self.causal, self.heads, self.layers, self.progress, self.timed)
        within = sorted((one for one in wide.single_candidates(1.0) if one.layers <= connected_in), key=lambda one: one.cost)
        # Dense attention, the last, connects in one layer.
        enough = next(one for one in map(wide.build_design, within) if (one.connected_in or _UNCONNECTED) <= connected_in)
        got = f"got connected_in={connected_in}; pass budget='{_rounded_up_text(self.budget_share(enough))}' for {enough.summary}"
        known = "that the search knows"
        if nearest.connected_in is None:
            reached = f"the best {known} reaches {share_text(nearest.reach[-1])} after {len(nearest.reach)} layers"
            return ValueError(f"budget must be more than {_in_percent(budget)} to connect all tokens: {reached}; {got}")
        fewest = f"connected_in must be at least {nearest.connected_in} within a budget of {_in_percent(budget)}"
        return ValueError(f"{fewest}, the fewest {known}, by {nearest.summary}; {got}")


def _count_text(patterns: Sequence[Pattern], what: str, text: Callable[[Pattern], str]) -> str:
    """The text of one; "2 heads of causal, 6 heads of ..." of several."""
    runs = [(len(list(same)), text(one)) for one, same in itertools.groupby(patterns)]
    return runs[0][1] if len(runs) == 1 else ", ".join(f"{n} {what}{'s' * (n > 1)} of {said}" for n, said in runs)


def _all_parts(grid: BlockGrid) -> Iterator[Pattern]:
    """Each registered pattern that names ranges, with all combinations of their values."""
    for name in list_registered(chooses=False):
        cls = pattern_class(name)
        ranges = cls.design_ranges(grid.q_len, grid.block_size)
        if ranges is None:
            continue
        for values in itertools.product(*ranges.values()):
            yield cls(**dict(zip(ranges, values, strict=True)))


def _total(pairs: np.ndarray) -> float:
    """The sum of (units, units) pairs; the sum of a row is exact in float32."""
    return float(pairs.sum(axis=1).sum(dtype=np.float64))


def _in_percent(share: float) -> str:
    return f"{100 * share:.6g}%"


def _rounded_up_text(share: float) -> str:
    """A budget, as text, that is not below this share."""
    return f"{math.ceil(share * 1e6) / 1e4:g}%"
