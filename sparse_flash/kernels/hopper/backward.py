"""The backward pass for Hopper: its kernel, what else runs in which order, and on which memory.

``prepare_kernel`` comes first. ``attention_backward_kernel`` then adds dQ to fp32 sums, and ``finish_kernel`` rounds them. If query
heads share keys, dK and dV are summed in the same way, unless one tile computes all of these heads: see
``division.heads_together``. If heavy columns are split, ``combine_columns_kernel`` adds their splits.

Tiles are added to dQ in order of arrival, and a floating-point sum depends on its order. For bitwise repeatable gradients, tiles
are added as integers, in units of a power of two per query: see ``bound_kernel``.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
import triton

from ..common.compat import Constants
from ..common.config import padded_head_dim, used_columns
from ..common.layout import as_addressable, is_addressable, layouts, restore_layout
from ..common.tiles import LOG2_E
from ..launch.launch import Recording, as_rows, descriptor_or_rows, launch_or_repeat, multiprocessors, table_arguments
from ..launch.order import concurrent_heads
from .backward_arguments import BackwardPointers, BackwardShape
from .backward_kernel import attention_backward_kernel
from .backward_rows import bound_kernel, combine_columns_kernel, finish_kernel, prepare_kernel
from .configs import BackwardConfig, backward_config
from .descriptors import FLOAT_LAYOUT, ROW_LAYOUT, gluon_descriptor, table_pointers, tile_queue
from .division import backward_tables, heads_together
from .variant import PLAIN, HopperVariant, hopper_variant

ROWS = 64  # tokens per program of bound_kernel and prepare_kernel
TILE = 64  # rows of a tile of sums


def attention_backward(call, dout, dlse, out, lse):
    """Returns dq, dk, dv like q, k, v, then sums of ``sink_terms``, (batch, heads, tiles), if sinks are learned. Unless the call is
    deterministic, tiles are added to dQ in an order that differs from run to run, and also to dK and dV if query heads share keys.

    call: an ``AttentionCall`` with table blocks of 64 to 256. head_dim: 33 to 256; v's is the same, or 65 to 128 if that of q and k
    is 129 or more. dlse: (batch, heads, q_len) float32, or None. Other tensors: float16 or bfloat16.
    """
    dlse = None if dlse is None else dlse.contiguous()
    inputs = dout, out, lse, *(() if dlse is None else (dlse,)), *call.inputs()
    # Hooks of saved tensors may have changed how they lie in memory.
    key = attention_backward_kernel.fn, dlse is None, *layouts(inputs)
    run = partial(_run, call, dout, dlse, out, lse)
    return tuple(launch_or_repeat(call.launches, key, call.table, inputs, run)[: 3 + (call.learned_sinks is not None)])


def _run(call, dout, dlse, out, lse, recording):
    q, k, v = call[:3]
    if not all(map(is_addressable, (dout, out, q, k, v))):
        dout, out, *ready = (as_addressable(t) for t in (dout, out, q, k, v))
        gradients = attention_backward(call.on(*ready), dout, dlse, out, lse)
        return *map(restore_layout, gradients, ready, (q, k, v)), *gradients[3:]
    of_variant, deterministic = hopper_variant(call.rest), call.deterministic
    plain, programs = of_variant is PLAIN, multiprocessors(q.device)
    tables = backward_tables(q.shape, v.shape, call.table, plain, deterministic, programs)
    space = _workspace(q, k, v, tables, deterministic, of_variant)
    tensors = _allocate_tensors(recording, dout, dlse, q, k, v, out, lse, deterministic, space, sinks=call.learned_sinks)
    _launch(recording, tensors, space, tables, call.scale, dlse is not None, deterministic, of_variant)
    return tensors.gradients


class JointBackward:
    """The backward passes of several calls that share queries, and each have keys of their own. out, lse: over the keys of all
    calls. Rows are prepared once. dQ is summed over all calls, and rounded once. The masks of the calls must pass
    ``can_share_sums``. See ``attention_backward`` for other arguments."""

    def __init__(self, dout, dlse, q, out, lse, scale):
        self.results, self.q, self.scale = (dout, None if dlse is None else dlse.contiguous(), out, lse), q, scale
        self.dq, self.workspace, self.finish = torch.empty_like(q), None, None

    def add_keys(self, k, v, mask, into=None):
        """Returns dk and dv like k and v. into: the two tensors that receive them, or None for new ones."""
        (dout, dlse, out, lse), space = self.results, _workspace(self.q, k, v, mask, False, PLAIN)
        gradients = self.dq, *(into or (torch.empty_like(k), torch.empty_like(v)))
        recording = Recording()  # never replayed, as a replayed call has one mask
        tensors = _allocate_tensors(recording, dout, dlse, self.q, k, v, out, lse, False, space, gradients, self.workspace)
        config = _config(self.q, v, mask, PLAIN)
        launches = BackwardLaunches(tensors, space, mask, self.scale, dlse is not None, False, PLAIN, config)
        if self.workspace is None:
            recording.launch(prepare_kernel, launches.prepare())
        recording.launch(attention_backward_kernel, launches.add_tiles(), PLAIN.kinds)
        _finish_dkv(recording, launches)
        self.workspace, self.finish = tensors.workspace, launches.finish_dq()
        return tensors.dk, tensors.dv

    def round_dq(self):
        """Returns dq, after the last call."""
        Recording().launch(finish_kernel, self.finish)
        return self.dq


def can_share_sums(q, v, masks) -> bool:
    """Whether the calls of these masks have the same layout of the sums of dQ. None: dense."""
    layouts = set()
    for mask in masks:
        space, config = _workspace(q, v, v, mask, False, PLAIN), _config(q, v, mask, PLAIN)
        layouts.add((space.padded_q, config))
    return len(layouts) == 1 and not any(mask is not None and mask.starts is not None for mask in masks)


class BackwardTensors(NamedTuple):
    """The tensors of a call, without its variant's."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor  # lse if the call has none
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    workspace: torch.Tensor  # sums of dQ, then rows: see ``_Workspace``
    kv_sums: torch.Tensor
    bounds: torch.Tensor
    queue: torch.Tensor
    sinks: torch.Tensor | None  # if they are learned
    sink_sums: torch.Tensor | None  # for their gradient

    @property
    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        return self.dq, self.dk, self.dv, self.sink_sums


