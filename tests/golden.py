"""Writes digests of what built-in patterns and choosers keep to patterns/golden.json, so that no version changes it in silence.

make golden    adds what is missing from the file; it changes nothing that is there
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch

import sparse_flash as sf
from sparse_flash import patterns
from sparse_flash.masks.chooser import has_choosers
from sparse_flash.masks.registry import find_docstring_line, pattern_class

FILE = Path(__file__).parent / "patterns" / "golden.json"
PAIRS_AT, BLOCKS_AT = (300, 1024, 4096), (200, 512, 1000)
# Texts beside the specimens: fields that these leave at their defaults, forms of expressions, choosers.
OTHERS = [
    "bigbird(window=3, density=0.1, global_blocks=2, seed=5, block=64)",
    "butterfly(factors=3, block=32)",
    "causal & (local(1024) | sinks(4))",
    "dilated(3, 2, block=16)",
    "fixed(8, summary=3, block=16)",
    "frame_window(video_layout(7, 15, 30, tile=(1, 8, 8), prefix=9), 3, anchors=2, keep_beside=False)",
    "neighborhood((9, 16, 28), (3, 5, 7), stride=(1, 2, 3), dilation=(2, 1, 4), causal=(True, False, False))",
    "neighborhood((9, 16, 28), (4, 6, 8))",
    "per_head([causal, ~local(9)])",
    "power_of_two(factors=4, block=32)",
    "radial(video_layout(7, 15, 30, tile=(1, 8, 8), suffix=9), anchors=2)",
    "random(0.2, seed=3, block=16)",
    "shifted(documents((0, 70, 900, 2600)), 100) | global_tokens(100) | last_tokens(50)",
    "strided(6, block=16)",
    "tile_window(video_layout(7, 15, 30, tile=(2, 4, 8), prefix=5), (1, 3, 3), keep_beside=False)",
    "causal & (pooled(mass=0.7, block=64) | sinks(9))",
    "sampled(5, floor=0.05, block=64)",
    "pooled(budget=0.3, block=64)",
]


def specs() -> list[str]:
    """Returns spec texts in which every built-in pattern and chooser occurs, except those without text."""
    names = [name for name in patterns.__all__ if name != "from_mask_fn"]
    specimens = [eval(find_docstring_line(pattern_class(name), "specimen"), vars(patterns)).to_spec() for name in names]
    choosers = [
        f"causal & {find_docstring_line(pattern_class(name), 'specimen')}" for name in sf.list_choosers() if name != "scored"
    ]
    return sorted([*specimens, *(sf.parse(text).to_spec() for text in [*OTHERS, *choosers])])


def golden(text: str) -> dict[str, str]:
    """Returns a digest of what the text keeps at each of three lengths."""
    kept = (
        {str(n): _kept_blocks(text, n) for n in BLOCKS_AT}
        if has_choosers(text)
        else {str(n): _kept_pairs(text, n) for n in PAIRS_AT}
    )
    return {length: _short(found) for length, found in kept.items()}


def _kept_pairs(text: str, tokens: int) -> np.ndarray:
    pattern = sf.parse(text)
    pattern = pattern.map_leaves(lambda leaf: sf.shifted(leaf, 0) if leaf.named_tokens() else leaf)
    return sf.compile_mask(pattern, tokens, block_size=64).to_dense().numpy()


def _kept_blocks(text: str, tokens: int) -> np.ndarray:
    q, k = (_numbers((1, heads, tokens, 16), step) for heads, step in ((4, 7919), (2, 6101)))
    return sf.choose_blocks(text, q, k).block_states().numpy() > 0


def _numbers(shape: tuple[int, ...], step: int) -> torch.Tensor:
    """Returns numbers of -2 to 2 in sixteenths, so that their products are exact; like random ones, but of no generator."""
    index = np.arange(np.prod(shape), dtype=np.int64)
    return torch.from_numpy(((index * step + index**2 * 31) % 10007 % 65 - 32) / 16).float().view(shape)


def _short(kept: np.ndarray) -> str:
    return hashlib.sha256(f"{kept.shape}".encode() + np.packbits(kept).tobytes()).hexdigest()[:12]


def add() -> int:
    """Adds what is missing; returns the number of texts added."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    new = {text: golden(text) for text in specs() if text not in known}
    lines = (f" {json.dumps(text)}: {json.dumps(found)}" for text, found in sorted((known | new).items()))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return len(new)


if __name__ == "__main__":
    print(f"{FILE.name}: {add()} added")
