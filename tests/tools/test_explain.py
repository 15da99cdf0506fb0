"""The numbers of ``explain`` and the pictures of ``draw``, against the dense mask."""

import dataclasses
import importlib
import tracemalloc
from contextlib import nullcontext

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import heavy_rows_split
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_flash as sf
from sparse_flash import backends
from sparse_flash.tools import draw
from sparse_flash.tools.explain import explain, reachability
from sparse_flash.tools.figures import size_text

MASKS = [
    ("full", 256, 256, 64),
    ("causal", 300, 300, 64),
    ("causal & local(40)", 200, 330, 32),
    ("causal", 330, 200, 32),
    ("butterfly(block=16)", 256, 256, 16),
    ("strided(5, block=3)", 217, 190, 16),
    ("shifted(documents([0, 50, 60, 130]), 0, allow_uncovered=True)", 200, 200, 16),
    ("random(0.1, block=7) & causal", 150, 150, 32),
    ("local(3) & ~local(2)", 100, 100, 16),
]


@pytest.mark.parametrize("spec, q_len, kv_len, block", MASKS)
def test_numbers_are_those_of_the_dense_mask(spec, q_len, kv_len, block):
    mask = sf.compile_mask(spec, q_len, kv_len, block)
    dense, e = mask.to_dense().numpy(), explain(mask, heads=3, head_dim=32)
    assert e.kept_pairs == dense.sum()
    assert e.empty_queries == (~dense.any(1)).sum()
    assert e.empty_keys == (~dense.any(0)).sum()
    states = mask.block_states().numpy()
    assert (e.kept_blocks, e.partial_blocks) == ((states > 0).sum(), (states == 1).sum())
    assert e.rows.max == (states > 0).sum(1).max()
    assert e.columns.max == (states > 0).sum(0).max()
    assert e.flops == 4 * 3 * 32 * dense.sum()
    causal = np.tri(q_len, kv_len, kv_len - q_len, dtype=bool)
    assert e.causal == (not (dense & ~causal).any())
    if e.causal:
        assert e.causal_density == pytest.approx(dense.sum() / causal.sum())
        blocks = sf.compile_mask("causal", q_len, kv_len, block).block_states().numpy()
        assert e.rival_blocks == (blocks > 0).sum()


def test_costs_are_compared_with_the_dense_call_that_a_user_would_otherwise_run():
    mask, both_ways = (explain(sf.compile_mask(spec, 4096), heads=2) for spec in ("causal & local(512)", "local(512)"))
    causal, full = (explain(sf.compile_mask(spec, 4096), heads=2) for spec in ("causal", "full"))
    assert (mask.dense_flops, mask.dense_bytes_moved) == (causal.flops, causal.bytes_moved)
    assert (both_ways.dense_flops, both_ways.dense_bytes_moved) == (full.flops, full.bytes_moved)
    assert mask.speedup == causal.kept_blocks / mask.kept_blocks and both_ways.speedup == full.kept_blocks / both_ways.kept_blocks
    for name, e in (("dense causal attention", mask), ("dense attention", both_ways)):
        said = e.lines()
        assert all(f" {name}" in said[line] for line in ("predicted speed-up", "forward FLOPs", "forward traffic"))


def parts(mask, unit):
    """Its pairs, ``unit`` queries at a time."""
    return np.split(mask.to_dense().numpy(), range(unit, mask.q_len, unit))


def test_figures_and_pictures_of_a_dense_mask_take_little_memory_beside_its_table():
    mask = sf.compile_mask("causal & ~local(5000)", 1 << 19)
    for look in (explain, lambda mask: draw.make_picture(mask, 64, 64)):
        tracemalloc.start()
        look(mask)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < mask.nbytes / 4


@pytest.mark.parametrize("spec", ["causal & local(3)", "butterfly(block=1)", "causal & power_of_two(block=1)", "full", "local(2)"])
def test_reachability_is_a_power_of_the_mask(spec):
    tokens = 48
    mask = sf.compile_mask(spec, tokens, block_size=16)
    step = mask.to_dense().numpy() | np.eye(tokens, dtype=bool)
    lower = np.tri(tokens, dtype=bool)
    reach = reachability(mask)
    assert reach.unit == 1
    for layers, share in reach.shares.items():
        power = np.linalg.matrix_power(step.astype(object), layers) > 0
        assert share == pytest.approx((power & lower).sum() / lower.sum())


