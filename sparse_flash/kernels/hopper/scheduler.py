"""Chooses the next tile of each persistent program, and reads its row of the table.

Programs take tiles from a queue, a counter in global memory, heaviest first. The scheduler warp takes a tile, reads the table, and
passes a ``TileInfo`` to the other warps through a ring in shared memory. It works one tile ahead, so no warp waits for the table.

The ring has two slots. A slot is released with the tile's queries (forward) or keys (backward). By then every warp has read the
slot:

- The loading warp reads it before it requests the tile's data.
- The computing warps wait for that data. They read the slot before they release the tile's queries (forward), or before they hand
  dK and dV to the sending warp, which releases the keys (backward).

If shared memory holds the queries, or keys, of one tile only, the slots have their own barriers, and each warp that releases that
ring also releases the slot.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.gluon import record
from .lengths import Cuts, TokenLengths, cut_steps
from .ring import Ring, new_linked_ring, new_ring

TILE = gl.constexpr(128)  # queries (forward), or keys (backward) unless blocks are smaller
# Fields of a work item, int32: see ``Table.work``.
WORK_FIELDS = gl.constexpr(8)


@record
class Heads:
    queries: gl.tensor  # how many
    group: gl.tensor  # how many of them share a key head

    @gluon.jit
    def of(self, batch_head):
        """Returns (batch, head) of a batch-head of queries."""
        return batch_head // self.queries, batch_head % self.queries


class TablePointers(NamedTuple):
    """The lookup table as a launch passes it, by query or by key. Without a table, the pointers are not read."""

    mask_index: Any
    work: Any
    entries: Any  # the blocks of each row, or column
    tile_idx: Any
    tile_runs: Any
    tile_bits: Any


@record
class TableArguments:
    """Holds the lookup table, whose first fields are ``TablePointers``. Without a table (SPARSE false), a tile takes every step."""

    mask_index: gl.tensor
    work: gl.tensor
    entries: gl.tensor
    tile_idx: gl.tensor
    tile_runs: gl.tensor
    tile_bits: gl.tensor
    mask_batch_stride: gl.tensor
    mask_head_stride: gl.tensor
    BLOCK: gl.constexpr
    SPARSE: gl.constexpr
    OWN_STARTS: gl.constexpr  # whether blocks start at any token: see ``document_tables``

    @gluon.jit
    def mask_of(self, batch, head):
        """Returns the number of the stored mask that a head uses."""
        mask = batch * 0
        # A single mask has number 0. Without the read, the first tile starts earlier.
        if (self.mask_batch_stride != 0) | (self.mask_head_stride != 0):
            mask = gl.load(self.mask_index + batch * self.mask_batch_stride + head * self.mask_head_stride)
        return mask

    @gluon.jit
    def position(self, step, stop, STEP: gl.constexpr):
        """Returns the first token of a step of STEP tokens; 0 past the end of a row. step: counted from the table's start."""
        STEPS: gl.constexpr = self.BLOCK // STEP
        if self.SPARSE:
            block = gl.load(self.entries + step // STEPS, mask=step < stop, other=0)
            start = block if self.OWN_STARTS else block * self.BLOCK
            position = gl.where(step < stop, start + step % STEPS * STEP, 0)
        else:
            position = step * STEP
        return position


@record
class Queue:
    """Holds the tiles that the programs of a launch share."""

    counters: gl.tensor  # (2,) int32, both 0 at the start: tiles taken, programs that have left
    items: gl.tensor  # work items of a mask
    tiles: gl.tensor  # of all items
    heads_together: gl.tensor  # batch-heads that are computed together: see ``Scheduler.lookup``


@record
class TileInfo:
    """Describes a tile to the other warps. Steps are counted from the table's start."""

    first: gl.tensor  # query (forward) or key (backward); -1 after the last tile
    batch_head: gl.tensor  # of queries; with TOGETHER, the first of the head group
    begin: gl.tensor  # start of its full steps
    runs: gl.tensor  # start of its run steps
    bits: gl.tensor  # start of its bit steps
    end: gl.tensor  # end of its bit steps
    position: gl.tensor  # the first token of its first step
    split: gl.tensor  # its number, from 1, if it is a split of a row, otherwise 0
    cuts: Cuts
    # Only with OWN_STARTS, otherwise undefined:
    stop: gl.tensor  # the end of its tokens
    to_padded: gl.tensor  # added to a token's position, gives its position on the axis of whole blocks
    skipped: gl.tensor  # 1 if the last full block has one step instead of two, otherwise 0

    @gluon.jit
    def part_from(self, row):
        """Returns the part of a tile from a row on."""
        bounds = self.begin, self.runs, self.bits, self.end
        of_document = self.stop, self.to_padded, self.skipped
        return TileInfo(self.first + row, self.batch_head, *bounds, self.position, self.split, self.cuts, *of_document)


# Numbers of fields of a TileInfo in shared memory: with lengths, with blocks of documents, with splits, and with none of these.
CUT_FIELDS = gl.constexpr(17)
DOCUMENT_FIELDS = gl.constexpr(11)
SPLIT_FIELDS = gl.constexpr(8)
WHOLE_FIELDS = gl.constexpr(7)


@record
class Scheduler:
    slots: Ring  # of ``TileInfo``, a piece per field
    table: TableArguments
    heads: Heads
    queue: Queue
    length: gl.tensor  # of the axis along which steps go
    lengths: TokenLengths
    TILE: gl.constexpr  # tokens of a tile
    STEP: gl.constexpr  # tokens of a step
    BY_KEY: gl.constexpr
    DOWN: gl.constexpr  # whether partial blocks are visited from the last to the first
    SPLIT: gl.constexpr  # whether rows may be split
    TOGETHER: gl.constexpr  # whether a tile computes a whole head group, one query head after the other

    @gluon.jit
    def tile(self, turn):
        """Waits for the program's next tile. turn: the number of the program's previous tiles."""
        self.slots.wait(turn)
        return self.read_tile(turn)

    @gluon.jit
    def read_tile(self, turn):
        """Returns ``tile`` without waiting again."""
        split = turn * 0
        if self.slots.PIECES >= SPLIT_FIELDS:
            split = self._read(turn, 7)
        first = self._read(turn, 0)
        cuts = Cuts(first, first, first, first, first, first, first, first, first)
        if self.lengths.ANY:
            cuts = Cuts(
                low=self._read(turn, 8),
                own=self._read(turn, 9),
                shift_low=self._read(turn, 10),
                shift_runs=self._read(turn, 11),
                shift_bits=self._read(turn, 12),
                other_first=self._read(turn, 13),
                other_last=self._read(turn, 14),
                own_first=self._read(turn, 15),
                own_last=self._read(turn, 16),
            )
        stop, to_padded, skipped = first, first, first
        if self.table.OWN_STARTS:
            stop, to_padded, skipped = self._read(turn, 8), self._read(turn, 9), self._read(turn, 10)
        return TileInfo(
            first=first,
            batch_head=self._read(turn, 1),
            begin=self._read(turn, 2),
            runs=self._read(turn, 3),
            bits=self._read(turn, 4),
            end=self._read(turn, 5),
            position=self._read(turn, 6),
            split=split,
            cuts=cuts,
            stop=stop,
            to_padded=to_padded,
            skipped=skipped,
        )

    @gluon.jit
    def _read(self, turn, FIELD: gl.constexpr):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.max(self.slots.stage(turn, FIELD).load(layout), 0)

    @gluon.jit
    def hand_over(self, turn, number, items, tiles):
        """Passes a tile to the other warps. number: its index in the queue. items, tiles: from ``in_use``."""
        tile = self.lookup(number, items, tiles)
        cuts = tile.cuts
        plain = tile.first, tile.batch_head, tile.begin, tile.runs, tile.bits, tile.end, tile.position, tile.split
        if self.table.OWN_STARTS:
            own = tile.stop, tile.to_padded, tile.skipped
            self._write(turn, plain + own)
        else:
            shifts = cuts.low, cuts.own, cuts.shift_low, cuts.shift_runs, cuts.shift_bits
            self._write(turn, plain + shifts + (cuts.other_first, cuts.other_last, cuts.own_first, cuts.own_last))

    @gluon.jit
    def hand_over_end(self, turn):
        self._write(turn, (-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0))

    @gluon.jit
    def _write(self, turn, values):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        for field in gl.static_range(self.slots.PIECES):
            self.slots.stage(turn, field).store(gl.full([1], values[field], gl.int32, layout=layout))
        self.slots.commit(turn)

    @gluon.jit
    def position(self, tile, step, stop):
        """Returns the first token of a step of a tile. stop: the end of the tile's steps."""
        entry = self.entry_step(tile, step)
        return self.table.position(entry, stop + (entry - step), self.STEP)

    @gluon.jit
    def entry_step(self, tile, step):
        """Returns where a step of a tile is in the table, which also has the steps that the tile leaves out."""
        if self.lengths.ANY:
            step += tile.cuts.shift(step, tile.bits)
        elif self.table.OWN_STARTS:
            step += gl.where(step >= tile.runs, tile.skipped, 0)
        return step

    @gluon.jit
    def first_step(self, first, begin, runs, end):
        """Returns the first step of a tile; ``next_step`` gives the others.

        Partial blocks come first, so that computing their masks overlaps the start of the tile. With DOWN, the first of them is the
        block of a causal row's own tokens, in which each query keeps a key. Without a table, steps by key start next to the tile's
        keys: if all programs added to the same tile of dQ at once, they would wait for each other.
        """
        if self.DOWN:
            step = gl.where(end > runs, end - 1, begin)
        elif self.table.SPARSE or not self.BY_KEY:
            step = gl.where(end > runs, runs, begin)
        else:
            step = first // self.STEP % end
            if self.lengths.ANY:
                step = begin + first // self.STEP % (end - begin)
        return step

    @gluon.jit
    def next_step(self, tile, step):
        """Returns the step of a tile after ``step``; after the last step, any step of the tile."""
        if self.DOWN:
            following = gl.where(step > tile.runs, step - 1, gl.where(step + 1 >= tile.runs, tile.begin, step + 1))
        else:
            following = gl.where(step + 1 >= tile.end, tile.begin, step + 1)
        return following

    @gluon.jit
    def other_partial_steps(self, tile):
        """Returns (begin, end) of the steps of partial blocks, without the first."""
        return tile.runs + (0 if self.DOWN else 1), tile.end - (1 if self.DOWN else 0)

    @gluon.jit
    def in_use(self):
        """Returns the numbers of items and of tiles to compute. A table made on the device has space for splits, or for blocks of
        documents, and the host does not know how many are in use. The others never enter the queue."""
        items, tiles = self.queue.items, self.queue.tiles
        if self.SPLIT or self.table.OWN_STARTS:
            items = gl.load(self.table.work + (5 if self.table.OWN_STARTS else 6))
            tiles = tiles // self.queue.items * items
        return items, tiles

    @gluon.jit
    def lookup(self, number, items, tiles):
        """Returns the TileInfo of a number in the queue. ``heads_together`` batch-heads, whose keys and values fit the L2 cache,
        are computed together: items follow each other, each with all of these batch-heads."""
        table, heads_together = self.table, self.queue.heads_together
        # Tokens of a row of the table. A tile may be taller than a block, but not taller than a row.
        ROW: gl.constexpr = self.TILE if self.TILE > table.BLOCK else table.BLOCK
        TILES: gl.constexpr = ROW // self.TILE
        STEPS: gl.constexpr = table.BLOCK // self.STEP if table.SPARSE else 1
        slots = items * TILES
        group = number // (slots * heads_together)
        rest = number - group * slots * heads_together
        together = gl.minimum(heads_together, tiles // slots - group * heads_together)
        slot, batch_head = rest // together, group * heads_together + rest % together
        if self.TOGETHER:
            batch_head *= self.heads.group  # the first query head of the head group
        split = slot * 0
        stop, to_padded, skipped = slot, slot, slot
        if table.SPARSE:
            batch, head = self.heads.of(batch_head)
            item = table.work + (table.mask_of(batch, head) * self.queue.items + slot // TILES) * WORK_FIELDS
            if table.OWN_STARTS:
                gl.static_assert(TILES == 1)
                first, to_padded, document_end = gl.load(item), gl.load(item + 6), gl.load(item + 7)
                stop = gl.minimum(document_end, first + self.TILE)
            else:
                first = gl.load(item) * ROW + slot % TILES * self.TILE
                split = gl.load(item + 5)
            begin, runs, bits, end = gl.load(item + 1), gl.load(item + 2), gl.load(item + 3), gl.load(item + 4)
            split = gl.where(split > 0, (split - 1) * TILES + slot % TILES + 1, 0)
        else:
            first = slot * self.TILE
            begin = slot * 0
            end = (self.length + self.STEP - 1) // self.STEP
            # By query, an incomplete last step is masked like a run entry; by key, tokens past the end are zeros.
            runs = end if self.BY_KEY else self.length // self.STEP
            bits = end
        cuts = Cuts(first, first, first, first, first, first, first, first, first)
        if self.lengths.ANY:
            batch, head = self.heads.of(batch_head)
            bounds = begin, runs, bits, end
            begin, runs, bits, end, cuts = cut_steps(
                self.lengths, table, batch, first, bounds, TILE=self.TILE, STEP=self.STEP, BY_KEY=self.BY_KEY
            )
        else:
            skipped = slot * 0
            if table.OWN_STARTS and STEPS == 2:
                # These tables have no bit entries. A document's last block is the last full or the last run entry.
                skipped = self._is_half_empty(begin, runs, document_end)
                end = end * 2 - skipped - self._is_half_empty(runs, end, document_end)
                begin, runs, bits = begin * 2, runs * 2 - skipped, end
            else:
                begin, runs, bits, end = begin * STEPS, runs * STEPS, bits * STEPS, end * STEPS
        tile = TileInfo(first, batch_head, begin, runs, bits, end, first, split, cuts, stop, to_padded, skipped)
        position = self.position(tile, self.first_step(first, begin, runs, end), end)
        return TileInfo(first, batch_head, begin, runs, bits, end, position, split, cuts, stop, to_padded, skipped)

    @gluon.jit
    def _is_half_empty(self, begin, end, document_end):
        """Returns 1 if the second step of the last of entries begin .. end - 1 is past the document's end, otherwise 0."""
        start = gl.load(self.table.entries + (end - 1), mask=end > begin, other=-self.STEP)
        return (start + self.STEP >= document_end).to(gl.int32)


@gluon.jit
def new_scheduler(
    released_with,
    table,
    heads,
    queue,
    length,
    lengths,
    TILE: gl.constexpr,
    STEP: gl.constexpr,
    BY_KEY: gl.constexpr,
    SPLIT: gl.constexpr,
    CONSUMERS: gl.constexpr = 1,
    TOGETHER: gl.constexpr = False,
):
    """Returns a scheduler with its ring of slots. released_with: the ring of the tiles' queries (forward) or keys (backward).
    CONSUMERS: how many release a slot, if that ring has one stage."""
    WITHOUT_LENGTHS: gl.constexpr = SPLIT_FIELDS if SPLIT or not BY_KEY else WHOLE_FIELDS
    FIELDS: gl.constexpr = CUT_FIELDS if lengths.ANY else DOCUMENT_FIELDS if table.OWN_STARTS else WITHOUT_LENGTHS
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    data = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], layout)
    if released_with.STAGES > 1:
        slots = new_linked_ring(released_with, data, 2, FIELDS)
    else:
        slots = new_ring(data, 2, FIELDS, CONSUMERS)
    # In tiles taller than a block, some queries keep nothing of the last block: see ``first_step``.
    DOWN: gl.constexpr = not BY_KEY and TILE <= table.BLOCK
    return Scheduler(slots, table, heads, queue, length, lengths, TILE, STEP, BY_KEY, DOWN, SPLIT, TOGETHER)


@gluon.jit
def schedule(scheduler):
    """Runs the scheduler warp."""
    turn = 0
    number = gl.program_id(0)
    items, tiles = scheduler.in_use()
    while number < tiles:
        scheduler.hand_over(turn, number, items, tiles)
        turn += 1
        # A new tile is taken only after the last but one is released, so no tile waits here while other programs are idle.
        scheduler.slots.acquire(turn)
        number = gl.num_programs(0) + gl.atomic_add(scheduler.queue.counters, 1, sem="relaxed")
    scheduler.hand_over_end(turn)
    # The last program to leave the queue resets it for the next launch.
    if gl.atomic_add(scheduler.queue.counters + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(scheduler.queue.counters, 0)
        gl.store(scheduler.queue.counters + 1, 0)
