"""Long context: with a sliding window, time and memory grow with the length, not with its square.

pip install -e ".[cli]"
python examples/long_context.py                   # up to 65,536 tokens, on a CPU or a GPU
python examples/long_context.py --pattern "causal & (local(256) | sinks(64))"
"""

import time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import sparse_flash as sf


def main(
    pattern: Annotated[str, typer.Option(help="Spec text.")] = "causal & local(256)",
    longest: Annotated[int, typer.Option(help="Tokens; each row has a quarter of the next one's.")] = 65536,
    rows: int = 4,
    heads: int = 2,
    head_dim: int = 64,
) -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    table = Table(title=f"{pattern}: forward and backward, {heads} heads of {head_dim}, {dtype} on {device}")
    for heading in ("tokens", "compile", "forward + backward", "per token", "table", "dense scores would take"):
        table.add_column(heading, justify="right")
    seconds = []
    for tokens in (longest // 4**row for row in reversed(range(rows))):
        begin = time.perf_counter()
        mask = sf.compile_mask(pattern, tokens, device=device)
        compiled = time.perf_counter() - begin
        q, k, v = (torch.randn(1, heads, tokens, head_dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        times = []
        for _ in range(2):  # the first call of a shape may build kernels
            begin = time.perf_counter()
            sf.attention(q, k, v, mask).sum().backward()
            q.grad[0, 0, 0, 0].item()  # waits for the GPU
            times.append(time.perf_counter() - begin)
        seconds.append(min(times))
        table.add_row(
            f"{tokens:,}",
            f"{compiled:.3f} s",
            f"{seconds[-1]:.4f} s",
            f"{seconds[-1] / tokens * 1e6:.2f} µs",
            f"{mask.nbytes / 2**10:,.0f} KiB",
            f"{tokens**2 * heads * q.element_size() / 2**30:,.2f} GiB",
        )
    Console().print(table)
    return seconds


if __name__ == "__main__":
    typer.run(main)
