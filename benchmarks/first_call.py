"""How long the first training step of a process takes on a GPU where no kernel has been compiled yet.

    python -m sparse_flash.benchmarks.first_call

Each case is a process of its own, with an empty cache of Triton. The time is that of the first forward and backward pass, with what
they compile and load, but without importing torch and starting CUDA.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

MASKS = ("dense", "causal & local(1024)", "causal")


def time_first_step(spec: str, tokens: int, heads: int, head_dim: int) -> float:
    """Returns the seconds of the first step of this process. spec: of the mask, or "dense"."""
    import sparse_flash as sf

    size = 1, heads, tokens, head_dim
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    mask = None if spec == "dense" else spec
    out = sf.attention(q, k, v, mask)
    torch.autograd.grad(out, (q, k, v), v)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def time_in_process(case: list[str]) -> float:
    """Returns the seconds of a step that a process without compiled kernels takes. case: arguments of this program."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TRITON_CACHE_DIR": folder}
        command = [sys.executable, "-m", "sparse_flash.benchmarks.first_call", *case]
        return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mask", nargs="+", default=MASKS, help='specs of masks, or "dense"')
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="processes of each case")
    parser.add_argument("--here", action="store_true", help="measures the first mask in this process, and prints seconds alone")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no GPU to compile for")
    shape = options.tokens, options.heads, options.head_dim
    if options.here:
        print(time_first_step(options.mask[0], *shape))
        return
    import triton

    print(f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, torch {torch.__version__}, triton {triton.__version__}")
    size = ["--tokens", str(options.tokens), "--heads", str(options.heads), "--head-dim", str(options.head_dim)]
    for mask in options.mask:
        seconds = [time_in_process(["--here", "--mask", mask, *size]) for _ in range(options.repeats)]
        each = " ".join(f"{second:.1f}" for second in seconds)
        print(f"{mask:24} {statistics.median(seconds):5.1f} s  ({each})", flush=True)


if __name__ == "__main__":
    main()