@pytest.mark.parametrize("spec", [spec for spec, q_len, kv_len, _ in MASKS if q_len == kv_len])
@pytest.mark.parametrize("units", [2, 5, 200])
def test_units_of_reachability_are_connected_where_a_pair_is_kept(spec, units):
    mask = sf.compile_mask(spec, 387, block_size=16)
    reach = reachability(mask, units)
    connected = np.array(
        [[cell.any() for cell in np.split(row, range(reach.unit, 387, reach.unit), 1)] for row in parts(mask, reach.unit)]
    )
    sizes = np.diff(np.append(np.arange(0, 387, reach.unit), 387))
    pairs = np.tril(np.outer(sizes, sizes), -1) + np.diag(sizes * (sizes + 1) // 2)
    share = pairs[connected | np.eye(len(sizes), dtype=bool)].sum() / pairs.sum()
    assert reach.unit >= 16 and reach.shares[1] == pytest.approx(share)


def test_causal_butterfly_never_reaches_most_of_the_past_and_powers_of_two_do():
    flat = explain(sf.compile_mask("causal & butterfly(block=16)", 1024, block_size=16))
    difference = explain(sf.compile_mask("causal & power_of_two(block=16)", 1024, block_size=16))
    assert flat.reach.limit < 0.5 and any("any depth" in hint for hint in flat.hints)
    assert difference.reach.limit == 1


def test_hints_say_where_dense_wins_and_where_nothing_is_kept():
    assert any("dense causal attention" in hint for hint in explain(sf.compile_mask("causal", 1024)).hints)
    assert explain(sf.compile_mask("causal & local(128)", 4096)).hints == []
    nothing = explain(sf.compile_mask("causal & ~causal", 256))
    assert nothing.speedup == float("inf") and "keeps nothing" in nothing.hints[0]


def test_operations_and_traffic_count_both_head_dims():
    mask = sf.compile_mask("causal & local(100)", 512)
    both, one, other = explain(mask, head_dim=96, v_head_dim=32), explain(mask, head_dim=96), explain(mask, head_dim=32)
    for name in ("flops", "visited_flops", "dense_flops", "bytes_moved", "dense_bytes_moved"):
        assert getattr(both, name) == (getattr(one, name) + getattr(other, name)) / 2


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"heads": 0}, ValueError, "heads must be an integer of at least 1; got 0"),
        ({"heads": 4.5}, ValueError, "got 4.5"),
        ({"head_dim": "64"}, ValueError, "head_dim must be an integer of at least 1; got '64'"),
        ({"dtype": "bf16"}, TypeError, "dtype must be a torch.dtype, such as torch.bfloat16; got 'bf16'"),
    ],
)
def test_numbers_of_a_call_that_cannot_be_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        explain("causal", q_len=256, **given)


@pytest.mark.parametrize("look", [explain, sf.draw])
def test_a_mask_without_contents_is_refused_with_the_way_out(look):
    q = torch.zeros(1, 1, 64, 16)
    for mask in (sf.compile_mask("causal", 64), sf.topk_blocks(q, q, 2, every=1, block_size=16)):
        look(mask)
        with pytest.raises(ValueError, match="on the device meta has no contents to look at; make it on another, such as cpu"):
            look(mask.to("meta"))


@pytest.mark.parametrize("look", [explain, sf.draw])
def test_a_pattern_that_differs_by_head_is_refused_with_one_that_works(look):
    for heads in (sf.per_head(["causal & local(9)", "full", "full"]), "per_head([causal & local(9), full, full])"):
        with pytest.raises(
            ValueError, match=r"must be that of one head; got 2 different ones; pass one, such as '(.*)'$"
        ) as refused:
            look(heads, q_len=64)
        look(str(refused.value).split("'")[1], q_len=64)


