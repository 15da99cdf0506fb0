"""Hugging Face Diffusers: runs the self-attention of video transformers under a mask, with their tokens in the order of tiles.

    from sparse_flash.integrations.diffusers import use_sparse_flash

    use_sparse_flash(pipe.transformer, "tile_window(layout, (3, 3, 3))")

The processor of each layer is replaced by one that runs the model's own and computes the ``scaled_dot_product_attention`` in it
here. Hooks around the blocks reorder tokens once for all layers; CogVideoX, and HunyuanVideo with ``token_replace``, do in each.

Source: https://huggingface.co/docs/diffusers/api/attnprocessor (diffusers 0.42).
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import diffusers
import torch
from torch.overrides import TorchFunctionMode

from ..api.attention import attention
from ..compat.constants import constant_in_graphs
from ..compat.dynamo import outside_graphs
from ..core.arguments import check_precision
from ..masks.block_mask import compile_cached
from ..masks.cache import to_traceable
from ..masks.chooser import has_choosers
from ..masks.fit import check_known_end
from ..masks.memory import cached_until_cleared
from ..masks.parsing import parse, split_at_layout
from ..masks.pattern import Pattern
from ..patterns import video_layout as VideoLayout
from .models import MaskRecord, check_layers, describe_layer, library_of, record_layers, unswitched_error

if tuple(map(int, diffusers.__version__.split(".")[:2])) < (0, 42):
    raise ImportError(f"diffusers 0.42.1 or newer is needed; got {diffusers.__version__}: pip install 'diffusers>=0.42.1'")

_RUN_KEY = "_sparse_flash_run"
_PROBE = (2**12,) * 3  # a grid that no window is too large for
_LEAST_BLOCK = 64  # tokens of a table's block: Hopper's kernels take no smaller ones


class _ModelParts(NamedTuple):
    """Says where a model keeps what."""

    # From config=, the model's, and given=, its arguments by name, to the (frames, height, width) of its video, in tokens.
    grid_of: Callable[..., tuple[int, int, int]]
    layers: tuple[tuple[str, str], ...] = (("transformer_blocks", "attn1"),)  # lists of blocks, and the attention in each block
    embed: str = ""  # the module that returns the video's tokens
    rotary_dim: int = 0  # of tokens in what ``rope`` returns
    conditions: tuple[str, Callable] | None = None  # the module that returns conditions of single tokens, what reorders them
    text_first: bool = False  # in attention
    outside_graphs: bool = False  # whether the length of text in attention depends on a mask's values
    reorders_in_layers: bool | str = False  # whether each layer must; or config.image_condition_type with which it must


def _count_patches(frames: int, rows: int, *patch: str, config: Any, given: Any) -> tuple[int, int, int]:
    """A ``grid_of`` for latents with these dimensions and width last. patch: the config's names of the sides of a patch."""
    sides = config.patch_size if not patch else [(getattr(config, name) if name else None) or 1 for name in patch]
    shape = given["hidden_states"].shape
    return shape[frames] // sides[0], shape[rows] // sides[1], shape[4] // sides[2]


def _grid_of_ltx(*, config: Any, given: Any) -> tuple[int, int, int]:
    sizes, tokens = tuple(given.get(name) for name in ("num_frames", "height", "width")), given["hidden_states"].shape[1]
    if None in sizes:
        raise ValueError(f"num_frames, height and width must be passed to LTXVideoTransformer3DModel; got {sizes}")
    if sizes[0] * sizes[1] * sizes[2] != tokens:
        raise ValueError(
            f"hidden_states must be the tokens of {' x '.join(map(str, sizes))} (num_frames, height, width); got {tokens} tokens; "
            "tokens of conditions after the video are not supported: call restore(transformer) for such a video"
        )
    return sizes


def _reorder_conditions_of_wan(layout, batch: int, out):
    timestep, projected, *rest = out
    return timestep, layout.to_tiles(projected, 1) if projected.dim() == 3 else projected, *rest


def _reorder_conditions_of_ltx(layout, batch: int, out):
    projected, *rest = out
    single = projected.shape[0] == batch  # one for each entry of the batch, otherwise one for each token
    return projected if single else layout.to_tiles(projected.unflatten(0, (batch, -1)), 1).flatten(0, 1), *rest


