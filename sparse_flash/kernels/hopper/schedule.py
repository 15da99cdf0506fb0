"""Which tile each of the persistent programs computes next, and what the table says of it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Fields of a work item, int32: see ``Table.work``.
WORK_FIELDS = gl.constexpr(8)


@gluon.jit
def tiles_of_program(tiles):
    """How many of ``tiles`` this program computes."""
    programs = gl.num_programs(0)
    rounds = tiles // programs
    return rounds + (_place(rounds) < tiles % programs).to(gl.int32)


@gluon.jit
def tile_number(turn, tiles):
    """The program's tile of a turn; past its last, any tile."""
    return gl.minimum(turn * gl.num_programs(0) + _place(turn), tiles - 1)


@gluon.jit
def _place(turn):
    # There and back again: tiles come heaviest first, and who took the heaviest of one round takes the lightest of the next.
    program = gl.program_id(0)
    return gl.where(turn % 2 == 0, program, gl.num_programs(0) - 1 - program)


@gluon.jit
def slot_and_head(number, slots, heads, heads_together):
    """Tile ``number`` as (slot, head): for each group of heads whose keys and values fit the L2 cache together, slot after
    slot, and within a slot all heads of the group."""
    group = number // (slots * heads_together)
    rest = number - group * slots * heads_together
    together = gl.minimum(heads_together, heads - group * heads_together)
    return rest // together, group * heads_together + rest % together


@gluon.jit
def work_item(work, mask, items, item):
    """(row, begin, runs, bits, end, part) of an item of a mask: see ``Table.work``."""
    line = work + (mask * items + item) * WORK_FIELDS
    return gl.load(line), gl.load(line + 1), gl.load(line + 2), gl.load(line + 3), gl.load(line + 4), gl.load(line + 5)