@pytest.mark.parametrize("look", [explain, sf.draw])
def test_a_mask_that_all_heads_share_is_looked_at_as_one(look):
    alike = sf.per_head(["causal", "causal"])
    assert str(look(alike, q_len=64)).endswith(str(look("causal", q_len=64)).partition("\n")[2])
    assert str(look(sf.compile_mask(alike, 64))) == str(look(sf.compile_mask("causal", 64)))


def test_a_mask_that_differs_by_head_is_refused():
    mask = sf.BlockMask.per_head(["causal", "full"], q_len=256)
    with pytest.raises(ValueError, match="one mask; got 2"):
        explain(mask)


@pytest.mark.parametrize("specs", [["causal & local(40)", "full", "strided(5, block=3)"], ["causal & ~causal", "random(0.3)"]])
def test_the_mask_of_one_head_is_that_which_was_given(specs):
    mask = sf.BlockMask.per_head(specs, q_len=200, block_size=32)
    for head, spec in enumerate(specs):
        assert mask.select(head).equal(sf.compile_mask(spec, 200, block_size=32))


def test_the_functions_stay_where_the_modules_of_their_names_are_loaded():
    import sparse_flash.tools.draw
    import sparse_flash.tools.explain  # noqa: F401

    assert callable(sf.draw) and callable(sf.explain)