_MODELS = {
    "WanTransformer3DModel": _ModelParts(
        grid_of=partial(_count_patches, 2, 3),
        layers=(("blocks", "attn1"),),
        embed="patch_embedding",
        rotary_dim=1,
        conditions=("condition_embedder", _reorder_conditions_of_wan),
    ),
    "HunyuanVideoTransformer3DModel": _ModelParts(
        grid_of=partial(_count_patches, 2, 3, "patch_size_t", "patch_size", "patch_size"),
        layers=(("transformer_blocks", "attn"), ("single_transformer_blocks", "attn")),
        embed="x_embedder",
        reorders_in_layers="token_replace",
    ),
    "LTXVideoTransformer3DModel": _ModelParts(
        grid_of=_grid_of_ltx, embed="proj_in", rotary_dim=1, conditions=("time_embed", _reorder_conditions_of_ltx)
    ),
    "MochiTransformer3DModel": _ModelParts(
        grid_of=partial(_count_patches, 2, 3, "", "patch_size", "patch_size"), embed="patch_embed", outside_graphs=True
    ),
    "CogVideoXTransformer3DModel": _ModelParts(
        grid_of=partial(_count_patches, 1, 3, "patch_size_t", "patch_size", "patch_size"), text_first=True, reorders_in_layers=True
    ),
}


def use_sparse_flash(
    transformer: torch.nn.Module,
    spec: str | Callable[[Any], Pattern | str],
    layout: str | tuple[int, int, int] | Callable[[int, int, int], Any] = "auto",
    dense_steps: int | Iterable[int] = (),
    dense_layers: Iterable[int] = (),
    precision: str | None = None,
) -> torch.nn.Module:
    """Switches a video transformer's self-attention to ``sparse_flash.attention`` under ``spec``; returns the transformer.

    transformer: a Wan, HunyuanVideo, LTX-Video, Mochi or CogVideoX transformer of diffusers, such as ``pipe.transformer``, or a
    module that holds one, such as a compiled one.
    spec: spec text in which the word ``layout`` stands for the ``VideoLayout`` of the inputs, as in
    ``"tile_window(layout, (3, 3, 3))"`` and ``"layout & (sampled(16, budget=0.1, block=64))"``; ``"layout"`` keeps all pairs. Or a
    function from the layout to a pattern or its text. The layout has the model's text, if it is in the same attention, as prefix
    (CogVideoX) or suffix. No spec makes padding of tiles seen.
    layout: "auto" takes the tile that ``VideoLayout.of`` proposes for the grid of the inputs. Or a tile, (frames, height, width) in
    tokens, or a function from the grid to a VideoLayout.
    dense_steps: the numbers of the steps of a sampling loop in which the model runs unchanged, or how many of the first ones. A
    step is a run of calls with one timestep, which is read, so each call waits for the GPU. Counting starts again when the timestep
    is the loop's first one, or changes in the other direction. Training refuses dense_steps.
    dense_layers: the numbers of layers that keep all pairs; HunyuanVideo counts its single blocks after the others.
    precision: "fp8" computes in e4m3, without gradients: see ``sparse_flash.attention``. Masks for padded text are refused then.

    Tables have blocks of one tile, and of 64 tokens for smaller tiles; a chooser has its own ``block``. Masks for padded text
    (HunyuanVideo) become ``kv_lens``; other masks of attention are refused. Gradient checkpointing works; call backward before the
    next forward call. With a cache of diffusers, dense steps keep all pairs in the order of tiles, and models are switched between
    two videos. Raises ValueError for models that are not known, for context parallelism and for arguments that do not fit.
    """
    model, parts = _find_model(transformer)
    layers = [getattr(block, attn) for blocks, attn in parts.layers for block in getattr(model, blocks)]
    dense = check_layers(dense_layers, range(len(layers)))
    check_precision(precision)
    run = _Run(model, parts, spec, _parse_layout(layout), _parse_steps(dense_steps), precision)
    restore(model)
    for number, layer in enumerate(layers):
        layer.processor = _Processor(layer.processor, run, number, number in dense)
        layer.extra_repr = partial(_describe_layer, layer)  # print(model) shows it
    run.layers = layers
    run.hooks = [model.register_forward_pre_hook(run.begin, with_kwargs=True)]
    if not run.reorders_in_layers:
        run.hooks.append(getattr(model, parts.embed).register_forward_hook(run.reorder_tokens))
        run.hooks.append(model.rope.register_forward_hook(run.reorder_rotary))
        run.hooks.append(model.norm_out.register_forward_pre_hook(run.restore_order))
        if parts.conditions is not None:
            run.hooks.append(getattr(model, parts.conditions[0]).register_forward_hook(run.reorder_conditions))
    setattr(model, _RUN_KEY, run)
    return transformer


