"""Problems for the benchmark's peers, and stand-ins for these."""

import json
import shlex
import sys
import types

import torch

from sparse_flash.benchmarks.measure.accuracy import as_attend, sampled_errors
from sparse_flash.benchmarks.workload import cases
from sparse_flash.benchmarks.workload.problem import build_problem


def problem(spec, tokens=256, block_size=128, heads=2, head_dim=16, batch=1, kv_heads=None):
    """A small problem on the CPU. spec: one for all heads, or a tuple with one per head."""
    case = cases.Case(cases.Shape(batch, heads, tokens, head_dim, kv_heads), cases.Mask("", spec, block_size), "sparse_flash")
    return build_problem(case, torch.device("cpu"), torch.float32)


def errors_of(peer, p):
    """A peer's errors, against float64 at sampled queries."""
    p = p.with_memory_order(peer.order)
    return sampled_errors(p, as_attend(p.leaves, peer.prepare(p)))


def run_program(program, folder, command: str) -> tuple[int, dict]:
    """Runs a program of the benchmark on the CPU: (its exit status, what its file in the folder holds)."""
    status = program.main([*shlex.split(command), "--device", "cpu", "--out", str(folder)])
    written = [*folder.glob("*.json")]
    return status, json.loads(written[0].read_text()) if written else {}


def provide(monkeypatch, name: str, **contents) -> types.ModuleType:
    """Makes a module of this name importable, and the packages that it is in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if end == len(parts) or path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
        if end > 1:
            setattr(sys.modules[path.rpartition(".")[0]], parts[end - 1], sys.modules[path])
    vars(sys.modules[name]).update(contents)
    return sys.modules[name]
