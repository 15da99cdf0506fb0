"""Hugging Face Diffusers: runs the self-attention of video transformers under a mask, with their tokens in the order of tiles.

    from sparse_flash.integrations.diffusers import use_sparse_flash

    use_sparse_flash(pipe.transformer, "layout & sampled(16, budget=0.1, block=128)", dense_steps=10)

The processor of each layer is replaced by one that runs the model's own and computes the ``scaled_dot_product_attention`` in it
here. ``_MODELS`` says where a model keeps its video: hooks around its blocks reorder tokens once, or each layer does.

Source: https://huggingface.co/docs/diffusers/api/attnprocessor (diffusers 0.42).
"""

import copy
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

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
from ..patterns import video_layout as VideoLayout
from .models import MaskRecord, check_layers, describe_layer, library_of, record_layers, unswitched_error

if tuple(map(int, diffusers.__version__.split(".")[:2])) < (0, 42):
    raise ImportError(f"diffusers 0.42.1 or newer is needed; got {diffusers.__version__}: pip install 'diffusers>=0.42.1'")

_RUN_KEY = "_sparse_flash_run"
_PROBE = (2**12,) * 3  # a grid that no window is too large for
_LEAST_BLOCK = 64  # tokens of a table's block: Hopper's kernels take no smaller ones


def _count_patches(frames: int, rows: int, *patch: str, config: Any, given: Any) -> tuple[int, int, int]:
    """A ``grid_of`` for latents with these dimensions and width last. patch: the config's names of the sides of a patch."""
    sides = config.patch_size if not patch else [(getattr(config, name) if name else None) or 1 for name in patch]
    shape = given["hidden_states"].shape
    return shape[frames] // sides[0], shape[rows] // sides[1], shape[4] // sides[2]


def _grid_of_ltx(*, config: Any, given: Any) -> tuple[int, int, int]:
    sizes, tokens = tuple(given.get(name) for name in ("num_frames", "height", "width")), given["hidden_states"].shape[1]
    if None in sizes:
        raise ValueError(f"num_frames, height and width must be passed to the model; got {sizes}; or call restore(transformer)")
    if sizes[0] * sizes[1] * sizes[2] != tokens:
        raise ValueError(
            f"hidden_states must be the tokens of {' x '.join(map(str, sizes))} (num_frames, height, width); got {tokens} tokens; "
            "tokens of conditions next to the video are not supported: call restore(transformer) for such a video"
        )
    return sizes


@outside_graphs
def _grid_of_minimax(*, config: Any, given: Any) -> tuple[int, int, int]:
    """Reads the grid from the positions of the video, which is after all audio and text: tag 0 in ``token_tags``."""
    start = int(given["token_tags"].nonzero().max()) + 1
    frame, row, _ = given["position_ids"][start:].cpu().T
    cells = int((frame == frame[0]).sum())
    width = int((row[:cells] == row[0]).sum())
    grid = len(frame) // cells, cells // width, width
    if math.prod(grid) != len(frame):
        raise ValueError(f"position_ids must end with whole frames; got {len(frame)} tokens in frames of {cells}")
    return grid


@dataclass(frozen=True)
class _ModelParts:
    """Says where a model keeps what. Text and all else in its attention is after the video, or before it."""

    # From config=, the model's, and given=, its arguments by name, to the (frames, height, width) of its video, in tokens.
    # None for other models, in whose attention the video is found by its length.
    grid_of: Any
    embed: tuple[str, ...] = ()  # the modules that return the video's tokens; if none, each layer reorders its q, k and v
    in_layers_if: tuple[str, Any] = ("", True)  # a name in config or given, and the value with which each layer must reorder
    rotary_dim: int = -2  # of tokens in what ``rope`` returns
    conditions: tuple[str, int] | None = None  # the module that returns conditions of single tokens, and which one they are in that
    text_first: bool = False
    spreads_masks: bool = False  # whether its processors make a mask of all pairs from that of padded text, by repeat and &
    outside_graphs: bool = False  # whether the length of text in attention depends on a mask's values


