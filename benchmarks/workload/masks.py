"""The masks of the suites' rows."""

from dataclasses import replace
from math import isqrt, log

import numpy as np
import torch

from .cases import Mask, Shape

FULL, CAUSAL, BUTTERFLY = Mask.of("full"), Mask.of("causal"), Mask.of("butterfly")
BLOCK = 128


def list_density_masks(tokens: int) -> list[Mask]:
    """Masks of many densities and kinds, sparsest last within a kind."""
    unit, wide, middle, narrow = max(isqrt(tokens // BLOCK), 1), *(window_size(tokens, share) for share in (8, 16, 32))
    specs = (
        f"random(0.5); random(0.25); random(0.1); local({wide}); causal & local({middle}); strided({unit}); fixed({unit}); "
        f"butterfly; causal & power_of_two; bigbird; longformer({narrow}, tokens=64); causal & block_diagonal({wide}); "
        f"causal & (local({middle}) | butterfly)"
    ).split("; ")
    return [Mask.of(spec) for spec in specs]


def window_size(tokens: int, share: int) -> int:
    """A window of 1 / share of the tokens, at least a block."""
    return max(tokens // share, BLOCK)


def window(size: int) -> Mask:
    return Mask(f"causal & window {size}", f"causal & local({size})")


def strided(tokens: int) -> Mask:
    return Mask("strided", f"strided({isqrt(tokens // BLOCK)})")


def equal_documents(tokens: int, count: int = 7) -> Mask:
    """Token t belongs to document t // (tokens // count): ``count`` equal documents, and the few remaining tokens."""
    length = max(tokens // count, 1)
    bounds = tuple(dict.fromkeys([*range(0, tokens, length), tokens]))
    return Mask(f"causal in {count} documents", f"causal & documents({bounds})")


def ragged_documents(tokens: int, median: float = 665.0, sigma: float = 1.3, window: int | None = None) -> Mask:
    """Documents of log-normal lengths; the last is cut at the end. By default 54 in 65,536 tokens."""
    draws, bounds = torch.Generator().manual_seed(0), [0]
    while bounds[-1] < tokens:
        length = int(torch.empty(1).log_normal_(log(median), sigma, generator=draws).item()) + 1
        bounds.append(min(bounds[-1] + length, tokens))
    near, local = ("", "") if window is None else (f" & window {window}", f"local({window}) & ")
    return Mask(f"causal{near} in {len(bounds) - 1} ragged documents", f"causal & {local}documents({tuple(bounds)})")


def changed(mask: Mask, change: str) -> Mask:
    """change: one of ``changes.CHANGES``."""
    return replace(mask, label=f"{mask.label}, {change}", change=change)


def windowed_with_globals(size: int, tokens: int) -> Mask:
    """A window and global tokens, which are rows and columns of full length."""
    return Mask(f"window {size}, {tokens} global tokens", f"global_tokens({tokens}) | local({size})")


def random_blocks(density: float, block: int) -> Mask:
    return Mask(f"random {density:.0%}, blocks of {block}", f"random({density}, block={block})", block_size=block)


def bigbird_map(blocks: int) -> np.ndarray:
    """(blocks, blocks) bool: three diagonals, two global blocks, three random draws per row (arXiv:2007.14062, sec. 2)."""
    i, j = np.ogrid[:blocks, :blocks]
    kept = (abs(i - j) <= 1) | (i < 2) | (j < 2)
    draws = torch.Generator().manual_seed(0)
    for row in kept:
        row[torch.randint(0, blocks, (3,), generator=draws).numpy()] = True
    return kept


def longformer_map(blocks: int) -> np.ndarray:
    """(blocks, blocks) bool: nine diagonals and one global block (arXiv:2004.05150, sec. 3.1)."""
    i, j = np.ogrid[:blocks, :blocks]
    return (abs(i - j) <= 4) | (i < 1) | (j < 1)


def even_map(blocks: int, kept: int) -> np.ndarray:
    """(blocks, blocks) bool with ``kept`` blocks: rows differ by at most one, and so do columns. The extra cost of a skewed mask
    with as many blocks is the price of its skew. Cyclic diagonals, evenly spaced, the last one cut short."""
    entry = np.arange(kept)
    diagonal, row = entry // blocks, entry % blocks
    shift = diagonal * blocks // -(-kept // blocks)
    even = np.zeros((blocks, blocks), bool)
    even[row, (row + shift) % blocks] = True
    return even


def skewed_and_even(tokens: int) -> list[Mask]:
    """BigBird's and Longformer's block maps, each followed by an even one with as many blocks."""
    masks = []
    for name, build in (("bigbird", bigbird_map), ("longformer", longformer_map)):
        kept = build(tokens // BLOCK)
        masks += [
            _mask_from_map(f"{name} blocks", kept),
            _mask_from_map(f"even, as many as {name}", even_map(len(kept), int(kept.sum()))),
        ]
    return masks


def _mask_from_map(label: str, kept: np.ndarray) -> Mask:
    rows = "/".join("".join("01"[int(block)] for block in row) for row in kept)
    return Mask(label, f'from_blocks("{rows}", block={BLOCK})')


def list_peer_masks(shape: Shape) -> list[Mask]:
    """The masks of the peers suite at one of its four large shapes: all at the main one, else a selection."""
    tokens = shape.tokens
    if shape.head_dim == 64:
        return [FULL, CAUSAL, window(1024), BUTTERFLY]
    if tokens == 4096:
        return [FULL, CAUSAL]
    masks = [FULL, CAUSAL, window(1024), BUTTERFLY, strided(tokens)]
    if tokens == 65536:
        return [*masks, ragged_documents(tokens), windowed_with_globals(1024, 128), *skewed_and_even(tokens)]
    return [*masks, equal_documents(tokens)]
