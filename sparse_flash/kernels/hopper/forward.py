"""The forward kernel for Hopper: persistent programs with a scheduler warp, a loading warp and one to three computing warp groups.

The scheduler warp takes tiles from the queue. The loading warp reads the table, and fills rings of key and value tiles by TMA. Each
computing warp group holds 64 queries. With blocks of 64 a program has one such group, because rows of blocks share no keys; two
programs then share a multiprocessor. Products of one step run on the tensor cores while the softmax of another runs on other units.
Within a tile, the scores of the next step overlap this step's weighted values. Across tiles, the first scores of the next tile
overlap the last values of this one, so a short row leaves no gap. Comments number the products of a step:

    (1) S = Q K^T       P = exp2(S - maximum), in base 2
    (2) O += P V

If head_dim is above 128, or v has another head_dim than q and k, shared memory holds the queries of one tile only. They are
released when the tile's last scores are computed, and results go from registers straight to global memory.

Sources: arXiv:2407.08608 (FlashAttention-3: warp groups, asynchronous products); arXiv:2205.14135, Alg. 5 (block-sparse).
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from ..common.compat import Constants
from ..common.config import padded_head_dim
from ..common.gluon import async_store, opaque_zero, record, store_wait, view_for_tma
from ..common.grid import tile_and_batch_head
from ..common.layout import as_addressable, empty_out, is_addressable, layouts, restore_out
from ..common.tiles import FLOOR, LN_2, LOG2_E, store_tile
from ..launch.launch import descriptor_or_rows, launch_or_repeat, multiprocessors, table_arguments
from ..launch.order import concurrent_heads
from ..portable.sinks import add_sink
from ..portable.softmax import finish, init_softmax
from .configs import EightBitConfig
from .descriptors import gluon_descriptor, table_pointers, tile_queue
from .division import column_constants, items_and_tiles, plan_eight_bits, plan_forward
from .dropout import Dropout, new_dropout
from .eight_bits import NO_SCALES, Scales, new_eight_bits
from .lengths import PAST_THE_END, TokenLengths, load_existing, new_barrier, new_lengths
from .masks import LOWEST, load_row_words, load_run_words, where_bits, words_below, words_within
from .products import keep_rows, new_sums, scale_rows, stage_pieces, start_pieces_product, store_columns, write_columns, write_rows
from .quantization import Operands, quantize_operands
from .ring import PingPong, Ring, allocate_tiles, new_ping_pong, new_ring
from .scheduler import Heads, Queue, Scheduler, TableArguments, new_scheduler, schedule
from .scores import ScoringInputs, new_scoring
from .sixteen_bits import SixteenBits
from .variant import PLAIN, HopperVariant, hopper_variant

GROUP_QUERIES = gl.constexpr(64)  # queries per warp group
COMBINED = tl.constexpr(32)  # queries per program that combines splits

# New lengths, heads or masks never recompile.
NOT_SPECIALIZED = [
    "mask_batch_stride",
    "mask_head_stride",
    "heads",
    "group",
    "q_len",
    "kv_len",
    "items",
    "work_tiles",
    "heads_together",
    "split_tiles",
]


@dataclass(frozen=True)
class ForwardShape:
    """The constants of the forward kernel, except a user's functions."""

    DIM: int  # columns of q and k, in shared memory
    USED: int  # of DIM columns; the others are zeros
    DIM_V: int  # the same for v
    USED_V: int
    PIECES: int  # tiles of q and k in shared memory, side by side
    WIDE: bool  # whether shared memory holds the queries of one tile only
    GROUPS: int  # computing warp groups
    KEYS: int  # of a step
    STAGES: int  # tiles of keys, and of their values
    REGISTERS: int  # per thread of the second warp group and the third
    BLOCK: int  # of the table
    SPARSE: bool  # whether there is a table
    OWN_STARTS: bool  # whether blocks start at any token: see ``document_tables``
    SPLIT: bool  # whether rows may be split
    SCORED: bool  # as REACH: see ``common.variant``
    REACH: int
    DROPPED: bool  # whether there is dropout
    EIGHT: bool = False  # whether operands are e4m3: see ``eight_bits``

    @property
    def QUERIES(self) -> int:
        """Queries of a tile."""
        return 64 * self.GROUPS

    @property
    def VARIED(self) -> bool:
        """Whether scores are more than scaled products, or weights are dropped."""
        return self.SCORED or self.DROPPED

    @property
    def PING_PONG(self) -> bool:
        """Whether two warp groups alternate in starting their products: otherwise, with narrow heads, they drift into computing at
        the same time."""
        return self.GROUPS == 2 and self.USED_V <= 96 and not (self.WIDE or self.VARIED or self.EIGHT)

    @property
    def OVERLAPPED_FULL(self) -> bool:
        """Whether weighted values also overlap the warp group's next weights, in steps of full blocks. Three groups lack the
        registers (docs/performance/kernels.md has the figures)."""
        return self.GROUPS < 3 if self.EIGHT else self.OVERLAPPED_PARTIAL or (self.GROUPS == 2 and self.DIM_V <= 128)

    @property
    def OVERLAPPED_PARTIAL(self) -> bool:
        """The same of partial blocks: it does not pay for rows of few steps."""
        return self.VARIED or self.PING_PONG

    @property
    def V_ROWS(self) -> int:
        """Rows of a tile of values in shared memory. Products in e4m3 need it transposed."""
        return self.DIM_V if self.EIGHT else self.KEYS

    @property
    def V_COLUMNS(self) -> int:
        return self.KEYS if self.EIGHT else self.DIM_V