def restore(transformer: torch.nn.Module) -> torch.nn.Module:
    """Gives a transformer its own attention back, and returns it. One that was not switched stays as it is."""
    model, _ = _find_model(transformer)
    run = getattr(model, _RUN_KEY, None)
    if run is not None:
        for hook in run.hooks:
            hook.remove()
        for layer in run.layers:
            if isinstance(layer.processor, _Processor):  # otherwise somebody has set another one since
                layer.processor = layer.processor.original
            del layer.extra_repr
        delattr(model, _RUN_KEY)
    return transformer


def _switched(transformer: torch.nn.Module) -> _Run:
    model, _ = _find_model(transformer)
    run = getattr(model, _RUN_KEY, None)
    if run is None or not run.is_in_place():
        raise unswitched_error(f"{type(model).__name__} with other attention processors", "use_sparse_flash(transformer, spec)")
    return run


def masks_of(transformer: torch.nn.Module) -> dict[int, str | Callable[[Any], Pattern | str]]:
    """See ``sparse_flash.masks_of``."""
    run = _switched(transformer)
    return {number: "layout" if layer.processor.dense else run.spec for number, layer in enumerate(run.layers)}


@contextmanager
def record_masks(transformer: torch.nn.Module) -> Iterator[MaskRecord]:
    """See ``sparse_flash.record_masks``."""
    run = _switched(transformer)
    with record_layers(masks_of(transformer)) as run.record:
        try:
            yield run.record
        finally:
            run.record = None


def _describe_layer(layer: Any) -> str:
    processor = layer.processor
    if not isinstance(processor, _Processor):
        return describe_layer(layer, None)
    run, seen = processor.run, processor.run.video
    tile = "" if seen is None else f"; tile {seen.tile} of {seen.grid} tokens, {seen.tiled / math.prod(seen.grid) - 1:.1%} padding"
    steps = f"; dense steps {sorted(run.dense_steps)}" if run.dense_steps else ""
    return describe_layer(layer, f"{'layout' if processor.dense else run.spec}{tile}{steps}")


def _is_cached(model) -> bool:
    """Whether a cache of diffusers keeps what layers of the model returned, by ``enable_cache`` or by its own function."""
    registries = (getattr(module, "_diffusers_hook", None) for module in model.modules())
    return any(hook._is_stateful for registry in registries if registry is not None for hook in registry.hooks.values())


def _find_model(transformer) -> tuple[Any, _ModelParts]:
    """Returns the module that is a known model, and what is known of it."""
    if not isinstance(transformer, torch.nn.Module):
        raise TypeError(f"transformer must be a module, such as pipe.transformer; got {type(transformer).__name__}")
    for module in transformer.modules():
        for cls in type(module).__mro__:
            if cls.__name__ in _MODELS:
                return module, _MODELS[cls.__name__]
    way_out = "set attention processors that call sparse_flash.attention under a pattern of the layout"
    if library_of(transformer) == "transformers":
        way_out = "call use_sparse_flash of sparse_flash.integrations.transformers"
    raise ValueError(f"transformer must be one of {', '.join(_MODELS)}; got {type(transformer).__name__}; {way_out}")


def _parse_steps(steps: Any) -> frozenset[int]:
    steps = range(steps) if type(steps) is int and steps >= 0 else steps
    numbers = tuple(steps) if isinstance(steps, Iterable) else (steps,)
    if wrong := [one for one in numbers if isinstance(one, bool) or not isinstance(one, int) or one < 0]:
        raise ValueError(f"dense_steps must be numbers counted from 0; got {wrong}")
    return frozenset(numbers)


