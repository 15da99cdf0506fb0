"""Masks of the model's layers, by a name and the share of tiles that the mask keeps."""

import torch

import sparse_flash as sf

Mask = sf.BlockMask | str | None  # as attention takes it

# Windows by share: the part of each axis, frames, height and width, that a window has.
WINDOWS = {0.125: (1 / 2, 1 / 2, 1 / 2), 0.25: (1, 1 / 2, 1 / 2), 0.42: (3 / 4, 3 / 4, 3 / 4)}
SHARES = tuple(WINDOWS)
VSA = "vsa"  # a layer of its own, with parameters
BY_SHARE = "window", "sampled", "pooled", "random", VSA
NAMES = "dense", *BY_SHARE, "frames", "radial"


def masks_of(name: str, share: float, layout: sf.VideoLayout, layers: int, device: torch.device) -> list[Mask]:
    """A mask for each layer. share: for the names in BY_SHARE, one of SHARES. Under VSA layers choose for themselves."""
    if name in ("dense", VSA):
        return [None] * layers
    if name == "sampled":
        return [f"{layout} & sampled(16, budget={share}, block={layout.block_size})"] * layers
    if name == "pooled":
        return [f"{layout} & pooled(budget={share}, block={layout.block_size})"] * layers
    if name == "random":
        return [random_tiles(layout, share, layer, device) for layer in range(layers)]
    patterns = {
        "window": lambda: sf.tile_window(layout, window(layout, share)),
        "frames": lambda: sf.frame_window(layout, 1),
        "radial": lambda: sf.radial(layout, anchors=0),
    }
    mask = sf.compile_mask(patterns[name](), layout.length, block_size=layout.block_size, device=device)
    return [mask] * layers


def window(layout: sf.VideoLayout, share: float) -> tuple[int, ...]:
    """Tiles on each axis of the window that keeps about this share."""
    return tuple(max(1, round(part * tiles)) for part, tiles in zip(WINDOWS[share], layout.tile_grid, strict=True))


def kept_tiles(layout: sf.VideoLayout, share: float) -> int:
    """Tiles that each tile attends to, its own among them."""
    return max(1, round(share * layout.length / layout.block))


def random_tiles(layout: sf.VideoLayout, share: float, seed: int, device: torch.device) -> sf.BlockMask:
    """Each tile keeps its own and others drawn by seed, as many as choosers keep."""
    tiles = layout.length // layout.block
    drawn = torch.rand(tiles, tiles, generator=torch.Generator().manual_seed(seed)).fill_diagonal_(2)
    kept = torch.zeros(tiles, tiles, dtype=torch.bool).scatter_(1, drawn.topk(kept_tiles(layout, share), 1).indices, True)
    return sf.BlockMask.from_blocks(kept.to(device), layout.block_size, within=layout)
