"""A denoising step of a video transformer, dense and under masks over tiles; the kernels beside their peers; the permutation.

    python -m sparse_flash.benchmarks.video --out runs/video
    python -m sparse_flash.benchmarks.video --part steps --model wan-480p --how compiled --only "sdpa-cudnn|fa4|window"
    python -m sparse_flash.benchmarks.video --part steps --model hunyuan-video --layers 0.25
    python -m sparse_flash.benchmarks.video --part kernels --only "sparse_flash|cudnn"
    python -m sparse_flash.benchmarks.video --part permutation

``steps``: one forward pass of a transformer of diffusers (batch 1, random weights, real shapes), without gradients. A case
names what computes its self-attention. Dense ones: PyTorch's kernel and FlashAttention-4, called for q, k and v in the usual order,
without HunyuanVideo's mask of padded text, which keeps all here. Ours in tile order goes through ``use_sparse_flash``.
``compiled``: each block is one graph, by ``compile_repeated_blocks``. The speed-up is over the fastest dense case compiled alike.
``parts`` are ms of kernels by name, from one profiled step; ``idle`` is what no kernel fills. ``difference`` is the relative L2
distance of the output from the first dense case's: that of ``all pairs in tiles`` must be rounding, as between dense cases; the
others' tell how much random weights let a mask change. Such weights say nothing of quality.

``kernels``: a window of tiles in tile order, forward and backward, checked at sampled queries; grids are rounded up to
whole tiles, as some peers take full blocks alone. ``ragged`` rows have the model's own grid. Ours is timed before and after its
peers. Dense attention has the tokens of the model's own grid. ``permutation``: to_tiles and to_raster beside a copy; GB/s
read and written.

A case that is missing or fails is a row with the reason. Writes video.json after each row. Exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .baselines.flash import FlashAttention4, FlashOptions
from .measure.accuracy import TOLERANCE, relative_error
from .measure.noise import Timing, time_runs
from .measure.throughput import DTYPES, profile_kernels, time_passes, try_measuring
from .measure.throughput import run as run_case
from .program import RowFile, Table, add_device, add_limit, create_parser, print_tables
from .results import environment, has_numbers, why_not
from .workload.cases import OURS, Case, Mask, Shape
from .workload.masks import FULL
from .workload.video import ALL_PAIRS, MODELS, Model, StepCase, build_transformer, step_cases, windows

PARTS = {  # the first that is found in a kernel's name; names that torch.compile makes are lists of operations
    "rest": r"^triton_",
    "choice": r"log_sums|shares_kernel|keep_bits|[sS]ort|scan",
    "attention": r"attention_|flash|fmha|sdpa|combine_kernel",
    "permutation": r"index_?[sS]elect|gather|index_elementwise",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|conv|wgmma",
}
_CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
FA4 = FlashAttention4()


@torch.library.custom_op("sparse_flash_benchmarks::fa4", mutates_args=(), schema="(Tensor q, Tensor k, Tensor v) -> Tensor")
def _attend_by_fa4(q, k, v):
    return FA4.attend(q, k, v, FlashOptions(False))


@_attend_by_fa4.register_fake
def _(q, k, v):
    return q.new_empty(q.shape)


def _attend_by_torch(q, k, v):
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


@contextmanager
def patched_attention(transformer: Any, model: Model, case: StepCase) -> Iterator[None]:
    """The transformer computes its self-attention as the case says."""
    from sparse_flash.integrations.diffusers import restore, use_sparse_flash

    if case.spec is not None:
        use_sparse_flash(transformer, case.spec, case.tile)
        try:
            yield
        finally:
            restore(transformer)
        return
    module, dense = sys.modules[type(transformer).__module__], _attend_by_fa4 if case.name == "fa4" else _attend_by_torch
    unpatched = module.dispatch_attention_fn

    def dispatch(query, key, value, **options):
        is_self_attention = query.shape[1] == key.shape[1] == model.tokens
        return dense(query, key, value) if is_self_attention else unpatched(query, key, value, **options)

    kernel = sdpa_kernel(_CUDNN_FIRST, set_priority=True) if case.name == "sdpa-cudnn" else nullcontext()
    with patch.object(module, "dispatch_attention_fn", dispatch), kernel:
        yield


@contextmanager
def compiled_blocks(transformer: Any) -> Iterator[None]:
    """Each block of the transformer is one graph."""
    torch.compiler.reset()
    transformer.compile_repeated_blocks(fullgraph=True)
    try:
        yield
    finally:
        for module in transformer.modules():
            module._compiled_call_impl = None
        torch.compiler.reset()


def classify_kernel(kernel: str) -> str:
    return next((part for part, names in PARTS.items() if re.search(names, kernel)), "rest")


def profile_step(fn: Callable, step_ms: float) -> dict[str, float]:
    """Milliseconds of kernels by part, and of no kernel as idle, from one step."""
    found = dict.fromkeys(("attention", "products", "permutation", "choice", "rest"), 0.0)
    for event in profile_kernels(fn):
        found[classify_kernel(event.key)] += event.self_device_time_total / 1e3
    return found | {"idle": step_ms - sum(found.values())}


def measure_step(
    transformer: Any, inputs: dict, model: Model, case: StepCase, seconds: float, reference: list[torch.Tensor]
) -> dict:
    """A row's figures. reference: the output of the first dense case, or empty; a dense case puts its own there."""
    cuda = inputs["timestep"].device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else None
    found: dict = {}
    compiled = compiled_blocks(transformer) if case.compiled else nullcontext()
    if case.name == "fa4" and (reason := FA4.missing()):
        return {"refused": reason}
    with torch.no_grad(), patched_attention(transformer, model, case), compiled:
        outputs: list[torch.Tensor] = []
        found["first_s"] = sum(time_runs(lambda: outputs.append(transformer(**inputs).sample), 0, least=1, wait=wait))
        (out,) = outputs
        if not torch.isfinite(out).all():
            return found | {"failed": "its output has values that are not finite"}
        if case.spec is None:
            reference[:] = reference or [out]
        if reference:
            found["difference"] = relative_error(out, reference[0].double())
        transformer(**inputs)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        times = time_runs(lambda: transformer(**inputs), seconds, wait=wait)
        found |= Timing.of(times).scaled(1e3).as_result("step_ms") | {"steps": len(times)}
        if cuda:
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
            found["parts"] = profile_step(lambda: transformer(**inputs), found["step_ms"])
    return found


