"""Video transformers of diffusers under a mask equal their own attention with the mask's pairs, their tokens in raster order."""

import copy
import inspect
import itertools
import pickle

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.overrides import TorchFunctionMode

import sparse_flash as sf

diffusers = pytest.importorskip("diffusers", minversion="0.42", reason="not installed: pip install 'diffusers>=0.42.1'")

from diffusers import hooks  # noqa: E402

from sparse_flash.integrations.diffusers import restore, use_sparse_flash  # noqa: E402

CELLS, TEXT = (3, 5, 7), 7
TOKENS, TEXT_EXISTS = int(np.prod(CELLS)), torch.arange(TEXT) < torch.tensor([7, 4])[:, None]
TILE = (2, 2, 4)  # all axes of CELLS are ragged
WINDOW, CHOSEN = "tile_window(layout, (1, 2, 1))", "layout & sampled(16, budget=0.3, block=64)"
SMALL = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4}


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# Of each model: the class, its sizes, and its inputs beside those of all.
WAN = diffusers.WanTransformer3DModel, {"text_dim": 8, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2}
HUNYUAN = {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 8, "pooled_projection_dim": 8}
HUNYUAN |= {"rope_axes_dim": (4, 6, 6), "guidance_embeds": False}
HUNYUAN_VIDEO = diffusers.HunyuanVideoTransformer3DModel
OF_HUNYUAN = {"encoder_attention_mask": TEXT_EXISTS.long(), "pooled_projections": drawn(2, 8)}
LTX = diffusers.LTXVideoTransformer3DModel, {"cross_attention_dim": 32, "num_layers": 2, "caption_channels": 8}
OF_LTX = {"hidden_states": drawn(2, TOKENS, 4), "encoder_attention_mask": TEXT_EXISTS.long()}
OF_LTX |= dict(zip(("num_frames", "height", "width"), CELLS, strict=True))
MOCHI = {"num_layers": 2, "pooled_projection_dim": 16, "text_embed_dim": 8, "time_embed_dim": 16, "max_sequence_length": 16}
COGVIDEOX = {"num_layers": 2, "time_embed_dim": 8, "text_embed_dim": 8, "max_text_seq_length": TEXT, "sample_frames": 9}
COGVIDEOX |= {"sample_height": 10, "sample_width": 14, "use_rotary_positional_embeddings": True}
OF_COGVIDEOX = {"hidden_states": drawn(2, 3, 4, 10, 14), "image_rotary_emb": (drawn(TOKENS, 16).cos(), drawn(TOKENS, 16).sin())}
HUNYUAN_15 = {"num_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 8, "text_embed_2_dim": 8, "image_embed_dim": 8}
HUNYUAN_15 |= {"patch_size": 2, "rope_axes_dim": (4, 6, 6)}
OF_HUNYUAN_15 = {"encoder_attention_mask": TEXT_EXISTS.float(), "image_embeds": drawn(2, 2, 8)}
OF_HUNYUAN_15 |= {"encoder_hidden_states_2": drawn(2, 3, 8), "encoder_attention_mask_2": torch.tensor([[1, 1, 0], [1, 1, 1]])}
LTX_2 = {f"audio_{name}": size for name, size in SMALL.items()} | {"audio_cross_attention_dim": 32, "audio_pos_embed_max_pos": 5}
LTX_2 |= LTX[1] | {"perturbed_attn": True}
OF_LTX_2 = OF_LTX | {"audio_hidden_states": drawn(2, 6, 4), "audio_num_frames": 6, "audio_encoder_hidden_states": drawn(2, TEXT, 8)}
COSMOS = {"num_layers": 2, "text_embed_dim": 8, "adaln_lora_dim": 4, "max_size": (3, 10, 14), "concat_padding_mask": False}
MINIMAX = {"hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1, "ffn_dim": 32, "audio_in_channels": 4, "text_dim": 8}
MINIMAX |= {"freq_dim": 16, "time_embed_hidden_dim": 16, "time_embed_dim": 16, "rope_freq_dim": 2}
# Text, the frame that the video starts with, audio and the video, one after another.
PARTS = torch.tensor([TEXT, 35, 6, TOKENS])
TAGS = torch.tensor([1, 0, 2, 0]).repeat_interleave(PARTS)
PLACES = [torch.arange(size)[:, None].expand(-1, 3) for size in PARTS[:3]] + [torch.cartesian_prod(*map(torch.arange, CELLS))]
OF_MINIMAX = {"hidden_states": drawn(2, 140, 16), "audio_hidden_states": drawn(2, 6, 4), "token_tags": TAGS}
OF_MINIMAX |= {"position_ids": torch.cat(PLACES), "timestep_indices": (TAGS == 0) + 0}
OF_MINIMAX |= {f"{name}_indices": (TAGS.eq(tag)).nonzero()[:, 0] for tag, name in enumerate(("video", "text", "audio"))}
ANIMATE = {"in_channels": 12, "latent_channels": 4, "image_dim": None, "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8}}
ANIMATE |= {"motion_encoder_size": 16, "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 8}
ANIMATE |= {"face_encoder_hidden_dim": 8, "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2}
OF_ANIMATE = {"hidden_states": drawn(2, 12, 3, 10, 14), "pose_hidden_states": drawn(2, 4, 2, 10, 14)}
OF_ANIMATE |= {"face_pixel_values": drawn(2, 3, 5, 16, 16)}
OF_ANYFLOW = {"hidden_states": drawn(2, 3, 4, 10, 14), "timestep": torch.full((2, 3), 500.0), "r_timestep": torch.full((2, 3), 9.0)}
ALLEGRO = {"num_layers": 2, "cross_attention_dim": 32, "caption_channels": 8, "sample_height": 10, "sample_width": 14}
TIME_OF_EACH_TOKEN = {"timestep": torch.linspace(0, 1000, 2 * TOKENS).view(2, -1)}
VACE = {"vace_layers": (0,), "vace_in_channels": 4}
FORCING = {"timestep": torch.linspace(0, 1000, 6).view(2, 3), "enable_diffusion_forcing": True}
GUIDED = {"spatio_temporal_guidance_blocks": [0]}  # whose attention the model skips
MODELS = {
    "wan": (*WAN, {}),
    "hunyuan": (HUNYUAN_VIDEO, HUNYUAN, OF_HUNYUAN),
    "ltx": (*LTX, OF_LTX),
    "mochi": (diffusers.MochiTransformer3DModel, MOCHI, {"encoder_attention_mask": TEXT_EXISTS}),
    "cogvideox": (diffusers.CogVideoXTransformer3DModel, COGVIDEOX, OF_COGVIDEOX),
    "wan vace": (diffusers.WanVACETransformer3DModel, WAN[1] | VACE, {"control_hidden_states": drawn(2, 4, 3, 10, 14)}),
    "skyreels": (diffusers.SkyReelsV2Transformer3DModel, WAN[1], {}),
    "chronoedit": (diffusers.ChronoEditTransformer3DModel, WAN[1], {}),
    "wan animate": (diffusers.WanAnimateTransformer3DModel, WAN[1] | ANIMATE, OF_ANIMATE),
    "anyflow": (diffusers.AnyFlowTransformer3DModel, WAN[1], OF_ANYFLOW),
    "allegro": (diffusers.AllegroTransformer3DModel, ALLEGRO, {}),
    "hunyuan 1.5": (diffusers.HunyuanVideo15Transformer3DModel, HUNYUAN_15, OF_HUNYUAN_15),
    "ltx-2": (diffusers.LTX2VideoTransformer3DModel, LTX_2, OF_LTX_2),
    "cosmos": (diffusers.CosmosTransformer3DModel, COSMOS, {}),
    "minimax": (diffusers.MiniMaxH3Transformer3DModel, MINIMAX, OF_MINIMAX),
    "wan, a time of each token": (*WAN, TIME_OF_EACH_TOKEN),
    "skyreels, diffusion forcing": (diffusers.SkyReelsV2Transformer3DModel, WAN[1], FORCING),
    "ltx-2, split rotary, guided": (diffusers.LTX2VideoTransformer3DModel, LTX_2 | {"rope_type": "split"}, OF_LTX_2 | GUIDED),
    "ltx, a time of each token": (*LTX, OF_LTX | TIME_OF_EACH_TOKEN),
    "hunyuan, token_replace": (HUNYUAN_VIDEO, HUNYUAN | {"image_condition_type": "token_replace"}, OF_HUNYUAN),
}
# Calls of layer 0, if they are not the first: Mochi calls for each entry of the batch, VACE's own blocks are first.
IN_ORDER = {"mochi": (0, 1), "wan vace": (1,), "ltx-2, split rotary, guided": ()}
KINDS = [name for name in MODELS if "," not in name]
each_model = pytest.mark.parametrize("name", MODELS)


def made(name, layers=2):
    kind, sizes, inputs = MODELS[name]
    torch.manual_seed(0)
    names = inspect.signature(kind).parameters
    model = kind(**{name: size for name, size in (SMALL | sizes).items() if name in names})
    if name == "mochi":
        torch.nn.init.normal_(model.pos_frequencies)  # zeros otherwise
    blocks = "blocks" if hasattr(model, "blocks") else "transformer_blocks"
    setattr(model, blocks, getattr(model, blocks)[:layers])
    usual = {"hidden_states": drawn(2, 4, 3, 10, 14), "encoder_hidden_states": drawn(2, TEXT, 8)}
    return model.eval(), usual | {"timestep": torch.tensor([500.0, 500.0]), **inputs, "return_dict": False}


def run(model, inputs, **changed):
    with torch.no_grad():
        return model(**inputs | changed)[0]


def outcome(model, inputs):
    """What it returns, and the gradient of each parameter that has one."""
    model.zero_grad()
    out = model(**inputs)[0]
    out.square().sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class RasterPairs(TorchFunctionMode):
    """Masks all self-attention to which the video belongs, token by token in the model's own order."""

    tile = TILE

    def __init__(self, spec, text_first=False, dense_layers=()):
        super().__init__()
        self.spec, self.text_first, self.dense_layers, self.layer = spec, text_first, dense_layers, itertools.count()

    def kept(self, layout, q, k, own):
        place = layout.position_of
        pattern = sf.parse(self.spec.replace("layout", layout.to_spec()))
        return torch.from_numpy(pattern.token_rule(place[:, None], place[None, :]))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = [*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
        tokens, text = q.shape[2], q.shape[2] - TOKENS
        own = kwargs.get("attn_mask")
        if text >= 0 and tokens == k.shape[2] and next(self.layer) not in self.dense_layers:
            layout = sf.VideoLayout(*CELLS, self.tile, **{"prefix" if self.text_first else "suffix": text})
            kept = self.kept(layout, q, k, own)
            assert 0 < kept.float().mean() < 1
            own = kept if own is None else own & kept
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=own)


class ChosenPairs(RasterPairs):
    """Masks it by what a chooser keeps of its queries and keys."""

    tile = (4, 4, 4)

    def kept(self, layout, q, k, own):
        text = q.shape[2] - TOKENS
        lens = None if own is None else layout.length - text + own[:, 0, 0, -text:].sum(-1)
        q, k = (layout.to_tiles(one, 2) for one in (q, k))
        chosen = sf.choose_blocks(self.spec.replace("layout", layout.to_spec()), q, k, kv_lens=lens)
        place = torch.from_numpy(layout.position_of)
        return chosen.to_dense()[..., place[:, None], place]


def expected(model, inputs, spec=WINDOW, call=run, pairs=RasterPairs, **options):
    with pairs(spec, type(model).__name__.startswith(("CogVideoX", "MiniMax")), **options):
        return call(model, inputs)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dense_layers", [(), (0,)], ids=["", "a dense layer"])
@each_model
def test_a_window_is_dense_attention_under_its_pairs(name, dense_layers):
    model, inputs = made(name)
    dense = IN_ORDER.get(name, dense_layers) if dense_layers else ()
    want, gradients = expected(model, inputs, call=outcome, dense_layers=dense)
    assert len(gradients) > 20
    use_sparse_flash(model, WINDOW, TILE, dense_layers=dense_layers)
    checkpointed, by_function = copy.deepcopy(model), copy.deepcopy(model)
    checkpointed.train().enable_gradient_checkpointing()
    use_sparse_flash(by_function, lambda layout: sf.parse(f"tile_window({layout}, (1, 2, 1))"), TILE, dense_layers=dense_layers)
    for one in (model, by_function, checkpointed, pickle.loads(pickle.dumps(model))):
        out, found = outcome(one, inputs)
        close(out, want)
        assert found.keys() == gradients.keys()
        for parameter, right in gradients.items():
            torch.testing.assert_close(found[parameter], right, rtol=1e-3, atol=1e-3 * float(right.abs().max()) + 1e-4)


@each_model
def test_a_layout_without_a_mask_changes_nothing_nor_do_restoring_and_saving(name, tmp_path):
    model, inputs = made(name)
    own, processors = run(model, inputs), [m.processor for m in model.modules() if hasattr(m, "processor")]
    for layout in ("auto", TILE, lambda *cells: sf.VideoLayout(*cells, (1, 8, 8))):
        assert use_sparse_flash(model, "layout", layout) is model
        close(run(model, inputs), own)
    use_sparse_flash(model, WINDOW, TILE).save_pretrained(tmp_path)
    assert (run(model, inputs) - own).abs().max() > 1e-2
    assert torch.equal(run(type(model).from_pretrained(tmp_path).eval(), inputs), own)
    assert restore(model) is model and torch.equal(run(restore(model), inputs), own)
    assert processors == [m.processor for m in model.modules() if hasattr(m, "processor")]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_padding_is_not_seen_under_patterns_that_do_not_know_it():
    model, inputs = made("wan")
    want = expected(model, inputs, "layout & (local(24) | sinks(3))")
    for spec in ("layout & (local(24) | sinks(3))", "local(24) | sinks(3) | (layout & local(1))"):
        use_sparse_flash(model, spec, TILE)
        close(run(model, inputs), want)
    use_sparse_flash(model, lambda layout: "local(24) | sinks(3)", TILE)
    close(run(model, inputs), want)


@each_model
def test_a_chooser_is_dense_attention_under_the_tiles_that_it_chooses(name):
    model, inputs = made(name)
    own, want = run(model, inputs), expected(model, inputs, CHOSEN, pairs=ChosenPairs)
    assert (want - own).abs().max() > 1e-3
    close(run(use_sparse_flash(model, CHOSEN, (4, 4, 4)), inputs), want)


@each_model
def test_a_change_in_one_cell_stays_in_its_tile(name):
    model, inputs = made(name)
    inputs |= {"isolate_modalities": True} if "ltx-2" in name else {}  # otherwise by its audio
    channels = 2 if name in ("cogvideox", "anyflow") else 1
    changed = inputs["hidden_states"].clone()
    if changed.dim() == 3:
        changed[:, -TOKENS] += 1
    else:
        changed.movedim(channels, 1)[:, :, 0, 0, 0] += 1
    use_sparse_flash(model, "tile_window(layout, 1, keep_beside=False)", TILE)
    moved = (run(model, inputs, hidden_states=changed) - run(model, inputs)).abs() > 1e-6
    if changed.dim() == 3:
        moved = moved.any(2).any(0)[-TOKENS:].view(CELLS)
    else:
        moved = moved.any(channels).any(0).view(3, 5, 2, 7, 2).any(4).any(2)
    assert moved.sum() == 16 and moved[:2, :2, :4].all()


@each_model
def test_guidance_is_the_same_in_one_batch_and_in_two_calls(name):
    model, inputs = made(name)
    use_sparse_flash(model, WINDOW, TILE)
    both = run(model, inputs)
    for entry in range(2):
        of_all = MODELS[name][0] is diffusers.MiniMaxH3Transformer3DModel  # its batch shares all but the hidden states
        half = {
            key: one[entry : entry + 1] if torch.is_tensor(one) and one.shape[0] == 2 and (not of_all or "hidden" in key) else one
            for key, one in inputs.items()
        }
        close(run(model, half), both[entry : entry + 1])


@pytest.mark.parametrize("name", ["wan", "minimax"])
@pytest.mark.parametrize("times", [(999, 750, 500, 250), (0, 250, 500, 750)], ids=["downward", "upward"])
@pytest.mark.parametrize("dense_steps", [2, range(2), [0, 3]], ids=str)
def test_dense_steps_are_counted_by_timestep(name, times, dense_steps):
    model, inputs = made(name)

    def at(time):  # the video's, next to MiniMax-H3's of conditions
        return torch.tensor([2000 if name == "minimax" else time, time])

    own = [run(model, inputs, timestep=at(time)) for time in times]
    use_sparse_flash(model, WINDOW, TILE, dense_steps=dense_steps)
    dense = range(dense_steps) if isinstance(dense_steps, int) else dense_steps
    for times_seen in (4, 4, 3, 4):  # loops one after another, one of them shorter
        for step, time in enumerate(times[:times_seen]):
            for _guided in range(2):
                got = run(model, inputs, timestep=at(time))
                assert torch.equal(got, own[step]) == (step in dense)


STEPS = [None, None, "tile_window(layout, (2, 2, 2))", WINDOW]
SHOWN = "from step 0 dense, from step 2 tile_window(layout, (2, 2, 2)), from step 3 tile_window(layout, (1, 2, 1))"


@pytest.mark.parametrize("spec", [STEPS, lambda step: STEPS[min(step, 3)]], ids=["a list", "a function"])
@each_model
def test_each_step_of_sampling_may_have_a_spec(name, spec):
    model, inputs = made(name)
    calls = [inputs | {"timestep": inputs["timestep"] * 0 + time} for time in (999.0, 800.0, 600.0, 400.0, 200.0)]
    want = [run(model, call) if one is None else expected(model, call, one) for call, one in zip(calls, [*STEPS, WINDOW])]
    use_sparse_flash(model, spec, TILE)
    for _loop in range(2):
        with sf.record_masks(model) as record:
            for call, right in zip(calls, want):
                close(run(model, call), right)
        assert record[1].dense == {"in a dense step": 2} and 0 < record[1].kept < 1
    shown, masks = (SHOWN, tuple(STEPS)) if spec is STEPS else (str(spec), spec)
    assert sf.masks_of(model)[1] == masks and f"sparse_flash mask: {shown}; tile {TILE}" in str(model)
    with pytest.raises(ValueError, match="specs by step count the steps of sampling"):
        model.train()(**inputs)


@each_model
def test_a_switched_model_says_its_layout_its_masks_and_what_its_layers_did(name):
    model, inputs = made(name)
    plain = str(model)
    use_sparse_flash(model, WINDOW, TILE, dense_steps=1, dense_layers=[0])
    assert sf.masks_of(model) == {0: "layout", 1: WINDOW} | ({2: WINDOW} if name == "wan vace" else {})
    with sf.record_masks(model) as record:
        for time in (999, 500, 200):
            run(model, inputs, timestep=inputs["timestep"] * 0 + time)
    run(model, inputs)
    assert f"sparse_flash mask: {WINDOW}; tile {TILE} of {CELLS} tokens, 82.9% padding; dense steps [0]\n" in str(model)
    assert record[0].dense == {"in a dense step": 1, "one of dense_layers": 2} and record[1].dense == {"in a dense step": 1}
    assert 0 < record[1].kept < 1 and record[1].calls == 3
    if name == "wan":
        layout = sf.VideoLayout(*CELLS, TILE)
        density = sf.compile_mask(WINDOW.replace("layout", str(layout)), layout.length).density
        assert record[1].kept.tolist() == pytest.approx([density * layout.length / layout.tokens])
    assert str(restore(model)) == plain
    for say in (sf.masks_of, lambda model: sf.record_masks(model).__enter__()):
        with pytest.raises(ValueError, match="must be one that use_sparse_flash switched"):
            say(model)


def test_the_layout_follows_the_inputs():
    model, inputs = made("wan")
    use_sparse_flash(model, "layout")
    for shape in ((1, 4, 3, 10, 14), (2, 4, 1, 16, 32), (1, 4, 5, 6, 4)):
        changed = {"hidden_states": torch.randn(shape), "encoder_hidden_states": torch.randn(shape[0], TEXT, 8)}
        changed["timestep"] = torch.full(shape[:1], 500)
        close(run(model, inputs, **changed), run(restore(copy.deepcopy(model)), inputs, **changed))


needs_patterns_in_graphs = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="torch.compile takes patterns from PyTorch 2.13"
)
COMPILED = {
    "whole": lambda model: torch.compile(model, backend="eager", fullgraph=True),
    "by blocks": lambda model: model.compile_repeated_blocks(backend="eager", fullgraph=True) or model,
}
IN_GRAPHS = [("wan", CHOSEN, "whole"), *((name, WINDOW, "whole") for name in ("hunyuan", "ltx", "cogvideox"))]
# Attention of Mochi breaks the graph; diffusers names no blocks of the others that repeat.
IN_GRAPHS += [(name, WINDOW, "by blocks") for name in KINDS if name not in ("mochi", "cogvideox", "cosmos", "allegro")]


@needs_patterns_in_graphs
@pytest.mark.parametrize("name, spec, how", IN_GRAPHS)
def test_one_graph_holds_the_whole_model_or_a_block(name, spec, how):
    torch._dynamo.reset()
    model, inputs = made(name, layers=2 if how == "by blocks" else 1)
    want = run(use_sparse_flash(model, spec, TILE), inputs)
    close(run(COMPILED[how](model), inputs), want)


@needs_patterns_in_graphs
@pytest.mark.parametrize("name, dense_steps", [("wan", 1), ("mochi", 0)])
def test_what_reads_values_breaks_the_graph(name, dense_steps):
    torch._dynamo.reset()
    model, inputs = made(name, layers=1)
    first = {"timestep": torch.tensor([999.0, 999.0])}
    own, want = run(model, inputs, **first), run(use_sparse_flash(model, WINDOW, TILE), inputs)
    compiled = torch.compile(model, backend=(counter := CompileCounterWithBackend("eager")))
    use_sparse_flash(compiled, WINDOW, TILE, dense_steps=dense_steps)
    if dense_steps:
        close(run(compiled, inputs, **first), own)
    close(run(compiled, inputs), want)
    graphs = counter.frame_count
    for time in (400, 300, 999, 500):
        run(compiled, inputs, timestep=torch.tensor([time, time]) * 1.0)
    assert counter.frame_count == graphs


TIMES = (900.0, 800.0, 700.0, 600.0, 500.0, 400.0)
NOW = [0]  # of the loop, which caches ask for
ALWAYS = {"spatial_attention_timestep_skip_range": (-1, 1001), "current_timestep_callback": lambda: NOW[0]}
CACHES = {
    "pyramid": lambda: hooks.PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2, **ALWAYS),
    "first block": lambda: hooks.FirstBlockCacheConfig(threshold=0.5),
    "faster": lambda: hooks.FasterCacheConfig(
        unconditional_batch_skip_range=2,
        unconditional_batch_timestep_skip_range=(-1, 1001),
        attention_weight_callback=lambda _: 0.3,
        **ALWAYS,
    ),
    "mag": lambda: hooks.MagCacheConfig(num_inference_steps=6, mag_ratios=[1.0] * 6, retention_ratio=0.1, threshold=0.3),
}
# FasterCache itself takes no tokens without frames and halves no other inputs; the next two caches know some models only.
UNREGISTERED = {"skyreels", "chronoedit", "wan animate", "allegro", "hunyuan 1.5", "ltx-2", "minimax"}
UNCACHED = {"faster": {"ltx", "ltx-2", "hunyuan", "wan vace", "wan animate", "minimax"}}
UNCACHED |= {"first block": UNREGISTERED, "mag": UNREGISTERED}
CACHED = [(name, kind) for name in KINDS for kind in CACHES if name not in {"cosmos", "anyflow", *UNCACHED.get(kind, ())}]
ORDERS = ["switched first", "cached first", "cached by its function"]


def sampled(model, inputs, times=TIMES):
    outputs = []
    for NOW[0] in times:
        with model.cache_context("cond"):
            outputs.append(run(model, inputs, timestep=torch.tensor([NOW[0]] * 2)))
    return outputs


@pytest.mark.parametrize("name, kind, order", [(*case, order) for case, order in zip(CACHED, itertools.cycle(ORDERS))])
def test_caches_hold_tokens_in_one_order_in_sparse_and_dense_steps(name, kind, order):
    model, inputs = made(name)
    plain, own = sampled(copy.deepcopy(model), inputs), copy.deepcopy(model)
    own.enable_cache(CACHES[kind]())
    want = sampled(own, inputs)
    assert any(not torch.allclose(one, two, atol=1e-3) for one, two in zip(want, plain))  # some steps come from the cache
    if order == "cached first":
        model.enable_cache(CACHES[kind]())
    use_sparse_flash(model, "layout", TILE, dense_steps=[0, 3])
    if order == "switched first":
        model.enable_cache(CACHES[kind]())
    elif order == "cached by its function":
        apply = {"pyramid": "pyramid_attention_broadcast", "first block": "first_block_cache"}.get(kind, f"{kind}_cache")
        getattr(hooks, f"apply_{apply}")(model, CACHES[kind]())
    for got, one in zip(sampled(model, inputs), want):
        close(got, one)
    model._reset_stateful_cache()
    use_sparse_flash(model, WINDOW, TILE, dense_steps=range(len(TIMES)))  # all steps are dense
    for got, one in zip(sampled(model, inputs), want):
        close(got, one)


def offloaded(model, kind, **options):
    model.enable_group_offload(onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), offload_type=kind, **options)


def offloaded_by_accelerate(model):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed; the extra transformers brings it")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def with_lora(model, fused=False):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    torch.manual_seed(1)
    names = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=names))
    if fused:
        model.fuse_lora()


