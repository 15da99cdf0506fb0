"""Bytes that the kernels read, from DRAM and from the L2 cache into the multiprocessors, against the density of the mask.

    python -m sparse_flash.benchmarks.traffic --out runs/traffic

After arXiv:2205.14135, Prop. 4: what block-sparse attention brings into fast memory is a part for its inputs and outputs and a
part proportional to density, bytes = a + b x density. ``count_bytes`` counts both from the algorithm. Fast memory is that of a
multiprocessor; DRAM is read less often, as the L2 cache holds what is read again. Each density runs in its own process under Nsight
Compute (``ncu``), which empties the caches before it counts. Writes traffic.json, traffic.png and traffic-dark.png.
"""

import csv
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import sparse_flash

from .program import create_parser
from .report.plots import draw_traffic
from .results import environment, write_json

DENSITIES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
TOKENS, HEADS, HEAD_DIM, BLOCK = 16384, 16, 128, 128
PASSES = ("forward", "backward")
METRICS = {"multiprocessor_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum", "dram_bytes": "dram__bytes_read.sum"}
LEVELS = tuple(METRICS)  # where bytes are read from
_WARM_UP = 2
_SECONDS = 900  # for one density: compiling, and a few launches, each several times


def parse_point(density: float, text: str) -> dict:
    """Returns the figures of one density by pass, from the output of ``ncu --csv --print-units base``, whose table has a row for
    each metric of a launch. The last launch counts, as earlier ones warm up. Raises ValueError with what ncu said instead."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[tuple[str, str], dict] = {}  # by pass and ID, in order
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        name = next((name for name in PASSES if f"attention_{name}" in (row["Kernel Name"] or "")), None)
        if name and row.get("Metric Unit") == "byte":  # other lines are the program's own
            launch = launches.setdefault((name, row["ID"]), {"kernel": row["Kernel Name"]})
            launch[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    point: dict = {"density": density}
    for (name, _), launch in launches.items():
        if launch.keys() >= {*METRICS.values()}:
            point[name] = {"kernel": launch["kernel"]} | {key: launch[metric] for key, metric in METRICS.items()}
    if missing := [name for name in PASSES if name not in point]:
        said = " ".join(line for line in lines if line.startswith("==")) or text.strip()[-400:] or "nothing"
        raise ValueError(f"ncu gave no bytes of attention_{missing[0]} at density {density:g}; it said: {said}")
    return point


def count_bytes(name: str) -> dict[str, float]:
    """{"a", "b"} of bytes read = a + b x density, by the algorithm: a tile stays in fast memory, and each block that it visits is
    brought there once. Forward: a tile of queries, and keys and values. Backward: a tile of keys and values; and queries,
    gradients of the output, and two float32 numbers a query."""
    rows = HEADS * TOKENS
    two = 2 * rows * HEAD_DIM * 2  # both of two tensors in bfloat16, once
    if name == "forward":
        return {"a": two / 2, "b": two * TOKENS / BLOCK}
    return {"a": two, "b": (two + 2 * rows * 4) * TOKENS / BLOCK}


def fit(points: list[dict], name: str, level: str) -> dict[str, float]:
    """Least squares, of a pass and a level: {"a", "b"} of bytes read = a + b x density, and "r2", the share of the variance
    explained."""
    density = np.array([point["density"] for point in points], float)
    read = np.array([point[name][level] for point in points], float)
    terms = np.stack([np.ones_like(density), density], 1)
    (a, b), *_ = np.linalg.lstsq(terms, read, rcond=None)
    left, all_of_it = ((read - terms @ (a, b)) ** 2).sum(), ((read - read.mean()) ** 2).sum()
    return {"a": float(a), "b": float(b), "r2": float(1 - left / all_of_it) if all_of_it else 1.0}


def block_map(density: float, generator=None, device=None):
    """(1, HEADS, q_blocks, kv_blocks) bool: random blocks, the same number in each row."""
    blocks = TOKENS // BLOCK
    scores = torch.rand(1, HEADS, blocks, blocks, generator=generator, device=device)
    kept = scores.topk(round(density * blocks), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, kept, True)


def run_worker(density: float) -> None:
    """The program that runs under ncu."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, HEADS, TOKENS, HEAD_DIM)
    q, k, v, dout = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    # A table at density 1 too: dense calls have tiles of their own.
    mask = sparse_flash.BlockMask.from_blocks(block_map(density, generator, "cuda"), BLOCK)
    for _ in range(_WARM_UP + 1):
        torch.autograd.grad(sparse_flash.attention(q, k, v, mask), (q, k, v), dout)
        torch.cuda.synchronize()


def profile(ncu: str, density: float) -> str:
    """The output of ncu for a worker, with its own messages."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [ncu, "--clock-control", "none", "--metrics", ",".join(METRICS.values())]
        command += ["-k", "regex:attention_(forward|backward)"]
        command += ["--csv", "--print-units", "base", "--log-file", str(log)]
        command += [sys.executable, "-m", __spec__.name, "--worker", repr(density)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        said = log.read_text() if log.exists() else ""
    if done.returncode:
        tail = "\n".join(f"{said}\n{done.stdout}\n{done.stderr}".strip().splitlines()[-15:])
        raise RuntimeError(f"ncu ended with status {done.returncode} at density {density:g}:\n{tail}")
    return said


def write(folder: Path, machine: dict, points: list[dict]) -> dict:
    """Writes the JSON and its plots; returns the JSON's contents."""
    shape = {"name": f"B1 H{HEADS} N{TOKENS} D{HEAD_DIM}", "tokens": TOKENS, "heads": HEADS, "head_dim": HEAD_DIM, "block": BLOCK}
    data = {
        "format": 3,
        "environment": machine,
        "shape": shape | {"dtype": "bfloat16"},
        "metrics": METRICS,
        "points": points,
        "fits": {name: {level: fit(points, name, level) for level in LEVELS} for name in PASSES},
        "counted": {name: count_bytes(name) for name in PASSES},
    }
    write_json(folder / "traffic.json", data)
    draw_traffic(data, folder)
    return data


def main(arguments: list[str] | None = None) -> int:
    parser = create_parser("traffic", __doc__)
    parser.add_argument("--worker", type=float, metavar="DENSITY", help="run one density here, without ncu around it")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here, and the traffic of its memory is what is measured")
    if options.worker is not None:
        run_worker(options.worker)
        return 0
    ncu = shutil.which("ncu")
    if ncu is None:
        parser.error("there is no ncu on the path; install Nsight Compute, which CUDA's toolkit brings")
    points = []
    try:
        for density in DENSITIES:
            points.append(parse_point(density, profile(ncu, density)))
            for name in PASSES:
                inner, outer = (points[-1][name][level] / 1e9 for level in LEVELS)
                print(f"density {density:<7g} {name:8} into multiprocessors {inner:.3f} GB, from DRAM {outer:.3f} GB", flush=True)
    except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    write(options.out, environment(torch.device("cuda")), points)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