def _allocate_tensors(
    recording: Recording,
    dout,
    dlse,
    q,
    k,
    v,
    out,
    lse,
    deterministic: bool,
    space: "_Workspace",
    gradients: tuple | None = None,
    workspace: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> BackwardTensors:
    """gradients, workspace: the tensors to use, or None for new ones. sinks: if they are learned."""
    kind = {"dtype": torch.float32, "device": q.device}
    gradients = gradients or [recording.fresh(torch.empty_like(t)) for t in (q, k, v)]
    sink_sums = None if sinks is None else recording.fresh(torch.empty(*q.shape[:2], space.padded_q // ROWS, **kind))
    if workspace is None:
        workspace = recording.fresh(torch.empty(space.dq_sums + space.rows, **kind))
    kv_sums = workspace
    if space.kv_sums:
        fill = torch.zeros if space.added and not deterministic else torch.empty
        kv_sums = recording.each_time(partial(fill, space.kv_sums, **kind))
    bounds = recording.each_time(partial(torch.zeros, (2, k.shape[0] * k.shape[1]), **kind)) if deterministic else lse
    queue = recording.each_time(partial(tile_queue, q.device))
    dlse = lse if dlse is None else dlse
    return BackwardTensors(q, k, v, dout, out, lse, dlse, *gradients, workspace, kv_sums, bounds, queue, sinks, sink_sums)


class _Workspace(NamedTuple):
    """The sizes of a call's sums, which are fp32 or int32, and what they hold."""

    padded_q: int  # tokens in whole blocks, so that no block extends into the rows of the next head
    padded_kv: int
    dq_sums: int  # elements
    rows: int  # elements of lse, of delta and, with integer sums, of units
    kv_sums: int  # elements of sums of dK and dV; 0 unless several tiles contribute to one
    added: bool  # whether all tiles add to ``kv_sums``; otherwise only splits of columns have sums there
    splits: int  # tiles of splits per head
    together: bool  # whether a tile computes all query heads that share a key head


def _workspace(q, k, v, tables, deterministic: bool, of_variant: HopperVariant) -> _Workspace:
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    dim, dim_v = padded_head_dim(head_dim), padded_head_dim(v.shape[3])
    block_size = tables.block_size if tables else _config(q, v, tables, of_variant).keys
    padded_q, padded_kv = (triton.cdiv(length, block_size) * block_size for length in (q_len, kv_len))
    if tables and tables.starts is not None:
        padded_q = padded_kv = (len(tables.starts) - 1) * block_size
    q_rows = batch * heads * padded_q
    together = not deterministic and heads_together(q.shape, kv_heads, tables, of_variant is PLAIN, multiprocessors(q.device))
    # Tiles of several query heads add to dK and dV in order of arrival. With integer sums, each query head has its own, which
    # ``finish_kernel`` adds. Splits of columns are then added like other tiles.
    added = heads > kv_heads and not together
    split = tables is not None and tables.by_key.is_split and not deterministic
    splits = tables.by_key.splits.shape[1] * (block_size // TILE) if split else 0
    kv_rows = batch * (heads if deterministic else kv_heads) * (padded_kv if added else splits * TILE)
    return _Workspace(
        padded_q, padded_kv, q_rows * dim, (3 if deterministic else 2) * q_rows, kv_rows * (dim + dim_v), added, splits, together
    )


def _launch(recording, tensors, space: _Workspace, tables, scale, has_dlse: bool, deterministic: bool, of_variant) -> None:
    config = _config(tensors.q, tensors.v, tables, of_variant)
    launches = BackwardLaunches(tensors, space, tables, scale, has_dlse, deterministic, of_variant, config)
    if deterministic:
        recording.launch(bound_kernel, launches.bound(), of_variant.kinds)
    recording.launch(prepare_kernel, launches.prepare(), (tensors.sinks is not None and tensors.sinks.dtype,))
    recording.launch(attention_backward_kernel, launches.add_tiles(), of_variant.kinds)
    recording.launch(finish_kernel, launches.finish_dq())
    _finish_dkv(recording, launches)


def _finish_dkv(recording, launches: "BackwardLaunches") -> None:
    for finish in launches.finish_dkv():
        recording.launch(finish_kernel, finish)
    if launches.space.splits and not launches.space.added:
        tensors = launches.tensors
        combine = combine_columns_launch(tensors.dk, tensors.dv, tensors.kv_sums, launches.tables, launches.factors)
        recording.launch(combine_columns_kernel, combine)


def _config(q, v, tables, of_variant: HopperVariant) -> BackwardConfig:
    scored = of_variant.switches["SCORED"]
    return backward_config(q.shape[3], v.shape[3], tables and tables.block_size, of_variant is PLAIN, scored)


@cache
def backward_shape(config: BackwardConfig, head_dim: int, v_head_dim: int, block_size: int | None, *switches) -> BackwardShape:
    """block_size: the table's, or None. switches: the fields of ``BackwardShape`` after SPARSE."""
    dim, dim_v = padded_head_dim(head_dim), padded_head_dim(v_head_dim)
    # Sums of values that are narrower than keys are whole.
    columns = dim, used_columns(head_dim), dim_v, used_columns(v_head_dim) if dim_v == dim else dim_v
    of_tile = config.wide, config.keys, config.queries, config.q_stages, config.dout_stages
    return BackwardShape(*columns, *of_tile, block_size or config.keys, block_size is not None, *switches)


class BackwardLaunches(NamedTuple):
    """Makes (grid, arguments, constants, options) of each launch of a call."""

    tensors: BackwardTensors
    space: _Workspace
    tables: object  # the mask, its blocks by document, or None
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
        return self.tables.starts if self.tables else None

    @property
    def share(self) -> float:
        """The share of pairs that dropout keeps. Gradients are divided by it at the end."""
        return 1.0 - (self.variant.dropout_p or 0.0)

    @property
    def factors(self) -> tuple[float, float]:
        """(the factor of dQ and dK, the factor of dV)."""
        return self.scale / self.share, 1.0 / self.share

    @property
    def sums(self) -> torch.Tensor:
        """Sums of dQ, as rows of 256."""
        dtype = torch.int32 if self.deterministic else torch.float32
        return self.tensors.workspace[: self.space.dq_sums].view(dtype).view(-1, 256)

    @property
    def rows(self) -> torch.Tensor:
        """Rows of lse, of delta and, with integer sums, of units."""
        batch, heads = self.tensors.q.shape[:2]
        return self.tensors.workspace[self.space.dq_sums :].view(-1, batch * heads * self.space.padded_q)

    @property
    def row_options(self) -> dict:
        """Options of kernels that compute whole rows."""
        return {"num_warps": max(4, self.dim // 32)}

    @property
    def start_block_size(self) -> int:
        return 0 if self.starts is None else self.tables.block_size

    def bound(self):
        k, v = self.tensors.k, self.tensors.v
        batch, kv_heads, kv_len = k.shape[:3]
        arguments = [descriptor_or_rows(k, ROWS, self.dim), descriptor_or_rows(v, ROWS, self.dim_v)]
        arguments += [self.tensors.bounds, kv_heads, kv_len, self.variant.given]
        constants = {"DIM": self.dim, "DIM_V": self.dim_v, "TILE": ROWS}
        return (triton.cdiv(kv_len, ROWS) * batch * kv_heads, 1), arguments, constants, self.row_options

    def prepare(self):
        tensors, given = self.tensors, self.variant.given
        batch, heads, q_len, _ = tensors.q.shape
        arguments = [
            descriptor_or_rows(tensors.out, ROWS, self.dim_v),
            descriptor_or_rows(tensors.dout, ROWS, self.dim_v),
            tensors.lse,
            tensors.dlse,
            self.sums,
            self.rows,
            tensors.bounds,
            self.starts,
            tensors.sinks,
            tensors.sink_sums,
            heads,
            heads // tensors.k.shape[1],
            q_len,
            self.space.padded_q,
            self.share,
        ]
        constants = {"DIM": self.dim, "DIM_V": self.dim_v, "TILE": ROWS}
        constants |= {"HAS_DLSE": self.has_dlse, "FIXED": self.deterministic, "DROPOUT": self.variant.dropout_p is not None}
        constants["CUT"] = given.q_starts is not None or given.q_lens is not None
        constants["TABLE_BLOCK"] = self.start_block_size
        return (self.space.padded_q // ROWS * batch * heads, 1), arguments, constants, self.row_options

    def add_tiles(self):
        tensors, space, tables, config, dim, dim_v = self.tensors, self.space, self.tables, self.config, self.dim, self.dim_v
        q, k, v = tensors[:3]
        batch, heads, q_len, _ = q.shape
        kv_heads, kv_len = k.shape[1:3]
        block_size = tables.block_size if tables else config.keys
        work = (tables.whole_columns if self.deterministic else tables.by_key.work) if tables else tensors.lse
        items = work.shape[1] if tables else triton.cdiv(kv_len, config.keys)
        batch_heads = batch * (kv_heads if space.together else heads)
        tiles = items * (block_size // config.keys) * batch_heads
        shape = self.shape
        keys, width, rows = shape.KEYS, shape.WIDTH, self.rows
        grads = (None, None) if self.starts is None else (tensors.dk, tensors.dv)
        pointers, strides = table_pointers(tables, tables and tables.by_key, work, tensors.lse)
        arguments = [
            gluon_descriptor(q, [1, 1, config.queries, width]),
            gluon_descriptor(k, [1, 1, keys, width]),
            gluon_descriptor(v, [1, 1, keys, dim_v]),
            gluon_descriptor(tensors.dout, [1, 1, config.queries, dim_v]),
            *(gluon_descriptor(rows[row], [config.queries], ROW_LAYOUT) for row in (0, 1, 2 if self.deterministic else 0)),
            gluon_descriptor(self.sums, [shape.SENT_ROWS, 256], FLOAT_LAYOUT),
            gluon_descriptor(tensors.dk, [1, 1, keys, width]),
            gluon_descriptor(tensors.dv, [1, 1, keys, dim_v]),
            BackwardPointers(tensors.kv_sums, *grads, tensors.queue),
            pointers,
            *strides,
            heads,
            heads // kv_heads,
            q_len,
            space.padded_q,
            space.padded_kv,
            # Rows of sums of all key heads, or of all query heads if each has its own sums.
            space.kv_sums // (dim + dim_v) or batch * kv_heads * space.padded_kv,
            space.splits,
            items,
            tiles,
            concurrent_heads(2 * (dim + dim_v), q_len, tables, batch_heads, by_key=True),
            self.factors[0],
            self.scale * LOG2_E.value,
            self.variant.given,
        ]
        switches = self.variant.switches
        constants = {"SHAPE": Constants(shape), "SCORE": switches["SCORE"], "DERIVATIVE": switches["DERIVATIVE"]}
        return (min(tiles, config.programs * multiprocessors(q.device)), 1), arguments, constants, config.options

    @property
    def shape(self) -> BackwardShape:
        tensors, config, tables, space, switches = self.tensors, self.config, self.tables, self.space, self.variant.switches
        ragged = tables is None and tensors.k.shape[2] % config.keys > 0
        sums = self.starts is not None, space.together, space.added, space.splits > 0, self.deterministic
        of_heads = tensors.q.shape[3], tensors.v.shape[3]
        of_variant = switches["SCORED"], switches["REACH"], self.variant.dropout_p is not None
        return backward_shape(config, *of_heads, tables and tables.block_size, *sums, ragged, *of_variant)

    def finish_dq(self):
        return self._finish(self.tensors.dq, self.sums, 1, self.space.padded_q, self.factors[0], self.dim)

    def finish_dkv(self) -> Iterator[tuple]:
        tensors, space = self.tensors, self.space
        of_keys, of_values = self.factors
        if space.added:
            widths = self.dim, self.dim_v
            dk_sums, dv_sums = tensors.kv_sums.split([space.kv_sums // sum(widths) * width for width in widths])
            members = tensors.q.shape[1] // tensors.k.shape[1] if self.deterministic else 1
            yield self._finish(tensors.dk, dk_sums, members, space.padded_kv, of_keys, self.dim)
            yield self._finish(tensors.dv, dv_sums, members, space.padded_kv, of_values, self.dim_v)

    def _finish(self, grad, sums, members: int, length: int, factor: float, dim: int):
        batch, heads = grad.shape[:2]
        target = descriptor_or_rows(grad, TILE, dim) if self.starts is None else as_rows(grad, dim)
        arguments = [target, sums, self.rows[2 if self.deterministic else 0], self.starts, heads, members, length, factor]
        constants = {"DIM": dim, "TILE": TILE, "FIXED": sums.dtype == torch.int32}
        constants["TABLE_BLOCK"] = self.start_block_size
        return (length // TILE * batch * heads, 1), arguments, constants, self.row_options


def combine_columns_launch(dk, dv, kv_sums, tables, factors: tuple[float, float]):
    """Returns (grid, arguments, constants, options). factors: of dK and of dV."""
    batch, heads = dk.shape[:2]
    dims, splits = [padded_head_dim(grad.shape[3]) for grad in (dk, dv)], tables.by_key.splits
    index, *_, mask_batch_stride, mask_head_stride = table_arguments(tables, tables.by_key, kv_sums)
    arguments = [descriptor_or_rows(grad, TILE, dim) for grad, dim in zip((dk, dv), dims, strict=True)]
    arguments += [kv_sums, splits, index, mask_batch_stride, mask_head_stride, heads, splits.shape[1], *factors]
    # A split column has at least two splits, so at most half of the entries are in use.
    grid = (2 * (splits.shape[1] // 2) * (tables.block_size // TILE) * batch * heads, 1)
    constants = {"DIM": dims[0], "DIM_V": dims[1], "TILE": TILE, "TABLE_BLOCK": tables.block_size}
    return grid, arguments, constants, {"num_warps": 8}