CHANGES = {
    "groups of blocks": lambda model: offloaded(model, "block_level", num_blocks_per_group=1),
    "groups of leaves": lambda model: offloaded(model, "leaf_level"),
    "accelerate": offloaded_by_accelerate,
    "bfloat16 weights": lambda model: model.enable_layerwise_casting(torch.bfloat16, torch.float32),
    "lora": with_lora,
    "fused lora": lambda model: with_lora(model, fused=True),
    "fused projections": lambda model: model.fuse_qkv_projections(),
}
CHANGED = [*itertools.product(KINDS, ["bfloat16 weights", "groups of blocks"])]
CHANGED += [(name, "lora") for name in KINDS if name != "allegro"]  # which takes no adapters
CHANGED += itertools.product(["wan", "hunyuan"], ["groups of leaves", "accelerate", "fused lora"])
CHANGED += itertools.product(["wan", "ltx", "cogvideox"], ["fused projections"])


@pytest.mark.parametrize("name, change", CHANGED)
def test_what_changes_modules_works_before_and_after_the_switch(name, change):
    model, inputs = made(name)
    after, own = copy.deepcopy(model), copy.deepcopy(model)
    CHANGES[change](own)
    want = expected(own, inputs)
    CHANGES[change](model)
    close(run(use_sparse_flash(model, WINDOW, TILE), inputs), want)
    if change == "fused projections":
        assert any(part.endswith("to_qkv") for part, _ in model.named_modules())
    if (name, change) != ("cogvideox", "fused projections"):  # which sets other attention processors
        CHANGES[change](use_sparse_flash(after, WINDOW, TILE))
        close(run(after, inputs), want)


