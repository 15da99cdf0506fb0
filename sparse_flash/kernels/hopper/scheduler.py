"""Which tile each of the persistent programs computes next, and what the table says of it.

Programs take tiles from a queue, heaviest first: a counter in global memory. A warp of its own takes them, looks them up,
and tells the others through shared memory, one tile ahead, so that nobody waits for the table.

What it tells lies in two slots, of which it writes one again once the tile two turns back is done. Each reader of that tile
has read by then: the loading warp before it asked for the tile's data, which the computing warps waited for; they before they
gave the tile's place back (forward), or handed its dK and dV to the sending warp, which gives it back (backward).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Fields of a work item, int32: see ``Table.work``.
WORK_FIELDS = gl.constexpr(8)


@gluon.jit
def next_tile(queue):
    """The number of the next tile, after the first, which is that of the program. queue: (2,) int32, both 0 at the start."""
    return gl.num_programs(0) + gl.atomic_add(queue, 1, sem="relaxed")


@gluon.jit
def leave(queue):
    """The last program to leave the queue makes it ready for the next launch."""
    if gl.atomic_add(queue + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(queue, 0)
        gl.store(queue + 1, 0)


@gluon.jit
def slot_and_head(number, slots, heads, heads_together):
    """Tile ``number`` as (slot, head): for each group of heads whose keys and values fit the L2 cache together, slot after
    slot, and within a slot all heads of the group."""
    group = number // (slots * heads_together)
    rest = number - group * slots * heads_together
    together = gl.minimum(heads_together, heads - group * heads_together)
    return rest // together, group * heads_together + rest % together


@gluon.jit
def mask_of(p, batch, head):
    """Which of the stored masks a head uses."""
    mask = batch * 0
    # One mask for all is the first, and the first tile waits for one read less.
    if (p.mask_batch_stride != 0) | (p.mask_head_stride != 0):
        mask = gl.load(p.mask_index + batch * p.mask_batch_stride + head * p.mask_head_stride)
    return mask


@gluon.jit
def work_item(work, mask, items, item):
    """(row, begin, runs, bits, end, part) of an item of a mask: see ``Table.work``."""
    line = work + (mask * items + item) * WORK_FIELDS
    row, part = gl.load(line), gl.load(line + 5)
    return row, gl.load(line + 1), gl.load(line + 2), gl.load(line + 3), gl.load(line + 4), part


@gluon.jit
def allocate_notes(SLOTS: gl.constexpr, FIELDS: gl.constexpr):
    """Shared memory for ``tell`` and ``told``."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], layout)


@gluon.jit
def tell(notes, slot, values):
    """Writes int32 scalars into a slot, for whoever waits on a barrier that the writer arrives at later."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for field in gl.static_range(len(values)):
        notes.index(slot * len(values) + field).store(gl.full([1], values[field], gl.int32, layout=layout))


@gluon.jit
def told(notes, slot, FIELD: gl.constexpr, FIELDS: gl.constexpr):
    """A scalar of a slot."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(notes.index(slot * FIELDS + FIELD).load(layout), 0)