def measure_kernels(options: argparse.Namespace, names: list[str], device: torch.device) -> Iterator[dict]:
    """A row for each peer of each window, as plain data."""
    peers = ("cudnn-blocks", "fastvideo", "flex-fa4") if device.type == "cuda" else ()
    dense = "sdpa-cudnn" if device.type == "cuda" else "sdpa-math"
    done = set()
    for label, layout, window, heads, tokens in windows(names, whole=options.model is None and device.type == "cuda"):
        shape = Shape(1, heads, layout.length, 16 if names == ["toy"] else 128)
        mask = Mask(f"window of {window} tiles", f"tile_window({layout}, {window})", layout.block_size)
        cases = [Case(shape, mask, peer) for peer in (OURS, *peers, OURS)] + [Case(replace(shape, tokens=tokens), FULL, dense)]
        facts = {"label": label, "tile": layout.tile, "window": window}
        for case in cases:
            if not re.search(options.only, case.peer) or (case.peer == dense and case.key in done):
                continue
            done.add(case.key)
            yield case.as_data() | facts | run_case(case, device, options.row_limit)


def measure_permutation(model: Model, device: torch.device, dtype: torch.dtype) -> Iterator[dict]:
    """to_tiles, to_raster and a copy, forward and backward, of what a model reorders: its tokens, or q."""
    layout, heads, dim = model.layout("auto"), model.heads, model.config.get("attention_head_dim", 128)
    for shape, axis in (((1, layout.tokens, heads * dim), 1), ((1, heads, layout.tokens, dim), 2)):
        x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        tiled = layout.to_tiles(x.detach(), axis).requires_grad_()
        for name, source, fn in (
            ("copy", x, torch.clone),
            ("to_tiles", x, partial(layout.to_tiles, dim=axis)),
            ("to_raster", tiled, partial(layout.to_raster, dim=axis)),
        ):
            moved = (source.numel() + fn(source).numel()) * source.element_size()
            found: dict = {"what": name, "shape": list(shape), "tile": layout.tile, "bytes": moved}
            for key, timing in time_passes((source,), partial(fn, source), device, 0.1, backward=True):
                found |= timing.as_result(key) | {key.replace("_ms", "_gb_s"): moved / timing.median / 1e6}
            yield found


def run_steps(model_name: str, options: argparse.Namespace, device: torch.device, is_over: Callable[[], bool]) -> Iterator[dict]:
    """The rows of a model."""
    model = MODELS[model_name]
    transformer, inputs = build_transformer(model, device, DTYPES[device.type], options.layers)
    facts = {"model": model_name, "grid": model.grid, "tokens": model.tokens, "layers": options.layers}
    reference: list[torch.Tensor] = []
    for case in step_cases(model, options.how, device):
        if not re.search(options.only, case.name):
            continue
        if is_over():
            return
        tile = {"tile": model.layout(case.tile).tile} if case.spec else {}
        step = partial(measure_step, transformer, inputs, model, case, options.seconds, reference)
        yield facts | asdict(case) | tile | try_measuring(step, options.row_limit)


def add_speedups(rows: list[dict]) -> None:
    """Puts "speedup" into each row of ours, and "over": the fastest dense case so far of its model that was compiled alike."""
    timed = [row for row in rows if has_numbers(row)]
    for row in timed:
        alike = [one for one in timed if (one["model"], one["compiled"], one["spec"]) == (row["model"], row["compiled"], None)]
        if row["spec"] and alike:
            best = min(alike, key=lambda one: one["step_ms"])
            row |= {"over": best["name"], "speedup": best["step_ms"] / row["step_ms"]}