def made_other():
    """A model that is not known, whose first block is of text alone."""
    torch.manual_seed(0)
    sizes = {"in_text_dim": 8, "in_text_dim2": 8, "time_dim": 16, "model_dim": 32, "ff_dim": 32, "num_text_blocks": 1}
    model = diffusers.Kandinsky5Transformer3DModel(**sizes, num_visual_blocks=2, axes_dims=(4, 6, 6)).eval()
    torch.nn.init.normal_(model.out_layer.out_layer.weight, std=0.1)
    for block in model.visual_transformer_blocks:
        torch.nn.init.normal_(block.visual_modulation.out_layer.weight, std=0.1)
    inputs = {"hidden_states": drawn(2, 3, 10, 14, 4), "encoder_hidden_states": drawn(2, TEXT, 8), "timestep": torch.ones(2)}
    inputs |= {"visual_rope_pos": [torch.arange(size) for size in CELLS], "text_rope_pos": torch.arange(TEXT)}
    return model, inputs | {"pooled_projections": drawn(2, 8), "return_dict": False}


def test_another_model_runs_with_its_grid():
    model, inputs = made_other()
    own = run(model, inputs)
    with pytest.raises(ValueError, match=r"must be one of Wan.* got Kandinsky5Transformer3DModel; pass grid="):
        use_sparse_flash(model, WINDOW)
    want = expected(model, inputs)
    assert (want - own).abs().max() > 1e-2
    close(run(use_sparse_flash(model, "layout", grid=CELLS), inputs), own)
    close(run(use_sparse_flash(model, WINDOW, TILE, grid=CELLS), inputs), want)
    assert sf.masks_of(model).keys() == {0, 1, 2} and torch.equal(run(restore(model), inputs), own)