_COSMOS = _ModelParts(partial(_count_patches, 2, 3))
_WAN = replace(_COSMOS, embed=("patch_embedding",), rotary_dim=-3, conditions=("condition_embedder", 1))
_ALLEGRO = _ModelParts(partial(_count_patches, 2, 3, "patch_size_t", "patch_size", "patch_size"))
_HUNYUAN = replace(_ALLEGRO, embed=("x_embedder",))
_MODELS = {
    "WanTransformer3DModel": _WAN,
    "ChronoEditTransformer3DModel": _WAN,
    "WanAnimateTransformer3DModel": _COSMOS,  # faces belong to frames of tokens in raster order
    "WanVACETransformer3DModel": replace(_WAN, embed=("patch_embedding", "vace_patch_embedding")),
    "SkyReelsV2Transformer3DModel": replace(_WAN, in_layers_if=("enable_diffusion_forcing", True)),
    "HunyuanVideoTransformer3DModel": replace(_HUNYUAN, in_layers_if=("image_condition_type", "token_replace")),
    "HunyuanVideo15Transformer3DModel": replace(_HUNYUAN, spreads_masks=True),
    "LTXVideoTransformer3DModel": _ModelParts(_grid_of_ltx, embed=("proj_in",), conditions=("time_embed", 0)),
    "LTX2VideoTransformer3DModel": _ModelParts(_grid_of_ltx),  # audio attends to the video, which must not have padding then
    "MochiTransformer3DModel": _ModelParts(
        partial(_count_patches, 2, 3, "", "patch_size", "patch_size"), embed=("patch_embed",), rotary_dim=-3, outside_graphs=True
    ),
    "CogVideoXTransformer3DModel": _ModelParts(
        partial(_count_patches, 1, 3, "patch_size_t", "patch_size", "patch_size"), text_first=True
    ),
    "AllegroTransformer3DModel": _ALLEGRO,
    "AnyFlowTransformer3DModel": _ModelParts(partial(_count_patches, 1, 3)),
    "CosmosTransformer3DModel": _COSMOS,
    "MiniMaxH3Transformer3DModel": _ModelParts(_grid_of_minimax, text_first=True),
}
_OTHER = _ModelParts(None)
_ATTENTIONS = ("attn1", "attn", "self_attn", "self_attention")  # names of self-attention in a block of diffusers


