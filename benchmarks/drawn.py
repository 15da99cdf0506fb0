"""Times rows that are drawn at random, to hold predictions of time against.

    python -m sparse_flash.benchmarks.drawn --seed 1 --count 200 --out runs/drawn

Writes drawn.json after each row: the case, forward and backward milliseconds with their spread, and the back end that ran. The same
seed draws the same rows (``workload.drawn``).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from .baselines.registry import peer
from .measure.throughput import CPU_SECONDS, DTYPES, failure_text, passes
from .results import environment
from .workload.drawn import drawn
from .workload.problem import problem_of


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog="python -m sparse_flash.benchmarks.drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="rows (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/drawn"), help="folder (default %(default)s)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no more is begun (default: none)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    until, device = time.monotonic() + options.limit, torch.empty(0, device=options.device).device
    rows: list[dict] = []
    data = {"format": 1, "seed": options.seed, "environment": environment(device), "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    _write(options.out, data)
    for number, case in enumerate(drawn(options.seed, options.count)):
        if time.monotonic() > until:
            print(f"the time was up: {options.count - number} rows were not begun", flush=True)
            break
        row: dict = {"shape": asdict(case.shape), "spec": case.mask.spec, "block_size": case.mask.block_size}
        try:
            problem, rival = problem_of(case, device, DTYPES[device.type]), peer(case.peer)
            row["backend"] = rival.runs_on(problem)
            for name, timing in passes(problem.leaves, rival.prepare(problem), device, CPU_SECONDS, backward=True):
                row |= timing.named(name)
            del problem
        except Exception as error:  # the others still can
            row["failed"] = failure_text(error)
        rows.append(row)
        _write(options.out, data)
        said = row.get("failed") or f"{row['forward_ms']:.3f} ms forward, {row['backward_ms']:.3f} backward"
        print(f"{number + 1} of {options.count}: {case.shape}; {case.label[:80]}; {said}", flush=True)
    print(options.out)
    return int(any("failed" in row for row in rows))


def _write(folder: Path, data: dict) -> None:
    (folder / "drawn.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
