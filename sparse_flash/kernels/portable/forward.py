"""The portable forward kernel: FlashAttention-2's online softmax over the blocks that a table lists.

Source: arXiv:2307.08691, Alg. 1; arXiv:2205.14135, Alg. 5 (block-sparse). Dense attention is the same body without a table.
"""

import torch
import triton
import triton.language as tl

from ..common.config import padded_head_dim
from ..common.layout import empty_out
from ..common.tiles import (
    BITS,
    CUT,
    FLOOR,
    FULL,
    LN_2,
    LOG2_E,
    RUNS,
    dense_bounds,
    kept_pairs,
    load_tile,
    of_kept_pairs,
    ordered_tile,
    row_bounds,
    step_position,
    store_tile,
)
from ..common.variant import kernel_terms, launch_options
from ..launch import tuned
from ..launch.launch import NOT_SPECIALIZED, Recording, described, length_variant, row_count, run_within_memory, table_arguments
from ..launch.replay import known_call
from .configs import forward_config
from .dropout import dropout_stream, kept_by_dropout
from .lengths import cut_entry, valid_entries, valid_tokens
from .scores import scored


@triton.jit
def _walk(
    state,
    q,
    k_tensor,
    v_tensor,
    batch,
    head,
    line,
    stream,
    kv_head,
    table,
    begin,
    end,
    first_query,
    q_len,
    kv_len,
    valid,
    score_scale,
    terms,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
    SCORED: tl.constexpr,
    REACH: tl.constexpr,
    SCORE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Folds entries begin .. end - 1, all of one kind, into the softmax state of a query tile. valid: for KIND CUT the first
    key that exists, the one past the last, and the entries' kind."""
    accumulator, running_max, running_sum = state
    STEPS: tl.constexpr = TABLE_BLOCK // TILE_N if SPARSE else 1
    last = end * STEPS
    position = step_position(table[0], begin * STEPS, last, STEPS, TILE_N, TABLE_BLOCK, SPARSE)
    for step in tl.range(begin * STEPS, last, num_stages=1 if KIND == CUT else None):
        # The table is read one step ahead, so that no load of keys waits for it.
        upcoming = step_position(table[0], step + 1, last, STEPS, TILE_N, TABLE_BLOCK, SPARSE)
        k = load_tile(k_tensor, batch, kv_head, position, TILE_N, DIM)
        scores = tl.dot(q, k.T, input_precision="ieee")
        if SCORED:
            place = (batch, head, line, first_query + (kv_len - q_len), position)
            scores = scored(scores, score_scale, place, terms, REACH, SCORE, TILE_M, TILE_N, False, KIND)
        if KIND == FULL and not SCORED:
            new_max = tl.maximum(running_max, tl.max(scores, 1) * score_scale)
            weights = tl.math.exp2(scores * score_scale - new_max[:, None])
        else:
            if KIND != FULL:
                block_start = position - (step % STEPS) * TILE_N
                row_start = first_query // TABLE_BLOCK * TABLE_BLOCK
                q_in_block = (first_query - row_start + tl.arange(0, TILE_M))[:, None]
                kv_in_block = (position - block_start + tl.arange(0, TILE_N))[None, :]
                left = (q_len - row_start, kv_len - block_start)
                if KIND != CUT:
                    kept = kept_pairs(table, step // STEPS, q_in_block, kv_in_block, left[0], left[1], TABLE_BLOCK, SPARSE, KIND)
            if not SCORED:
                scores *= score_scale
            if KIND == CUT:
                scores = of_kept_pairs(
                    scores, -float("inf"), valid[2], table, step // STEPS, q_in_block, kv_in_block, TABLE_BLOCK, SPARSE
                )
                key = position + tl.arange(0, TILE_N)
                exists = (key >= valid[0]) & (key < valid[1])
                scores = tl.where(exists[None, :], scores, -float("inf"))
            elif KIND != FULL:
                scores = tl.where(kept, scores, -float("inf"))
            new_max = tl.maximum(running_max, tl.max(scores, 1))
            weights = tl.math.exp2(scores - new_max[:, None])
        rescale = tl.math.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        accumulator = accumulator * rescale[:, None]
        if terms.seed is not None:
            survives = kept_by_dropout(terms, stream, first_query, position, TILE_M, TILE_N, False)
            # A zero that the compiler does not know: it would choose after rounding, between unpacked halves of registers.
            weights = tl.where(survives, weights, tl.minimum(terms.dropout_p, 0.0))
        v = load_tile(v_tensor, batch, kv_head, position, TILE_N, DIM_V)
        if KIND == CUT:  # a weight of 0 times anything is not always 0
            v = tl.where(exists[:, None], v, 0.0)
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision="ieee")
        running_max = new_max
        position = upcoming
    return accumulator, running_max, running_sum


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_forward_kernel(
    q_tensor,
    k_tensor,
    v_tensor,
    out_tensor,
    lse_ptr,
    mask_index,
    row_ptr,
    row_split,
    row_order,
    col_idx,
    tile_idx,
    tile_runs,
    tile_bits,
    mask_batch_stride,
    mask_head_stride,
    heads,
    group,
    q_len,
    kv_len,
    q_blocks,
    score_scale,
    terms,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
    SCORED: tl.constexpr,
    REACH: tl.constexpr,
    SCORE: tl.constexpr,
    DERIVATIVE: tl.constexpr,
):
    """One program a query tile and head. score_scale: scale * log2(e). group: query heads that share a key head. DIM: padded
    head_dim of q and k, DIM_V: of v and out. terms, SCORED, REACH, SCORE, DERIVATIVE: see ``common.variant``."""
    slot = tl.program_id(0)
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    kv_head = head // group
    table = (col_idx, tile_idx, tile_runs, tile_bits)
    if SPARSE:
        mask = tl.load(mask_index + batch * mask_batch_stride + head * mask_head_stride)
        row, first_query = ordered_tile(row_order, mask, q_blocks, slot, TILE_M, TABLE_BLOCK)
        bounds = row_bounds(row_ptr, row_split, mask, row, q_blocks)
    else:
        first_query = slot * TILE_M
        bounds = dense_bounds(kv_len, TILE_N)
    q = load_tile(q_tensor, batch, head, first_query, TILE_M, DIM)
    state = (
        tl.zeros([TILE_M, DIM_V], tl.float32),
        tl.full([TILE_M], FLOOR, tl.float32),
        tl.zeros([TILE_M], tl.float32),
    )
    first, last = valid_tokens(terms.q_starts, terms.q_lens, batch, q_len)
    first_key, last_key = valid_tokens(terms.kv_starts, terms.kv_lens, batch, kv_len)
    Q_CUT: tl.constexpr = terms.q_starts is not None or terms.q_lens is not None
    KV_CUT: tl.constexpr = terms.kv_starts is not None or terms.kv_lens is not None
    if Q_CUT:  # a tile of no valid query has no keys
        last_key = tl.where((first_query < last) & (first_query + TILE_M > first), last_key, first_key)
    line = tl.program_id(1)
    stream = dropout_stream(terms, line)
    KINDS: tl.constexpr = BITS + 1 if SPARSE else RUNS if Q_CUT or KV_CUT else BITS
    # fmt: off
    if Q_CUT or KV_CUT:
        entries = valid_entries(col_idx, bounds, first_key, last_key, kv_len, TABLE_BLOCK if SPARSE else TILE_N, SPARSE)
        if KV_CUT or not SPARSE:
            for number in range(2 * KINDS):
                begin, end = cut_entry(entries, number, KINDS)
                if begin < end:
                    state = _walk(state, q, k_tensor, v_tensor, batch, head, line, stream, kv_head, table, begin, end, first_query,
                                  q_len, kv_len, (first_key, last_key, number // 2), score_scale, terms, DIM, DIM_V, TILE_M,
                                  TILE_N, TABLE_BLOCK, SPARSE, SCORED, REACH, SCORE, CUT)
    for KIND in tl.static_range(FULL, KINDS):
        if Q_CUT or KV_CUT:
            begin, end = entries[KIND][1], entries[KIND][2]
        else:
            begin, end = bounds[KIND], bounds[KIND + 1]
        if KIND == FULL:  # noqa: SIM114 (known at compile time, as the next is not)
            state = _walk(state, q, k_tensor, v_tensor, batch, head, line, stream, kv_head, table, begin, end, first_query, q_len,
                          kv_len, (0, 0, 0), score_scale, terms, DIM, DIM_V, TILE_M, TILE_N, TABLE_BLOCK, SPARSE, SCORED, REACH,
                          SCORE, KIND)
        elif begin < end:  # a walk of no steps is not free: it fills and drains a pipeline
            state = _walk(state, q, k_tensor, v_tensor, batch, head, line, stream, kv_head, table, begin, end, first_query, q_len,
                          kv_len, (0, 0, 0), score_scale, terms, DIM, DIM_V, TILE_M, TILE_N, TABLE_BLOCK, SPARSE, SCORED, REACH,
                          SCORE, KIND)
    # fmt: on
    accumulator, running_max, running_sum = state
    keeps_nothing = running_sum == 0.0
    if Q_CUT:
        exists = (first_query + tl.arange(0, TILE_M) >= first) & (first_query + tl.arange(0, TILE_M) < last)
        keeps_nothing |= ~exists
        accumulator = tl.where(exists[:, None], accumulator, 0.0)
    total = tl.where(keeps_nothing, 1.0, running_sum)
    divisor = total
    if terms.seed is not None:
        divisor *= 1.0 - terms.dropout_p
    store_tile(out_tensor, accumulator / divisor[:, None], batch, head, first_query, TILE_M, DIM_V)
    query = first_query + tl.arange(0, TILE_M)
    lse = tl.where(keeps_nothing, -float("inf"), (running_max + tl.math.log2(total)) * LN_2)
    tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * q_len + query, lse, mask=query < q_len)


def attention_forward(q, k, v, mask, scale, terms=None, config=None, beside=None):
    """out (batch, heads, q_len, v's head_dim) in q's memory order, lse (batch, heads, q_len) float32.

    q, k, v: unbroken rows, base and strides multiples of 16 bytes. beside: see ``launch``.
    """
    given, switches, kinds = kernel_terms(terms)
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_head_dim = v.shape[1:]
    tensors = _tensors(q, k, v)
    _, _, _, out, lse = tensors
    recording = Recording(mask, _key(q, k, v, scale), tensors)
    block_size = mask.block_size if mask else None
    dim, dim_v = padded_head_dim(head_dim), padded_head_dim(v_head_dim)

    def run(config):
        m, n = config.tile_m, config.tile_n
        arguments = [
            described(q, m, dim),
            described(k, n, dim),
            described(v, n, dim_v),
            described(out, m, dim_v),
            lse,
            *table_arguments(mask, mask and mask.by_query, lse),
            heads,
            heads // kv_heads,
            q_len,
            kv_len,
            mask.by_query.row_order.shape[1] if mask else 0,
            scale * LOG2_E.value,
            given,
        ]
        constants = {"DIM": dim, "DIM_V": dim_v, "TILE_M": m, "TILE_N": n, "TABLE_BLOCK": block_size or n}
        constants |= {"SPARSE": mask is not None, **switches}
        grid = (row_count(mask and mask.by_query, q_len, m, block_size), batch * heads)
        options = launch_options(config, given, switches, m)
        prepared = grid, arguments, constants, options
        recording.launch(attention_forward_kernel, prepared, (*length_variant(q_len), *kinds), beside)

    if config is not None:
        run(config)
        return out, lse
    config = forward_config(q.dtype, head_dim, block_size, q.device, v_head_dim)
    run_within_memory(run, config, lambda: ("forward", q.device, q.dtype, dim, dim_v, block_size, kinds, *switches.values()))
    if terms is None:
        recording.finish()
    return out, lse


def repeated_forward(q, k, v, mask, scale):
    """The same without terms by a launch that was made before, or None; any q, k and v."""
    known = known_call(mask, _key(q, k, v, scale))
    if known is None:
        return None
    tensors = _tensors(q, k, v)
    return tensors[3:] if known.again(tensors) else None


def _key(q, k, v, scale) -> tuple:
    layout = q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, q.device
    return attention_forward_kernel.fn, tuned.times_read(), *layout, scale


def _tensors(q, k, v) -> tuple[torch.Tensor, ...]:
    return q, k, v, empty_out(q, v.shape[3]), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
