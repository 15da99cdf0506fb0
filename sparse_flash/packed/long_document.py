"""The table of one long document under a pattern, compiled once on the host, which contains those of documents of any lengths."""

from functools import cached_property

import numpy as np
import torch

from ..masks.block_mask import compile_up_to
from ..masks.cache import keep_if_captured, run_in_thread
from ..masks.document_blocks import single_runs
from ..masks.memory import cached_until_cleared
from ..masks.pattern import short_text
from .documents import BLOCK


def long_document(pattern, q_longest: int, k_longest: int, shares_documents: bool, device) -> "LongDocument":
    """For documents of up to these lengths. Compiled for powers of two of blocks, so for few lengths."""
    k_blocks, q_blocks = (1 << max(0, -(-longest // BLOCK) - 1).bit_length() for longest in (k_longest, q_longest))
    document = _long_document(pattern, k_blocks, 0 if shares_documents else q_blocks, device)
    keep_if_captured(document, device)
    return document


@cached_until_cleared(maxsize=64)
def _long_document(pattern, k_blocks, before, device) -> "LongDocument":
    return run_in_thread(LongDocument, pattern, k_blocks, before, device)


class LongDocument:
    """A document of ``k_blocks`` blocks of keys, with ``before`` blocks of queries before the first key."""

    def __init__(self, pattern, k_blocks: int, before: int, device):
        self.mask = compile_up_to(pattern, (before + k_blocks) * BLOCK, k_blocks * BLOCK, BLOCK, "cpu")
        if self.mask.mask_index.numel() > 1:
            raise ValueError(f"packed documents take one pattern for all; got {short_text(pattern)}; call once for each group")
        self.k_blocks, self.before, self._device = k_blocks, before, device

    @cached_property
    def entries(self) -> list[torch.Tensor]:
        """On the device: of each entry row * k_blocks + column, ascending, int64, and 3 * tile + kind, int32; run and bit tiles."""

        def make() -> list[torch.Tensor]:
            rows, cols, kinds, tiles = self.mask.by_query.entries()
            at = np.append(rows * self.k_blocks + cols, np.iinfo(np.int64).max)  # there is one at least
            order, tile = np.argsort(at), np.append(3 * tiles + kinds, 0).astype(np.int32)
            made = torch.from_numpy(at[order]), torch.from_numpy(tile[order]), *self.mask.tiles
            return [tensor.to(self._device) for tensor in made]

        return run_in_thread(make)

    def most_entries(self, q_blocks: int, k_blocks: int, longest: int) -> int:
        """An upper bound on the entries in this many blocks of documents of up to ``longest`` key blocks."""
        densest, of_rows, of_columns = self._weights
        if self.before:
            return max(2, min(q_blocks * of_rows, k_blocks * of_columns))
        return max(2, int(q_blocks * densest[max(0, longest - 1)]) + 1)

    @cached_property
    def _weights(self) -> tuple[np.ndarray, int, int]:
        """The most entries in a row of documents of up to n blocks, on average, for each n; in any row; in any column."""
        rows, cols, _, _ = run_in_thread(self.mask.by_query.entries)
        entries = np.cumsum(np.bincount(np.maximum(rows, cols), minlength=self.k_blocks)[: self.k_blocks])
        densest = np.maximum.accumulate(entries / np.arange(1, self.k_blocks + 1))
        of_rows, of_columns = (int(np.bincount(numbers, minlength=1).max()) for numbers in (rows, cols))
        return densest, of_rows, of_columns

    @cached_property
    def runs(self) -> "LongRuns | None":
        """None for a pattern whose queries do not keep one run of keys each, ascending from query to query."""

        def make() -> LongRuns | None:
            runs = single_runs(self.mask)
            return runs and LongRuns(*runs, self.before == 0, self._device)

        return run_in_thread(make)


class LongRuns:
    """The runs of keys of a long document. constants: first and stop of each query, (2, queries) int32; mask_index and tile_bits of
    a mask without bit tiles. longest: keys of a run."""

    def __init__(self, first: np.ndarray, stop: np.ndarray, square: bool, device):
        self._square = square
        # The most keys spanned by BLOCK consecutive queries that start in a given block; they lie in it and the next.
        some = stop > first
        low, high = np.where(some, first, 1 << 30).reshape(-1, BLOCK).min(1), np.where(some, stop, 0).reshape(-1, BLOCK).max(1)
        reach = np.maximum(0, np.maximum(high, np.append(high[1:], 0)) - np.minimum(low, np.append(low[1:], 1 << 30)))
        self._blocks = -(-reach // BLOCK) + 1
        zeros = (torch.zeros(shape, dtype=torch.int32, device="cpu") for shape in ((1, 1), (2, BLOCK, BLOCK // 32)))
        kept = np.maximum(stop - first, 0)
        self.longest, self._kept_before = int(kept.max(initial=0)), np.cumsum(kept)
        runs = torch.from_numpy(np.stack([first, stop]).astype(np.int32))
        self.constants = [t.to(device) for t in (runs, *zeros)]

    def mean_keys(self, tokens: int) -> float:
        """The keys of a query of a document of so many tokens, on average."""
        tokens = min(max(1, tokens), len(self._kept_before))
        return float(self._kept_before[tokens - 1]) / tokens

    def find_capacity(self, q_blocks: int, k_blocks: int, longest: int) -> tuple[int, int]:
        """Upper bounds on the entries and on the tiles of all documents of up to ``longest`` keys together.

        A block of queries of one document touches as many blocks as its runs span, plus one. Any other block of queries touches at
        most those from its first document's first key to its last document's last key. A document meets at most two of these, so
        they touch 2 * (k_blocks + q_blocks) blocks in total. All of them may be partial, and so may the blocks of the two query
        blocks where a document's queries begin and cease to keep something: 2 * (k_blocks + 2 * q_blocks) in total. In any other
        block of queries, runs start or stop in the partial blocks. Both ascend, so a document has no more of either than it has
        blocks of keys and of queries: 2 * (k_blocks + 2 * q_blocks) in total.
        """
        longest = -(-longest // BLOCK)
        each = np.minimum(self._blocks, longest + 1)
        if self._square:
            # The mean over a document's first query blocks, for the worst of its lengths.
            each = np.cumsum(each) / np.arange(1, len(each) + 1)
            each = each[: max(1, longest)]
        entries = int(np.ceil(q_blocks * each.max())) + 2 * (k_blocks + q_blocks)
        return max(2, entries), max(2, min(entries, 6 * k_blocks + 10 * q_blocks))