def use_sparse_flash(
    transformer: torch.nn.Module,
    spec: str | Callable[[Any], Any] | Sequence[Any],
    layout: str | tuple[int, int, int] | Callable[[int, int, int], Any] = "auto",
    dense_steps: int | Iterable[int] = (),
    dense_layers: Iterable[int] = (),
    precision: str | None = None,
    grid: tuple[int, int, int] | None = None,
) -> torch.nn.Module:
    """Switches a video transformer's self-attention to ``sparse_flash.attention`` under ``spec``; returns the transformer.

    transformer: a video transformer of diffusers, such as ``pipe.transformer``, or a module that holds one, such as a compiled one.
    The guide has a table of known models; others need ``grid``.
    spec: spec text in which the word ``layout`` stands for the ``VideoLayout`` of the inputs, as in
    ``"tile_window(layout, (3, 3, 3))"`` and ``"layout & (sampled(16, budget=0.1, block=64))"``; ``"layout"`` keeps all pairs. Or a
    function from the layout to a pattern or its text. The layout has the model's text, if it is in the same attention, as prefix
    (CogVideoX, MiniMax-H3) or suffix. No spec makes padding of tiles seen. A list has a spec for each step of a sampling loop, the
    last one also for later steps; a function with a parameter named ``step`` returns one. None: the model runs unchanged.
    layout: "auto" takes the tile that ``VideoLayout.of`` proposes for the grid of the inputs. Or a tile, (frames, height, width) in
    tokens, or a function from the grid to a VideoLayout.
    dense_steps: the numbers of the steps of a sampling loop in which the model runs unchanged, or how many of the first ones. A
    step is a run of calls with one timestep, which is read, so each call waits for the GPU. Counting starts again when the timestep
    is the loop's first one, or changes in the other direction. Training refuses dense_steps.
    dense_layers: the numbers of layers that keep all pairs, counted through the model's lists of blocks, one after another.
    precision: "fp8" computes in e4m3, without gradients: see ``sparse_flash.attention``. Masks for padded text are refused then.
    grid: only for a model that is not known, the (frames, height, width) of its video in tokens. They must be in raster order in
    attention, which nothing can check. If there are other tokens in the same attention, ``layout`` must return a VideoLayout with
    them as prefix or suffix. Attention over other tokens, such as only text, stays as it is.

    Tables have blocks of one tile, and of 64 tokens for smaller tiles; a chooser has its own ``block``. Masks for padded text
    (HunyuanVideo) become ``kv_lens``; other masks of attention are refused. Gradient checkpointing works; call backward before the
    next forward call. With a cache of diffusers, dense steps keep all pairs in the order of tiles, and models are switched between
    two videos. Raises ValueError for models that are not known, for context parallelism and for arguments that do not fit.
    """
    model, parts = _find_model(transformer, grid)
    layers = _find_layers(model)
    dense = check_layers(dense_layers, range(len(layers)))
    check_precision(precision)
    if grid is not None and (parts is not _OTHER or len(grid) != 3 or any(type(side) is not int or side < 1 for side in grid)):
        raise ValueError(
            f"grid must be (frames, height, width) in tokens, of a model that is not known; got {grid!r} for {type(model).__name__}"
        )
    run = _Run(model, parts, spec, _parse_layout(layout), _parse_steps(dense_steps), precision, grid)
    if hasattr(model, _RUN_KEY):
        restore(model)
    for number, layer in enumerate(layers):
        layer.processor = _processor_class(layer.processor.__class__)(layer.processor, run, number, number in dense)
        layer.extra_repr = partial(_describe_layer, layer)  # print(model) shows it
    run.layers = layers
    run.hooks = [model.register_forward_pre_hook(run.begin, with_kwargs=True)]
    if not run.known:
        run.hooks.append(model.register_forward_hook(run.check_found))
    if parts.embed:
        run.hooks += [getattr(model, name).register_forward_hook(run.reorder_tokens) for name in parts.embed]
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


def _switched(transformer: torch.nn.Module) -> "_Run":
    model, _ = _find_model(transformer)
    run = getattr(model, _RUN_KEY, None)
    if run is None or not run.is_in_place():
        raise unswitched_error(f"{type(model).__name__} with other attention processors", "use_sparse_flash(transformer, spec)")
    return run


def masks_of(transformer: torch.nn.Module) -> dict[int, Any]:
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
    return describe_layer(layer, f"{'layout' if processor.dense else _describe_spec(run.spec)}{tile}{steps}")


def _describe_spec(spec: Any) -> str:
    if not isinstance(spec, tuple):
        return str(spec)
    changes = [step for step in range(len(spec)) if step == 0 or spec[step] != spec[step - 1]]
    return ", ".join(f"from step {step} {spec[step] or 'dense'}" for step in changes)


def _is_cached(model) -> bool:
    """Whether a cache of diffusers keeps what layers of the model returned, by ``enable_cache`` or by its own function."""
    registries = (getattr(module, "_diffusers_hook", None) for module in model.modules())
    return any(hook._is_stateful for registry in registries if registry is not None for hook in registry.hooks.values())


def _find_model(transformer, grid: Any = None) -> tuple[Any, _ModelParts]:
    """Returns the module that is a known model, was switched or, with a grid, is a model of diffusers; and what is known of it."""
    if not isinstance(transformer, torch.nn.Module):
        raise TypeError(f"transformer must be a module, such as pipe.transformer; got {type(transformer).__name__}")
    for module in transformer.modules():
        for cls in type(module).__mro__:
            if cls.__name__ in _MODELS:
                return module, _MODELS[cls.__name__]
    for module in transformer.modules():
        if _RUN_KEY in vars(module) or (grid is not None and issubclass(type(module), diffusers.ModelMixin)):
            return module, _OTHER
    way_out = "pass grid=(frames, height, width) of its video in tokens, if they are in raster order in attention"
    if library_of(transformer) == "transformers":
        way_out = "call use_sparse_flash of sparse_flash.integrations.transformers"
    raise ValueError(f"transformer must be one of {', '.join(_MODELS)}; got {type(transformer).__name__}; {way_out}")