def step_cells(found: dict) -> list[str]:
    name = f"{found['name']}{', compiled' * found['compiled']}" + (f", tile {tuple(found['tile'])}" if found["spec"] else "")
    if not has_numbers(found):
        return [found["model"], name, "", why_not(found)]
    texts = [f"{found['speedup']:.2f}" if "speedup" in found else "", f"{found.get('peak_bytes', 0) / 2**30:.1f}"]
    said = [f"{part} {ms:.1f}" for part, ms in found.get("parts", {}).items() if ms > 0.05]
    said += [f"difference {found['difference']:.1e}"] if "difference" in found else []
    return [found["model"], name, f"{found['step_ms']:.1f}", ", ".join(said), *texts]


def kernel_cells(found: dict) -> list[str]:
    where = [found["label"], f"{tuple(found['tile'])}, {tuple(found['window'])}", str(Shape(**found["shape"])), found["peer"]]
    if not has_numbers(found):
        return [*where, why_not(found)]
    times = [f"{found[key]:.3f}" if key in found else "" for key in ("forward_ms", "backward_ms")]
    return [*where, " / ".join(times), "" if found["correct"] else "WRONG"]


def permutation_cells(found: dict) -> list[str]:
    times = [f"{found[f'{key}_ms']:.3f} ms, {found[f'{key}_gb_s']:.0f} GB/s" for key in ("forward", "backward")]
    return [found["what"], str(tuple(found["shape"])), *times]


def is_wrong(found: dict, steps: list[dict], dtype: torch.dtype) -> bool:
    """Whether a result is wrong: all pairs in tiles may differ from dense twice as much as dense cases differ."""
    if found.get("name") != ALL_PAIRS:
        return found.get("correct") is False
    dense = [row.get("difference", 0.0) for row in steps if row["model"] == found["model"] and row["spec"] is None]
    return found.get("difference", 0.0) > max(2 * max(dense, default=0.0), TOLERANCE[dtype] / 10)


COLUMNS = {
    "steps": (step_cells, ("model", "case", "ms", "parts", "speed-up", "GiB")),
    "kernels": (kernel_cells, ("grid", "tile, window", "shape", "peer", "ms forward / backward", "")),
    "permutation": (permutation_cells, ("what", "shape", "forward", "backward")),
}


def main(arguments: list[str] | None = None) -> int:
    parser = create_parser("video", __doc__)
    parser.add_argument("--part", action="append", choices=tuple(COLUMNS), help="may be repeated (default: all)")
    parser.add_argument(
        "--model", action="append", choices=tuple(MODELS), help="may be repeated (default: all but toy; toy on a CPU)"
    )
    parser.add_argument("--how", choices=("eager", "compiled", "both"), default="both", help="(default %(default)s)")
    parser.add_argument("--only", default="", help="a regular expression for names of cases and peers (default: all)")
    parser.add_argument("--layers", type=float, default=1.0, help="share of a model's layers (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long a step is repeated (default %(default)s)")
    parser.add_argument("--row-limit", type=int, default=120, help="seconds for a row (default %(default)s)")
    add_limit(parser)
    add_device(parser)
    options = parser.parse_args(arguments)
    device, dtype, until = options.device, DTYPES[options.device.type], time.monotonic() + options.limit
    names = options.model or (["toy"] if device.type == "cpu" else [name for name in MODELS if name != "toy"])
    facts = {"environment": environment(device), "dtype": str(dtype).removeprefix("torch.")}
    file = RowFile(options.out / "video.json", facts, *COLUMNS)
    file.write()

    def is_over() -> bool:
        return time.monotonic() > until

    def rows(part: str) -> Iterator[dict]:
        if part == "kernels":
            yield from measure_kernels(options, names, device)
        for name in names:
            if part == "steps":
                yield from run_steps(name, options, device, is_over)
            elif part == "permutation":
                yield from measure_permutation(MODELS[name], device, dtype)

    tables = []
    for part in options.part or COLUMNS:
        cells, headings = COLUMNS[part]
        for found in () if is_over() else rows(part):
            file.data[part].append(found)
            add_speedups(file.data["steps"])
            file.write()
            print(part, *filter(None, cells(found)), sep="; ", flush=True)
            if is_over():
                break
        tables.append(Table(*headings, title=part))
        for found in file.data[part]:
            tables[-1].add_row(*cells(found))
    if is_over():
        print("the time was up: the rest was not begun", flush=True)
    print_tables(*tables, folder=options.out)
    return int(any(is_wrong(found, file.data["steps"], dtype) for part in COLUMNS for found in file.data[part]))


if __name__ == "__main__":
    sys.exit(main())
