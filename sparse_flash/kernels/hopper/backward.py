"""The backward pass for Hopper: what runs in which order, and on which memory.

First ``prepare_kernel``; then the kernel of the head dimensions, in ``narrow_backward``, ``wide_backward`` or ``paired_backward``,
which adds dQ to fp32 sums; then ``finish_kernel``. Where query heads share keys, dK and dV are summed likewise, or one tile is of
all these heads: see ``_walks_together``. Where heavy columns are split, ``combine_columns_kernel`` sums their splits.

Tiles are added to dQ in order of arrival, and a floating-point sum depends on its order. For bitwise repeatable gradients, tiles
are added as integers, in units of a power of two per query: see ``bound_kernel``.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import padded_head_dim
from ..common.gluon import Constants
from ..common.tiles import LOG2_E
from ..launch import tuned
from ..launch.launch import Recording, multiprocessors, rows_of, table_arguments
from ..launch.launch import described as described_for_triton
from ..launch.order import heads_in_queue
from ..launch.replay import known_call
from .backward_arguments import (
    BackwardArguments,
    BackwardInputs,
    BackwardPointers,
    BackwardShape,
    Gradients,
    existing_tokens,
)
from .backward_rows import bound_kernel, combine_columns_kernel, finish_kernel, prepare_kernel
from .backward_to_128 import backward_to_128
from .configs import PAIRED_BACKWARD, BackwardConfig, backward_config, backward_keys, backward_of_variant
from .descriptors import FLOAT_LAYOUT, ROW_LAYOUT, blocks_by_document, described, table_pointers, tile_queue
from .dropout import new_dropout
from .lengths import own_barrier
from .paired_backward import paired_backward
from .products import used_columns
from .ring import ring_beside, ring_of, tiles
from .scheduler import Heads, TableArguments, new_scheduler
from .scores import new_terms
from .variant import PLAIN, HopperVariant, hopper_variant
from .wide_backward import wide_backward

# New lengths, heads or masks never recompile.
NOT_SPECIALIZED = [
    "mask_batch_stride",
    "mask_head_stride",
    "heads",
    "group",
    "q_len",
    "padded_q_len",
    "padded_kv_len",
    "kv_lines",
    "splits",
    "items",
    "work_tiles",
    "heads_together",
]
ROWS = 64  # tokens per program of bound_kernel and prepare_kernel
_SHORT_COLUMN = 3072  # queries in a column's blocks, on average


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_backward_kernel(
    q_tensor,
    k_tensor,
    v_tensor,
    dout_tensor,
    lse_rows,
    delta_rows,
    unit_rows,
    dq_rows,
    dk_tensor,
    dv_tensor,
    dkv_rows,
    pointers,
    table,
    mask_batch_stride,
    mask_head_stride,
    heads,
    group,
    q_len,
    padded_q_len,
    padded_kv_len,
    kv_lines,
    splits,
    items,
    work_tiles,
    heads_together,
    scale,
    score_scale,
    variant,
    SHAPE: gl.constexpr,
    SCORE: gl.constexpr,
    DERIVATIVE: gl.constexpr,
):
    """Makes the record that the warps share, and runs the roles of the head dimensions. Descriptors are arguments of their own, as
    Triton 3.6 and 3.7 take none within a tuple; so are integers, as Triton specializes those within one."""
    dtype: gl.constexpr = q_tensor.dtype
    PIECES: gl.constexpr = SHAPE.PARTS * SHAPE.ACROSS
    k_tiles = tiles(dtype, SHAPE.K_STAGES * PIECES, SHAPE.KEYS, SHAPE.WIDTH)
    k = ring_of(k_tiles, SHAPE.K_STAGES, PIECES, CONSUMERS=SHAPE.PARTS)
    v_tiles = tiles(dtype, SHAPE.PARTS, SHAPE.KEYS, SHAPE.DIM_V)
    v = ring_of(v_tiles, 1) if SHAPE.PARTS == 1 else ring_beside(k, v_tiles, 1, SHAPE.PARTS)
    q_tiles = tiles(dtype, SHAPE.Q_STAGES * SHAPE.ACROSS, SHAPE.QUERIES, SHAPE.WIDTH)
    q = ring_of(q_tiles, SHAPE.Q_STAGES, SHAPE.ACROSS, CONSUMERS=SHAPE.READERS)
    dout = ring_beside(q, tiles(dtype, SHAPE.DOUT_STAGES, SHAPE.QUERIES, SHAPE.DIM_V), SHAPE.DOUT_STAGES)
    lse = gl.allocate_shared_memory(gl.float32, [SHAPE.Q_STAGES, SHAPE.QUERIES], lse_rows.layout)
    delta = gl.allocate_shared_memory(gl.float32, [SHAPE.DOUT_STAGES, SHAPE.QUERIES], delta_rows.layout)
    unit = lse
    if SHAPE.FIXED:
        unit = gl.allocate_shared_memory(gl.float32, [SHAPE.Q_STAGES, SHAPE.QUERIES], unit_rows.layout)
    table = TableArguments(*table, mask_batch_stride, mask_head_stride, SHAPE.BLOCK, SHAPE.SPARSE, SHAPE.OWN_STARTS)
    heads_of = Heads(heads, group)
    lengths, kv_len = existing_tokens(variant, q_len, k_tensor, SHAPE.SCORED)
    arrived = k.full
    if lengths.ANY:
        arrived = own_barrier()
    dropout = new_dropout(variant)
    SIGNED: gl.constexpr = dropout.ENABLED and DERIVATIVE is not None
    p = BackwardArguments(
        inputs=BackwardInputs(q_tensor, k_tensor, v_tensor, dout_tensor, lse_rows, delta_rows, unit_rows),
        grads=Gradients(
            dq_rows=dq_rows,
            dk=dk_tensor,
            dv=dv_tensor,
            dkv_rows=(dkv_rows,),
            pointers=pointers,
            padded_q_len=padded_q_len,
            padded_kv_len=padded_kv_len,
            kv_lines=kv_lines,
            splits=splits,
        ),
        table=table,
        heads=heads_of,
        scale=scale,
        scoring=new_terms(
            variant, score_scale, q_len, kv_len, SHAPE.SCORED, SHAPE.REACH, SCORE, DERIVATIVE, BY_KEY=True, SIGNED=SIGNED
        ),
        lengths=lengths,
        arrived=arrived,
        dropout=dropout,
        scheduler=new_scheduler(
            k,
            table,
            heads_of,
            heads_together,
            items,
            work_tiles,
            pointers.queue,
            q_len,
            lengths,
            SHAPE.TILE,
            STEP=SHAPE.QUERIES,
            BY_KEY=True,
            SPLIT=SHAPE.SPLIT,
            CONSUMERS=SHAPE.PARTS,
            TOGETHER=SHAPE.TOGETHER,
        ),
        k=k,
        v=v,
        q=q,
        dout=dout,
        lse=lse,
        unit=unit,
        delta=delta,
        SHAPE=SHAPE,
    )
    if SHAPE.DIM <= 128:
        backward_to_128(p)
    elif SHAPE.PARTS == 1:
        wide_backward(p)
    else:
        paired_backward(p)


def attention_backward(dout, dlse, q, k, v, out, lse, mask, scale, variant=None, deterministic=False, config=None):
    """dq, dk, dv like q, k, v. dlse may be None. Unless ``deterministic``, the summation order of dQ differs from run to run, as
    does that of dK and dV if query heads share them.

    Other tensors: float16 or bfloat16, contiguous rows, base and strides multiples of 16 bytes; head_dim 33 to 256, of v the same,
    or 65 to 128 if it is 129 or more. mask: table blocks of 64 to 256.
    """
    of_variant = hopper_variant(variant)
    by_document = blocks_by_document(q, v, mask, of_variant is PLAIN)
    walked = mask if by_document is None else by_document
    room = _room(q, k, v, walked, deterministic, of_variant)
    dlse = None if dlse is None else dlse.contiguous()
    tensors = _tensors(dout, dlse, q, k, v, out, lse, deterministic, room)
    key = _key(dout, dlse, q, k, v, out, scale, of_variant, deterministic, config)
    recording = Recording(mask, key, (*tensors, *of_variant.given.tensors()), (tensors.workspace, tensors.kv_sums), room)
    _launch(recording, tensors, room, walked, scale, dlse is not None, deterministic, of_variant, config)
    recording.finish()
    return tensors.gradients


class BackwardOfParts:
    """The backward passes of calls with the same queries, but keys of their own, given the results over all keys: rows are prepared
    once, and dQ is summed over all calls and rounded once. Only for masks that ``sum_alike``. Other arguments as for
    ``attention_backward``."""

    def __init__(self, dout, dlse, q, out, lse, scale):
        self.results, self.q, self.scale = (dout, None if dlse is None else dlse.contiguous(), out, lse), q, scale
        self.dq, self.workspace, self.finish = torch.empty_like(q), None, None

    def of_keys(self, k, v, mask, into=None):
        """dk and dv like k and v. into: two such tensors that receive them, or None."""
        (dout, dlse, out, lse), room = self.results, _room(self.q, k, v, mask, False, PLAIN)
        gradients = self.dq, *(into or (torch.empty_like(k), torch.empty_like(v)))
        tensors = _tensors(dout, dlse, self.q, k, v, out, lse, False, room, gradients, self.workspace)
        config = _config(self.q, v, mask, PLAIN)
        launches = BackwardLaunches(tensors, room, mask, self.scale, dlse is not None, False, PLAIN, config)
        # Not to be repeated, as a call is known by one mask. It ends here, and with it the sums of dK and dV.
        recording = Recording(None, (), ())
        if self.workspace is None:
            recording.launch(prepare_kernel, launches.prepare())
        recording.launch(attention_backward_kernel, launches.add_tiles(), PLAIN.kinds)
        _finish_keys(recording, launches)
        self.workspace, self.finish = tensors.workspace, launches.finish_queries()
        return tensors.dk, tensors.dv

    def of_queries(self):
        """dq of all calls, once they are made."""
        Recording(None, (), ()).launch(finish_kernel, self.finish)
        return self.dq


def sum_alike(q, v, masks) -> bool:
    """Whether calls with these masks (None: dense) lay the sums of dQ out in one way."""
    layouts = set()
    for mask in masks:
        room, config = _room(q, v, v, mask, False, PLAIN), _config(q, v, mask, PLAIN)
        layouts.add((room.padded_q, config.queries, config.pieces, config.partitions, *config.options.items()))
    return len(layouts) == 1 and not any(mask is not None and mask.starts is not None for mask in masks)


def repeated_backward(dout, dlse, q, k, v, out, lse, mask, scale, variant=None, deterministic=False):
    """``attention_backward`` by replayed launches, or None if there are none; any tensors."""
    of_variant = hopper_variant(variant)
    known = known_call(mask, _key(dout, dlse, q, k, v, out, scale, of_variant, deterministic))
    if known is None:
        return None
    dlse = None if dlse is None else dlse.contiguous()
    tensors = _tensors(dout, dlse, q, k, v, out, lse, deterministic, known.facts)
    return tensors.gradients if known.again((*tensors, *of_variant.given.tensors())) else None


def _key(dout, dlse, q, k, v, out, scale, of_variant: HopperVariant, deterministic: bool, config=None) -> tuple:
    layout = q.shape, q.stride(), k.shape, k.stride(), v.stride(), out.stride(), dout.stride(), q.dtype, q.device
    more = scale, config, dlse is None, deterministic, of_variant.key
    return attention_backward_kernel.fn, tuned.times_read(), *layout, *more


class BackwardTensors(NamedTuple):
    """Of a call, without those of its variant. A replayed launch knows them by their place."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor  # lse, if there is none
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    workspace: torch.Tensor  # sums of dQ, and rows: see ``_Room``
    kv_sums: torch.Tensor
    bounds: torch.Tensor
    queue: torch.Tensor

    @property
    def gradients(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.dq, self.dk, self.dv


def _tensors(
    dout,
    dlse,
    q,
    k,
    v,
    out,
    lse,
    deterministic: bool,
    room: "_Room",
    gradients: tuple | None = None,
    workspace: torch.Tensor | None = None,
) -> BackwardTensors:
    """gradients, workspace: to be used, or None for new ones."""
    device = q.device
    gradients = gradients or (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    if workspace is None:
        workspace = torch.empty(room.dq_sums + room.rows, dtype=torch.float32, device=device)
    kv_sums = workspace
    if room.kv_sums:
        fill = torch.zeros if room.added and not deterministic else torch.empty
        kv_sums = fill(room.kv_sums, dtype=torch.float32, device=device)
    bounds = torch.zeros((2, k.shape[0] * k.shape[1]), dtype=torch.float32, device=device) if deterministic else lse
    dlse = lse if dlse is None else dlse
    return BackwardTensors(q, k, v, dout, out, lse, dlse, *gradients, workspace, kv_sums, bounds, tile_queue(device))


class _Room(NamedTuple):
    """Sums in fp32, or integers of that size. padded_q, padded_kv: tokens, in whole blocks: no block extends into the next head's
    rows. dq_sums: element count. rows: of lse, delta and, if sums are integers, units. kv_sums: of dK and dV, if several tiles
    contribute to one; otherwise 0. added: whether they are those of all tiles, as query heads share them, or of ``splits`` tiles of
    splits per head. together: whether a tile is of all query heads that share a key head."""

    padded_q: int
    padded_kv: int
    dq_sums: int
    rows: int
    kv_sums: int
    added: bool
    splits: int
    together: bool


def _room(q, k, v, mask, deterministic: bool, of_variant: HopperVariant) -> _Room:
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    dim, dim_v = padded_head_dim(head_dim), padded_head_dim(v.shape[3])
    keys = backward_keys(dim, mask and mask.block_size)
    block_size = mask.block_size if mask else keys
    padded_q, padded_kv = (triton.cdiv(length, block_size) * block_size for length in (q_len, kv_len))
    if mask and mask.starts is not None:
        padded_q = padded_kv = (len(mask.starts) - 1) * block_size
    lines = batch * heads * padded_q
    together = not deterministic and _walks_together(q, k, mask, of_variant)
    # If tiles of several query heads share dK and dV, these are also summed in fp32: in order of arrival, or one after the other.
    # Splits of columns are then added like other tiles.
    added = heads > kv_heads and not together
    split = mask is not None and mask.by_key.is_split and not deterministic
    splits = mask.by_key.splits.shape[1] * (block_size // keys) if split else 0
    kv_lines = batch * (heads if deterministic else kv_heads) * (padded_kv if added else splits * keys)
    return _Room(
        padded_q, padded_kv, lines * dim, (3 if deterministic else 2) * lines, kv_lines * (dim + dim_v), added, splits, together
    )


def _walks_together(q, k, mask, of_variant: HopperVariant) -> bool:
    """Whether a tile is of all query heads that share a key head, and not of one, with dK and dV added to sums in fp32 that another
    kernel rounds. Where columns are short: 42 to 58 % less time with one or two blocks, 4 to 14 % with 9 to 16, level with 33. Long
    ones lose 7 to 24 %, as fewer programs walk one head's queries at a time (docs/performance/kernels.md)."""
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads == kv_heads or padded_head_dim(q.shape[3]) > 128 or of_variant is not PLAIN:
        return False
    if mask is None or mask.starts is not None or mask.by_key.is_split:
        return False
    masks, columns = mask.by_key.row_order.shape
    lines, blocks = k.shape[0] * kv_heads, mask.by_key.col_idx.numel()
    if masks > 1 or mask.mask_index.shape[1] > 1:
        return False
    return _short_columns(lines, columns, blocks, mask.block_size, multiprocessors(q.device))


def _short_columns(lines: int, columns: int, blocks: int, block_size: int, programs: int) -> bool:
    """Whether columns are short, and programs stay busy until the last has finished although a heavy column is as many times
    heavier as heads share it: an unsplit one has at most 64 blocks, four times the mean, or a thirty-second of all. lines: of key
    heads. blocks: room for as many, in a table made on the device."""
    balanced = lines * columns >= 8 * programs and lines * blocks >= 64 * programs and 36 * lines >= programs
    return balanced and blocks * block_size <= _SHORT_COLUMN * columns


def _launch(recording, tensors, room: _Room, mask, scale, has_dlse: bool, deterministic: bool, of_variant, config) -> None:
    config = config or _config(tensors.q, tensors.v, mask, of_variant)
    launches = BackwardLaunches(tensors, room, mask, scale, has_dlse, deterministic, of_variant, config)
    if deterministic:
        recording.launch(bound_kernel, launches.bound(), of_variant.kinds)
    recording.launch(prepare_kernel, launches.prepare())
    recording.launch(attention_backward_kernel, launches.add_tiles(), of_variant.kinds)
    recording.launch(finish_kernel, launches.finish_queries())
    _finish_keys(recording, launches)


def _finish_keys(recording, launches: "BackwardLaunches") -> None:
    for finish in launches.finish_keys():
        recording.launch(finish_kernel, finish)
    if launches.room.splits and not launches.room.added:
        tensors, keys = launches.tensors, launches.config.keys_together
        combine = combine_columns_launch(tensors.dk, tensors.dv, tensors.kv_sums, launches.mask, keys, launches.factors)
        recording.launch(combine_columns_kernel, combine)


def _config(q, v, mask, of_variant: HopperVariant) -> BackwardConfig:
    dim, block_size = padded_head_dim(q.shape[3]), mask and mask.block_size
    if of_variant is PLAIN:
        if used_columns(q.shape[3]) == 192 and padded_head_dim(v.shape[3]) == 128 and block_size != 64:
            return PAIRED_BACKWARD
        return backward_config(q.dtype, dim, block_size, q.device, padded_head_dim(v.shape[3]))
    return backward_of_variant(dim, block_size, of_variant.switches["SCORED"])


def backward_shape(config: BackwardConfig, head_dim: int, v_head_dim: int, block_size: int | None, **switches) -> BackwardShape:
    """block_size: the table's, or None. switches: the fields of ``BackwardShape`` that follow SPARSE."""
    dim, dim_v = padded_head_dim(head_dim), padded_head_dim(v_head_dim)
    return BackwardShape(
        DIM=dim,
        USED=used_columns(head_dim),
        DIM_V=dim_v,
        # Sums of values that are narrower than keys are whole.
        USED_V=used_columns(v_head_dim) if dim_v == dim else dim_v,
        TILE=config.keys,
        PARTS=config.partitions,
        QUERIES=config.queries,
        Q_STAGES=config.q_stages,
        DOUT_STAGES=config.dout_stages,
        COLUMNS=dim // config.pieces,
        BLOCK=block_size or config.keys,
        SPARSE=block_size is not None,
        **switches,
    )


def rows_sent(shape: BackwardShape) -> int:
    """Returns how many rows of dQ in register order are sent at once: those of a piece, or in ``wide_backward`` of half a piece."""
    return shape.QUERIES * shape.COLUMNS // (512 if shape.DIM > 128 and shape.PARTS == 1 else 256)


class BackwardLaunches(NamedTuple):
    """(grid, arguments, constants, options) of the launches of a call."""

    tensors: BackwardTensors
    room: _Room
    mask: object  # or blocks by document, or None
    scale: float
    has_dlse: bool
    deterministic: bool
    variant: HopperVariant
    config: BackwardConfig

    @property
    def dim(self) -> int:
        return padded_head_dim(self.tensors.q.shape[3])

    @property
    def dim_v(self) -> int:
        return padded_head_dim(self.tensors.v.shape[3])

    @property
    def starts(self) -> torch.Tensor | None:
        return self.mask.starts if self.mask else None

    @property
    def share(self) -> float:
        """What dropout keeps; the kernels leave it to the end to divide by it."""
        return 1.0 - (self.variant.given.dropout_p or 0.0)

    @property
    def factors(self) -> tuple[float, float]:
        """Of dQ and dK, and of dV."""
        return self.scale / self.share, 1.0 / self.share

    @property
    def sums(self) -> torch.Tensor:
        """Of dQ."""
        dtype = torch.int32 if self.deterministic else torch.float32
        return self.tensors.workspace[: self.room.dq_sums].view(dtype).view(-1, 256)

    @property
    def rows(self) -> torch.Tensor:
        """lse, delta and, if sums are integers, units."""
        batch, heads = self.tensors.q.shape[:2]
        return self.tensors.workspace[self.room.dq_sums :].view(-1, batch * heads * self.room.padded_q)

    @property
    def options_of_rows(self) -> dict:
        """Of kernels that compute whole rows."""
        return {"num_warps": max(4, self.dim // 32)}

    @property
    def block_of_starts(self) -> int:
        return 0 if self.starts is None else self.mask.block_size

    def bound(self):
        k, v = self.tensors.k, self.tensors.v
        batch, kv_heads, kv_len = k.shape[:3]
        arguments = [described_for_triton(k, ROWS, self.dim), described_for_triton(v, ROWS, self.dim_v)]
        arguments += [self.tensors.bounds, kv_heads, kv_len, self.variant.given]
        constants = {"DIM": self.dim, "DIM_V": self.dim_v, "TILE": ROWS}
        return (triton.cdiv(kv_len, ROWS) * batch * kv_heads, 1), arguments, constants, self.options_of_rows

    def prepare(self):
        tensors, given = self.tensors, self.variant.given
        batch, heads, q_len, _ = tensors.q.shape
        arguments = [
            described_for_triton(tensors.out, ROWS, self.dim_v),
            described_for_triton(tensors.dout, ROWS, self.dim_v),
            tensors.lse,
            tensors.dlse,
            self.sums,
            self.rows,
            tensors.bounds,
            self.starts,
            heads,
            heads // tensors.k.shape[1],
            q_len,
            self.room.padded_q,
            self.share,
        ]
        constants = {"DIM": self.dim, "DIM_V": self.dim_v, "TILE": ROWS}
        constants |= {"HAS_DLSE": self.has_dlse, "FIXED": self.deterministic, "DROPOUT": self.variant.given.dropout_p is not None}
        constants["CUT"] = given.q_starts is not None or given.q_lens is not None
        constants["TABLE_BLOCK"] = self.block_of_starts
        return (self.room.padded_q // ROWS * batch * heads, 1), arguments, constants, self.options_of_rows

    def add_tiles(self):
        tensors, room, mask, config, dim, dim_v = self.tensors, self.room, self.mask, self.config, self.dim, self.dim_v
        q, k, v = tensors[:3]
        batch, heads, q_len, _ = q.shape
        kv_heads, kv_len = k.shape[1:3]
        block_size = mask.block_size if mask else config.keys
        work = (mask.whole_columns if self.deterministic else mask.by_key.work) if mask else tensors.lse
        items = work.shape[1] if mask else triton.cdiv(kv_len, config.keys)
        lines = batch * (kv_heads if room.together else heads)
        tiles = items * (block_size // config.keys) * lines
        shape = self.shape
        keys, width, rows = shape.KEYS, shape.WIDTH, self.rows
        dkv_rows = None
        if dim <= 128:
            kv_rows = tensors.kv_sums[: room.kv_sums or room.dq_sums].view(-1, 256)
            dkv_rows = described(kv_rows, [keys * dim // 512, 256], FLOAT_LAYOUT)
        grads = (None, None) if self.starts is None else (tensors.dk, tensors.dv)
        pointers, strides = table_pointers(mask, mask and mask.by_key, work, tensors.lse)
        arguments = [
            described(q, [1, 1, config.queries, width]),
            described(k, [1, 1, keys, width]),
            described(v, [1, 1, keys, dim_v]),
            described(tensors.dout, [1, 1, config.queries, dim_v]),
            *(described(rows[row], [config.queries], ROW_LAYOUT) for row in (0, 1, 2 if self.deterministic else 0)),
            described(self.sums, [rows_sent(shape), 256], FLOAT_LAYOUT),
            described(tensors.dk, [1, 1, keys, width]),
            described(tensors.dv, [1, 1, keys, dim_v]),
            dkv_rows,
            BackwardPointers(tensors.kv_sums, *grads, tensors.queue),
            pointers,
            *strides,
            heads,
            heads // kv_heads,
            q_len,
            room.padded_q,
            room.padded_kv,
            # As many as key heads, or as query heads if each has its own sums.
            room.kv_sums // (dim + dim_v) or batch * kv_heads * room.padded_kv,
            room.splits,
            items,
            tiles,
            heads_in_queue(2 * (dim + dim_v), q_len, mask, lines, by_key=True),
            self.factors[0],
            self.scale * LOG2_E.value,
            self.variant.given,
        ]
        switches = self.variant.switches
        constants = {"SHAPE": Constants(shape), "SCORE": switches["SCORE"], "DERIVATIVE": switches["DERIVATIVE"]}
        return (min(tiles, config.programs * multiprocessors(q.device)), 1), arguments, constants, config.options

    @property
    def shape(self) -> BackwardShape:
        tensors, config, mask, room = self.tensors, self.config, self.mask, self.room
        return backward_shape(
            config,
            tensors.q.shape[3],
            tensors.v.shape[3],
            mask and mask.block_size,
            OWN_STARTS=self.starts is not None,
            TOGETHER=room.together,
            ADDED=room.added,
            SPLIT=room.splits > 0,
            FIXED=self.deterministic,
            RAGGED=mask is None and tensors.k.shape[2] % config.keys > 0,
            SCORED=self.variant.switches["SCORED"],
            REACH=self.variant.switches["REACH"],
        )

    def finish_queries(self):
        config, factor = self.config, self.factors[0]
        across = config.options["num_warps"] * 16 // config.queries
        of_tile = config.queries, self.dim, across, config.pieces
        return self._finish(self.tensors.dq, self.sums, 1, self.room.padded_q, factor, *of_tile)

    def finish_keys(self) -> Iterator[tuple]:
        tensors, room, config = self.tensors, self.room, self.config
        of_keys, of_values = self.factors
        if room.added:
            widths = self.dim, self.dim_v
            dk_sums, dv_sums = tensors.kv_sums.split([room.kv_sums // sum(widths) * width for width in widths])
            members = tensors.q.shape[1] // tensors.k.shape[1] if self.deterministic else 1
            yield self._finish(tensors.dk, dk_sums, members, room.padded_kv, of_keys, config.keys_together, self.dim)
            yield self._finish(tensors.dv, dv_sums, members, room.padded_kv, of_values, config.keys_together, self.dim_v)

    def _finish(self, grad, sums, members: int, length: int, factor: float, tile: int, dim: int, across: int = 1, pieces: int = 1):
        batch, heads = grad.shape[:2]
        target = described_for_triton(grad, tile, dim) if self.starts is None else rows_of(grad, dim)
        arguments = [target, sums, self.rows[2 if self.deterministic else 0], self.starts, heads, members, length, factor]
        constants = {"DIM": dim, "TILE": tile, "ACROSS": across, "PIECES": pieces, "FIXED": sums.dtype == torch.int32}
        constants["TABLE_BLOCK"] = self.block_of_starts
        return (length // tile * batch * heads, 1), arguments, constants, self.options_of_rows


def combine_columns_launch(dk, dv, kv_sums, mask, keys: int, factors: tuple[float, float]):
    """(grid, arguments, constants, options). keys: of the tiles that were summed. factors: of dK and dV."""
    batch, heads = dk.shape[:2]
    dims, table = [padded_head_dim(grad.shape[3]) for grad in (dk, dv)], mask.by_key.splits
    index, *_, mask_batch_stride, mask_head_stride = table_arguments(mask, mask.by_key, kv_sums)
    arguments = [described_for_triton(grad, keys, dim) for grad, dim in zip((dk, dv), dims, strict=True)]
    arguments += [kv_sums, table, index, mask_batch_stride, mask_head_stride, heads, table.shape[1], *factors]
    # A split column has two splits or more, so the second half of the lines is never in use.
    grid = (2 * (table.shape[1] // 2) * (mask.block_size // keys) * batch * heads, 1)
    constants = {"DIM": dims[0], "DIM_V": dims[1], "TILE": keys, "TABLE_BLOCK": mask.block_size}
    return grid, arguments, constants, {"num_warps": 8}