def _parse_spec(spec: Any) -> tuple[str, ...]:
    """Returns the pieces of spec text around the word layout, none for a function."""
    if callable(spec):
        return ()
    if not isinstance(spec, str):
        raise TypeError(f"spec must be text or a function from a layout to a pattern; got {type(spec).__name__}")
    pieces = split_at_layout(spec)
    parse(VideoLayout(*_PROBE).to_spec().join(pieces))  # raises now if something is wrong with it
    return pieces


def _parse_layout(layout: Any) -> Any:
    if layout == "auto":
        return VideoLayout.of
    if callable(layout):
        return layout
    if not isinstance(layout, (tuple, list)) or len(layout) != 3:
        raise ValueError(f"layout must be 'auto', a tile of three numbers or a function from a grid; got {layout!r}")
    VideoLayout(*_PROBE, tuple(layout))
    return partial(VideoLayout, tile=tuple(layout))


@constant_in_graphs
@cached_until_cleared(maxsize=256)  # torch.compile compiles anew for another object
def _build_layout(make: Callable, grid: tuple[int, int, int]) -> VideoLayout:
    layout = make(*grid)
    if not isinstance(layout, VideoLayout) or layout.grid != grid or layout.prefix or layout.suffix:
        raise ValueError(f"layout must return a VideoLayout of the grid {grid}, without prefix and suffix; got {layout!r}")
    return layout


@outside_graphs
def _count_step(times: list[float], timestep: Any) -> int:
    """Returns the number of a call's step, as ``use_sparse_flash`` says. times: of the present loop's steps."""
    now = float(torch.as_tensor(timestep).max())
    if now not in times[-1:]:
        turns = len(times) > 1 and (now > times[-1]) != (times[1] > times[0])
        times[:] = [now] if turns or now in times[:1] else [*times, now]
    return len(times) - 1


