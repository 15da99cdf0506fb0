"""Times one pass of several checkouts in turns, to tell a change of a kernel from the drift of a GPU.

    git worktree add /tmp/before HEAD~1
    python -m sparse_flash.benchmarks.checkouts /tmp/before . --rounds 9
    python -m sparse_flash.benchmarks.checkouts /tmp/before . --forward --precision fp8 --row causal
    python -m sparse_flash.benchmarks.checkouts /tmp/before . --case "1 16/8 4096 128 causal & local(512)"

Each checkout is a process that holds the inputs and results of one row. In each round every process times its pass, in
alternating order. A pass is a CUDA graph, replayed with a cold L2 cache. The first checkout is the base: a ratio above 1 is a gain.
Results whose norms differ from the base's by more than 0.2 % are named. Writes checkouts.json after every row.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES = (
    "1 4/4 131072 128 causal",
    "4 16/16 4096 96 causal",
    "16 16/16 2048 128 causal",
    "1 16/16 16384 128 causal",
    "1 16/16 16384 128 full",
    "1 32/8 16384 128 causal",
    "1 16/16 16384 128 causal & local(1024)",
    "1 16/16 16384 128 causal & documents((0, 1000, 3100, 4500, 8000, 11000, 13333, 16384))",
    "1 16/16 32768 128 random(0.08, block=128)",
    "4 16/16 8192 64 causal",
    "1 16/16 16384 128 butterfly(block=128)",
)
_REPLAYS = 5  # in a turn, of which the median counts
_MOST_DIFFERENCE = 2e-3


def main(arguments: list[str] | None = None) -> int:
    import numpy as np
    import torch

    from .program import RowFile, Table, create_parser, print_tables
    from .results import environment

    parser = create_parser("checkouts", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="checkouts, the base first")
    parser.add_argument("--row", action="append", default=[], metavar="TEXT", help="only rows with this in their name")
    parser.add_argument(
        "--case", action="append", default=[], help='rows instead of these: "BATCH HEADS/KV_HEADS TOKENS HEAD_DIM SPEC"'
    )
    parser.add_argument("--rounds", type=int, default=9, help="(default %(default)s)")
    parser.add_argument("--forward", action="store_true", help="the forward pass instead of the backward pass")
    parser.add_argument("--precision", help="of the forward pass")
    options = parser.parse_args(arguments)
    if missing := [str(folder) for folder in options.folders if not (folder / "sparse_flash" / "__init__.py").is_file()]:
        parser.error(f"no checkout of sparse_flash is at {', '.join(missing)}")
    if options.precision and not options.forward:
        parser.error(f"--precision {options.precision} has no backward pass; add --forward")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    file = RowFile(
        options.out / "checkouts.json", {"environment": environment(device), "options": vars(options) | {"out": ""}}, "rows"
    )
    file.data["options"]["folders"] = names = [folder.resolve().name for folder in options.folders]
    table = Table("row", *names, "", title="ms, and how many times as fast as the first")
    workers = [_Worker(folder) for folder in options.folders]
    for case in options.case or [case for case in CASES if not options.row or any(text in case for text in options.row)]:
        for worker in workers:  # all compile at once
            worker.tell(case=case, forward=options.forward, precision=options.precision)
        norms = [worker.hear() for worker in workers]
        times: list[list[float]] = [[] for _ in workers]
        for turn in range(options.rounds):
            for number in range(len(workers)) if turn % 2 == 0 else reversed(range(len(workers))):
                workers[number].tell(time=True)
                times[number].append(workers[number].hear())
        medians = [statistics.median(ms) for ms in times]
        differing = [name for name, of_one in zip(names, norms) if not np.allclose(of_one, norms[0], _MOST_DIFFERENCE, 0)]
        file.add("rows", {"case": case, "ms": times, "differing": differing}, case, *(f"{ms:.3f}" for ms in medians))
        cells = [f"{ms:.3f} ({medians[0] / ms:.3f})" for ms in medians]
        table.add_row(case, *cells, f"other results: {', '.join(differing)}" if differing else "")
    print_tables(table, folder=options.out)
    return 1 if any(row["differing"] for row in file.data["rows"]) else 0


class _Worker:
    """A process that runs the code of one checkout. It answers each line of JSON with another."""

    def __init__(self, folder: Path):
        self._folder = folder = folder.resolve()
        self._imported = tempfile.TemporaryDirectory()  # holds the package as it would be installed
        package = Path(self._imported.name, "sparse_flash")
        package.mkdir()
        for part in (*(folder / "sparse_flash").iterdir(), folder / "patterns"):
            if part.name != "__pycache__" and not (package / part.name).exists():
                (package / part.name).symlink_to(part)
        command = [sys.executable, "-P", __file__]  # -P: modules beside this file are not for import by their bare names
        environment = os.environ | {"PYTHONPATH": self._imported.name}
        self._process = subprocess.Popen(command, text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def tell(self, **what) -> None:
        print(json.dumps(what), file=self._process.stdin, flush=True)

    def hear(self):
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of {self._folder} ended with status {self._process.wait()}; its error is above")
        return json.loads(answer)


def _work() -> None:
    """Answers a case with the norms of its results, and "time" with the milliseconds of one turn."""
    prepared: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "case" in asked:
            prepared = None  # frees the earlier row's memory
            prepared = _prepare(asked)
            answer = prepared[1]
        else:
            answer = statistics.median(prepared[0]() for _ in range(_REPLAYS))
        print(json.dumps(answer), flush=True)


def _prepare(asked: dict) -> tuple[Callable[[], float], list[float]]:
    """Returns (a function that runs a pass and returns its milliseconds, the norms of the results)."""
    import torch

    import sparse_flash as sf

    batch, heads, tokens, head_dim, spec = asked["case"].split(None, 4)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    def draw(count: str, trained: bool = not asked["forward"]):
        x = torch.randn(int(batch), int(tokens), int(count), int(head_dim), device=device, dtype=torch.bfloat16)
        return x.transpose(1, 2).requires_grad_(trained)

    q_heads, kv_heads = heads.split("/")
    q, k, v, grad = draw(q_heads), draw(kv_heads), draw(kv_heads), draw(q_heads, False)
    mask = None if spec == "full" else sf.compile_mask(spec, int(tokens), block_size=128, device=device)
    precision = {"precision": asked["precision"]} if asked["precision"] else {}
    attend = lambda: sf.attention(q, k, v, mask, **precision)  # noqa: E731
    stream = torch.cuda.Stream() if device == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())  # where the inputs are drawn
    with torch.cuda.stream(stream):  # which does nothing for None; a backward pass runs on the stream of its forward pass
        out = attend()
        run = attend if asked["forward"] else lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
        results = [run() for _ in range(3)][-1]
        norms = [x.float().norm().item() for x in (results if isinstance(results, tuple) else (results,))]
    if stream is None:

        def time_once() -> float:
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)

        return time_once, norms
    torch.cuda.synchronize()
    graph, cold = torch.cuda.CUDAGraph(), torch.empty(64 << 20, device=device)
    with torch.cuda.graph(graph, stream=stream):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        cold.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    return replay, norms


if __name__ == "__main__":
    if __package__:
        sys.exit(main())
    _work()
