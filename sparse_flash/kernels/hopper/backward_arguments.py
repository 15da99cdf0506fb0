"""Records of the backward kernel for Hopper: what it is compiled for, and what its warps share.

For each step of a tile of keys, the kernel computes five products and two pointwise steps, which comments number:

    (1) S = Q K^T           (a) P = exp2(S - lse)       lse, and the scale of S, in base 2
    (2) dP = dO V^T         (b) dS = P (dP - delta)     delta: the sum of dO * O over columns
    (3) dV += P^T dO
    (4) dK += dS^T Q
    (5) dQ += dS K                                      in global memory, as other tiles add to the same queries
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..common.gluon import record
from .dropout import Dropout
from .lengths import TokenLengths
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
    WIDE: bool  # whether ``wide_backward`` computes
    TILE: int  # keys
    QUERIES: int  # of a step
    Q_STAGES: int
    DOUT_STAGES: int
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
    DROPPED: bool  # whether there is dropout

    @property
    def NARROW(self) -> bool:
        """Whether ``narrow_backward`` computes. Without WIDE and NARROW, ``paired_backward`` does."""
        return self.DIM == 64

    @property
    def PARTS(self) -> int:
        """Parts of a tile, each with a warp group in a role of its own, in ``paired_backward``."""
        return 1 if self.NARROW else self.TILE // 64

    @property
    def KEYS(self) -> int:
        """Keys of a part."""
        return self.TILE // self.PARTS

    @property
    def K_STAGES(self) -> int:
        """Tiles of keys in shared memory: two if the next tile's keys are loaded during a tile."""
        return self.TILE // 64 if self.ACROSS == 1 else 1

    @property
    def ACROSS(self) -> int:
        """Tiles of q and k in shared memory, side by side: three take less than 192 columns padded to 256."""
        return 3 if self.DIM > 128 and not self.WIDE else 1

    @property
    def WIDTH(self) -> int:
        """Columns of such a tile."""
        return 64 if self.ACROSS > 1 else self.DIM

    @property
    def READERS(self) -> int:
        """How many warp groups release the queries of a step."""
        return 2 if self.WIDE else self.PARTS

    @property
    def COLUMNS(self) -> int:
        """Columns of a piece of dQ, which has 64 queries. Of 64 queries and 64 columns, two warp groups compute half each."""
        return 32 if self.NARROW and self.QUERIES < self.TILE else 64

    @property
    def PIECES(self) -> int:
        """Pieces of 64 queries that have columns in use."""
        return -(-self.USED // self.COLUMNS)

    @property
    def GROUP_PIECES(self) -> int:
        """Pieces that a warp group of ``paired_backward`` computes in each step: with ACROSS, it computes one more in every second
        step."""
        return 1 if self.PARTS == 2 else 2

    @property
    def PIECE_COLUMNS(self) -> tuple[int, int]:
        """Columns in use of the first two pieces of ``paired_backward``."""
        return 64, min(self.USED - 64, 64)

    @property
    def SENT_ROWS(self) -> int:
        """Rows of 256 numbers of dQ that are sent at once: a step's, half a piece, or as many as the second piece has."""
        return self.QUERIES // 4 if self.NARROW else 8 if self.WIDE else self.PIECE_COLUMNS[1] // 4

    @property
    def LATE(self) -> bool:
        """Whether a step of ``paired_backward`` loads rows of lse and delta only where they are used. Loaded before the products,
        they wait for no product's reads of shared memory, but there must be registers for them."""
        return self.PARTS == 1 or self.SCORED or self.DROPPED

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
    pointers: gl.tuple  # ``BackwardPointers``
    padded_q_len: gl.tensor
    padded_kv_len: gl.tensor
    kv_rows: gl.tensor
    splits: gl.tensor  # tiles of splits per head


@record
class BackwardArguments:
    """Holds what the warps share, except the buffers of one family."""

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
    k: Ring  # a stage has pieces of the first part's keys, then of the second's
    v: Ring
    q: Ring  # one stage per step
    dout: Ring  # released with q
    lse: gl.shared_memory_descriptor  # loaded with q
    unit: gl.shared_memory_descriptor  # loaded with q
    delta: gl.shared_memory_descriptor  # loaded with dout
    SHAPE: gl.constexpr  # ``BackwardShape``


@record
class NarrowBuffers:
    """Holds the buffers of ``narrow_backward``."""

    dscores: gl.shared_memory_descriptor  # (1, queries, keys)
    dq: Ring  # one stage, through which every step sends dQ, and every tile dV


@record
class PairedGroup:
    """Holds the buffers of a warp group of ``paired_backward`` and its sending warp."""

    tiles: gl.shared_memory_descriptor  # two of dscores, or one: (queries, keys) up to head_dim 128, else (keys, queries)
    dq: Ring  # one stage, through which the group sends its pieces of dQ, and at the end of a tile dV
    GROUP: gl.constexpr  # 0 or 1


@record
class WideBuffers:
    """Holds the buffers of ``wide_backward``."""

    weights: Ring  # a fill for each step, and one without data at the end of each tile, after the first group's last read of k
    dscores: Ring
    dq: Ring  # halves of pieces of dQ, for the sending warp
    dk: Ring  # without data; full: dK is in the buffer of k, or has been added
    dv: Ring  # without data; full: dV is in the buffer of v, or has been added
