"""The work of calls that are no queue of tiles: decoding, choices of blocks, and attention over blocks that queries picked.

Each function returns amounts of work: bytes in the time of a copy, products in the time at the chip's peak, or counts.
``predict_work`` multiplies them by measured factors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..common.config import padded_head_dim
from ..portable.configs import HOPPER, combined_at_a_time, decode_config
from ..selection import division
from ..selection.division import SelectionSizes
from .chips import Chip
from .model import HOST_US, AttentionSizes, CallWork

_SCORES_HELD = 1 << 15  # scores of a row that a rule reads once: kernels/choosers/rules
# Calls of few queries: programs that share a multiprocessor; microseconds of a step whose loads overlap nothing.
_SLOTS, _STEP_US = 2, 1.0
_WEIGHT = 128  # operations in whose time a pair's weight is computed
# Microseconds of the host, of a call under a selection, forward and backward, and of a choice: beside some thirty launches.
_SELECTION_HOST_US, _CHOICE_HOST_US = (1500.0, 2300.0), 1000.0


def describe_decode(
    sizes: AttentionSizes, keys: float, chip: Chip, block_size: int | None, picked: bool = False, e4m3: bool = False, page: int = 0
) -> CallWork:
    """Returns the work of a call of few queries over a cache.

    keys: how many keys the queries of a sequence read in each key head. block_size: of the table or of the picks, None without
    either. picked: whether each query has a choice of its own. e4m3: whether the cache is in e4m3. page: tokens of its pages, 0 if
    it has none.
    """
    group = sizes.heads // sizes.kv_heads
    rows, apart = (group, sizes.q_len) if picked else (group * sizes.q_len, 1)
    alike = e4m3 and not picked and (page == 0 or page >= 128)
    config = decode_config(torch.bfloat16, sizes.head_dim, block_size, rows, sizes.v_head_dim, HOPPER, e4m3, alike)
    slots, tiles = _SLOTS * chip.multiprocessors, sizes.batch * sizes.kv_heads * apart * -(-rows // config.tile_m)
    steps = max(1, -(-int(keys / apart) // config.tile_n))
    splits = max(1, min(slots // tiles, steps))
    stored = min(config.tile_m, 1 << (rows - 1).bit_length())
    of_key = (sizes.head_dim + sizes.v_head_dim) * (1 if e4m3 else 2)
    read = sizes.batch * sizes.kv_heads * keys * of_key
    us = read / chip.bytes_per_us
    in_turn = -(-steps // splits) * -(-tiles * splits // slots)  # steps of a slot, one after the other
    # In e4m3 a count, as instructions bound steps; otherwise the microseconds that loads do not hide.
    waits = float(in_turn) if e4m3 else max(0.0, in_turn * _STEP_US - us)
    merges = -(-splits // combined_at_a_time(stored, padded_head_dim(sizes.v_head_dim))) if splits > 1 else 0
    amounts = {"launch": 1.0, "merging splits": merges, "keys and values": us, "tables": us if block_size else 0.0}
    amounts |= {"steps": waits, "rows past 16": in_turn * (config.tile_m / 16 - 1)}
    amounts["short pages"] = us if 0 < page < config.tile_n else 0.0
    return CallWork("decoding e4m3" if e4m3 else "decoding", amounts, HOST_US[0], True)


class ChoiceSizes(NamedTuple):
    """Sizes of a choice. A chooser compares ``rows`` of queries with ``columns`` of keys, of all heads of a sequence. A row and a
    column are ``span`` tokens each, and ``seen`` is the share of the pairs. blocks: (of queries, of keys). means: whether rows or
    columns are means of tokens. budget: whether heads compete, so that a row has the scores of all."""

    rows: int
    columns: int
    span: int
    seen: float
    blocks: tuple[int, int]
    means: bool
    budget: bool


def describe_choice(choice: ChoiceSizes, sizes: AttentionSizes, chip: Chip) -> CallWork:
    """Returns the work of choosing blocks."""
    heads, (q_blocks, kv_blocks) = sizes.batch * sizes.heads, choice.blocks
    pairs = heads * choice.rows * choice.columns * choice.seen / (chip.multiprocessors * chip.flops_per_us)
    products, scores = 2 * choice.span * sizes.head_dim * pairs, heads * q_blocks * kv_blocks / chip.bytes_per_us
    padded = (sizes.heads if choice.budget else 1) * kv_blocks
    searches = 32 if padded > _SCORES_HELD else 0  # reads of a row's scores beyond the first
    tokens = sizes.batch * (sizes.heads * sizes.q_len + sizes.kv_heads * sizes.kv_len)
    amounts = {
        "launches": 1.0,
        "products": products if choice.span == 1 else 0.0,
        "products of several tokens": products if choice.span > 1 else 0.0,
        "weights": _WEIGHT * pairs,
        "log-sums": 8 * heads * choice.rows * kv_blocks * choice.seen / chip.bytes_per_us,
        "rules and table": 16 * scores,
        "rules of long rows": 4 * searches * scores,
        "means": 2 * tokens * sizes.head_dim / chip.bytes_per_us if choice.means else 0.0,
    }
    return CallWork("choice", amounts, _CHOICE_HOST_US, False)


def describe_selection(
    backward: bool, picks: np.ndarray, sizes: SelectionSizes, head_dim: int, chip: Chip, portable: bool = False
) -> CallWork:
    """Returns the work of a pass of attention over picked blocks. picks: (batch, heads that pick, choices, n), ascending, then
    -1."""
    picks = picks.reshape(sizes.batch_heads, sizes.pickers, sizes.choices, sizes.slots)
    return (_describe_backward if backward else _describe_forward)(picks, sizes, padded_head_dim(head_dim), chip, portable)


def _describe_forward(picks: np.ndarray, sizes: SelectionSizes, dim: int, chip: Chip, portable: bool) -> CallWork:
    visits, listed = _count_visits(picks, sizes)
    pair_us = (4 * dim + _WEIGHT) / (chip.multiprocessors * chip.flops_per_us)
    rows = listed * sizes.rows_of_choice
    amounts = {
        "rows of queries": rows * 3 * 2 * dim / chip.bytes_per_us,  # gathered, and results written and read
        "products": rows * sizes.block * pair_us,
        "visits of tiles": visits * division.TILE_ROWS * sizes.block * pair_us,
        "tables": picks.size * 16 / chip.bytes_per_us,
    }
    return CallWork("portable " * portable + "selection forward", amounts, _SELECTION_HOST_US[0], portable)


def _count_visits(picks: np.ndarray, sizes: SelectionSizes) -> tuple[int, int]:
    """Returns (how many blocks tiles visit, how many picks they leave to the lists of key blocks)."""
    choices, _, of_choice = sizes.tiled
    least, visits, listed = division.least_choices(sizes), 0, 0
    first = np.arange(-(-sizes.choices // choices)) * choices * sizes.every + sizes.kv_len - sizes.q_len
    for of_head in picks.reshape(-1, sizes.choices, sizes.slots):
        padded = np.pad(of_head, ((0, -sizes.choices % choices), (0, 0)), constant_values=-1).reshape(len(first), -1)
        tile, slot = np.nonzero(padded >= 0)
        visited, counts = np.unique(tile * sizes.key_blocks + padded[tile, slot], return_counts=True)
        cut = (visited % sizes.key_blocks + 1) * sizes.block - 1 > first[visited // sizes.key_blocks]
        whole = cut | (counts >= least)
        visits, listed = visits + int(whole.sum()), listed + int(counts[~whole].sum())
    return visits * of_choice, listed


def _describe_backward(picks: np.ndarray, sizes: SelectionSizes, dim: int, chip: Chip, portable: bool) -> CallWork:
    keys = min(sizes.block, 64 if portable and dim > 128 else 128)  # of a part of dQ
    visits_all = division.visits_all(sizes)
    rounds = division.plan_backward(sizes, dim, dim, 2, keys, not visits_all)
    most, parts = division.backward_piece_size(sizes, rounds), sizes.block // keys
    longest = sum(_longest_program(picks, sizes, one, most, parts, chip.multiprocessors) for one in rounds.all)
    rows = int((picks >= 0).sum()) * sizes.rows_of_choice * parts
    amounts = {
        "products": longest * sizes.rows_of_choice * keys * (10 * dim + _WEIGHT) / chip.flops_per_us,
        "sums of dQ": 0.0 if visits_all else rows * 4 * dim / chip.bytes_per_us,  # written and read
        "rounds": float(len(rounds.all)),
    }
    if visits_all:
        visits = _count_visits(picks, sizes)[0] * division.TILE_ROWS * sizes.block
        amounts["visits of tiles"] = visits * (6 * dim + _WEIGHT) / (chip.multiprocessors * chip.flops_per_us)
    return CallWork("portable " * portable + f"selection backward, {keys} keys", amounts, _SELECTION_HOST_US[1], portable)


def _longest_program(picks: np.ndarray, sizes: SelectionSizes, of: division.Round, most: int, parts: int, programs: int) -> int:
    """Returns how many entries of lists the program with the most takes in a round. Pieces of lists come heaviest first; each
    program takes one in turn, and every second time the programs are in reverse order."""
    some = picks[of.head : of.head + of.heads, :, of.choice : of.choice + of.choices]
    head = np.nonzero(some >= 0)[0]
    lists = np.bincount(head * sizes.key_blocks + some[some >= 0], minlength=of.heads * sizes.key_blocks)
    pieces, unit = -(-lists // most), sizes.tiled.choices
    even = (-(-lists // np.maximum(pieces, 1)) + unit - 1) // unit * unit
    rest = (lists - (pieces - 1) * even)[pieces > 0]
    found = np.concatenate([even.repeat(np.maximum(pieces - 1, 0)), rest]).repeat(parts)
    turns = np.pad(np.sort(found)[::-1], (0, -len(found) % programs)).reshape(-1, programs)
    turns[1::2] = turns[1::2, ::-1]
    return int(turns.sum(0).max(initial=0))