def test_other_models_that_do_not_fit_are_errors():
    model, inputs = made_other()
    use_sparse_flash(model, WINDOW, TILE, grid=(3, 5, 8))
    with pytest.raises(ValueError, match=r"of 120 tokens, and attention of 7 x 7, 105 x 105 tokens"):
        run(model, inputs)
    unet = diffusers.UNet2DModel(block_out_channels=(32,), down_block_types=["DownBlock2D"], up_block_types=["UpBlock2D"])
    with pytest.raises(ValueError, match=r"lists of blocks .* got UNet2DModel with the lists \['down_blocks', 'up_blocks'\]"):
        use_sparse_flash(unet, WINDOW, grid=CELLS)


OF_END = "layout & (local(9) | last_tokens(3))"
UNFIT = [
    ("hunyuan", OF_END, TILE, {}, "counts from the end"),
    ("hunyuan", OF_END, (2, 8, 8), {}, "counts from the end"),
    ("ltx", WINDOW, TILE, {"height": 4}, "got 105 tokens; tokens of conditions"),
    ("ltx", WINDOW, TILE, {"num_frames": None, "video_coords": drawn(2, 3, TOKENS)}, "num_frames, height and width must be passed"),
    ("cogvideox", WINDOW, TILE, {"attention_kwargs": {"attention_mask": torch.zeros(4, 1, 112)}}, "must be of padded text"),
    ("wan", WINDOW, lambda *cells: sf.VideoLayout(*cells, TILE, prefix=1), {}, "without prefix and suffix"),
]


@pytest.mark.parametrize("name, spec, layout, changed, message", UNFIT)
def test_inputs_that_do_not_fit_are_errors(name, spec, layout, changed, message):
    model, inputs = made(name)
    use_sparse_flash(model, spec, layout)
    with pytest.raises(ValueError, match=message):
        run(model, inputs, **changed)


def test_models_that_changed_since_they_were_switched_are_errors():
    model, inputs = made("wan")
    use_sparse_flash(model, WINDOW, TILE, dense_steps=1)
    with pytest.raises(ValueError, match="steps of sampling"):
        model.train()(**inputs)
    parallel = diffusers.ParallelConfig(context_parallel_config=diffusers.ContextParallelConfig(ulysses_degree=2))
    model._parallel_config = parallel  # as enable_parallelism sets it
    with pytest.raises(ValueError, match=r"must not be under context parallelism.*leave enable_parallelism out"):
        run(model, inputs)
    model.set_attn_processor(type(model.blocks[0].attn2.processor)())
    with pytest.raises(ValueError, match="were replaced"):
        run(model, inputs)