def _find_layers(model) -> list[Any]:
    """Returns the self-attention of each block in the model's lists of blocks."""
    lists = {name: child for name, child in model.named_children() if isinstance(child, torch.nn.ModuleList)}
    parts = [[getattr(block, name, None) for name in _ATTENTIONS] for blocks in lists.values() for block in blocks]
    layers = [found[0] for own in parts if (found := [one for one in own if hasattr(one, "processor")])]
    if not layers:
        raise ValueError(
            f"transformer must have lists of blocks with an attention processor in {', '.join(_ATTENTIONS)}; got "
            f"{type(model).__name__} with the lists {sorted(lists)}; call sparse_flash.attention in it"
        )
    return layers


def _parse_steps(steps: Any) -> frozenset[int]:
    steps = range(steps) if type(steps) is int and steps >= 0 else steps
    numbers = tuple(steps) if isinstance(steps, Iterable) else (steps,)
    if wrong := [one for one in numbers if isinstance(one, bool) or not isinstance(one, int) or one < 0]:
        raise ValueError(f"dense_steps must be numbers counted from 0; got {wrong}")
    return frozenset(numbers)


def _spec_at(spec: Any, step: int) -> Any:
    if isinstance(spec, tuple):
        return spec[min(step, len(spec) - 1)]
    return spec(step=step) if _takes_step(spec) else spec


def _takes_step(spec: Any) -> bool:
    return callable(spec) and "step" in inspect.signature(spec).parameters


def _check_spec(spec: Any) -> Any:
    """Returns a spec, a list as a tuple, or raises an error. Of a function with steps it checks the first one."""
    spec = tuple(spec) if isinstance(spec, list) else spec
    if spec == ():
        raise ValueError("spec must have an entry for each step of a sampling loop, the last one for all later steps; got []")
    for one in spec if isinstance(spec, tuple) else [_spec_at(spec, 0)]:
        if one is not None or spec is None:
            _parse_spec(one)
    return spec


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
def _build_layout(make: Callable, grid: tuple[int, int, int], known: bool) -> VideoLayout:
    layout = make(*grid)
    if not isinstance(layout, VideoLayout) or layout.grid != grid or (known and (layout.prefix or layout.suffix)):
        limit = ", without prefix and suffix" if known else ""
        raise ValueError(f"layout must return a VideoLayout of the grid {grid}{limit}; got {layout!r}")
    return layout


@outside_graphs
def _start_step(run: "_Run", timestep: Any) -> None:
    """Finds the number of a call's step, as ``use_sparse_flash`` says, and its spec. run.times: of the present loop's steps."""
    time, times = float(torch.as_tensor(timestep).max()), run.times
    if time not in times[-1:]:
        turns = len(times) > 1 and (time > times[-1]) != (times[1] > times[0])
        times[:] = [time] if turns or time in times[:1] else [*times, time]
    step = len(times) - 1
    run.now = None if step in run.dense_steps else _spec_at(run.spec, step)
    run.pieces = () if run.now is None else _parse_spec(run.now)


