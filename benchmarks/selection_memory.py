"""Memory of attention over key blocks that each query picked, against length: what a call holds at once beyond its inputs.

    python -m sparse_flash.benchmarks.selection_memory --out runs/selection-memory
    python -m sparse_flash.benchmarks.selection_memory --heads 64 4 --tokens 65536 --workspace 512

Parts of results lie in a workspace of so many MiB; a call that needs more takes several turns. Two figures for each length: the
forward pass alone, without gradients, and the forward and backward pass of a training step. Beside them the bytes of the results
themselves, which no call can do without: out, and out with dq, dk and dv. Picks are drawn, as in ``selection``. On a CPU
the back end has no workspace. Writes selection_memory.json and selection_memory.png.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

from sparse_flash.selection import by_kernels

from .baselines.selection import PEERS
from .measure.accuracy import eagerly
from .measure.throughput import failure_text, peak_bytes
from .results import environment
from .selection import PicksCase, leaves_of, selection_of

_MIB, _GIB = 1 << 20, 1 << 30
PASSES = ("forward", "both")


@contextmanager
def workspace(mib: int) -> Iterator[None]:
    """Calls within take this for parts of results."""
    before = by_kernels.WORKSPACE
    by_kernels.WORKSPACE = mib * _MIB
    try:
        yield
    finally:
        by_kernels.WORKSPACE = before


def measured(case: PicksCase, device: torch.device, dtype: torch.dtype) -> dict:
    """Bytes of the inputs; of the results, and held at once beyond the inputs, by pass. Or {"failed": why}."""
    try:
        peer = PEERS["sparse_flash"]
        leaves = leaves_of(case, device, dtype, peer.order)
        attend = eagerly(leaves, peer.prepare(leaves, selection_of(case, device)))
        dout = torch.randn_like(leaves[0])
        attend(dout)  # compiles, and makes what stays between calls
        inputs = sum(t.nbytes for t in leaves)
        return {
            "input_bytes": inputs,
            "result_bytes": {"forward": dout.nbytes, "both": dout.nbytes + inputs},
            "extra_bytes": {"forward": peak_bytes(attend, device), "both": peak_bytes(lambda: attend(dout), device)},
        }
    except Exception as error:  # a length that does not fit is a result
        return {"failed": failure_text(error)}


def plot(rows: list[dict], target: Path) -> Path:
    """GiB against tokens, a line for each workspace; dotted: the results themselves."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if "failed" not in row]
    if not rows:
        raise ValueError("nothing was measured; selection_memory.json says why")
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, name, title in zip(axes, PASSES, ("forward, without gradients", "forward and backward"), strict=True):
        for number, mib in enumerate(sorted({row["workspace_mib"] for row in rows})):
            these = [row for row in rows if row["workspace_mib"] == mib]
            tokens = [row["case"]["tokens"] for row in these]
            axis.plot(tokens, [row["extra_bytes"][name] / _GIB for row in these], f"C{number}o-", label=f"workspace of {mib:,} MiB")
        results = sorted((row["case"]["tokens"], row["result_bytes"][name] / _GIB) for row in rows)
        axis.plot(*zip(*results, strict=True), "k:", label="the results themselves")
        axis.set_title(title)
        axis.set_xlabel("tokens")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("GiB held at once, beyond the inputs")
    axes[0].legend(fontsize=8)
    figure.savefig(target, dpi=130)
    return target


def main(arguments: list[str] | None = None) -> int:
    program = "python -m sparse_flash.benchmarks.selection_memory"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog=program)
    parser.add_argument("--out", type=Path, default=Path("runs/selection-memory"), help="folder (default %(default)s)")
    parser.add_argument("--tokens", type=int, action="append", help="(default 16384, 32768, ..., 1048576)")
    parser.add_argument("--workspace", type=int, action="append", metavar="MIB", help="(default 128, 512, 2048)")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("HEADS", "KV_HEADS"), help="(default 32 8)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default %(default)s)")
    parser.add_argument("--block", type=int, default=128, help="tokens of a picked block (default %(default)s)")
    parser.add_argument("--picks", type=int, default=16, help="blocks of a query, its own included (default %(default)s)")
    parser.add_argument("--alike", type=float, default=0.8, help="0 to 1 (default %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default %(default)s)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads, kv_heads = options.heads
    case = PicksCase(0, heads, kv_heads, options.head_dim, options.block, options.picks, options.alike)
    data: dict = {"format": 1, "environment": environment(device), "dtype": str(dtype).removeprefix("torch."), "rows": []}
    options.out.mkdir(parents=True, exist_ok=True)
    for mib in options.workspace or (128, 512, 2048):
        for tokens in options.tokens or [1 << power for power in range(14, 21)]:
            one = replace(case, tokens=tokens)
            with workspace(mib):
                found = measured(one, device, dtype)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            data["rows"].append({"case": asdict(one), "workspace_mib": mib, **found})
            (options.out / "selection_memory.json").write_text(json.dumps(data, indent=1) + "\n")
            held = found.get("extra_bytes", {})
            said = " / ".join(f"{held[name] / _GIB:.2f}" for name in PASSES) + " GiB" if held else found["failed"]
            print(f"{tokens:,} tokens, workspace of {mib:,} MiB: {said}", flush=True)
    try:
        print(plot(data["rows"], options.out / "selection_memory.png"))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
