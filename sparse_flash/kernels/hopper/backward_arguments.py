"""Records of the backward kernel for Hopper: what it is compiled for, and what its warps share.

For each step of a tile of keys, the kernel computes five products, which comments number. Between these it computes P and dS:

    (1) S = Q K^T           P = exp2(S - lse)       lse, and the scale of S, in base 2
    (2) dP = dO V^T         dS = P (dP - delta)     delta: the sum of dO * O over columns
    (3) dV += P^T dO
    (4) dK += dS^T Q
    (5) dQ += dS K                                  in global memory, as other tiles add to the same queries
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..common.gluon import record
from .dropout import Dropout
from .lengths import TokenLengths, new_lengths
from .ring import Ring
from .scheduler import Heads, Scheduler, TableArguments
from .scores import ScoringInputs


@dataclass(frozen=True)
class BackwardShape:
    """The constants of a backward kernel, except a user's functions."""

    DIM: int  # columns of q and k in sums; in shared memory too, unless ACROSS is more than 1
    USED: int  # of DIM columns; the others are zeros
    DIM_V: int  # the same for v
    USED_V: int
    TILE: int  # keys
    PARTS: int  # of a tile: 2 if each of two warp groups has keys of its own
    QUERIES: int  # of a step
    Q_STAGES: int
    DOUT_STAGES: int
    COLUMNS: int  # of a piece of dQ, as many as shared memory holds
    BLOCK: int  # of the table
    SPARSE: bool  # whether there is a table
    OWN_STARTS: bool  # whether blocks start at any token: see ``document_tables``
    TOGETHER: bool  # whether a tile computes a whole head group, one query head after the other
    ADDED: bool  # whether several tiles add to one dK and dV, for instance the query heads of a head group
    SPLIT: bool  # whether columns may be split
    FIXED: bool  # whether gradients are independent of the order in which tiles are added
    RAGGED: bool  # whether, without a table, the last tile has fewer keys
    SCORED: bool  # as REACH: see ``common.variant``
    REACH: int
    PAIRED: bool

    @property
    def GROUP_PIECES(self) -> int:
        """Pieces of dQ that a group of ``paired_backward`` computes in each step."""
        return 1 if self.DIM > 128 else self.QUERIES * self.DIM // (64 * self.COLUMNS * self.PARTS)

    @property
    def PIECE_ROWS(self) -> int:
        """Rows of 256 numbers of such a piece, which has 64 queries."""
        return self.COLUMNS // 4

    @property
    def KEYS(self) -> int:
        """Keys of a part of a tile."""
        return self.TILE // self.PARTS

    @property
    def K_STAGES(self) -> int:
        return self.KEYS // 64

    @property
    def ACROSS(self) -> int:
        """Tiles of q and k in shared memory, side by side."""
        return self.USED // 64 if self.DIM > 128 and self.PARTS == 2 else 1

    @property
    def WIDTH(self) -> int:
        """Columns of such a tile."""
        return 64 if self.ACROSS > 1 else self.DIM

    @property
    def READERS(self) -> int:
        """How many roles release the queries of a step."""
        return 2 if self.DIM > 128 or self.PARTS == 2 else 1

    @property
    def PIECES(self) -> int:
        """Pieces of dQ that have columns in use."""
        return -(-self.USED // self.COLUMNS)

    @property
    def ALL_PIECES(self) -> int:
        """Pieces of dQ."""
        return self.DIM // self.COLUMNS

    @property
    def SPLIT_SUMS(self) -> bool:
        """Whether splits have sums of their own, until ``combine_columns_kernel`` adds them. With ADDED, they are added like other
        tiles."""
        return self.SPLIT and not self.ADDED

    @property
    def ALONE(self) -> bool:
        """Whether sums of dK and dV are stored instead of added, as each has one tile only."""
        return self.FIXED or self.SPLIT_SUMS


class BackwardPointers(NamedTuple):
    """Global memory that a backward kernel addresses without a descriptor."""

    kv_sums: Any  # sums of dK, and after them of dV
    dk: Any  # None unless OWN_STARTS
    dv: Any
    queue: Any


@record
class BackwardInputs:
    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    dout: tma.tensor_descriptor
    lse_rows: tma.tensor_descriptor
    delta_rows: tma.tensor_descriptor
    unit_rows: tma.tensor_descriptor


@record
class Gradients:
    """Holds the outputs. Rows of dQ hold sums in register order. With ADDED or SPLIT_SUMS, rows of dK and dV do too."""

    dq_rows: tma.tensor_descriptor
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor
    dkv_rows: gl.tuple  # a descriptor of ``kv_sums``, up to head_dim 128
    pointers: gl.tuple  # ``BackwardPointers``
    padded_q_len: gl.tensor
    padded_kv_len: gl.tensor
    kv_rows: gl.tensor
    splits: gl.tensor  # tiles of splits per head


@record
class BackwardArguments:
    """Holds what the warps share, except the buffers of one kernel."""

    inputs: BackwardInputs
    grads: Gradients
    table: TableArguments
    heads: Heads
    scale: gl.tensor
    scoring: ScoringInputs
    lengths: TokenLengths
    arrived: gl.shared_memory_descriptor  # the loading warp's own barrier, with lengths
    dropout: Dropout
    scheduler: Scheduler
    k: Ring  # one stage per tile; with PARTS, pieces of the first warp group's keys, then of the second's
    v: Ring
    q: Ring  # one stage per step
    dout: Ring  # released with q
    lse: gl.shared_memory_descriptor  # loaded with q
    unit: gl.shared_memory_descriptor  # loaded with q
    delta: gl.shared_memory_descriptor  # loaded with dout
    SHAPE: gl.constexpr  # ``BackwardShape``


@gluon.jit
def new_backward_lengths(variant, q_len, k_tensor, SCORED: gl.constexpr):
    """Returns (TokenLengths, kv_len). If no warp uses kv_len, it is q_len: another number would cost a shared value."""
    lengths = new_lengths(variant, q_len, q_len)
    kv_len = q_len
    if SCORED or lengths.ANY:
        kv_len = k_tensor.shape[2]
        lengths = new_lengths(variant, q_len, kv_len)
    return lengths, kv_len
