"""A denoising step of a video transformer, dense and under masks over tiles; the kernels beside their peers.

    python -m sparse_flash.benchmarks.video --out runs/video
    python -m sparse_flash.benchmarks.video --part steps --model wan-480p --how compiled --only "sdpa-cudnn|fa4|window"
    python -m sparse_flash.benchmarks.video --part steps --model h3-91k --layers 0.1
    python -m sparse_flash.benchmarks.video --part kernels --only "sparse_flash|cudnn"

``steps``: one forward pass of a transformer of diffusers (batch 1, random weights, real shapes), without gradients. A case
names what computes its self-attention. Dense ones: PyTorch's kernel and FlashAttention-4, called for q, k and v in the usual order,
without HunyuanVideo's mask of padded text, which keeps all here. Ours in tile order goes through ``use_sparse_flash``. NVIDIA's
block-sparse attention does too, in place of ours, with lists of blocks made before; its blocks are full, so it attends to ragged
tiles' padding.
``compiled``: each block is one graph, by ``compile_repeated_blocks``. The speed-up is over the fastest dense case compiled alike.
``parts`` are ms of kernels by name, from one profiled step; ``idle`` is what no kernel fills. ``difference`` is the relative L2
distance of the output from the first dense case's: that of ``all pairs in tiles`` must be rounding, as between dense cases; the
others' tell how much random weights let a mask change. Such weights say nothing of quality.

``kernels``: a window of tiles in tile order, forward and backward, checked at sampled queries; grids are rounded up to
whole tiles, as some peers take full blocks alone. ``ragged`` rows have the model's own grid. Ours is timed before and after its
peers. Dense attention has the tokens of the model's own grid.

A case that is missing or fails is a row with the reason. Writes video.json after each row. Exits with 1 if a result is wrong.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparse_flash import VideoLayout, compile_mask

from .baselines.base import why_missing
from .baselines.flash import FlashAttention4, FlashOptions
from .baselines.full_blocks import list_kept
from .measure.accuracy import TOLERANCE, relative_error
from .measure.noise import Timing, time_runs
from .measure.throughput import DTYPES, profile_kernels, try_measuring
from .measure.throughput import run as run_case
from .program import RowFile, Table, add_device, add_limit, create_parser, print_tables
from .results import environment, has_numbers, why_not
from .workload.cases import OURS, Case, Mask, Shape
from .workload.masks import FULL
from .workload.video import ALL_PAIRS, MODELS, NVIDIA, Model, StepCase, build_transformer, step_cases, windows

PARTS = {  # the first that is found in a kernel's name; names that torch.compile makes are lists of operations
    "rest": r"^triton_",
    "choice": r"log_sums|shares_kernel|keep_bits|[sS]ort|scan",
    "attention": r"attention_|flash|fmha|sdpa|combine_kernel|SparseAttn",
    "permutation": r"index_?[sS]elect|gather|index_elementwise",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|conv|wgmma",
}
_CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
FA4, BLOCK = FlashAttention4(), 128  # BLOCK: tokens of a block of NVIDIA's


@torch.library.custom_op("sparse_flash_benchmarks::fa4", mutates_args=())
def _attend_by_fa4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return FA4.attend(q, k, v, FlashOptions(False))


@torch.library.custom_op("sparse_flash_benchmarks::nvidia", mutates_args=())
def _attend_by_nvidia(q: Tensor, k: Tensor, v: Tensor, index: Tensor, count: Tensor) -> Tensor:
    from cudnn.block_sparse_attention import BSA

    found = BSA.block_sparse_attention_forward(q, k, v, index, q2k_block_nums=count, sparse_block_size=BLOCK)
    return found["o_tensor"].contiguous()


for _made in (_attend_by_fa4, _attend_by_nvidia):
    _made.register_fake(lambda q, *others: q.new_empty(q.shape))


def _attend_by_torch(q, k, v):
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def _nvidias_attention(spec: str, layout: VideoLayout, heads: int, device: torch.device) -> Callable:
    """What takes the place of ``sparse_flash.attention``. It ignores the mask that it gets for the spec's, in whole blocks."""
    mask = compile_mask(spec.replace("layout", layout.to_spec()), layout.length, block_size=BLOCK)
    index, count = list_kept(mask.kept_blocks().to(device).expand(1, heads, -1, -1))

    def attend(q, k, v, mask, **options):
        return _attend_by_nvidia(q, k, v, index, count)

    return attend