class Outputs(NamedTuple):
    """Global memory for results."""

    out: Any
    lse: Any
    out_of_splits: Any  # partial results of each split of a tile, until ``combine_kernel`` merges them
    lse_of_splits: Any
    sinks: Any = None  # (heads,), logits that join the softmax


@record
class ForwardArguments:
    """Holds what the warps share. A stage of q has a piece for each warp group, through which the group also stores its output.
    With 192 columns, q has three pieces for each warp group, and k has three."""

    q_tensor: tma.tensor_descriptor
    k_tensor: tma.tensor_descriptor
    v_tensor: tma.tensor_descriptor
    out_tensor: tma.tensor_descriptor
    outputs: gl.tuple  # ``Outputs``
    split_tiles: gl.tensor  # tiles of splits, per head
    table: TableArguments
    heads: Heads
    q_len: gl.tensor
    kv_len: gl.tensor
    scoring: ScoringInputs
    lengths: TokenLengths
    arrived: gl.shared_memory_descriptor  # the loading warp's own barrier, with lengths
    dropout: Dropout
    scheduler: Scheduler
    q: Ring  # a stage per tile; two stages, or one if WIDE
    k: Ring  # one stage per step
    v: Ring
    ping_pong: PingPong  # of the warp groups, if PING_PONG
    weights: tl.core.base_value  # of scores: ``SixteenBits`` or ``EightBits``
    SHAPE: gl.constexpr  # ``ForwardShape``


