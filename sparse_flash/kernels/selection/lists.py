"""Tables of key blocks chosen by query, made on the device: which picks a tile of queries walks itself, and where the other ones go
in the lists by key block."""

import torch
import triton
import triton.language as tl

from ..common.grid import tile_and_batch_head
from ..launch.launch import launch
from .tiles import SelectionSizes, padded

_UNKNOWN = tl.constexpr(0x7FFFFFFF)  # above every key of a sort
_CUT = tl.constexpr(1 << 30)
# Choices that one program of ``selection_keys_kernel`` reads.
_CHOICES_TOGETHER = 32


@triton.jit
def _prefix_of_run(key_a, bits_a, count_a, key_b, bits_b, count_b):
    """Sums within runs of equal keys."""
    same = key_a == key_b
    return key_b, bits_b | tl.where(same, bits_a, 0), count_b + tl.where(same, count_a, 0)


@triton.jit(do_not_specialize=["choices", "q_len", "offset"])
def selection_walks_kernel(
    picks,
    walked,
    counts,
    blocks,
    bits,
    choices,
    q_len,
    offset,
    LEAST: tl.constexpr,
    WIDTH: tl.constexpr,
    EVERY: tl.constexpr,
    SLOTS: tl.constexpr,
    CHOICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The blocks that the tiles of CHOICES choices walk: those that at least LEAST of them picked, and those that the causal limit
    cuts for their first query.

    picks: (lines, choices, SLOTS) int32. walked: like picks, int8. counts: (lines, clusters, 2) int32, how many blocks are whole,
    and how many there are. blocks: (lines, clusters, WIDTH) int32, ascending within whole and cut ones. bits: like blocks, int64
    if WIDE, otherwise int32; bit c: choice c of the cluster picked the block. offset: position of the first query.
    """
    table = tl.program_id(0).to(tl.int64)
    cluster, line = tile_and_batch_head((choices + CHOICES - 1) // CHOICES)
    number = tl.arange(0, PADDED)
    choice = cluster * CHOICES + number // SLOTS
    exists = (number < CHOICES * SLOTS) & (choice < choices)
    first_pick = (line.to(tl.int64) * choices + cluster * CHOICES) * SLOTS
    pick = tl.load(picks + first_pick + number, mask=exists, other=-1)
    last = tl.minimum((choice + 1) * EVERY, q_len) - 1 + offset
    kept = exists & (pick >= 0) & (pick <= last // BLOCK) & (last >= 0)
    cut = (pick + 1) * BLOCK - 1 > cluster * CHOICES * EVERY + offset
    key = tl.where(kept, tl.where(cut, _CUT, 0) + pick * PADDED + number, _UNKNOWN)
    key = tl.sort(key)
    kept = key != _UNKNOWN
    cut = kept & ((key & _CUT) != 0)
    number = key % PADDED
    bit = tl.full([PADDED], 1, tl.int64 if WIDE else tl.int32) << (number // SLOTS)
    one = kept.to(tl.int32)
    _, together, before = tl.associative_scan((key // PADDED, bit, one), 0, _prefix_of_run)
    _, _, after = tl.associative_scan((key // PADDED, bit, one), 0, _prefix_of_run, reverse=True)
    walks = kept & (cut | (before + after > LEAST))
    entry = walks & (after == 1)
    place = tl.cumsum(entry.to(tl.int32), 0) - 1
    fits = entry & (place < WIDTH)
    tl.store(blocks + table * WIDTH + place, (key & (_CUT - 1)) // PADDED, mask=fits)
    tl.store(bits + table * WIDTH + place, together, mask=fits)
    tl.store(counts + table * 2, tl.sum((entry & (cut == 0)).to(tl.int32), 0))
    tl.store(counts + table * 2 + 1, tl.sum(entry.to(tl.int32), 0))
    tl.store(walked + first_pick + number, walks.to(tl.int8), mask=kept)


def selection_walks(picks, sizes: SelectionSizes, least: int):
    """(walked, counts, blocks, bits) of ``selection_walks_kernel``. picks: (batch, kv_heads * pickers, choices, slots) int32."""
    together, slots, choices = sizes.tiled.choices, sizes.slots, sizes.choices
    clusters, picked = triton.cdiv(choices, together), together * slots
    # Picked by ``least``; and those that a cluster's queries cut.
    width = min(picked, sizes.key_blocks, picked // least + (together * sizes.every - 1) // sizes.block + 2)
    wide = together > 32

    def empty(*shape, dtype=torch.int32):
        return torch.empty((*picks.shape[:2], *shape), dtype=dtype, device=picks.device)

    walked = empty(choices, slots, dtype=torch.int8)
    counts, blocks = empty(clusters, 2), empty(clusters, width)
    bits = empty(clusters, width, dtype=torch.int64 if wide else torch.int32)
    arguments = [picks, walked, counts, blocks, bits, choices, sizes.q_len, sizes.kv_len - sizes.q_len]
    constants = {"LEAST": least, "WIDTH": width, "EVERY": sizes.every, "SLOTS": slots, "CHOICES": together}
    constants |= {"PADDED": padded(picked), "BLOCK": sizes.block, "WIDE": wide}
    options = {"num_warps": max(1, min(8, padded(picked) // 256))}
    launch(selection_walks_kernel, (clusters * picks.shape[0] * picks.shape[1], 1), arguments, constants, options)
    return walked, counts, blocks, bits


@triton.jit(
    do_not_specialize=["lines", "choices", "q_len", "offset", "key_blocks", "lines_together", "choices_together", "dropped"]
)
def selection_keys_kernel(
    picks,
    walked,
    keys,
    entries,
    counts,
    lines,
    choices,
    q_len,
    offset,
    key_blocks,
    lines_together,
    choices_together,
    dropped,
    EVERY: tl.constexpr,
    SLOTS: tl.constexpr,
    PADDED: tl.constexpr,
    PICKERS: tl.constexpr,
    BLOCK: tl.constexpr,
    WALKED: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Where each pick goes in the lists by key block: launch, column and whether it is whole, as one number to sort by.

    picks: (lines * PICKERS, choices, SLOTS) int32. walked: like picks, int8, which picks are in no list; used if WALKED. keys: like
    picks; int16 keys are less 32,768. entries: like picks, int32, choice * SLOTS + number among the listed picks of the choice,
    within the launch. counts: (lines * PICKERS, choices) int32, how many picks are listed. dropped: the key of unlisted picks.
    lines_together, choices_together: see ``Span``.
    """
    unit = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    exists = unit < lines * PICKERS * choices.to(tl.int64)
    slot = tl.arange(0, PADDED)
    at = unit[:, None] * SLOTS + slot[None, :]
    some = exists[:, None] & (slot < SLOTS)[None, :]
    pick = tl.load(picks + at, mask=some, other=-1)
    picker = (unit // choices).to(tl.int32)
    choice = (unit % choices).to(tl.int32)
    last = tl.minimum((choice + 1) * EVERY, q_len) - 1 + offset
    listed = some & (pick >= 0) & (pick <= (last // BLOCK)[:, None]) & (last >= 0)[:, None]
    if WALKED:
        listed = listed & (tl.load(walked + at, mask=listed, other=1) == 0)
    whole = (pick + 1) * BLOCK - 1 <= (choice * EVERY + offset)[:, None]
    line = picker // PICKERS
    ranges = (choices + choices_together - 1) // choices_together
    launch_number = line // lines_together * ranges + choice // choices_together
    column = (launch_number * lines_together + line % lines_together)[:, None] * key_blocks + pick
    key = tl.where(listed, column * 2 + whole.to(tl.int32), dropped)
    if keys.dtype.element_ty == tl.int16:
        key -= 32768
    tl.store(keys + at, key.to(keys.dtype.element_ty), mask=some)
    within = (picker % (PICKERS * lines_together)) * choices_together + choice % choices_together
    rank = tl.cumsum(listed.to(tl.int32), 1) - 1
    tl.store(entries + at, within[:, None] * SLOTS + rank, mask=some)
    tl.store(counts + unit, tl.sum(listed.to(tl.int32), 1), mask=exists)


def selection_keys(picks, walked, sizes: SelectionSizes, together: tuple[int, int], keys: int):
    """(keys, entries, counts) of ``selection_keys_kernel``. picks: (batch, kv_heads * pickers, choices, slots) int32. walked: None
    if every pick is listed. together: lines and choices of a turn. keys: how many there are."""
    sorted_by = torch.empty_like(picks, dtype=torch.int16 if keys < 1 << 16 else torch.int32)
    entries, counts = torch.empty_like(picks), torch.empty(picks.shape[:3], dtype=torch.int32, device=picks.device)
    arguments = [picks, picks if walked is None else walked, sorted_by, entries, counts, sizes.lines, sizes.choices, sizes.q_len]
    arguments += [sizes.kv_len - sizes.q_len, sizes.key_blocks, *together, keys]
    constants = {"EVERY": sizes.every, "SLOTS": sizes.slots, "PADDED": padded(sizes.slots), "PICKERS": sizes.pickers}
    constants |= {"BLOCK": sizes.block, "WALKED": walked is not None, "TOGETHER": _CHOICES_TOGETHER}
    programs = triton.cdiv(counts.numel(), _CHOICES_TOGETHER)
    launch(selection_keys_kernel, (programs, 1), arguments, constants, {"num_warps": 4}, (sorted_by.dtype,))
    return sorted_by, entries, counts
