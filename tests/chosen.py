"""Draws of choosers and rules, and their meaning in float64 and plain Python, from their docstrings."""

import math
from fractions import Fraction

import numpy as np
import strategies
import torch
from hypothesis import strategies as st
from oracle import DEVICE

import sparse_flash as sf
from sparse_flash.choosers import built_in as choosers
from sparse_flash.masks.chooser import RULES, Chooser
from sparse_flash.masks.fields import limits_of
from sparse_flash.masks.grid import BlockGrid
from sparse_flash.masks.pattern import And, Or
from sparse_flash.masks.registry import find_docstring_line, pattern_class

_POWERS = st.sampled_from([1, 2, 4, 8, 16, 32, 64])
# Fields of classes that need more than their types say.
_FIELDS = {"antidiagonal": {"stride": _POWERS}}
BUILT_IN = [name for name in sf.list_choosers() if pattern_class(name).__module__ == choosers.__name__]
SPECIMENS = {name: find_docstring_line(pattern_class(name), "specimen") for name in BUILT_IN}
SCORING = [name for name in BUILT_IN if name != "scored"]  # by themselves
COMPARING = [name for name in SCORING if pattern_class(name).compared_features is not Chooser.compared_features]

shares = st.sampled_from([0.01, 0.07, 0.25, 0.5, 0.9, 1.0]) | st.floats(0.001, 1)
rules = st.one_of(
    st.integers(1, 9).map(lambda number: ("keep", number)),
    *(shares.map(lambda number, rule=rule: (rule, number)) for rule in RULES),
)
blocks = st.sampled_from([64, 128])


def of_name(name: str, *, rule=rules, block=None):
    """Draws of one class of choosers. block: draws; drawn from all values, None among them, by default."""
    options = {"block": st.none() | blocks if block is None else block}
    cls = pattern_class(name)
    inherited = {limit.field for limit in limits_of(Chooser)[1]}
    by_type = {limit.field: strategies.number(limit, False) for limit in limits_of(cls)[1] if limit.field not in inherited}
    made = st.fixed_dictionaries({**by_type, **_FIELDS.get(name, {}), **options})
    return st.tuples(made, rule).map(lambda drawn: pattern_class(name)(**drawn[0], **dict([drawn[1]])))


def drawn(names=BUILT_IN, **options):
    return st.one_of(*(of_name(name, **options) for name in names))


def joined(within, some, always):
    """``within & (some | always)``; within, always: None for none."""
    spec = some[0]
    for one in (*some[1:], *([] if always is None else [always])):
        spec = spec | one
    return spec if within is None else within & spec


def says_causal(pattern, everywhere=False) -> bool:
    """Whether an expression has the word, outside of ``~``. everywhere: as an operand of its outermost &, so that it limits all."""
    if isinstance(pattern, And) or (isinstance(pattern, Or) and not everywhere):
        return any(says_causal(one, everywhere) for one in pattern.operands)
    return str(pattern) == "causal"


def fit(within, always) -> bool:
    """Whether ``within & (chooser | always)`` is legal: causal beside a chooser alone is not."""
    return says_causal(within, True) or not says_causal(always)