class Allocations(TorchDispatchMode):
    """The bytes that tensors made within hold, each storage once."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in pytree.tree_leaves(made):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in given:
                self.storages[t.untyped_storage()._cdata] = t.untyped_storage()  # kept, so no other takes its address
        return made

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


CALLS = [
    ("causal & local(200)", {}),
    ("causal", {"heads": 4, "kv_heads": 2, "batch": 2}),
    ("causal", {"heads": 4, "kv_heads": 2, "deterministic": True}),
    ("full", {"head_dim": 64}),
    ("global_tokens(128) | local(64)", {}),
    ("global_tokens(128) | local(64)", {"deterministic": True, "head_dim": 40}),
    ("causal & local(200)", {"block_size": 32}),
    ("causal", {"head_dim": 96, "v_head_dim": 64}),
    ("global_tokens(128) | local(64)", {"head_dim": 192, "v_head_dim": 128}),
    ("global_tokens(128) | local(64)", {"head_dim": 160}),
    ("global_tokens(128) | local(64)", {"head_dim": 160, "block_size": 64}),
    ("causal", {"head_dim": 192, "v_head_dim": 128, "heads": 4, "kv_heads": 2, "deterministic": True}),
    ("full", {"head_dim": 256, "v_head_dim": 72, "heads": 4, "kv_heads": 2, "batch": 2}),
    ("full", {"head_dim": 256, "deterministic": True}),
]


@pytest.mark.parametrize("spec, options", CALLS, ids=str)
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_memory_is_what_launchers_allocate(backend, spec, options, monkeypatch):
    """The kernels are not launched: only their arguments count. Blocks of 64 and of 128 hold different lengths of these tokens."""
    pytest.importorskip("triton")
    folder = "sparse_flash.kernels.hopper" if backend == "hopper" else "sparse_flash.kernels.portable"
    passes = [importlib.import_module(f"{folder}.{name}") for name in ("forward", "backward")]
    recording = importlib.import_module("sparse_flash.kernels.launch.launch").Recording
    monkeypatch.setattr(recording, "launch", lambda *arguments, **more: None)
    for module in passes:
        if hasattr(module, "tile_queue"):
            monkeypatch.setattr(module, "tile_queue", lambda device: None)
    s = {"heads": 2, "head_dim": 128, "v_head_dim": None, "batch": 1, "kv_heads": None, "deterministic": False, "block_size": 128}
    s |= options
    with heavy_rows_split() if "global" in spec else nullcontext():
        mask = sf.compile_mask(spec, 560, 940, s.pop("block_size"))
    m = explain(mask, dtype=torch.bfloat16, **s).memory
    assert set(m.work) == {"triton", "hopper"}
    dims, kv_heads = (s["head_dim"], s["v_head_dim"] or s["head_dim"]), s["kv_heads"] or s["heads"]
    q, k, v = (
        torch.zeros(s["batch"], heads, tokens, dim, dtype=torch.bfloat16)
        for heads, tokens, dim in ((s["heads"], 560, dims[0]), (kv_heads, 940, dims[0]), (kv_heads, 940, dims[1]))
    )
    table = mask.kernel_table(on_gpu=True)
    assert m.inputs == sum(t.nbytes for t in (q, k, v))
    assert m.table == (0 if table is None else mask.nbytes + (0 if table is mask else table.nbytes))
    has_backward = backend == "hopper" and backends.get_backend("hopper").has_backward(*dims)
    if not has_backward:
        passes[1] = importlib.import_module("sparse_flash.kernels.portable.backward")
    forward, backward = (module.__dict__[f"attention_{name}"] for module, name in zip(passes, ("forward", "backward")))
    with Allocations() as of_call:
        out, lse = forward(q, k, v, table, 1.0)
    assert of_call.bytes == m.outputs + m.work[backend][0]
    assert of_call.bytes + m.inputs + m.table == m.forward(backend)
    more = {"deterministic": s["deterministic"]} if has_backward else {}
    if s["deterministic"] and table is not None:
        _ = table.whole_columns  # made once and kept with the table
    with Allocations() as of_gradients:
        backward(out, None, q, k, v, out, lse, table, 1.0, **more)
    assert of_gradients.bytes == m.gradients + m.work[backend][1]
    assert m.backward(backend) == m.inputs + m.outputs + m.table + out.nbytes + of_gradients.bytes


def test_memory_of_a_call_on_this_device_is_what_it_leaves_and_what_it_peaks_at():
    """On a CPU, what remains after a call; on a GPU, also the peak."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mask = sf.compile_mask("causal & local(200)", 4096, device=device)
    m = explain(mask, heads=4, dtype=torch.float16).memory
    q, k, v = (torch.randn(1, 4, 4096, 64, dtype=torch.float16, device=device, requires_grad=True) for _ in range(3))
    out, lse = sf.attention(q, k, v, mask, return_lse=True)
    assert (out.nbytes, lse.nbytes, q.nbytes + k.nbytes + v.nbytes) == (m.out, m.lse, m.inputs)
    if device == "cuda":
        backend = backends.choose_backend("auto", backends.Call.from_tensors(q, k, v, mask.block_size))
        out.sum().backward()  # compiled, and with room for gradients
        q.grad = k.grad = v.grad = out = lse = None
        dout = torch.randn_like(q)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated() - m.inputs - m.table - m.out
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(sf.attention(q, k, v, mask), (q, k, v), dout)
        assert torch.cuda.max_memory_allocated() - before == pytest.approx(m.backward(backend), abs=1 << 16)


@pytest.mark.parametrize("options", [{"head_dim": 300}, {"dtype": torch.float64}], ids=str)
def test_a_call_that_no_kernel_takes_has_its_memory_in_words(options):
    e = explain(sf.compile_mask("causal", 1000), **options)
    during_call, in_backward = (e.lines()[name] for name in ("memory of a call", "of its backward pass"))
    assert during_call.startswith(f"{size_text(e.memory.held[0])} and chunks of scores on torch: q, k and v")
    assert in_backward.startswith(f"{size_text(e.memory.held[1])} and chunks of scores on torch: as above")


def test_back_ends_that_do_not_run_a_call_have_no_memory():
    mask = sf.compile_mask("random(0.05, block=32)", 1024, block_size=32)
    assert mask.coarse is None and set(explain(mask).memory.work) == {"triton"}
    assert set(explain(sf.compile_mask("causal", 256), dtype=torch.float32).memory.work) == {"triton"}
    assert set(explain(sf.compile_mask("causal", 256), dtype=torch.float64).memory.work) == set()
    with pytest.raises(ValueError, match="multiple of kv_heads; got 4 and 3"):
        explain(mask, heads=4, kv_heads=3)