@contextmanager
def patched_attention(transformer: Any, model: Model, case: StepCase) -> Iterator[None]:
    """The transformer computes its self-attention as the case says."""
    from sparse_flash.integrations import diffusers as switched

    if case.spec is not None:
        switched.use_sparse_flash(transformer, case.spec, case.tile)
        lists = case.spec, model.layout(case.tile), model.heads, transformer.device
        instead = _nvidias_attention(*lists) if case.name == NVIDIA else switched.attention
        try:
            with patch.object(switched, "attention", instead):
                yield
        finally:
            switched.restore(transformer)
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
    transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)  # text in another block must not make lengths symbols
    try:
        yield
    finally:
        for module in transformer.modules():
            module._compiled_call_impl = None
        torch.compiler.reset()


def profile_step(fn: Callable, step_ms: float) -> dict[str, float]:
    """Milliseconds of kernels by part, and of no kernel as idle, from one step."""
    found = dict.fromkeys(("attention", "products", "permutation", "choice", "rest"), 0.0)
    for event in profile_kernels(fn):
        part = next((part for part, names in PARTS.items() if re.search(names, event.key)), "rest")
        found[part] += event.self_device_time_total / 1e3
    return found | {"idle": step_ms - sum(found.values())}


def measure_step(
    transformer: Any, inputs: dict, model: Model, case: StepCase, seconds: float, reference: list[torch.Tensor]
) -> dict:
    """A row's figures. reference: the output of the first dense case, or empty; a dense case puts its own there."""
    cuda = inputs["timestep"].device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else None
    found: dict = {}
    compiled = compiled_blocks(transformer) if case.compiled else nullcontext()
    if reason := FA4.missing() if case.name == "fa4" else case.name == NVIDIA and why_missing("cudnn.block_sparse_attention"):
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
    dense, *peers = ("sdpa-cudnn", "cudnn-blocks", "fastvideo", "flex-fa4") if device.type == "cuda" else ("sdpa-math",)
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


def run_steps(model_name: str, options: argparse.Namespace, device: torch.device, is_over: Callable[[], bool]) -> Iterator[dict]:
    """The rows of a model; under masks with "speedup", and "over": the fastest dense case so far that was compiled alike."""
    model = MODELS[model_name]
    transformer, inputs = build_transformer(model, device, DTYPES[device.type], options.layers)
    facts = {"model": model_name, "grid": model.grid, "tokens": model.tokens, "layers": options.layers}
    reference: list[torch.Tensor] = []
    dense: list[dict] = []
    for case in step_cases(model, options.how, device):
        if not re.search(options.only, case.name):
            continue
        if is_over():
            return
        tile = {"tile": model.layout(case.tile).tile} if case.spec else {}
        step = partial(measure_step, transformer, inputs, model, case, options.seconds, reference)
        found = facts | asdict(case) | tile | try_measuring(step, options.row_limit)
        alike = [row for row in dense if row["compiled"] == case.compiled]
        if has_numbers(found) and not case.spec:
            dense.append(found)
        elif has_numbers(found) and alike:
            best = min(alike, key=lambda row: row["step_ms"])
            found |= {"over": best["name"], "speedup": best["step_ms"] / found["step_ms"]}
        yield found


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


def is_wrong(found: dict, steps: list[dict], dtype: torch.dtype) -> bool:
    """Whether a result is wrong: all pairs in tiles may differ from dense twice as much as dense cases differ."""
    if found.get("name") != ALL_PAIRS:
        return found.get("correct") is False
    dense = [row.get("difference", 0.0) for row in steps if row["model"] == found["model"] and row["spec"] is None]
    return found.get("difference", 0.0) > max(2 * max(dense, default=0.0), TOLERANCE[dtype] / 10)


COLUMNS = {
    "steps": (step_cells, ("model", "case", "ms", "parts", "speed-up", "GiB")),
    "kernels": (kernel_cells, ("grid", "tile, window", "shape", "peer", "ms forward / backward", "")),
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

    steps = chain.from_iterable(run_steps(name, options, device, is_over) for name in names)
    rows, tables = {"steps": steps, "kernels": measure_kernels(options, names, device)}, []
    for part in options.part or COLUMNS:
        cells, headings = COLUMNS[part]
        for found in () if is_over() else rows[part]:
            file.add(part, found, part, *cells(found))
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