class _Run:
    """The settings of a switched model, and its present call, until the next, as gradient checkpointing runs layers again."""

    def __init__(self, model: Any, parts: _ModelParts, spec: Any, make: Callable, dense_steps: Any, precision: Any, grid: Any):
        self.config, self.parts, self.spec, self.make = model.config, parts, _check_spec(spec), make
        self.dense_steps, self.precision, self.times, self.grid = dense_steps, precision, list[float](), grid and tuple(grid)
        self.known = parts.grid_of is not None
        self.by_step = bool(dense_steps) or isinstance(self.spec, tuple) or _takes_step(spec)
        self.names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        if self.by_step and "timestep" not in self.names:
            raise ValueError(f"the model must take timestep, by which steps are counted; got {', '.join(self.names)}")
        self.layers: list[Any] = []
        self.hooks: list[Any] = []
        self.layout: Any = None  # only of the video; None where the model runs unchanged
        self.outer: Any = None  # the same, if hooks around the blocks reorder tokens
        self.video: Any = None  # the latest layout
        self.record: MaskRecord | None = None  # of ``record_masks``
        self.now = None if self.by_step else self.spec  # the spec of the present step; None if it is dense
        self.pieces = () if self.by_step else _parse_spec(spec)
        self.found, self.others = False, set[tuple[int, int]]()  # the video's attention; the lengths of other attention
        self.batch = 0

    def is_in_place(self) -> bool:
        return all(isinstance(layer.processor, _Processor) for layer in self.layers)

    def begin(self, model, args, kwargs) -> None:
        if not self.is_in_place():
            raise ValueError("the model's attention processors were replaced; call use_sparse_flash again")
        if getattr(getattr(model, "_parallel_config", None), "context_parallel_config", None) is not None:
            raise ValueError("the model must not be under context parallelism; leave enable_parallelism out, or call restore()")
        given, parts = {**dict(zip(self.names, args)), **kwargs}, self.parts
        self.found, self.others = False, set()
        name, value = parts.in_layers_if
        in_layers = not parts.embed or given.get(name, self.config.get(name)) == value
        if self.by_step:
            if model.training and torch.is_grad_enabled():
                raise ValueError("dense_steps and specs by step count the steps of sampling; leave them out for training")
            # MiniMax-H3 has other times for audio and conditions; its last token is the video's.
            time, numbers = given["timestep"], given.get("timestep_indices")
            _start_step(self, time if numbers is None else time[numbers[-1]])
            if self.now is None and (in_layers or not outside_graphs(_is_cached)(model)):
                self.layout = self.outer = None
                return
        grid = parts.grid_of(config=self.config, given=given) if self.known else self.grid
        self.layout = self.video = _build_layout(self.make, grid, self.known)
        self.outer = None if in_layers else self.layout

    def check_found(self, model, args, out) -> None:
        if self.others and not self.found:
            lengths = ", ".join(f"{q_len} x {kv_len}" for q_len, kv_len in sorted(self.others))
            raise ValueError(
                f"grid must be the video's in attention; got {self.video!r} of {self.video.tokens} tokens, and attention of "
                f"{lengths} tokens; for text before it pass layout=lambda *grid: sf.VideoLayout(*grid, tile, prefix=n)"
            )

    def reorder_tokens(self, module, args, out):
        if self.outer is None:
            return None
        # (batch, channels, frames, height, width), which the model flattens, or Mochi's (batch * frames, tokens, channels).
        dim = 2 if out.dim() == 5 else 1
        out = out.flatten(2) if dim == 2 else out.reshape(-1, self.outer.tokens, out.shape[-1])
        self.batch = out.shape[0]  # caches may call the model with half of the entries that it was given
        out = self.outer.to_tiles(out, dim)
        return out[..., None, None] if dim == 2 else out

    def reorder_rotary(self, module, args, out):
        dim = self.parts.rotary_dim
        return None if self.outer is None else tuple(self.outer.to_tiles(one, one.dim() + dim) for one in out)

    def reorder_conditions(self, module, args, out):
        number = self.parts.conditions[1]
        one = out[number]
        if self.outer is None or (one.dim() == 2 and one.shape[0] == self.batch):  # one for each entry of the batch
            return None
        tiled = self.outer.to_tiles(one.reshape(self.batch, self.outer.tokens, -1), 1)
        return *out[:number], tiled if one.dim() == 3 else tiled.flatten(0, 1), *out[number + 1 :]

    def restore_order(self, module, args):
        return None if self.outer is None else (self.outer.to_raster(args[0], 1), *args[1:])

    def count_all(self, q_len: int, kv_len: int) -> int:
        return q_len * (kv_len - self.layout.length + self.layout.tokens)

    def attend(self, dense, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        """Takes the place of scaled_dot_product_attention, whose arguments these are. dense: whether to keep all pairs."""
        layout, text = self.layout, 0
        if self.known:
            text = query.shape[2] - (layout.tokens if self.outer is None else layout.length)
            layout = VideoLayout(*layout.grid, layout.tile, *((text, 0) if self.parts.text_first else (0, text)))
        elif (query.shape[2], key.shape[2]) != (layout.tokens, layout.tokens):
            self.others.add((query.shape[2], key.shape[2]))
            options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)
        self.found = True
        kv_lens = None
        if attn_mask is not None:
            if attn_mask.dtype != torch.bool or tuple(attn_mask.shape[1:3]) != (1, 1) or not text or self.parts.text_first:
                raise ValueError(
                    f"the attention mask must be of padded text, (batch, 1, 1, tokens) bool; got {tuple(attn_mask.shape)} "
                    f"{attn_mask.dtype}; leave it out, or call restore(transformer)"
                )
            kv_lens = layout.length - text + attn_mask[:, 0, 0, -text:].sum(-1)
        if self.outer is None:
            query, key, value = (layout.to_tiles(one, 2) for one in (query, key, value))
        mask: Any = layout
        if not dense and self.now is not None:  # a dense step with a cache, which must hold tokens in one order, keeps all pairs
            mask = layout.to_spec().join(self.pieces) if self.pieces else layout & self.now(layout)
        if torch.compiler.is_compiling():
            mask = to_traceable(mask)
        if not has_choosers(mask):  # which have their own blocks
            if kv_lens is not None:
                check_known_end(mask)
            mask = compile_cached(mask, layout.length, layout.length, max(layout.block_size, _LEAST_BLOCK), query.device)
        options: dict[str, Any] = {"dropout_p": dropout_p, "kv_lens": kv_lens, "precision": self.precision}
        out = attention(query, key, value, mask, scale=scale, **options)
        return layout.to_raster(out, 2) if self.outer is None else out


