"""Video transformers of diffusers with random weights, what computes their self-attention, and windows on their grids."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sparse_flash import VideoLayout

ALL_PAIRS, NVIDIA = "all pairs in tiles", "nvidia window 10%"


@dataclass(frozen=True)
class Model:
    """cls: its class in diffusers. latents: (frames, height, width), in patches of (1, 2, 2). text, audio: tokens. layers: the
    config's numbers of blocks. tile: one next to the proposed one, more like a cube."""

    cls: str
    latents: tuple[int, int, int]
    tile: tuple[int, int, int]
    heads: int
    layers: dict[str, int]
    text: int
    config: dict[str, Any]
    audio: int = 0

    @property
    def grid(self) -> tuple[int, int, int]:
        frames, height, width = self.latents
        return frames, height // 2, width // 2

    @property
    def beside(self) -> int:
        """Tokens of text and audio in the video's attention."""
        return 0 if self.cls.startswith("Wan") else self.text + self.audio

    @property
    def tokens(self) -> int:
        """Of its self-attention."""
        return math.prod(self.grid) + self.beside

    def layout(self, tile: str | tuple[int, int, int]) -> VideoLayout:
        layout = VideoLayout.of(*self.grid) if isinstance(tile, str) else VideoLayout(*self.grid, tile)
        side = "prefix" if self.cls.startswith("MiniMax") else "suffix"
        return replace(layout, **{side: self.beside})


def _wan(height: int, width: int, heads: int, layers: int, ffn: int) -> Model:
    config = {"attention_head_dim": 128, "ffn_dim": ffn, "text_dim": 4096}
    return Model("WanTransformer3DModel", (21, height, width), (2, 8, 8), heads, {"num_layers": layers}, 512, config)


_H3 = Model("MiniMaxH3Transformer3DModel", (77, 30, 52), (4, 8, 4), 56, {"num_layers": 50}, 512, {}, audio=896)
_TOY = {"attention_head_dim": 16, "text_dim": 8, "freq_dim": 16, "ffn_dim": 32}
MODELS = {
    "wan-480p": _wan(60, 104, 12, 30, 8960),  # Wan 2.1's 1.3B
    "wan-720p": _wan(90, 160, 12, 30, 8960),
    "wan22-480p": _wan(60, 104, 40, 40, 13824),  # each of Wan 2.2's two, A14B
    "wan22-720p": _wan(90, 160, 40, 40, 13824),
    "hunyuan-video": Model(
        "HunyuanVideoTransformer3DModel", (33, 90, 160), (2, 8, 8), 24, {"num_layers": 20, "num_single_layers": 40}, 256, {}
    ),
    "h3-31k": _H3,  # 480 x 832, 260 frames; audio is rounded up to whole blocks
    "h3-91k": replace(_H3, latents=(87, 48, 84), audio=1024),  # 768 x 1344, 294 frames
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

    with device:
        return transformer.eval(), _draw_inputs(model, transformer.config, partial(torch.randn, dtype=dtype))


def _draw_inputs(model: Model, config: Any, drawn: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """On PyTorch's default device. drawn: torch.randn in the model's dtype."""
    if model.cls.startswith("MiniMax"):  # one sequence of text, audio and the video's patches
        tags = torch.tensor([1, 2, 0]).repeat_interleave(torch.tensor([model.text, model.audio, math.prod(model.grid)]))
        places = torch.arange(model.beside)[:, None].expand(-1, 3), torch.cartesian_prod(*map(torch.arange, model.grid))
        return {
            "hidden_states": drawn(1, math.prod(model.grid), config.in_channels * math.prod(config.patch_size)),
            "audio_hidden_states": drawn(1, model.audio, config.audio_in_channels),
            "encoder_hidden_states": drawn(1, model.text, config.text_dim),
            "timestep": torch.tensor([0.9]),
            "timestep_indices": torch.zeros_like(tags),
            "token_tags": tags,
            "position_ids": torch.cat(places),
            **{f"{name}_indices": (tags == tag).nonzero()[:, 0] for tag, name in enumerate(("video", "text", "audio"))},
        }
    inputs = {"hidden_states": drawn(1, config.in_channels, *model.latents), "timestep": torch.tensor([900])}
    if model.cls.startswith("Wan"):
        return inputs | {"encoder_hidden_states": drawn(1, model.text, config.text_dim)}
    return inputs | {
        "encoder_hidden_states": drawn(1, model.text, config.text_embed_dim),
        "guidance": 1000 * drawn(1).abs(),
        "encoder_attention_mask": torch.ones(1, model.text, dtype=torch.long),
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
    """The window of tiles that keeps about this share of the pairs, those of tokens before and after the video included; of those
    within a tenth, the most even on the axes."""
    of_video = 1 - (layout.prefix + layout.suffix) / layout.length
    share = max(1 - (1 - share) / of_video**2, 1e-3)

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
    # Prefixes are kept, as the guide says; a suffix is text with a mask, whose end no pattern may count from.
    text = f" | last_tokens({model.beside})" if model.layout("auto").prefix else ""
    chosen, faster = (
        StepCase(f"chosen 10% by {rows} queries", f"layout & (sampled({rows}, budget=0.1, block=128){text})", model.tile)
        for rows in (16, 8)
    )
    ours = [tenth, *[other] * (model.layout(model.tile) != model.layout("auto")), chosen, faster]
    first = [StepCase("sdpa-cudnn"), StepCase("fa4"), replace(tenth, name=NVIDIA), *ours]
    first = first if device.type == "cuda" else [StepCase("sdpa"), *ours]
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
