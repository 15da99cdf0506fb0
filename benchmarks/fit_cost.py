"""Fits the constants of predicted times to measured rows, and says how far predictions are from them.

    python -m sparse_flash.benchmarks.fit_cost                        # errors of the shipped constants
    python -m sparse_flash.benchmarks.fit_cost --hold-out             # errors of each fifth of the cases by a fit to the others
    python -m sparse_flash.benchmarks.fit_cost --write                # fits all, writes kernels/cost/chips.json
    python -m sparse_flash.benchmarks.fit_cost runs/drawn/drawn.json  # rows of other files
    python -m sparse_flash.benchmarks.fit_cost --plot runs/cost       # also a picture

Only rows of today's kernels count, without dropout or padding. Held out, all rows of a case are in one part.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from sparse_flash.kernels.cost import chips
from sparse_flash.kernels.cost.chips import Chip
from sparse_flash.kernels.cost.model import AttentionSizes
from sparse_flash.masks.block_mask import BlockMask
from sparse_flash.tools.cost import launch_of

from .fit import LEAST_US, Errors, Sample, fit
from .report.plots import draw_predicted
from .workload.cases import Mask, Shape
from .workload.masks import skewed_and_even
from .workload.problem import parse_and_compile

RESULTS = Path(__file__).parent / "results"
# Without cost/h200-2026-11-27-drawn-2.json, a blind test of the constants that were fitted to these.
FILES = (
    *(f"h100-2026-11-25-peers/{name}.json" for name in ("results", "sparse", "four-rows")),
    "h100-2026-11-26-speedup/results.json",
    "video/h200-2026-11-27-steps.json",
    "kernels/h200-2026-11-20-portable-peers.json",
    "features/h200-2026-11-21.json",
    "short-calls/h200-2026-11-23-tiles.json",
    "cost/h200-2026-11-27-calibration.json",
    "cost/h200-2026-11-27-drawn.json",
    "cost/h200-2026-11-27-small-blocks.json",
)
# Rates of copies: of an H100 as in parallel/costs, of an H200 from video/h200-2026-11-27-steps.json. Peaks at sustained clocks.
_MULTIPROCESSORS, _FLOPS_PER_US = 132, 4096 * 1755
H100 = Chip("NVIDIA H100 80GB HBM3", _MULTIPROCESSORS, _FLOPS_PER_US, 2.7e6)
H200 = Chip("NVIDIA H200", _MULTIPROCESSORS, _FLOPS_PER_US, 3.87e6)
# Until then, blocks of 16 and 32 of head_dim above 64 ran in other tiles and warps.
_TILES_OF_WIDE_HEADS = "2026-11-27T21"
_NEAR_US = 10
FOLDS = 5


def read_samples(path: Path) -> Iterator[tuple[str, Sample]]:
    """Yields (the GPU's name, a measured pass) of a results file."""
    return samples_of_data(json.loads(path.read_text()))


def samples_of_data(data: object) -> Iterator[tuple[str, Sample]]:
    """Yields what ``read_samples`` does, of a results file's contents."""
    for case, row, environment in _rows(data):
        if row.get("backend") not in ("hopper", "triton") or case.get("dropout_p") or case.get("padded") or "forward_ms" not in row:
            continue
        sizes = {name: case["shape"].get(name) for name in Shape.__dataclass_fields__}
        shape, spec, block_size = Shape(**sizes), case["spec"], case.get("block_size", 128)
        small_and_wide = row.get("kernel_block", block_size) < 64 < max(shape.head_dim, shape.v_head_dim or 0)
        if small_and_wide and environment.get("date", "") < _TILES_OF_WIDE_HEADS:
            continue
        mask = _compile_mask(case.get("label", ""), tuple(spec) if isinstance(spec, list) else spec, shape.tokens, block_size)
        if block := row.get("kernel_block"):
            mask = replace(mask, coarse=None if block == block_size else mask.in_blocks_of(block))
        name = f"{shape}, {case.get('label') or str(spec)[:60]}, blocks of {block_size}"
        passes = [row[which] and 1e3 * row[which] if which in row else None for which in ("forward_ms", "backward_ms")]
        for sample in samples_of_call(mask, shape, H100, passes, name, row["backend"]):
            yield environment.get("device", ""), sample


def samples_of_call(
    mask: BlockMask, s: Shape, chip: Chip, us: Sequence[float | None], name: str, backend: str = "hopper"
) -> Iterator[Sample]:
    """Yields the passes of a call. us: microseconds, forward and backward; None: not measured. backend: "hopper" or "triton"."""
    kv_heads, v_head_dim = s.kv_heads or s.heads, s.v_head_dim or s.head_dim
    sizes = AttentionSizes(s.batch, s.heads, kv_heads, mask.q_len, mask.kv_len, s.head_dim, v_head_dim)
    for backward, time in zip((False, True), us, strict=True):
        if time is not None:
            yield Sample(launch_of(backward, backend == "triton", sizes, mask.kernel_table(True), chip), time, name)


def _rows(data: object, environment: dict | None = None) -> Iterator[tuple[dict, dict, dict]]:
    """Yields (case, result, the nearest "environment") of every measured row, at any depth of a file: {"case", "result"}, or one
    dict with "shape" and "spec"."""
    if isinstance(data, list):
        for value in data:
            yield from _rows(value, environment)
    elif isinstance(data, dict):
        environment = data.get("environment") or environment or {}
        if "case" in data and "result" in data:
            yield data["case"], data["result"], environment
        elif "shape" in data and "spec" in data:
            yield data, data, environment
        else:
            yield from _rows(list(data.values()), environment)


@cache
def _compile_mask(label: str, spec: str | tuple[str, ...], tokens: int, block_size: int) -> BlockMask:
    """Files hold only a digest of a map of blocks; the label says which map it is."""
    if str(spec).startswith("from_blocks("):
        spec = next(str(mask.spec) for mask in skewed_and_even(tokens) if mask.label == label)
    return parse_and_compile(Mask("", spec, block_size), tokens, torch.device("cpu"))[1]


def fold_of(name: str) -> int:
    """Returns the part of the cases, 0 to FOLDS - 1, that a sample of this name belongs to."""
    return zlib.crc32(name.encode()) % FOLDS


def fit_chips(found: dict[str, list[Sample]]) -> list[Chip]:
    """Returns the H100 and the H200 fitted to their samples. A constant that one GPU's samples do not determine is
    the other GPU's."""
    h200 = fit(H200, found.get(H200.name, []))
    h100 = fit(H100.with_inherited([h200]), found.get(H100.name, []))
    return [h100, fit(H200.with_inherited([h100]), found.get(H200.name, []))]


def errors_by_gpu(found: dict[str, list[Sample]], held_out: bool, made: list[Chip]) -> dict[str, list[tuple[float, Sample]]]:
    """Returns the signed errors of all samples. held_out: by constants that were fitted to the other parts of the cases; otherwise
    by ``made``."""
    errors: dict[str, list[tuple[float, Sample]]] = {}
    for fold in range(FOLDS):
        rest = {gpu: [s for s in measured if fold_of(s.name) != fold] for gpu, measured in found.items()}
        for chip in fit_chips(rest) if held_out else made:
            these = [s for s in found.get(chip.name, []) if fold_of(s.name) == fold]
            errors.setdefault(chip.name, []).extend((s.error(chip), s) for s in these)
    return errors


def split_errors(errors: list[tuple[float, Sample]], backward: bool) -> tuple[list[tuple[float, Sample]], ...]:
    """Returns the signed errors of forward or backward passes over 100 us: of passes that the GPU bounds, and of passes that wait
    for the host."""
    both: tuple[list[tuple[float, Sample]], ...] = [], []
    for error, sample in errors:
        if sample.launch.family.backward == backward and sample.us >= LEAST_US:
            both[sample.waits_for_host(error)].append((error, sample))
    return both


def report(gpu: str, errors: list[tuple[float, Sample]]) -> None:
    """Prints the errors of the passes over 100 us, and of shorter ones in microseconds."""
    for name, backward in (("forward", False), ("backward", True)):
        for said, found in zip(("", ", waiting for the host"), split_errors(errors, backward), strict=True):
            if found:
                of_pass = Errors.of(found)
                print(f"{gpu}, {name}{said}: {of_pass}")
                for error, sample in of_pass.worst:
                    print(f"    {error:+.1%} of {sample.us / 1e3:.3f} ms: {sample.name}")
    if short := [(abs(e * s.us), s) for e, s in errors if s.us < LEAST_US]:
        most, sample = max(short, key=lambda pair: pair[0])
        near = sum(us <= _NEAR_US for us, _ in short)
        print(f"{gpu}: {near} of {len(short)} shorter passes within {_NEAR_US} us, off by at most {most:.0f} us: {sample.name}")


def known_errors(data: object) -> dict[str, list[tuple[float, Sample]]]:
    """Returns the signed errors of the measured passes in ``data``, by GPU, for GPUs whose constants are known."""
    known, errors = chips.known_chips(), dict[str, list[tuple[float, Sample]]]()
    for gpu, sample in samples_of_data(data):
        if gpu in known:
            errors.setdefault(gpu, []).append((sample.error(known[gpu]), sample))
    return errors


def group_by_pass(errors: dict[str, list[tuple[float, Sample]]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Returns {pass: {GPU: [(measured ms, signed relative error)]}} of the passes over 100 us that the GPU bounds."""
    return {
        name: {gpu: [(s.us / 1e3, e) for e, s in split_errors(of_gpu, backward)[0]] for gpu, of_gpu in errors.items()}
        for name, backward in (("forward", False), ("backward", True))
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog="python -m sparse_flash.benchmarks.fit_cost")
    parser.add_argument("files", nargs="*", type=Path, default=[RESULTS / name for name in FILES], help="results files")
    parser.add_argument("--hold-out", action="store_true", help="report each case by a fit to the others")
    parser.add_argument("--plot", type=Path, help="folder for a picture of the errors")
    parser.add_argument("--write", action="store_true", help="fit all, and write the constants that come with the package")
    options = parser.parse_args(arguments)
    found: dict[str, list[Sample]] = {}
    for path in options.files:
        for gpu, sample in read_samples(path):
            found.setdefault(gpu, []).append(sample)
    made = fit_chips(found) if options.write else list(chips.shipped_chips().values())
    errors = errors_by_gpu(found, options.hold_out, made)
    for gpu, of_gpu in errors.items():
        report(gpu, of_gpu)
    if options.plot:
        options.plot.mkdir(parents=True, exist_ok=True)
        print(draw_predicted(group_by_pass(errors), options.plot)["light"])
    if options.write:
        chips.write_chips(chips.SHIPPED, made)
        print(chips.SHIPPED)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