class _Run:
    """The settings of a switched model, and its present call, until the next, as gradient checkpointing runs layers again."""

    def __init__(
        self, model: Any, parts: _ModelParts, spec: Any, make: Callable, dense_steps: frozenset[int], precision: str | None
    ):
        self.config, self.parts, self.spec, self.pieces, self.make = model.config, parts, spec, _parse_spec(spec), make
        self.dense_steps, self.precision, self.times = dense_steps, precision, list[float]()
        self.reorders_in_layers = parts.reorders_in_layers in (True, getattr(model.config, "image_condition_type", None))
        self.names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        self.layers: list[Any] = []
        self.hooks: list[Any] = []
        self.layout: Any = None  # only of the video; None where the model runs unchanged
        self.video: Any = None  # the latest layout
        self.record: MaskRecord | None = None  # of ``record_masks``
        self.keeps_all = False  # whether the call is a dense step in the order of tiles, as caches hold tokens in one order
        self.batch = 0

    def is_in_place(self) -> bool:
        return all(isinstance(layer.processor, _Processor) for layer in self.layers)

    def begin(self, model, args, kwargs) -> None:
        if not self.is_in_place():
            raise ValueError("the model's attention processors were replaced; call use_sparse_flash again")
        if getattr(getattr(model, "_parallel_config", None), "context_parallel_config", None) is not None:
            raise ValueError("the model must not be under context parallelism; leave enable_parallelism out, or call restore()")
        given = {**dict(zip(self.names, args)), **kwargs}
        self.keeps_all = False
        if self.dense_steps:
            if model.training and torch.is_grad_enabled():
                raise ValueError("dense_steps count the steps of sampling; call use_sparse_flash without them for training")
            if _count_step(self.times, given["timestep"]) in self.dense_steps:
                self.keeps_all = not self.reorders_in_layers and outside_graphs(_is_cached)(model)
                if not self.keeps_all:
                    self.layout = None
                    return
        self.layout = self.video = _build_layout(self.make, self.parts.grid_of(config=self.config, given=given))

    def reorder_tokens(self, module, args, out):
        if self.layout is None:
            return None
        if out.dim() == 5:  # (batch, channels, frames, height, width), which the model flattens
            return self.layout.to_tiles(out.flatten(2), 2)[..., None, None]
        out = out.reshape(-1, self.layout.tokens, out.shape[-1])  # Mochi's has frames in the batch
        self.batch = out.shape[0]  # caches may call the model with half of the entries that it was given
        return self.layout.to_tiles(out, 1)

    def reorder_rotary(self, module, args, out):
        return None if self.layout is None else tuple(self.layout.to_tiles(one, self.parts.rotary_dim) for one in out)

    def reorder_conditions(self, module, args, out):
        return None if self.layout is None else self.parts.conditions[1](self.layout, self.batch, out)

    def restore_order(self, module, args):
        return None if self.layout is None else (self.layout.to_raster(args[0], 1), *args[1:])

    def count_all(self, q_len: int, kv_len: int) -> int:
        return q_len * (kv_len - self.layout.length + self.layout.tokens)

    def attend(self, dense, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        """Takes the place of scaled_dot_product_attention, whose arguments these are. dense: whether to keep all pairs."""
        video = self.layout
        text = query.shape[2] - (video.tokens if self.reorders_in_layers else video.length)
        layout = VideoLayout(*video.grid, video.tile, *((text, 0) if self.parts.text_first else (0, text)))
        kv_lens = None
        if attn_mask is not None:
            if attn_mask.dtype != torch.bool or tuple(attn_mask.shape[1:3]) != (1, 1) or not text:
                raise ValueError(
                    f"the attention mask must be of padded text, (batch, 1, 1, tokens) bool; got {tuple(attn_mask.shape)} "
                    f"{attn_mask.dtype}; leave it out, or call restore(transformer)"
                )
            kv_lens = layout.length - text + attn_mask[:, 0, 0, -text:].sum(-1)
        if self.reorders_in_layers:
            query, key, value = (layout.to_tiles(one, 2) for one in (query, key, value))
        mask: Any = layout
        if not (dense or self.keeps_all):
            mask = layout.to_spec().join(self.pieces) if self.pieces else layout & self.spec(layout)
        if torch.compiler.is_compiling():
            mask = to_traceable(mask)
        if not has_choosers(mask):  # which have their own blocks
            if kv_lens is not None:
                check_known_end(mask)
            mask = compile_cached(mask, layout.length, layout.length, max(layout.block_size, _LEAST_BLOCK), query.device)
        options: dict[str, Any] = {"dropout_p": dropout_p, "kv_lens": kv_lens, "precision": self.precision}
        out = attention(query, key, value, mask, scale=scale, **options)
        return layout.to_raster(out, 2) if self.reorders_in_layers else out


class _Processor:
    """Runs a layer's own attention processor, with its attention computed by ``_Run.attend``."""

    def __init__(self, original: Any, run: _Run, number: int, dense: bool):
        self.original, self.run, self.number, self.dense = original, run, number, dense
        self.native = copy.copy(original)
        if hasattr(original, "_attention_backend"):
            self.native._attention_backend = "native"  # which calls scaled_dot_product_attention

    # Parameters have the names that attention modules of diffusers look for before they pass keywords on.
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        given, run = (attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb), self.run
        attend = self.original if run.layout is None else outside_graphs(self.attend) if run.parts.outside_graphs else self.attend
        if run.record is None:
            return attend(*given)
        in_step = run.layout is None or run.keeps_all
        why = "in a dense step" if in_step else "one of dense_layers" if self.dense else None
        with run.record.layer(self.number, why, run.count_all):
            return attend(*given)

    def attend(self, *given):
        calls = _AttentionOverride(self.run, self.dense)
        with calls:  # torch.compile knows no "as" here
            out = self.native(*given)
        if not calls.count:
            raise ValueError(f"{type(self.original).__name__} did not call scaled_dot_product_attention; call restore(transformer)")
        return out


class _AttentionOverride(TorchFunctionMode):
    def __init__(self, run: _Run, dense: bool):
        super().__init__()
        self.run, self.dense, self.count = run, dense, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.count += 1
            return self.run.attend(self.dense, *args, **(kwargs or {}))
        if func is torch.Tensor.unflatten:  # written in Python, and torch.compile cannot trace it within a mode
            func = torch.unflatten
        return func(*args, **(kwargs or {}))
