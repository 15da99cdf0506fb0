"""A ring of stages in shared memory, which one warp fills in turn and others use, with its barriers and their phases.

Stages are named by a count n of what has gone through the ring, from 0: n lies in stage n % STAGES, and its barriers complete
for the (n // STAGES)-th time. Everybody counts for themselves, so nothing about a ring is kept in registers but that count.

Who fills:  acquire(n), then expect(n, bytes) and load(n, ...), which the copy engine commits; or stores and commit(n).
Who uses:   wait(n), reads of stage(n), release(n).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..common.gluon import async_load, of_tensor, record


@record
class Ring:
    data: gl.shared_memory_descriptor  # (STAGES * PIECES, ...); of a ring of one stage, it may be that stage
    full: gl.shared_memory_descriptor  # a barrier for each stage
    empty: gl.shared_memory_descriptor  # likewise: its own, or those of a ring that is released with it
    STAGES: gl.constexpr
    PIECES: gl.constexpr  # of a stage
    RELEASES: gl.constexpr  # stages of the ring that ``empty`` belongs to, STAGES or more

    @gluon.jit
    def acquire(self, n):
        """Waits until the stage of n may be filled: until n - STAGES, if there was one, is released."""
        # By count of the barriers' own ring, which is released n + RELEASES - STAGES as it releases n - STAGES here.
        after = n + (self.RELEASES - self.STAGES)
        mbarrier.wait(_barrier(self.empty, after, self.RELEASES), ((after // self.RELEASES) & 1) ^ 1)

    @gluon.jit
    def expect(self, n, BYTES: gl.constexpr):
        """n is full once the copy engine has brought so many bytes."""
        mbarrier.expect(self.filled(n), BYTES)

    @gluon.jit
    def load(self, n, tensor, source, piece=0):
        """Starts the copy of a tile from global memory. tensor: descriptor with four dimensions. source: coordinates."""
        async_load(tensor, source, self.filled(n), of_tensor(self.stage(n, piece), tensor))

    @gluon.jit
    def commit(self, n):
        """n is full."""
        mbarrier.arrive(self.filled(n), count=1)

    @gluon.jit
    def wait(self, n):
        """Waits until n is full."""
        mbarrier.wait(self.filled(n), (n // self.STAGES) & 1)

    @gluon.jit
    def release(self, n, pred=True):
        """n has been used, if ``pred``. Of a ring with barriers of its own."""
        gl.static_assert(self.RELEASES == self.STAGES)
        mbarrier.arrive(_barrier(self.empty, n, self.STAGES), count=1, pred=pred)

    @gluon.jit
    def filled(self, n):
        """The barrier that says that n is full."""
        return _barrier(self.full, n, self.STAGES)

    @gluon.jit
    def place(self, n):
        """The number of n's stage."""
        return n % self.STAGES

    @gluon.jit
    def stage(self, n, piece=0):
        """Where n, or a piece of it, lies."""
        return self.data.index(self.place(n) * self.PIECES + piece)


@gluon.jit
def ring_of(data, STAGES: gl.constexpr, PIECES: gl.constexpr = 1, CONSUMERS: gl.constexpr = 1):
    """A ring in shared memory of shape (STAGES * PIECES, ...). CONSUMERS: how many release a stage."""
    full, empty = _barriers(STAGES), _barriers(STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(_barrier(full, stage, STAGES), count=1)
        mbarrier.init(_barrier(empty, stage, STAGES), count=CONSUMERS)
    return Ring(data, full, empty, STAGES, PIECES, STAGES)


@gluon.jit
def ring_beside(other, data, STAGES: gl.constexpr, PIECES: gl.constexpr = 1):
    """A ring whose n is released when that of ``other``, a ring of as many stages or more, is."""
    full = _barriers(STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(_barrier(full, stage, STAGES), count=1)
    return Ring(data, full, other.empty, STAGES, PIECES, other.STAGES)


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    # One has a dimension less: each dimension of what warps share takes shared memory.
    shape: gl.constexpr = [STAGES, 1] if STAGES > 1 else [1]
    return gl.allocate_shared_memory(gl.int64, shape, mbarrier.MBarrierLayout())


@gluon.jit
def _barrier(barriers, n, STAGES: gl.constexpr):
    return barriers.index(n % STAGES) if STAGES > 1 else barriers
