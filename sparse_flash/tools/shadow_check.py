"""A shadow check for training runs: recomputes sampled rows of attention and its gradients from the definition."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import torch

from ..dispatch import observers
from ..masks.block_mask import BlockMask
from ..masks.cache import as_block_mask
from ..masks.compiler import head_patterns
from ..masks.grid import BlockGrid
from ..masks.parsing import parse
from ..masks.pattern import Pattern
from ..selection.block_selection import BlockSelection
from ..variant.definition import Pairs, existing_pairs, kept_by_dropout, modify_scores
from ..variant.variant import Variant, check_counts

# Errors relative to the largest number among the sampled rows. Correct results in these types stay well below.
BOUNDS = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float32: 1e-3, torch.float64: 1e-8}
_log = logging.getLogger("sparse_flash.check")


class CheckError(RuntimeError):
    """A result of attention differs from its definition by more than a check's bound."""


@dataclass(frozen=True)
class Report:
    """The errors that a check found in one call of attention. call: the number of the target's call, from 1. shape: of q. errors:
    by name ("out", "lse", or "dq", "dk", "dv"), the largest error in the sampled rows, relative to their largest element."""

    call: int
    shape: tuple[int, ...]
    errors: dict[str, float]

    @property
    def worst(self) -> float:
        return max(self.errors.values())


class Check:
    """See ``check``. Calling it calls the target. reports: a list of ``Report``, two per attention call that was checked and
    differentiated."""

    def __init__(self, target: Callable, every: int, rows: int, bound: float | None, seed: int):
        check_counts(every=every, rows=rows)
        if bound is not None and (not isinstance(bound, (int, float)) or not bound > 0):
            raise ValueError(f"bound must be a positive number; got {bound!r}; None takes that of the dtype")
        if not callable(target):
            raise TypeError(f"check needs a module or a function that calls attention; got {type(target).__name__}")
        self.target, self.every, self.rows, self.bound = target, every, rows, bound
        self.calls = 0
        self.reports: list[Report] = []
        self._random = random.Random(seed)
        self._hooks = []
        if isinstance(target, torch.nn.Module):
            self._hooks = [
                target.register_forward_pre_hook(_Hook(self._enter)),
                target.register_forward_hook(_Hook(self._leave), always_call=True),
            ]

    def __call__(self, *args, **kwargs):
        if self._hooks:
            return self.target(*args, **kwargs)
        self._enter()
        try:
            return self.target(*args, **kwargs)
        finally:
            self._leave()

    def remove(self) -> None:
        """Stops checking a module."""
        for hook in self._hooks:
            hook.remove()
        self._leave()

    def _enter(self) -> None:
        self.calls += 1
        if self.calls % self.every == 1 % self.every:
            observers.observers.append(self)

    def _leave(self) -> None:
        if self in observers.observers:
            observers.observers.remove(self)

    def notify(self, q, k, v, mask, scale, out, lse, variant) -> None:
        sample = _Sample(q, k, v, mask, scale, out, lse, variant, self.rows, self._random)
        call = self.calls
        self._judge(call, sample, sample.forward_errors())
        inputs = {name: tensor for name, tensor in (("dq", q), ("dk", k), ("dv", v)) if tensor.requires_grad}
        if inputs and out.requires_grad:
            _GradientWatch({"out": out, "lse": lse}, inputs, lambda *both: self._judge(call, sample, sample.backward_errors(*both)))

    def _judge(self, call: int, sample: _Sample, errors: dict[str, float]) -> None:
        q, report = sample.q, Report(call, tuple(sample.q.shape), errors)
        self.reports.append(report)
        listed = ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
        _log.info("call %d, q %s: %s", call, report.shape, listed)
        bound = BOUNDS[q.dtype] if self.bound is None else self.bound
        if not report.worst <= bound:  # NaN exceeds any bound
            way_out = sample.contradiction() or "compare backend='reference', and report it with its mask"
            raise CheckError(
                f"in call {call}, attention of q {report.shape}, {q.dtype}, is further from its definition than {bound:.2g}: "
                f"{listed} (relative errors of sampled rows); {way_out}"
            )