@gluon.jit
def _load_queries(p, turn, batch, head, first_query):
    p.q.acquire(turn)
    p.q.expect(turn, p.SHAPE.QUERIES * p.SHAPE.DIM * (p.q.data.dtype.primitive_bitwidth // 8))
    WIDTH: gl.constexpr = p.SHAPE.DIM // p.SHAPE.PIECES
    for half in gl.static_range(p.SHAPE.QUERIES // GROUP_QUERIES):
        for piece in gl.static_range(p.SHAPE.PIECES):
            p.q.load(
                turn, p.q_tensor, [batch, head, first_query + half * GROUP_QUERIES, piece * WIDTH], half * p.SHAPE.PIECES + piece
            )


@gluon.jit
def _load_step(ring, step, tensor, batch, kv_head, position, TRANSPOSED: gl.constexpr = False):
    """Loads keys or values of a step. TRANSPOSED: whether tokens are along the last dimension."""
    ring.acquire(step)
    WIDTH: gl.constexpr = ring.data.shape[2]
    ring.expect(step, ring.PIECES * ring.data.shape[1] * WIDTH * (ring.data.dtype.primitive_bitwidth // 8))
    for piece in gl.static_range(ring.PIECES):
        if TRANSPOSED:
            ring.load(step, tensor, [batch, kv_head, 0, position], piece)
        else:
            ring.load(step, tensor, [batch, kv_head, position, piece * WIDTH], piece)


@gluon.jit
def _load_values(p, tile, step, cuts, batch, kv_head, position):
    """Loads values of a step, with zeros for keys that do not exist. cuts: how often such values were loaded before. Returns how
    often they are now."""
    if p.lengths.KV_CUT and tile.cuts.is_cut(position, p.kv_len, p.SHAPE.KEYS):
        p.v.acquire(step)
        first, last = tile.cuts.other_first - position, tile.cuts.other_last - position
        cuts = load_existing(p.v, step, p.v_tensor, [batch, kv_head, position, 0], p.arrived, cuts, first, last)
        p.v.commit(step)
    else:
        _load_step(p.v, step, p.v_tensor, batch, kv_head, position, p.SHAPE.EIGHT)
    return cuts


@gluon.jit
def _first_position(tile):
    """Returns the first token of a tile's first step. A row that keeps nothing takes one step of zeros, from past the end, as
    weights of 0 times NaN are NaN."""
    return gl.where(tile.end > tile.begin, tile.position, PAST_THE_END)


@gluon.jit
def _load_first_step(p, tile, turn, step):
    """Loads a tile's queries, and the keys of its first step. After its last tile a program computes the first scores of one more,
    and discards them."""
    batch, head = p.heads.of(tile.batch_head)
    _load_queries(p, turn, batch, head, gl.maximum(tile.first, 0))
    _load_step(p.k, step, p.k_tensor, batch, head // p.heads.group, _first_position(tile))


@gluon.jit
def _load_tiles(p):
    """Runs the loading warp: loads each tile's queries, and keys and values of each step, in order of use. Scores of a step are
    computed before the values of the previous step are used, so its keys come first."""
    step = 0
    turn = 0
    cuts = 0
    tile = p.scheduler.tile(turn)
    _load_first_step(p, tile, turn, step)
    while tile.first >= 0:
        batch, head = p.heads.of(tile.batch_head)
        kv_head = head // p.heads.group
        position = _first_position(tile)
        entry = p.scheduler.first_step(tile.first, tile.begin, tile.runs, tile.end)
        for _ in range(tile.end - tile.begin - 1):
            entry = p.scheduler.next_step(tile, entry)
            upcoming = p.scheduler.position(tile, entry, tile.end)
            _load_step(p.k, step + 1, p.k_tensor, batch, kv_head, upcoming)
            cuts = _load_values(p, tile, step, cuts, batch, kv_head, position)
            position = upcoming
            step += 1
        turn += 1
        if p.SHAPE.WIDE:
            # The next queries wait until this tile's last scores are computed.
            cuts = _load_values(p, tile, step, cuts, batch, kv_head, position)
        following = p.scheduler.tile(turn)
        _load_first_step(p, following, turn, step + 1)
        if not p.SHAPE.WIDE:
            cuts = _load_values(p, tile, step, cuts, batch, kv_head, position)
        tile = following
        step += 1


@gluon.jit
def _mask_words(p, tile, step, HALF_INDEX: gl.constexpr, layout: gl.constexpr):
    """Returns the mask of a step for this warp group's queries, as words for ``where_bits``. step: counted from the table's
    start."""
    table = p.table
    if p.lengths.ANY:
        position = p.scheduler.position(tile, step, tile.end)
        words = words_within(tile.cuts.other_first - position, tile.cuts.other_last - position, GROUP_QUERIES, p.SHAPE.KEYS, layout)
        if table.SPARSE:
            if step >= tile.cuts.own:
                words &= _load_tile_words(p, tile, step, HALF_INDEX, layout)
    elif not table.SPARSE:
        words = words_below(p.kv_len - step * p.SHAPE.KEYS, GROUP_QUERIES, p.SHAPE.KEYS, layout)
    else:
        words = _load_tile_words(p, tile, step, HALF_INDEX, layout)
    return words


@gluon.jit
def _load_tile_words(p, tile, step, HALF_INDEX: gl.constexpr, layout: gl.constexpr):
    """Returns the words of a step's mask tile."""
    table = p.table
    STEPS: gl.constexpr = table.BLOCK // p.SHAPE.KEYS
    mask_tile = gl.load(table.tile_idx + p.scheduler.entry_step(tile, step) // STEPS)
    ROW: gl.constexpr = p.SHAPE.QUERIES if p.SHAPE.QUERIES > table.BLOCK else table.BLOCK
    if p.SHAPE.QUERIES > table.BLOCK or table.OWN_STARTS:
        row = HALF_INDEX * GROUP_QUERIES
    else:
        row = tile.first % ROW + HALF_INDEX * GROUP_QUERIES
    if step < tile.bits:
        words = load_run_words(
            table.tile_runs + mask_tile * ROW + row, step % STEPS * p.SHAPE.KEYS, GROUP_QUERIES, p.SHAPE.KEYS, layout
        )
    else:
        WORDS: gl.constexpr = table.BLOCK // 32
        first = table.tile_bits + (mask_tile.to(gl.int64) * ROW + row) * WORDS + step % STEPS * (p.SHAPE.KEYS // 32)
        words = load_row_words(first, GROUP_QUERIES, p.SHAPE.KEYS, WORDS, layout)
    return words


@gluon.jit
def _fold_steps(
    p, tile, state, turn, step, begin, end, stream, terms, factor, zeros, HALF_INDEX: gl.constexpr, MASKED: gl.constexpr
):
    """Folds steps begin .. end - 1, all of full or all of partial blocks, into the softmax state of a tile. Each iteration starts
    the scores of its own step and the weighted values of the previous step. Runs and bits share one loop, as each copy of the loop
    costs a second of compilation."""
    sums, kept, running_max, running_sum = state
    score_layout: gl.constexpr = zeros.type.layout
    OVERLAPPED: gl.constexpr = p.SHAPE.OVERLAPPED_PARTIAL if MASKED else p.SHAPE.OVERLAPPED_FULL
    first_query = tile.first + HALF_INDEX * GROUP_QUERIES
    position = tile.position  # read only if VARIED
    for number in range(begin, end):
        entry = begin + (end - 1 - number) if MASKED and p.scheduler.DOWN else number
        before = step
        step += 1
        q = stage_pieces(p.q, turn, HALF_INDEX * p.SHAPE.PIECES + opaque_zero(step), p.SHAPE.PIECES)
        keys = stage_pieces(p.k, step, 0, p.SHAPE.PIECES)
        values = p.v.stage(before)
        if MASKED:
            words = _mask_words(p, tile, entry, HALF_INDEX, score_layout)
        if p.SHAPE.VARIED:
            position = p.scheduler.position(tile, entry, end)
        p.k.wait(step)
        if p.SHAPE.PING_PONG:
            p.ping_pong.take(before - turn, HALF_INDEX)
        # (1) S = Q K^T
        started_scores = start_pieces_product(q, keys, zeros, p.SHAPE.USED)
        p.v.wait(before)
        # (2) O += P V of the previous step
        started_values = p.weights.start_values(kept, values, sums)
        if p.SHAPE.PING_PONG:
            p.ping_pong.pass_on(HALF_INDEX)
        PRODUCTS: gl.constexpr = len(started_values)
        scores = warpgroup_mma_wait(PRODUCTS, deps=(started_scores,))
        p.k.release(step)
        if p.SHAPE.WIDE:
            # Full blocks are last. If the tile has none, the last partial block is.
            is_last = number + 1 == end
            p.q.release(turn, pred=is_last & (tile.begin == tile.runs) if MASKED else is_last)
        if p.scoring.SCORED:
            scores = p.scoring.scored(scores, terms, first_query, position)
        if MASKED:
            scores = where_bits(scores, words, LOWEST)
        if not OVERLAPPED:
            sums, running_sum = p.weights.add_values(started_values, sums, running_sum, 0)
            p.v.release(before)
        # P = exp2(S - maximum)
        kept, rescale, running_max, running_sum = p.weights.next(
            scores, running_max, running_sum, factor, stream, first_query, position
        )
        if OVERLAPPED:
            sums, running_sum = p.weights.add_values(started_values, sums, running_sum, 0)
            p.v.release(before)
        sums, running_sum = p.weights.rescale(sums, running_sum, rescale)
    return (sums, kept, running_max, running_sum), step


@gluon.jit
def _add_sink(p, tile, running_max, running_sum):
    """Returns (the factor for sums of values, maximum, sum) after the sink of a tile's head has joined. Splits get it when they are
    merged."""
    _, head = p.heads.of(tile.batch_head)
    sink = gl.load(p.outputs.sinks + head).to(gl.float32) * LOG2_E
    if p.SHAPE.SPLIT:
        sink = gl.where(tile.split > 0, -float("inf"), sink)
    new_max = gl.maximum(running_max, sink)
    rescale = gl.exp2(running_max - new_max)
    return rescale, new_max, running_sum * rescale + gl.exp2(sink - new_max)


@gluon.jit
def _compute(p, HALF_INDEX: gl.constexpr):
    """Runs a computing warp group, which has 64 queries of each tile."""
    DEPTH: gl.constexpr = 256 // p.q_tensor.dtype.primitive_bitwidth
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.SHAPE.KEYS, DEPTH])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    zeros = gl.zeros([GROUP_QUERIES, p.SHAPE.KEYS], gl.float32, layout=score_layout)
    SCORE_PRODUCTS: gl.constexpr = 2 if p.SHAPE.USED < p.SHAPE.DIM else p.SHAPE.PIECES
    no_values = new_sums(GROUP_QUERIES, p.SHAPE.DIM_V, p.SHAPE.USED_V, DEPTH)

    step = 0
    turn = 0
    tile = p.scheduler.tile(0)
    scales = p.weights.load_scales(p, tile, tile.first + HALF_INDEX * GROUP_QUERIES)
    p.q.wait(0)
    p.k.wait(0)
    q, keys = stage_pieces(p.q, 0, HALF_INDEX * p.SHAPE.PIECES, p.SHAPE.PIECES), stage_pieces(p.k, 0, 0, p.SHAPE.PIECES)
    started_scores = start_pieces_product(q, keys, zeros, p.SHAPE.USED)
    scores = warpgroup_mma_wait(0, deps=(started_scores,))
    p.k.release(0)
    while tile.first >= 0:
        if p.SHAPE.WIDE:
            p.q.release(turn, pred=tile.end - tile.begin <= 1)
        stream = p.dropout.stream(tile.batch_head)
        terms = p.scoring.load_head_terms(p.heads, tile.batch_head)
        first_query = tile.first + HALF_INDEX * GROUP_QUERIES
        factor = p.weights.factor(p, scales)
        if p.scoring.SCORED:
            scores = p.scoring.scored(scores, terms, first_query, tile.position)
        if tile.end > tile.runs:
            entry = p.scheduler.first_step(tile.first, tile.begin, tile.runs, tile.end)
            scores = where_bits(scores, _mask_words(p, tile, entry, HALF_INDEX, score_layout), LOWEST)
        elif tile.begin == tile.end:
            scores = gl.full([GROUP_QUERIES, p.SHAPE.KEYS], -float("inf"), gl.float32, layout=score_layout)
        kept, running_max, running_sum = p.weights.first(scores, factor, stream, first_query, tile.position)
        if not p.SHAPE.WIDE:
            if turn > 0:
                # The previous tile's output, in the stage of its queries, has probably been read by now, so this wait is short.
                store_wait(0)
                p.q.release(turn - 1)
        state = (no_values, kept, running_max, running_sum)
        # The first step, which is done above, has a partial block if the row has any.
        if p.table.SPARSE or p.lengths.variant.kv_starts is not None:
            begin, end = p.scheduler.other_partial_steps(tile)
            state, step = _fold_steps(p, tile, state, turn, step, begin, end, stream, terms, factor, zeros, HALF_INDEX, True)
        first = tile.begin + (tile.end == tile.runs).to(gl.int32)
        state, step = _fold_steps(p, tile, state, turn, step, first, tile.runs, stream, terms, factor, zeros, HALF_INDEX, False)
        sums, kept, running_max, running_sum = state
        if p.SHAPE.WIDE:
            p.scheduler.slots.release(turn)

        # (2) O += P V of the last step overlaps (1) S = Q K^T of the next tile's first.
        values = p.v.stage(step)
        p.v.wait(step)
        started_values = p.weights.start_values(kept, values, sums)
        upcoming = p.scheduler.tile(turn + 1)
        scales_before = scales
        scales = p.weights.load_scales(p, upcoming, upcoming.first + HALF_INDEX * GROUP_QUERIES)
        p.q.wait(turn + 1)
        p.k.wait(step + 1)
        q = stage_pieces(p.q, turn + 1, HALF_INDEX * p.SHAPE.PIECES, p.SHAPE.PIECES)
        keys = stage_pieces(p.k, step + 1, 0, p.SHAPE.PIECES)
        started_scores = start_pieces_product(q, keys, zeros, p.SHAPE.USED)
        sums, running_sum = p.weights.add_values(started_values, sums, running_sum, SCORE_PRODUCTS)
        p.v.release(step)

        running_max, running_sum = p.weights.of_rows(running_max, running_sum, row_layout)
        of_sink = 1.0
        if p.outputs.sinks is not None:
            of_sink, running_max, running_sum = _add_sink(p, tile, running_max, running_sum)
        keeps_nothing = running_sum == 0.0
        if p.lengths.Q_CUT:
            # A query that does not exist may have any numbers in its row.
            query = first_query + gl.arange(0, GROUP_QUERIES, layout=row_layout)
            keeps_nothing |= (query < tile.cuts.own_first) | (query >= tile.cuts.own_last)
        total = gl.where(keeps_nothing, 1.0, running_sum)
        divisor = total
        if p.dropout.ENABLED:
            divisor *= p.dropout.share()
        lse = gl.where(keeps_nothing, -float("inf"), (running_max + gl.log2(total)) * LN_2)
        by_row, lse = p.weights.dequantize(p, tile, scales_before, of_sink / divisor, lse, first_query)
        result = scale_rows(sums, by_row)
        if p.lengths.Q_CUT:
            result = keep_rows(result, gl.where(keeps_nothing, 0, -1))
        _store(p, tile, turn, result, lse, HALF_INDEX)

        scores = warpgroup_mma_wait(0, deps=(started_scores,))
        step += 1
        turn += 1
        p.k.release(step)
        tile = upcoming
    if not p.SHAPE.WIDE:
        store_wait(0)


@gluon.jit
def _store(p, tile, turn, result, lse, HALF_INDEX: gl.constexpr):
    """Stores a tile's lse and output. Without WIDE, the output is copied through the stage of the tile's queries, and the copy need
    not have ended on return. A split's results go to ``p.outputs``. result: in the form of ``new_sums``."""
    rows = gl.arange(0, GROUP_QUERIES, layout=lse.type.layout)
    first_row = tile.first + HALF_INDEX * GROUP_QUERIES
    if p.SHAPE.SPLIT:
        # A branch here, with a product in flight, would make the compiler serialize all products. So a split also stores to out, at
        # rows past the end, which are dropped.
        row = (tile.batch_head * p.split_tiles + tile.split - 1).to(gl.int64) * p.SHAPE.QUERIES + HALF_INDEX * GROUP_QUERIES
        is_split = tile.split > 0
        pointer = p.outputs.out_of_splits + row * p.SHAPE.DIM_V
        write_columns(pointer, p.SHAPE.DIM_V, result, is_split)
        gl.store(p.outputs.lse_of_splits + row + rows, lse, mask=is_split & (rows >= 0))
        first_row = gl.where(is_split, p.q_len, first_row)
    if p.SHAPE.WIDE or p.SHAPE.OWN_STARTS:
        # Stored from registers, so that rows beyond a document's end, which belong to the next document, can be left out.
        batch, head = p.heads.of(tile.batch_head)
        stop = tile.stop if p.SHAPE.OWN_STARTS else p.out_tensor.shape[2]
        write_rows(p.out_tensor, p.outputs.out, batch, head, first_row, stop, result)
    else:
        out = p.weights.staging(p, turn, HALF_INDEX)
        store_columns(out, result)
        fence_async_shared()
        batch, head = p.heads.of(tile.batch_head)
        async_store(p.out_tensor, [batch, head, first_row, 0], view_for_tma(out, p.out_tensor))
    query = first_row + rows
    stop = tile.stop if p.SHAPE.OWN_STARTS else p.q_len
    gl.store(p.outputs.lse + tile.batch_head.to(gl.int64) * p.q_len + query, lse, mask=query < stop)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_forward_kernel(
    q_tensor, k_tensor, v_tensor, out_tensor, outputs, table, counters, mask_batch_stride, mask_head_stride,
    heads, group, q_len, kv_len, items, work_tiles, heads_together, split_tiles, score_scale, variant, scales,
    SHAPE: gl.constexpr, SCORE: gl.constexpr, DERIVATIVE: gl.constexpr,
):  # fmt: skip
    # Tiles have two dimensions, as products need. Triton 3.9 tracks each byte of every view, so views inside the loops would cost
    # seconds of compilation.
    dtype: gl.constexpr = q_tensor.dtype
    STAGES: gl.constexpr = SHAPE.STAGES
    PIECES: gl.constexpr = SHAPE.PIECES
    GROUPS: gl.constexpr = SHAPE.GROUPS
    TURNS: gl.constexpr = 1 if SHAPE.WIDE else 2
    WIDTH: gl.constexpr = SHAPE.DIM // PIECES
    q = new_ring(
        allocate_tiles(dtype, TURNS * GROUPS * PIECES, GROUP_QUERIES, WIDTH), TURNS, PIECES=GROUPS * PIECES, CONSUMERS=GROUPS
    )
    k = new_ring(allocate_tiles(dtype, STAGES * PIECES, SHAPE.KEYS, WIDTH), STAGES, PIECES=PIECES, CONSUMERS=GROUPS)
    v = new_ring(allocate_tiles(dtype, STAGES, SHAPE.V_ROWS, SHAPE.V_COLUMNS), STAGES, CONSUMERS=GROUPS)
    strides = mask_batch_stride, mask_head_stride
    table = TableArguments(*table, *strides, SHAPE.BLOCK, SHAPE.SPARSE, SHAPE.OWN_STARTS)
    heads_of = Heads(heads, group)
    lengths = new_lengths(variant, q_len, kv_len)
    queue = Queue(counters, items, work_tiles, heads_together)
    scheduler = new_scheduler(
        q, table, heads_of, queue, kv_len, lengths, SHAPE.QUERIES, SHAPE.KEYS, BY_KEY=False, SPLIT=SHAPE.SPLIT, CONSUMERS=GROUPS
    )
    arrived = q.full
    if lengths.KV_CUT:
        arrived = new_barrier()
    dropout = new_dropout(variant)
    if SHAPE.EIGHT:
        weights = new_eight_bits(scales, dtype, out_tensor.dtype, SHAPE)
    else:
        weights = SixteenBits(dropout, dtype, SHAPE.VARIED)
    ping_pong = PingPong(q.full, q.full)
    if SHAPE.PING_PONG:
        ping_pong = new_ping_pong()
    # TMA signals the barriers, so it must see that they are initialized.
    fence_async_shared()
    p = ForwardArguments(
        q_tensor=q_tensor,
        k_tensor=k_tensor,
        v_tensor=v_tensor,
        out_tensor=out_tensor,
        outputs=outputs,
        split_tiles=split_tiles,
        table=table,
        heads=heads_of,
        q_len=q_len,
        kv_len=kv_len,
        scoring=new_scoring(
            variant, score_scale, q_len, kv_len, SHAPE.SCORED, SHAPE.REACH, SCORE, DERIVATIVE, BY_KEY=False, SIGNED=False
        ),
        lengths=lengths,
        arrived=arrived,
        dropout=dropout,
        scheduler=scheduler,
        q=q,
        k=k,
        v=v,
        ping_pong=ping_pong,
        weights=weights,
        SHAPE=SHAPE,
    )
    if GROUPS == 1:
        gl.warp_specialize([(_compute, (p, 0)), (_load_tiles, (p,)), (schedule, (scheduler,))], [1, 1], [24, 24])
    elif GROUPS == 2:
        gl.warp_specialize(
            [(_compute, (p, 0)), (_compute, (p, 1)), (_load_tiles, (p,)), (schedule, (scheduler,))],
            [4, 1, 1],
            [SHAPE.REGISTERS, 24, 24],
        )
    else:
        gl.warp_specialize(
            [(_compute, (p, 0)), (_compute, (p, 1)), (_compute, (p, 2)), (_load_tiles, (p,)), (schedule, (scheduler,))],
            [4, 4, 1, 1],
            [SHAPE.REGISTERS, SHAPE.REGISTERS, 24, 24],
        )


@triton.jit(do_not_specialize=["heads", "q_len", "mask_batch_stride", "mask_head_stride", "listed"])
def combine_kernel(
    out_tensor, lse_ptr, split_out, split_lse, split_rows, sinks, mask_index, mask_batch_stride, mask_head_stride,
    heads, q_len, listed, DIM: tl.constexpr, TABLE_ROW: tl.constexpr,
):  # fmt: skip
    """Merges the results of split rows: weights each split's output by its share of the softmax sum. A program merges ``COMBINED``
    queries of one head and one entry of ``Table.splits``. listed: the number of these entries, and of splits, for each mask."""
    STEPS: tl.constexpr = TABLE_ROW // COMBINED
    tile, batch_head = tile_and_batch_head(listed // 2 * STEPS)
    batch = batch_head // heads
    head = batch_head % heads
    mask = tl.load(mask_index + batch * mask_batch_stride + head * mask_head_stride)
    entry = split_rows + (mask * listed + tile // STEPS) * 4
    row, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    start = tile % STEPS * COMBINED
    if count > 0:
        rows = tl.arange(0, COMBINED)
        line = (batch_head.to(tl.int64) * listed + first) * TABLE_ROW + start + rows
        accumulator, running_max, running_sum = init_softmax(COMBINED, DIM)
        for _ in range(count):
            lse = tl.load(split_lse + line)
            new_max = tl.maximum(running_max, lse)
            rescale, weight = tl.exp(running_max - new_max), tl.exp(lse - new_max)
            out = tl.load(split_out + line[:, None] * DIM + tl.arange(0, DIM)[None, :])
            accumulator = accumulator * rescale[:, None] + out * weight[:, None]
            running_sum = running_sum * rescale + weight
            running_max = new_max
            line += TABLE_ROW
        state = accumulator, tl.maximum(running_max * LOG2_E, FLOOR), running_sum
        if sinks is not None:
            state = add_sink(state, tl.load(sinks + head))
        out, log = finish(state)
        first_query = row * TABLE_ROW + start
        store_tile(out_tensor, out, batch, head, first_query, COMBINED, DIM)
        query = first_query + rows
        tl.store(lse_ptr + batch_head.to(tl.int64) * q_len + query, log * LN_2, mask=query < q_len)


def attention_forward(call, of_copies: tuple = ()):
    """Returns out (batch, heads, q_len, v's head_dim), in q's memory order, and lse (batch, heads, q_len) float32.

    call: an ``AttentionCall`` on float16 or bfloat16, with table blocks of 64 to 256. of_copies: ``layouts`` of q, k and v that are
    not a call's own.
    """
    key = attention_forward_kernel.fn, of_copies
    return tuple(launch_or_repeat(call.launches, key, call.table, call.inputs(), partial(_run, call))[:2])


def _run(call, recording):
    q, k, v = call[:3]
    if not all(map(is_addressable, (q, k, v))):
        ready = [as_addressable(t) for t in (q, k, v)]
        out, lse = attention_forward(call.on(*ready), layouts(ready))
        return restore_out(out, ready[0], q, v), lse
    sinks, of_variant = call.sinks, hopper_variant(call.rest)
    config, tables = _config_and_tables(q, v, call.table, of_variant)
    split_rows = _count_split_rows(tables)
    out = recording.fresh(empty_out(q, v.shape[3]))
    lse = recording.fresh(torch.empty(q.shape[:3], dtype=torch.float32, device=q.device))
    split_out = split_lse = lse
    if split_rows:
        rows, dim_v = q.shape[0] * q.shape[1] * split_rows, padded_head_dim(v.shape[3])
        split_lse = recording.fresh(torch.empty(rows, dtype=torch.float32, device=q.device))
        split_out = recording.fresh(torch.empty((rows, dim_v), dtype=torch.float32, device=q.device))
    queue = recording.each_time(partial(tile_queue, q.device))
    tensors = q, k, v, out, lse, split_out, split_lse, queue
    of_sinks = () if sinks is None else (sinks.dtype,)
    prepared = _forward_launch(*tensors, tables, call.scale, split_rows, of_variant, config, sinks=sinks)
    recording.launch(attention_forward_kernel, prepared, (*of_variant.kinds, *of_sinks))
    if split_rows:
        recording.launch(combine_kernel, _combine_launch(out, lse, split_out, split_lse, tables, sinks), of_sinks)
    return out, lse


def attention_forward_of_eight_bits(call, of_copies: tuple = ()):
    """Returns out and lse as ``attention_forward`` does, computed in e4m3: see ``core.eight_bits``."""
    key, run = (attention_forward_kernel.fn, "e4m3", of_copies), partial(_run_of_eight_bits, call)
    return tuple(launch_or_repeat(call.launches, key, call.table, call[:3], run)[:2])


def _run_of_eight_bits(call, recording):
    q, k, v = call[:3]
    if not all(map(is_addressable, (q, k, v))):
        ready = [as_addressable(t) for t in (q, k, v)]
        out, lse = attention_forward_of_eight_bits(call.on(*ready), layouts(ready))
        return restore_out(out, ready[0], q, v), lse
    out = recording.fresh(empty_out(q, v.shape[3]))
    lse = recording.fresh(torch.empty(q.shape[:3], dtype=torch.float32, device=q.device))
    attend_to_operands(quantize_operands(q, k, v, call.scale, recording), out, lse, call.table, call.scale, recording)
    return out, lse


def attend_to_operands(operands: Operands, out, lse, mask, scale, recording) -> None:
    """Launches the forward kernel on operands in e4m3. out, lse: what it fills. mask: the table, or None."""
    q, k, v = operands[:3]
    dim = v.shape[2]
    config, tables = plan_eight_bits(q.shape, dim, mask, multiprocessors(q.device))
    split_rows = _count_split_rows(tables)
    split_out = split_lse = lse
    if split_rows:
        rows = q.shape[0] * q.shape[1] * split_rows
        split_lse = recording.fresh(torch.empty(rows, dtype=torch.float32, device=q.device))
        split_out = recording.fresh(torch.empty((rows, dim), dtype=torch.float32, device=q.device))
    queue = recording.each_time(partial(tile_queue, q.device))
    tensors = q, k, v, out, lse, split_out, split_lse, queue
    prepared = _forward_launch(*tensors, tables, scale, split_rows, PLAIN, config, Scales(*operands[3:]))
    recording.launch(attention_forward_kernel, prepared, (out.dtype,))
    if split_rows:
        recording.launch(combine_kernel, _combine_launch(out, lse, split_out, split_lse, tables))


@cache
def forward_shape(config, head_dim: int, v_head_dim: int, block_size: int | None, *switches) -> ForwardShape:
    """block_size: the table's, or None. switches: the fields of ``ForwardShape`` after SPARSE."""
    of_table = block_size or config.queries, block_size is not None
    groups = config.queries // GROUP_QUERIES.value
    columns = column_constants(head_dim, v_head_dim).values()
    eight = isinstance(config, EightBitConfig)
    return ForwardShape(*columns, groups, config.keys, config.stages, config.registers, *of_table, *switches, eight)


def _count_split_rows(tables) -> int:
    """Returns how many rows of queries per head the splits of the table's rows have."""
    split = tables is not None and tables.by_query.is_split
    return tables.by_query.splits.shape[1] * tables.row_queries if split else 0


def _config_and_tables(q, v, mask, of_variant: HopperVariant):
    return plan_forward(q.shape, v.shape[3], mask, of_variant is PLAIN, multiprocessors(q.device))


def _forward_launch(
    q, k, v, out, lse, split_out, split_lse, queue, tables, scale, split_rows, of_variant, config, scales=NO_SCALES, sinks=None
):
    """Returns (grid, arguments, constants, options). v: transposed if there are scales."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    group, batch_heads = heads // kv_heads, batch * heads
    v_head_dim = v.shape[3]
    if scales is not NO_SCALES:
        head_dim = v_head_dim = v.shape[2]
    switches = of_variant.switches
    starts = tables is not None and tables.starts is not None
    of_variant_switches = switches["SCORED"], switches["REACH"], of_variant.dropout_p is not None
    shape = forward_shape(config, head_dim, v_head_dim, tables and tables.block_size, starts, split_rows > 0, *of_variant_switches)
    dim, dim_v, width = shape.DIM, shape.DIM_V, shape.DIM // shape.PIECES
    items, tiles = items_and_tiles(q.shape, tables, config.queries)
    pointers, strides = table_pointers(tables, tables and tables.by_query, tables.by_query.work if tables else lse, lse)
    arguments = [
        gluon_descriptor(q, [1, 1, GROUP_QUERIES.value, width]),
        gluon_descriptor(k, [1, 1, config.keys, width]),
        gluon_descriptor(v, [1, 1, shape.V_ROWS, shape.V_COLUMNS]),
        gluon_descriptor(out, [1, 1, GROUP_QUERIES.value, dim_v]),
        Outputs(out, lse, split_out, split_lse, sinks),
        pointers,
        queue,
        *strides,
        heads,
        group,
        q_len,
        kv_len,
        items,
        tiles,
        concurrent_heads(dim + dim_v, kv_len, tables, batch_heads, group),
        split_rows // config.queries,
        scale * LOG2_E.value,
        of_variant.given,
        scales,
    ]
    constants = {"SHAPE": Constants(shape), "SCORE": switches["SCORE"], "DERIVATIVE": switches["DERIVATIVE"]}
    return (min(tiles, config.programs * multiprocessors(q.device)), 1), arguments, constants, config.options


def _combine_launch(out, lse, split_out, split_lse, tables, sinks=None):
    """Returns (grid, arguments, constants, options)."""
    batch, heads, q_len = lse.shape
    dim = split_out.shape[-1]
    splits = tables.by_query.splits
    index, *_, mask_batch_stride, mask_head_stride = table_arguments(tables, tables.by_query, lse)
    arguments = [descriptor_or_rows(out, COMBINED.value, dim), lse, split_out, split_lse, splits, sinks, index]
    arguments += [mask_batch_stride, mask_head_stride, heads, q_len, splits.shape[1]]
    # A split row has at least two splits, so at most half of the entries are in use.
    grid = (splits.shape[1] // 2 * (tables.row_queries // COMBINED.value) * batch * heads, 1)
    return grid, arguments, {"DIM": dim, "TABLE_ROW": tables.row_queries}, {"num_warps": 4}