def test_an_explanation_reads_as_sentences_and_has_them_as_fields():
    e = sf.explain("causal & local(1024)", 8, 128)
    text = str(e)
    assert text.startswith(
        "causal & local(1024)\n65,536 queries x 65,536 keys in blocks of 128; batch 1, 8 heads of 128, bfloat16\n"
    )
    assert e.kept_blocks == 4572 and "visited blocks" in text and "4,572 of 262,144" in text and "predicted speed-up" in text
    assert "hint: " in str(sf.explain(sf.compile_mask("causal", 256)))
    with pytest.raises(ValueError, match="got a mask of 256 x 256 tokens"):
        sf.explain(sf.compile_mask("causal", 256), q_len=512)


@dataclasses.dataclass(frozen=True)
class OfTheUser(sf.Pattern):
    """A pattern over a layout that keeps padding."""

    layout: sf.VideoLayout

    def token_rule(self, q, kv):
        return (q - kv) % 3 == 0


@settings(max_examples=60, deadline=None)
@given(
    pattern=strategies.by_name["tile_window"] | strategies.by_name["frame_window"] | strategies.by_name["radial"], data=st.data()
)
def test_figures_of_a_video_are_those_of_its_own_tokens(pattern, data):
    layout, block = pattern.layout, data.draw(st.sampled_from([16, 64]))
    pattern = dataclasses.replace(pattern, keep_beside=True)
    over = [pattern, pattern | sf.local(20), pattern & ~sf.local(2), ~pattern, OfTheUser(layout), OfTheUser(layout) & sf.local(40)]
    pattern = data.draw(st.sampled_from(over))
    mask = sf.compile_mask(pattern, layout.length, block_size=block)
    video, dense = explain(pattern, q_len=layout.length, block_size=block).video, mask.to_dense().numpy()
    exists = (layout.positions >= 0).all(1)
    assert exists.sum() == np.prod(layout.grid)
    assert video.kept == pytest.approx(dense[exists][:, exists].sum() / exists.sum() ** 2)
    visited = (mask.block_states().numpy() > 0).repeat(block, 0).repeat(block, 1)[: layout.tiled, : layout.tiled]
    assert video.visited == pytest.approx(visited.sum() / exists.sum() ** 2)
    assert video.padding == layout.length - layout.tokens
    seen = int(dense[:, ~layout.exists(np.arange(layout.length))].sum())
    assert video.seen == seen and video.lines()["padding"].endswith(
        f"{seen:,} kept pairs have one as key" if seen else "no query sees them"
    )


def test_explain_of_a_video_says_its_grid_padding_and_window_in_tokens():
    spec = "tile_window(video_layout(9, 30, 52, tile=(2, 8, 4), prefix=77, suffix=3), (5, 3, 4))"
    e = explain(spec)
    assert e.q_len == e.kv_len == e.video.layout.length
    said = e.lines()
    assert said["video"] == "9 x 30 x 52 tokens in 5 x 4 x 13 tiles of 2 x 8 x 4; prefix 77, suffix 3"
    assert said["padding"] == "2,600 positions, 18.5% of the video's tokens; no query sees them"
    assert said["tile order"].startswith("q, k and v have 16,720 tokens") and said["tile order"].endswith("before it 14,120")
    assert said["window"] == "9 x 24 x 16 tokens (frames x rows x columns)"  # the window has all frames, of which there are 9
    assert e.hints == ["A block of 128 tokens holds 2 tiles; block_size=64 visits less."]
    finer = explain(spec, block_size=64)
    assert finer.video.visited < e.video.visited and finer.video.kept == e.video.kept and finer.hints == []
    assert all(text in str(e) for text in said.values())
    with pytest.raises(ValueError, match="must be in tile order, with 16720 tokens; got 14120"):
        explain(spec, q_len=14120)


def test_figures_of_a_video_are_left_out_where_there_is_no_layout_of_that_length():
    one = sf.VideoLayout(2, 4, 8, (1, 4, 4))
    assert explain(sf.compile_mask(one, one.length)).video is None and explain("causal", q_len=64).video is None
    assert explain(one, q_len=16, kv_len=one.length).video is None