class _GradientWatch:
    """Collects the gradients of a call's results and inputs, and passes both on when the last of the inputs' has come."""

    def __init__(self, results: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor], judge: Callable[[dict, dict], None]):
        self._expected, self._judge = len(inputs), judge
        self._of_results: dict[str, torch.Tensor] = {}
        self._of_inputs: dict[str, torch.Tensor] = {}
        for name, tensor in results.items():
            tensor.register_hook(partial(self._keep, name))
        for name, tensor in inputs.items():
            tensor.register_hook(partial(self._finish, name))

    def _keep(self, name: str, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # None if nothing depends on the result
            self._of_results[name] = gradient.detach()

    def _finish(self, name: str, gradient: torch.Tensor) -> None:
        self._of_inputs[name] = gradient.detach()
        if len(self._of_inputs) == self._expected:
            self._judge(self._of_results, self._of_inputs)
            self._of_results.clear()
            self._of_inputs.clear()


class _Hook:
    """A hook of a module. A copy of it, in memory or in a file, does nothing, as a check is not part of a module's state."""

    def __init__(self, act: Callable[[], None] | None = None):
        self.act = act

    def __call__(self, *_) -> None:
        if self.act is not None:
            self.act()

    def __reduce__(self):
        return _Hook, ()


def check(target: Callable, *, every: int = 100, rows: int = 4, bound: float | None = None, seed: int = 0) -> Check:
    """Checks attention while a model trains, by recomputing some rows of the results in float64 from time to time.

    target: a module, whose calls are checked from now on, except calls of its copies; or a function, such as one training step:
    call the returned object in its place. every: the first call and each ``every``-th one after it are checked, with all their
    calls of ``attention``. rows: queries sampled per call of ``attention``, and as many keys. bound: the largest relative error
    allowed; None uses 0.05 for bfloat16, 0.01 for float16, 0.001 for float32. seed: of the sample.

    Sampled queries give out, lse and dq; sampled keys give dk and dv, from lse. A pattern itself says which pairs it keeps, so this
    also checks its table; a BlockMask has only its table, a BlockSelection its picks. For an expression with choosers, attention
    over the blocks that it chose is checked; ``choose_blocks(report=True)`` says what the choice loses. Errors are logged (logger
    "sparse_flash.check", level INFO) and kept in ``reports``. Raises CheckError beyond the bound: from the call for results, from
    ``backward()`` for gradients.

    A check costs some passes over the keys for each sampled row; other calls cost nothing. Lengths, dropout and score modifications
    are also recomputed. Not checked: the effect of sinks on results; the gradients of rel_bias and sinks; calls inside
    torch.compile; the gradients of layers with activation checkpointing.
    """
    return Check(target, every, rows, bound, seed)


class _Sample:
    """Rows of one call, and their results by the definition, in float64."""

    def __init__(self, q, k, v, mask, scale, out, lse, variant: Variant | None, rows: int, rng: random.Random):
        self.q, self.k, self.v, self.out, self.lse = (t.detach() for t in (q, k, v, out, lse))
        self.scale, self.group = scale, q.shape[1] // k.shape[1]
        self.keeps = _KeptPairs(mask, q.shape[1], q.shape[2], k.shape[2])
        if variant is not None and variant.rel_bias is not None:
            variant = replace(variant, rel_bias=variant.rel_bias.detach())
        self.variant = variant

        def sample(batch: int, heads: int, tokens: int) -> list[tuple[int, int, int]]:
            return [(rng.randrange(batch), rng.randrange(heads), rng.randrange(tokens)) for _ in range(rows)]

        self.queries, self.keys = sample(*q.shape[:3]), sample(*k.shape[:3])

    def contradiction(self) -> str | None:
        """Whether the mask's own rules disagree at a sampled query or key, and what to look at."""
        queries, keys = ({token for _, _, token in sampled} for sampled in (self.queries, self.keys))
        return self.keeps.contradiction(sorted(queries), sorted(keys))

    def forward_errors(self) -> dict[str, float]:
        outs, logs = zip(*(self._recompute_query(*query) for query in self.queries), strict=True)
        return {"out": _error(self.out, self.queries, outs), "lse": _error(self.lse, self.queries, logs)}

    def backward_errors(self, of_results: dict[str, torch.Tensor], of_inputs: dict[str, torch.Tensor]) -> dict[str, float]:
        """of_results: gradients of out and lse, if anything depends on them. of_inputs: dq, dk and dv, or some of them."""
        dout = of_results.get("out", torch.zeros_like(self.out))
        dlse = of_results.get("lse", torch.zeros_like(self.lse))
        errors = {}
        if "dq" in of_inputs:
            wanted = [self._query_gradient(*query, dout, dlse) for query in self.queries]
            errors["dq"] = _error(of_inputs["dq"], self.queries, wanted)
        if "dk" in of_inputs or "dv" in of_inputs:
            by_name = zip(*(self._key_gradients(*key, dout, dlse) for key in self.keys), strict=True)
            for name, rows in zip(("dk", "dv"), by_name, strict=True):
                if name in of_inputs:
                    errors[name] = _error(of_inputs[name], self.keys, rows)
        return errors

    def _recompute_query(self, b: int, h: int, i: int, q: torch.Tensor | None = None):
        """(out, lse) of a query; differentiable in q, (head_dim,) float64, by default the query itself."""
        q = self.q[b, h, i].double() if q is None else q
        keys = self._existing(self.keeps.keys_of_query(b, h, i), b, h, [i], slice(None))
        k, v = (t[b, h // self.group, keys].double() for t in (self.k, self.v))
        scores = self._scores(q[None], k, b, h, [i], keys)[0]
        lse = scores.logsumexp(0)
        if lse.isneginf():
            return v.new_zeros(v.shape[1]), lse
        return ((scores - lse).exp() * self._dropout(b, h, i, None)[keys]) @ v, lse

    def _query_gradient(self, b: int, h: int, i: int, dout, dlse) -> torch.Tensor:
        q = self.q[b, h, i].double().requires_grad_()
        with torch.enable_grad():
            out, lse = self._recompute_query(b, h, i, q)
            if lse.isneginf():
                return torch.zeros_like(q)
            return torch.autograd.grad(out @ dout[b, h, i].double() + lse * dlse[b, h, i].double(), q)[0]

    def _key_gradients(self, b: int, kv_head: int, j: int, dout, dlse) -> tuple[torch.Tensor, torch.Tensor]:
        """(dk, dv) of a key, from the queries' lse and out."""
        key, value = (t[b, kv_head, j].double() for t in (self.k, self.v))
        dk, dv = torch.zeros_like(key), torch.zeros_like(value)
        for h in range(kv_head * self.group, (kv_head + 1) * self.group):
            queries = self._existing(self.keeps.queries_of_key(b, h, j), b, h, slice(None), [j])
            q, upstream, out, lse = (t[b, h, queries].double() for t in (self.q, dout, self.out, self.lse))
            with torch.enable_grad():
                own = key.clone().requires_grad_()
                scores = self._scores(q, own[None], b, h, queries, [j])[:, 0]
            weights = torch.where(lse.isneginf(), 0.0, (scores.detach() - lse).exp())
            dropout = self._dropout(b, h, None, j)[queries]
            dscores = weights * (dropout * (upstream @ value) - (upstream * out).sum(1) + dlse[b, h, queries].double())
            dk += torch.autograd.grad(scores, own, dscores)[0]
            dv += (weights * dropout) @ upstream
        return dk, dv

    def _scores(self, q: torch.Tensor, k: torch.Tensor, b: int, h: int, queries, keys) -> torch.Tensor:
        """(queries, keys) scores for rows of q and k at these positions."""
        products = self.scale * q @ k.T
        return products if self.variant is None else modify_scores(self.variant, products, self._pairs(b, h, queries, keys))

    def _existing(self, kept: torch.Tensor, b: int, h: int, queries, keys) -> torch.Tensor:
        """The positions that a mask keeps in a row or a column, if both tokens exist."""
        kept = kept.to(self.q.device)
        exist = None if self.variant is None else existing_pairs(self.variant, self._pairs(b, h, queries, keys))
        return (kept if exist is None else kept & exist.flatten()).nonzero()[:, 0]

    def _dropout(self, b: int, h: int, i: int | None, j: int | None) -> torch.Tensor:
        """The factors by which dropout multiplies the weights of query i, or of key j."""
        if self.variant is None or self.variant.seed is None:
            return torch.ones(self.k.shape[2] if j is None else self.q.shape[2], dtype=torch.float64, device=self.q.device)
        # Drawn for 16 queries and 16 keys at a time.
        queries, keys = (slice(None) if token is None else slice(token // 16 * 16, token // 16 * 16 + 16) for token in (i, j))
        kept = kept_by_dropout(self.variant, self._pairs(b, h, queries, keys))
        row = kept[tuple(slice(None) if token is None else token % 16 for token in (i, j))]
        return row.double() / (1 - self.variant.dropout_p)

    def _pairs(self, b: int, h: int, queries, keys) -> Pairs:
        """queries, keys: their indices."""
        device, (_, heads, q_len, _), kv_len = self.q.device, self.q.shape, self.k.shape[2]
        query, key = (torch.arange(size, device=device)[which] for size, which in ((q_len, queries), (kv_len, keys)))
        batch, head = (torch.tensor([[index]], device=device) for index in (b, h))
        return Pairs(batch, head, query[:, None], key[None], heads, q_len, kv_len)


def _error(results: torch.Tensor, sampled: list[tuple[int, int, int]], rows: Sequence[torch.Tensor]) -> float:
    """The largest difference of the sampled results from these rows, relative to the rows' largest element; NaN and misplaced
    infinities count as infinite."""
    got, wanted = torch.stack([results[index].double() for index in sampled]), torch.stack(list(rows))
    equal = got == wanted  # including infinities
    difference = torch.where(equal, 0.0, (got - wanted).abs()).nan_to_num(float("inf"), float("inf")).max()
    size = torch.where(wanted.isfinite(), wanted.abs(), 0.0).max()
    return float(difference / size) if size > 0 else float(difference)


class _KeptPairs:
    """Which pairs a mask keeps, by row or column, (tokens,) bool on the CPU."""

    def __init__(self, mask: BlockMask | BlockSelection | Pattern | str | None, heads: int, q_len: int, kv_len: int):
        self.mask = parse(mask) if isinstance(mask, str) else mask
        self.heads = head_patterns(self.mask) if isinstance(self.mask, Pattern) else ()
        # How many query heads share picks.
        self.shared = heads // mask.heads if isinstance(mask, BlockSelection) else 1
        self.grid = BlockGrid(q_len, kv_len, mask.block_size if isinstance(mask, BlockMask) else 128)

    def keys_of_query(self, b: int, h: int, i: int) -> torch.Tensor:
        if isinstance(self.mask, (BlockMask, BlockSelection)):
            return self.mask.kept_keys(i, b, h // self.shared)
        if self.mask is None:
            return torch.ones(self.grid.kv_len, dtype=torch.bool, device="cpu")
        return self._by_rule(h, np.array([i]), np.arange(self.grid.kv_len))[0]

    def queries_of_key(self, b: int, h: int, j: int) -> torch.Tensor:
        if isinstance(self.mask, (BlockMask, BlockSelection)):
            return self.mask.kept_queries(j, b, h // self.shared)
        if self.mask is None:
            return torch.ones(self.grid.q_len, dtype=torch.bool, device="cpu")
        return self._by_rule(h, np.arange(self.grid.q_len), np.array([j]))[:, 0]

    def contradiction(self, queries: list[int], keys: list[int]) -> str | None:
        """Returns how the table of a pattern contradicts its token rule at these tokens, or None."""
        if not isinstance(self.mask, Pattern):
            return None
        table = as_block_mask(self.mask, q_len=self.grid.q_len, kv_len=self.grid.kv_len, block_size=self.grid.block_size)
        for name, tokens, by_rule, by_table in (
            ("query", queries, self.keys_of_query, table.kept_keys),
            ("key", keys, self.queries_of_key, table.kept_queries),
        ):
            for token, (head, pattern) in product(tokens, enumerate(self.heads)):
                if not torch.equal(by_rule(0, head, token), by_table(token, 0, head)):
                    return (
                        f"the table of {pattern} differs from its token rule at {name} {token}: correct block_rule, unit_pairs, "
                        "shift_invariant or ordered_runs of its patterns, or a rule that does not repeat"
                    )
        return None

    def _by_rule(self, head: int, queries: np.ndarray, keys: np.ndarray) -> torch.Tensor:
        pattern = self.heads[head % len(self.heads)].bind_length(self.grid.kv_len)
        kept = pattern.token_rule(queries[:, None] + self.grid.offset, keys[None, :])
        return torch.from_numpy(np.broadcast_to(kept, (len(queries), len(keys))).copy())
