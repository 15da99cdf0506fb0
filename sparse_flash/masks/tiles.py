"""Mask tiles: which pairs of a partial block are kept. Equal tiles are stored once.

A tile in which each row keeps one run of columns is a *run tile*, two numbers per row (causal, windows, documents, prefixes and
their intersections); any other is a *bit tile*.
"""

from collections.abc import Iterator

import numpy as np

EMPTY_TILE, FULL_TILE = -1, -2
_BATCH_PAIRS = 1 << 22


def pack_runs(first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Two numbers per row in one int32: ``first | stop << 16``; an empty run is 0."""
    packed = stop.astype(np.int32)
    # In place: numpy reuses temporaries by itself only where it recognizes the interpreter, not after torch.compile has run.
    packed <<= 16
    packed |= first.astype(np.int32)
    packed *= stop > first
    return packed


def unpack_runs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return packed & 0xFFFF, packed >> 16


def pack_bits(kept: np.ndarray) -> np.ndarray:
    """(n, block, block) bool -> (n, block, words) int32; column c is bit c % 32 of word c // 32."""
    data = np.packbits(kept, axis=2, bitorder="little")
    data = np.pad(data, ((0, 0), (0, 0), (0, -data.shape[2] % 4)))
    return np.ascontiguousarray(data).view(np.int32)


def unpack_bits(words: np.ndarray, block: int) -> np.ndarray:
    """The reverse of ``pack_bits``: (n, block, block) bool."""
    data = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape[:2], words.shape[2] * 4)
    return np.unpackbits(data, axis=2, bitorder="little")[:, :, :block].astype(bool)


def runs_to_dense(first: np.ndarray, stop: np.ndarray, block: int) -> np.ndarray:
    """Runs (n, block, runs), possibly overlapping -> (n, block, block) bool."""
    column = np.arange(block, dtype=first.dtype)
    kept = np.zeros((*first.shape[:2], block), bool)
    for run in range(first.shape[2]):
        kept |= (column >= first[:, :, run, None]) & (column < stop[:, :, run, None])
    return kept


def unique_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct rows of a 2-D array in order of first appearance: (index of each one's first row, number of each row)."""
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), rows.shape[1] * rows.itemsize)
    words = (np.pad(data, ((0, 0), (0, -data.shape[1] % 8))) if data.shape[1] % 8 else data).view(np.uint64)
    factors = np.random.default_rng(0).integers(1, 1 << 63, words.shape[1], dtype=np.uint64) * 2 + 1
    # Sorting one 64-bit sum per row is many times faster than sorting rows; the comparison below keeps it exact.
    _, first, inverse = np.unique(words @ factors, return_index=True, return_inverse=True)
    if not np.array_equal(words[first[inverse]], words):
        _, first, inverse = np.unique(words, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return first[order], np.argsort(order)[inverse.ravel()]


class TilePool:
    """Collects tiles of ``block`` x ``block`` pairs, equal ones once, and numbers them as they come. queries: rows, if others."""

    def __init__(self, block: int, queries: int | None = None):
        self.block, self.queries = block, queries or block
        self.is_bits: list[bool] = []
        self.kept: list[int] = []
        self._data: list[np.ndarray] = []
        self._number: dict[tuple[bool, bytes], int] = {}

    def add_runs(self, packed: np.ndarray) -> np.ndarray:
        """Run tiles (n, block) int32 -> tile numbers (n,) int64, or EMPTY_TILE or FULL_TILE."""
        unique, inverse = unique_rows(packed)
        first, stop = unpack_runs(packed[unique])
        kept = (stop - first).sum(1)
        numbers = [self._add(False, tile, n) for tile, n in zip(packed[unique], kept.tolist(), strict=True)]
        return np.array(numbers, np.int64)[inverse]

    def add_bits(self, words: np.ndarray) -> np.ndarray:
        """Bit tiles (n, block, words) int32 that are not empty, full or made of runs -> tile numbers (n,) int64."""
        kept = np.bitwise_count(words.view(np.uint32)).sum((1, 2), dtype=np.int64)
        return np.array([self._add(True, tile, n) for tile, n in zip(words, kept.tolist(), strict=True)], np.int64)

    def add_dense(self, kept: np.ndarray) -> np.ndarray:
        """Tiles (n, block, block) bool -> tile numbers as in ``add_runs``; those with one run per row become run tiles."""
        words = pack_bits(kept)
        unique, inverse = unique_rows(words.reshape(len(words), self.queries * words.shape[2]))
        tiles = kept[unique]
        rises = (tiles[:, :, 1:] & ~tiles[:, :, :-1]).sum(2) + tiles[:, :, 0]
        single = (rises <= 1).all(1)
        first, length = tiles.argmax(2), tiles.sum(2)
        runs = pack_runs(first, first + length)
        numbers = [
            self._add(not single[k], runs[k] if single[k] else words[unique[k]], int(length[k].sum())) for k in range(len(unique))
        ]
        return np.array(numbers, np.int64)[inverse]

    def _add(self, is_bits: bool, tile: np.ndarray, kept: int) -> int:
        if kept in (0, self.queries * self.block):
            return FULL_TILE if kept else EMPTY_TILE
        key = (is_bits, tile.tobytes())
        if key not in self._number:
            self._number[key] = len(self._data)
            self._data.append(np.array(tile))
            self.is_bits.append(is_bits)
            self.kept.append(kept)
        return self._number[key]

    def stack(self, numbers: np.ndarray, is_bits: bool) -> np.ndarray:
        """The tiles of one kind with these numbers: (n, block) or (n, block, words) int32."""
        shape = (self.queries, -(-self.block // 32)) if is_bits else (self.queries,)
        return np.stack([self._data[n] for n in numbers]) if len(numbers) else np.zeros((0, *shape), np.int32)


def dense_batches(count: int, block: int) -> Iterator[slice]:
    """Slices of ``count`` tiles, about four million pairs each, so evaluating tokens takes bounded memory."""
    step = max(1, _BATCH_PAIRS // block**2)
    return (slice(low, min(low + step, count)) for low in range(0, count, step))
