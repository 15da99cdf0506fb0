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

from ..common.config import padded_head_dim
from ..common.tiles import LOG2_E
from ..launch import tuned
from ..launch.launch import Recording, multiprocessors, rows_of, table_arguments
from ..launch.launch import described as described_for_triton
from ..launch.order import heads_in_queue
from ..launch.replay import known_call
from .backward_rows import bound_kernel, combine_columns_kernel, finish_kernel, prepare_kernel
from .configs import PAIRED_BACKWARD, BackwardConfig, backward_config, backward_of_variant
from .descriptors import FLOAT_LAYOUT, ROW_LAYOUT, blocks_by_document, described, tile_queue
from .narrow_backward import attention_backward_kernel
from .paired_backward import paired_backward_kernel
from .products import used_columns
from .variant import PLAIN, HopperVariant, hopper_variant
from .wide_backward import wide_backward_kernel

ROWS = 64  # tokens per program of bound_kernel and prepare_kernel
_SHORT_COLUMN = 3072  # queries in a column's blocks, on average


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
    tensors = _tensors(dout, dlse, q, k, v, out, lse, variant, of_variant, deterministic, room)
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
        tensors = _tensors(dout, dlse, self.q, k, v, out, lse, None, PLAIN, False, room, gradients, self.workspace)
        config = _config(self.q, v, mask, PLAIN)
        launches = BackwardLaunches(tensors, room, mask, self.scale, dlse is not None, False, PLAIN, config)
        # Not to be repeated, as a call is known by one mask. It ends here, and with it the sums of dK and dV.
        recording = Recording(None, (), ())
        if self.workspace is None:
            recording.launch(prepare_kernel, launches.prepare())
        recording.launch(launches.kernel, launches.add_tiles(), PLAIN.kinds)
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
    tensors = _tensors(dout, dlse, q, k, v, out, lse, variant, of_variant, deterministic, known.facts)
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
    seed: torch.Tensor

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
    variant,
    of_variant: HopperVariant,
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
    seed = lse if of_variant.dropout_p is None else variant.seed
    return BackwardTensors(q, k, v, dout, out, lse, dlse, *gradients, workspace, kv_sums, bounds, tile_queue(device), seed)


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
    keys = backward_config(dim, mask and mask.block_size).keys
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
    recording.launch(launches.kernel, launches.add_tiles(), of_variant.kinds)
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
        return backward_config(dim, block_size)
    return backward_of_variant(dim, block_size, of_variant.switches["SCORED"])


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
    def kernel(self):
        if self.config.partitions > 1:
            return paired_backward_kernel
        return wide_backward_kernel if self.dim > 128 else attention_backward_kernel

    @property
    def starts(self) -> torch.Tensor | None:
        return self.mask.starts if self.mask else None

    @property
    def share(self) -> float:
        """What dropout keeps; the kernels leave it to the end to divide by it."""
        return 1.0 - (self.variant.dropout_p or 0.0)

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
        constants |= {"HAS_DLSE": self.has_dlse, "FIXED": self.deterministic, "DROPOUT": self.variant.dropout_p is not None}
        constants["CUT"] = given.q_starts is not None or given.q_lens is not None
        constants["TABLE_BLOCK"] = self.block_of_starts
        return (self.room.padded_q // ROWS * batch * heads, 1), arguments, constants, self.options_of_rows

    def add_tiles(self):
        tensors, room, mask, config, dim, dim_v = self.tensors, self.room, self.mask, self.config, self.dim, self.dim_v
        q, k, v = tensors[:3]
        batch, heads, q_len, head_dim = q.shape
        kv_heads, kv_len = k.shape[1:3]
        block_size = mask.block_size if mask else config.keys
        work = (mask.whole_columns if self.deterministic else mask.by_key.work) if mask else tensors.lse
        items = work.shape[1] if mask else triton.cdiv(kv_len, config.keys)
        lines = batch * (kv_heads if room.together else heads)
        tiles = items * (block_size // config.keys) * lines
        index, _, _, _, row_idx, tile_idx, tile_runs, tile_bits, *strides = table_arguments(mask, mask and mask.by_key, tensors.lse)
        row_lse, row_delta, row_unit = self.rows[0], self.rows[1], self.rows[2 if self.deterministic else 0]
        paired, wide = self.kernel is paired_backward_kernel, self.kernel is wide_backward_kernel
        columns, keys = 64 if paired else dim, config.keys_together
        tile_of_q, tile_of_k, tile_of_v = [1, 1, config.queries, columns], [1, 1, keys, columns], [1, 1, keys, dim_v]
        results = [described(tensors.dk, tile_of_k), described(tensors.dv, tile_of_v)]
        # The wide kernel sends each piece in halves.
        rows_sent = config.queries * dim // (256 * config.pieces * (2 if wide else 1))
        sums = described(self.sums, [rows_sent, 256], FLOAT_LAYOUT)
        constants = {"DIM": dim}
        if paired:
            grads = [sums, *results, tensors.kv_sums]
            constants |= {"DIM_V": dim_v}
        elif wide:
            grads = [sums, *results, tensors.kv_sums]
            # Sums of values that are narrower than keys are whole.
            constants |= {"USED": used_columns(head_dim), "DIM_V": dim_v}
            constants |= {"USED_V": used_columns(v.shape[3]) if dim_v == dim else dim_v}
        else:
            kv_rows = tensors.kv_sums[: room.kv_sums or room.dq_sums].view(-1, 256)
            grads = [sums, *results]
            grads += [None, None] if self.starts is None else [tensors.dk, tensors.dv]
            grads += [described(kv_rows, [config.keys * dim // 512, 256], FLOAT_LAYOUT)]
            constants |= {"USED": used_columns(head_dim), "PIECES": config.pieces, "OWN_STARTS": self.starts is not None}
            constants["TOGETHER"] = room.together
        arguments = [
            described(q, tile_of_q),
            described(k, tile_of_k),
            described(v, tile_of_v),
            described(tensors.dout, [1, 1, config.queries, dim_v]),
            *grads,
            *(described(row, [config.queries], ROW_LAYOUT) for row in (row_lse, row_delta, row_unit)),
            index,
            work,
            row_idx,
            tile_idx,
            tile_runs,
            tile_bits,
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
            tensors.queue,
            self.factors[0],
            self.scale * LOG2_E.value,
            tensors.seed,
            self.variant.dropout_p or 0.0,
            self.variant.given,
        ]
        constants |= {"KEYS": config.keys, "QUERIES": config.queries}
        constants |= {"Q_STAGES": config.q_stages, "DOUT_STAGES": config.dout_stages}
        constants |= {"TABLE_BLOCK": block_size, "SPARSE": mask is not None}
        constants |= {"ADDED": room.added, "SPLIT": room.splits > 0}
        constants |= {"FIXED": self.deterministic, "DROPOUT": self.variant.dropout_p is not None}
        constants |= {"RAGGED": mask is None and kv_len % config.keys > 0} | self.variant.switches
        return (min(tiles, config.programs * multiprocessors(q.device)), 1), arguments, constants, config.options

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