class _Processor:
    """Runs a layer's own attention processor, with its attention computed by ``_Run.attend``."""

    def __init__(self, original: Any, run: _Run, number: int, dense: bool):
        self.original, self.run, self.number, self.dense = original, run, number, dense
        self.native = copy.copy(original)
        if hasattr(original, "_attention_backend"):
            self.native._attention_backend = "native"  # which calls scaled_dot_product_attention

    def __reduce__(self):
        return _new_processor, (type(self.original),), self.__dict__

    def __call__(self, *given, **named):
        run = self.run
        attend = self.original if run.layout is None else outside_graphs(self.attend) if run.parts.outside_graphs else self.attend
        if run.record is None:
            return attend(*given, **named)
        why = "in a dense step" if run.now is None else "one of dense_layers" if self.dense else None
        with run.record.layer(self.number, why, run.count_all):
            return attend(*given, **named)

    def attend(self, *given, **named):
        calls = _AttentionOverride(self.run, self.dense)
        with calls:  # torch.compile knows no "as" here
            out = self.native(*given, **named)
        if not calls.count and not named.get("all_perturbed"):  # LTX-2's guidance skips the attention of such a layer
            raise ValueError(f"{type(self.original).__name__} did not call scaled_dot_product_attention; call restore(transformer)")
        return out


@cache
def _processor_class(kind: Any) -> type[_Processor]:
    """A class with the signature of a processor's, in which attention modules look for names before they pass keywords on."""

    def call(self, *given, **named):
        return _Processor.__call__(self, *given, **named)

    vars(call)["__signature__"] = inspect.signature(kind.__call__)
    return type("_Processor", (_Processor,), {"__call__": call})


def _new_processor(kind: type) -> _Processor:
    return object.__new__(_processor_class(kind))


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
        if self.run.parts.spreads_masks and func in (torch.Tensor.repeat, torch.Tensor.__and__, operator.and_):
            return args[0]  # all pairs take gigabytes, and no result depends on the queries that are padding
        return func(*args, **(kwargs or {}))
