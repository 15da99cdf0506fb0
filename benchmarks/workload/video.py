"""Video transformers of diffusers with random weights, what computes their self-attention, and windows on their grids."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparse_flash import VideoLayout

ALL_PAIRS = "all pairs in tiles"


@dataclass(frozen=True)
class Model:
    """cls: its class in diffusers. latents: (frames, height, width), in patches of (1, 2, 2). text: tokens. layers: the config's
    numbers of blocks. tile: one that divides the grid better than the proposed one, if its sides may differ more."""

    cls: str
    latents: tuple[int, int, int]
    tile: tuple[int, int, int]
    heads: int
    layers: dict[str, int]
    text: int
    config: dict[str, Any]

    @property
    def grid(self) -> tuple[int, int, int]:
        frames, height, width = self.latents
        return frames, height // 2, width // 2

    @property
    def text_tokens(self) -> int:
        """Tokens of text in the video's attention."""
        return self.text if self.cls.startswith("Hunyuan") else 0

    @property
    def tokens(self) -> int:
        return math.prod(self.grid) + self.text_tokens

    def layout(self, tile: str | tuple[int, int, int]) -> VideoLayout:
        layout = VideoLayout.of(*self.grid) if isinstance(tile, str) else VideoLayout(*self.grid, tile)
        return replace(layout, suffix=self.text_tokens)


_WAN = {"attention_head_dim": 128, "ffn_dim": 8960, "text_dim": 4096}
_TOY = {"attention_head_dim": 16, "text_dim": 8, "freq_dim": 16, "ffn_dim": 32}
MODELS = {
    "wan-480p": Model("WanTransformer3DModel", (21, 60, 104), (2, 8, 8), 12, {"num_layers": 30}, 512, _WAN),
    "wan-720p": Model("WanTransformer3DModel", (21, 90, 160), (2, 8, 8), 12, {"num_layers": 30}, 512, _WAN),
    "hunyuan-video": Model(
        "HunyuanVideoTransformer3DModel", (33, 90, 160), (2, 8, 8), 24, {"num_layers": 20, "num_single_layers": 40}, 256, {}
    ),
    "toy": Model("WanTransformer3DModel", (5, 20, 48), (1, 8, 16), 2, {"num_layers": 2}, 8, _TOY),
}


def build_transformer(model: Model, device: torch.device, dtype: torch.dtype, share: float) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns a transformer with random weights, made on the device, and its inputs. share: of its layers that it has. Modules that
    diffusers keeps in float32 are so."""
    import diffusers

    layers = {name: max(1, round(share * count)) for name, count in model.layers.items()}
    cls, before = getattr(diffusers, model.cls), torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(dtype)
        with device:
            transformer = cls(num_attention_heads=model.heads, **layers, **model.config)
    finally:
        torch.set_default_dtype(before)
    for name, parameter in transformer.named_parameters():
        if set(name.split(".")) & set(cls._keep_in_fp32_modules or ()):
            parameter.data = parameter.data.float()

    def drawn(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    config = transformer.config
    inputs = {"hidden_states": drawn(1, config.in_channels, *model.latents), "timestep": torch.tensor([900], device=device)}
    if not model.text_tokens:
        return transformer.eval(), inputs | {"encoder_hidden_states": drawn(1, model.text, config.text_dim)}
    inputs |= {"encoder_hidden_states": drawn(1, model.text, config.text_embed_dim), "guidance": 1000 * drawn(1).abs()}
    mask = torch.ones(1, model.text, device=device, dtype=torch.long)
    return transformer.eval(), inputs | {
        "encoder_attention_mask": mask,
        "pooled_projections": drawn(1, config.pooled_projection_dim),
    }


@dataclass(frozen=True)
class StepCase:
    """Names what computes self-attention. spec: as ``use_sparse_flash`` takes it, for tiles of ``tile``; None: dense, in the
    usual order."""

    name: str
    spec: str | None = None
    tile: str | tuple[int, int, int] = "auto"
    compiled: bool = False


def window_of(layout: VideoLayout, share: float) -> tuple[int, ...]:
    """The window of tiles that keeps about this share of them; of those within a tenth, the most even on the axes."""

    def cost(window):
        sides = [side / tiles for side, tiles in zip(window, layout.tile_grid)]
        return round(abs(math.log(math.prod(sides) / share)), 1), max(sides) - min(sides)

    return min(itertools.product(*(range(1, tiles + 1) for tiles in layout.tile_grid)), key=cost)


def step_cases(model: Model, how: str, device: torch.device) -> list[StepCase]:
    """The rows of a model, in their order. how: "eager", "compiled" or "both"."""
    tenth, other, fifth = (
        StepCase(f"window {share:.0%}", f"tile_window(layout, {window_of(model.layout(tile), share)})", tile)
        for share, tile in ((0.1, "auto"), (0.1, model.tile), (0.2, "auto"))
    )
    chosen = StepCase("chosen 10%", "layout & sampled(16, budget=0.1, block=128)")
    first = [StepCase("sdpa-cudnn"), StepCase("fa4"), tenth, other, chosen]
    first = first if device.type == "cuda" else [StepCase("sdpa"), tenth, other, chosen]
    return [
        *([] if how == "compiled" else first),
        *([] if how == "eager" else [replace(case, compiled=True) for case in first]),
        *([] if how == "compiled" else [StepCase(ALL_PAIRS, "layout"), fifth]),
    ]


WHOLE_TILE_GRIDS = (  # (grid, tile, window in tiles, heads)
    ((24, 32, 48), (4, 4, 8), (3, 3, 3), 24),
    ((24, 32, 48), (4, 4, 4), (3, 3, 6), 24),
    ((32, 48, 80), (4, 4, 8), (3, 3, 3), 8),
    ((32, 48, 80), (4, 8, 8), (3, 3, 3), 8),
)


def windows(names: list[str], whole: bool) -> Iterator[tuple[str, VideoLayout, tuple[int, ...], int, int]]:
    """(label, layout, window, heads, tokens without padding) of windows that keep a tenth on the models' grids, in tiles of 128 and
    of 64, each first rounded up to whole tiles, then ragged. whole: whether the rows of ``WHOLE_TILE_GRIDS`` come first."""
    for grid, tile, window, heads in WHOLE_TILE_GRIDS if whole else ():
        yield "grid of whole tiles", VideoLayout(*grid, tile), window, heads, math.prod(grid)
    for name in names:
        model = MODELS[name]
        for block_size in (128, 64):
            ragged = VideoLayout.of(*model.grid, block_size=block_size)
            frames, height, width = (tiles * side for tiles, side in zip(ragged.tile_grid, ragged.tile))
            kept = window_of(ragged, 0.1)
            yield name, VideoLayout(frames, height, width, ragged.tile), kept, model.heads, ragged.tokens
            yield f"{name}, ragged", ragged, kept, model.heads, ragged.tokens
