"""A ring of stages in shared memory, with its barriers and their phases. One warp fills the stages in order, and others use them.

Fills are numbered from 0. Fill n uses stage n % STAGES, whose barriers complete for the (n // STAGES)-th time. Every warp counts
fills itself, so n is all that registers hold of a ring.

Producer:  acquire(n), then expect(n, bytes) and load(n, ...), which TMA commits; or stores and commit(n); or copies of elements and
           commit_copies(n).
Consumer:  wait(n), reads of stage(n), release(n).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..common.gluon import async_load, copies_arrive, record, view_for_tma


@record
class Ring:
    data: gl.shared_memory_descriptor  # (STAGES * PIECES, ...); for a ring of one stage, possibly just that stage
    full: gl.shared_memory_descriptor  # a barrier per stage
    empty: gl.shared_memory_descriptor  # a barrier per stage, its own or of a ring that is released with it
    STAGES: gl.constexpr
    PIECES: gl.constexpr  # per stage
    RELEASES: gl.constexpr  # stages of the ring that owns ``empty``, STAGES or more

    @gluon.jit
    def acquire(self, n):
        """Waits until the stage of n may be filled: until n - STAGES, if it exists, is released."""
        # If ``empty`` belongs to another ring, waits as that ring's acquire does: for its release of
        # n - STAGES = after - RELEASES.
        after = n + (self.RELEASES - self.STAGES)
        mbarrier.wait(_barrier(self.empty, after, self.RELEASES), ((after // self.RELEASES) & 1) ^ 1)

    @gluon.jit
    def expect(self, n, BYTES: gl.constexpr):
        """Makes n full once TMA has delivered this many bytes."""
        mbarrier.expect(self.full_barrier(n), BYTES)

    @gluon.jit
    def load(self, n, tensor, source, piece=0):
        """Starts the copy of a tile from global memory. tensor: a four-dimensional descriptor. source: coordinates."""
        async_load(tensor, source, self.full_barrier(n), view_for_tma(self.stage(n, piece), tensor))

    @gluon.jit
    def commit(self, n, pred=True):
        """Marks n full, if ``pred``."""
        mbarrier.arrive(self.full_barrier(n), count=1, pred=pred)

    @gluon.jit
    def commit_copies(self, n):
        """Makes n full once the asynchronous copies of all threads have arrived. Readers by TMA or wgmma fence before they read."""
        copies_arrive(self.full_barrier(n), increment_count=False)

    @gluon.jit
    def wait(self, n, pred=True):
        """Waits until n is full, if ``pred``."""
        mbarrier.wait(self.full_barrier(n), (n // self.STAGES) & 1, pred=pred)

    @gluon.jit
    def release(self, n, pred=True):
        """Marks n used, if ``pred``. Only for a ring with its own barriers."""
        gl.static_assert(self.RELEASES == self.STAGES)
        mbarrier.arrive(_barrier(self.empty, n, self.STAGES), count=1, pred=pred)

    @gluon.jit
    def full_barrier(self, n):
        """Returns the barrier that signals that n is full."""
        return _barrier(self.full, n, self.STAGES)

    @gluon.jit
    def place(self, n):
        """Returns the index of n's stage."""
        return n % self.STAGES

    @gluon.jit
    def stage(self, n, piece=0):
        """Returns the buffer of n, or of a piece of it."""
        return self.data.index(self.place(n) * self.PIECES + piece)


@record
class PingPong:
    """Makes two warp groups alternate: one computes while the products of the other run (arXiv:2407.08608, Sec. 3.1)."""

    first: gl.shared_memory_descriptor  # a barrier: the first group may start its products
    second: gl.shared_memory_descriptor  # a barrier: the second group may

    @gluon.jit
    def take(self, n, GROUP: gl.constexpr):
        """Waits until a group, 0 or 1, may start its products for the n-th time."""
        if GROUP == 0:
            mbarrier.wait(self.first, (n & 1) ^ 1)
        else:
            mbarrier.wait(self.second, n & 1)

    @gluon.jit
    def pass_on(self, GROUP: gl.constexpr):
        mbarrier.arrive(self.second if GROUP == 0 else self.first, count=1)


@gluon.jit
def new_ping_pong():
    first, second = _barriers(1), _barriers(1)
    mbarrier.init(first, count=1)
    mbarrier.init(second, count=1)
    return PingPong(first, second)


@gluon.jit
def allocate_tiles(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns shared memory for tiles that TMA loads and products read."""
    BITS: gl.constexpr = dtype.primitive_bitwidth
    SWIZZLE: gl.constexpr = 128 if COLUMNS * BITS >= 1024 else COLUMNS * BITS // 8
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=SWIZZLE, element_bitwidth=BITS, rank=2)
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS, COLUMNS], flat)


@gluon.jit
def new_ring(data, STAGES: gl.constexpr, PIECES: gl.constexpr = 1, CONSUMERS: gl.constexpr = 1, FILLS: gl.constexpr = 1):
    """Returns a ring over data of shape (STAGES * PIECES, ...). CONSUMERS: how many must release a stage. FILLS: how many commit
    it: 1, or the number of threads that copy elements."""
    full, empty = _barriers(STAGES), _barriers(STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(_barrier(full, stage, STAGES), count=FILLS)
        mbarrier.init(_barrier(empty, stage, STAGES), count=CONSUMERS)
    return Ring(data, full, empty, STAGES, PIECES, STAGES)


@gluon.jit
def new_linked_ring(other, data, STAGES: gl.constexpr, PIECES: gl.constexpr = 1, FILLS: gl.constexpr = 1):
    """Returns a ring that is released by the releases of ``other``, a ring with at least as many stages. FILLS: as for
    ``new_ring``."""
    full = _barriers(STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(_barrier(full, stage, STAGES), count=FILLS)
    return Ring(data, full, other.empty, STAGES, PIECES, other.STAGES)


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    # With one stage the barriers have one dimension less, as each dimension of a shared descriptor costs shared memory.
    shape: gl.constexpr = [STAGES, 1] if STAGES > 1 else [1]
    return gl.allocate_shared_memory(gl.int64, shape, mbarrier.MBarrierLayout())


@gluon.jit
def _barrier(barriers, n, STAGES: gl.constexpr):
    return barriers.index(n % STAGES) if STAGES > 1 else barriers
