"""``warm``: compiles the kernels of training before it starts."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .console import error_console, output_console, user_errors
from .options import BlockSize, dtype_of


def warm(
    head_dim: Annotated[list[int], typer.Option(min=1, help="Of queries and keys; may be given several times.")],
    dtype: Annotated[
        list[str] | None, typer.Option(help="bf16, fp16 or fp32; may be given several times. bf16 by default.")
    ] = None,
    v_head_dim: Annotated[int | None, typer.Option(min=1, help="Of values, where it is another.")] = None,
    block_size: BlockSize = 128,
    deterministic: Annotated[bool, typer.Option(help="The kernels of gradients that repeat bit for bit.")] = False,
    backend: Annotated[str, typer.Option(help="triton, hopper, or auto: the one that attention would take.")] = "auto",
    workers: Annotated[int | None, typer.Option(min=1, help="Kernels at a time; as many as cores, 8 at most, by default.")] = None,
) -> None:
    """Compiles the kernels of training, forward and backward, in parallel. Run it once per machine."""
    import torch

    from sparse_flash.tools import warming

    with user_errors():
        if reason := warming.unavailable():
            raise ValueError(f"nothing to compile: {reason}")
        head_dims = [(dim, v_head_dim or dim) for dim in head_dim]
        calls = warming.kinds(head_dims, [dtype_of(name) for name in dtype or ["bf16"]], block_size, deterministic)
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        with Progress(*columns, console=error_console(), transient=True, disable=not sys.stderr.isatty()) as bar:
            bar.add_task(f"compiling the kernels of {len(calls)} kinds of calls", total=None)
            done = warming.warm(calls, torch.device("cuda", torch.cuda.current_device()), backend, workers)
    console = output_console()
    for name in sorted(set(done.kernels)):
        count = done.kernels.count(name)
        console.print(f"  {name}" + (f", {count} versions" if count > 1 else ""))
    console.print(f"{len(done.kernels)} kernels of {done.kinds} kinds of calls are compiled; it took {done.seconds:.1f} s")