def tensors(q_len, kv_len, *, batch=1, heads=2, kv_heads=1, head_dim=8, dtype=torch.float32, seed=0, spread=2.0):
    """q and k. spread: the standard deviation of q's numbers, so that weights differ."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, q_len, head_dim), (batch, kv_heads, kv_len, head_dim)
    q, k = (torch.randn(shape, generator=generator) for shape in shapes)
    return (q * spread).to(DEVICE, dtype), k.to(DEVICE, dtype)


def groups_of(tokens: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, tokens)) for first in range(0, tokens, size)]


def scores_of(chooser, q, k, *, causal=True, scale=None, starts=None) -> np.ndarray:
    """The scores of a built-in chooser by its docstring, (batch, heads, q_blocks, kv_blocks) float64. starts: the first existing
    key of each sequence."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    if type(chooser).compared_features is Chooser.compared_features:  # its scores are the definition
        found = chooser.scores(q, k, BlockGrid(q.shape[2], k.shape[2], chooser.block_size)).double().cpu().numpy()
        return found
    q, k = (x.double().cpu().numpy() for x in (q, k))
    starts = np.zeros(len(q), int) if starts is None else starts
    places = [(b, h) for b in range(len(q)) for h in range(q.shape[1])]
    each = [_of_head(chooser, q[b, h], k[b, h // group], causal, scale, int(starts[b])) for b, h in places]
    return np.array(each).reshape(*q.shape[:2], *each[0].shape)


def _of_head(chooser, q, k, causal, scale, start):
    size, offset = chooser.block_size, len(k) - len(q)
    k = np.where(np.arange(len(k))[:, None] < start, 0, k)
    q_blocks, kv_blocks = groups_of(len(q), size), groups_of(len(k), size)
    # A row is of some block of queries, and sees what ends by the last of its tokens; a column is some keys.
    match chooser:
        case choosers.Pooled():
            rows, keys = q_blocks, size
        case choosers.Antidiagonal(stride=keys):
            rows = groups_of(len(q), keys)
        case choosers.Sampled(queries=count):
            picks = [(b, math.ceil(i * (b.stop - b.start) / count)) for b in q_blocks for i in range(1, count + 1)]
            rows, keys = [slice(b.start + n - 1, b.start + n) for b, n in picks], 1
    columns = groups_of(len(k), keys)
    until = [row.stop - 1 for row in rows]
    if isinstance(chooser, choosers.Antidiagonal):
        logits = _along_antidiagonals(q, k, keys)
    else:
        logits = (
            np.array([q[row].mean(0) for row in rows])
            @ np.array([_mean_of_existing(k[column], column.start, start) for column in columns]).T
        )
    last = np.array([column.stop - 1 for column in columns])
    seen = np.array([last <= position + offset if causal else last >= 0 for position in until])
    seen &= (np.arange(len(columns)) + 1) * keys > start
    weights = _softmax(logits * scale, seen)
    of_block = [[column.start // size == c for column in columns] for c in range(len(kv_blocks))]
    shares = weights @ np.array(of_block, float).T
    mine = np.array([row.start // size for row in rows])
    reduced = (lambda x: x.max(0)) if isinstance(chooser, choosers.Sampled) else (lambda x: x.mean(0))
    return np.array([reduced(shares[mine == block]) for block in range(len(q_blocks))])


def _mean_of_existing(x, first, start):
    return x.sum(0) / max(1, len(x) - max(0, start - first))


def _along_antidiagonals(q, k, stride):
    """The mean of the products on the antidiagonal of each square; pairs past the end count as 0."""
    products = q @ k.T
    squares = np.zeros((-(-len(q) // stride), -(-len(k) // stride)))
    for i in range(len(q)):
        j = np.arange(stride - 1 - i % stride, len(k), stride)
        squares[i // stride, j // stride] += products[i, j] / stride
    return squares


def _softmax(logits, seen):
    """The softmax over the seen columns of each row; 0 for a row that sees none."""
    weights = np.exp(np.where(seen, logits - np.where(seen, logits, -np.inf).max(1, initial=-1e300, keepdims=True), -np.inf))
    return weights / np.maximum(weights.sum(1, keepdims=True), 1e-300)


def count_of(number: int | float, blocks: int) -> int:
    """How many of these blocks a number, or a share, of them is."""
    return number if isinstance(number, int) else math.ceil(Fraction(str(number)) * blocks)


def kept_by(rule: str, number: int | float, scores: np.ndarray, allowed: np.ndarray, forced: np.ndarray) -> np.ndarray:
    """The blocks that a rule keeps of scores (heads, rows, blocks) float32, bool of the same shape."""
    heads, rows, _ = scores.shape
    kept = np.zeros(scores.shape, bool)
    for row in range(rows):
        here, must = np.nonzero(allowed[row])[0], np.nonzero(forced[row])[0]
        kept[:, row, must] = True
        found = {(h, b): scores[h, row, b] for h in range(heads) for b in here}
        possible = {place: score for place, score in found.items() if score > -math.inf}  # which NaN is not
        if rule == "budget":
            count = count_of(number, heads * len(here)) - heads * len(must)
            _keep_best(kept[:, row], {p: s for p, s in possible.items() if p[1] not in must}, count)
            continue
        for head in range(heads):
            mine = {place: score for place, score in possible.items() if place[0] == head}
            if rule == "keep":
                count = count_of(number, len(here)) - len(must)
                _keep_best(kept[:, row], {p: s for p, s in mine.items() if p[1] not in must}, count)
            elif rule == "mass":
                weights = {place: max(0.0, float(score)) for place, score in mine.items()}
                before, wanted = 0.0, number * sum(weights.values())
                for place in _best(weights):
                    if before < wanted:
                        kept[place[0], row, place[1]] = True
                    before += weights[place]
            else:
                for (h, b), score in mine.items():
                    kept[h, row, b] |= bool(score >= np.float32(number))
    return kept


def _best(scores: dict) -> list:
    """The places of scores, the best first; of equal ones the first."""
    return sorted(scores, key=lambda place: (-scores[place], place))


def _keep_best(kept: np.ndarray, scores: dict, count: int) -> None:
    for head, block in _best(scores)[: max(0, count)]:
        kept[head, block] = True


def pairs(pattern, q_len: int, kv_len: int) -> np.ndarray:
    """Those that a pattern keeps; all for None."""
    return np.ones((q_len, kv_len), bool) if pattern is None else strategies.dense(pattern, q_len, kv_len)


def blocks_of(kept: np.ndarray, size: int) -> np.ndarray:
    """Which blocks have a pair, (q_blocks, kv_blocks) of (q_len, kv_len) bool."""
    rows, columns = (groups_of(n, size) for n in kept.shape)
    return np.array([[kept[row, column].any() for column in columns] for row in rows])


def kept_pairs(rules, within, always, size: int, shape: tuple[int, int, int, int]) -> np.ndarray:
    """The pairs of a choice, bool of this shape, (batch, heads, q_len, kv_len). rules: (rule, number, scores) of each chooser; the
    scores are (batch, heads or key heads, q_blocks, kv_blocks). within, always: patterns, or None."""
    q_len, kv_len = shape[2:]
    limit = pairs(within, q_len, kv_len)
    allowed = blocks_of(limit, size)
    # The blocks in which positions of a row's queries fall, up to the last.
    first = np.array([rows.start + kv_len - q_len for rows in groups_of(q_len, size)]) // size
    last = np.array([rows.stop - 1 + kv_len - q_len for rows in groups_of(q_len, size)]) // size
    column = np.arange(allowed.shape[1])
    forced = (column >= first[:, None]) & (column <= last[:, None])
    if always is not None:
        forced |= blocks_of(pairs(always, q_len, kv_len), size)
    kept = np.broadcast_to(forced & allowed, (*shape[:2], *allowed.shape)).copy()
    for rule, number, scores in rules:
        mine = np.array([kept_by(rule, number, of_sequence, allowed, forced & allowed) for of_sequence in scores])
        kept |= mine.repeat(shape[1] // mine.shape[1], 1)
    return kept.repeat(size, 2).repeat(size, 3)[:, :, :q_len, :kv_len] & limit
