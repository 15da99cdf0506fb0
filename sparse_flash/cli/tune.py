"""``tune``: measures tile sizes on this GPU, and prints the measurements and the choices."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .console import error_console, output_console, user_errors
from .options import BlockSize, dtype_of

_NOTHING = (
    "Nothing to choose: the Hopper kernels run this call, and they have one measured config for each shape. --backend triton tunes "
    "the portable kernels."
)


def tune(
    pattern: Annotated[str, typer.Option(metavar="SPEC", help="The mask to tune for; dense attention is tuned as well.")] = (
        "causal & local(1024)"
    ),
    tokens: Annotated[int, typer.Option("--q-len", "--tokens", "-n", min=1, help="Queries, and keys, in tokens.")] = 16384,
    heads: Annotated[int, typer.Option(min=1, help="Heads of all sequences of the batch together.")] = 16,
    head_dim: Annotated[int, typer.Option(min=1, help="Of queries and keys.")] = 128,
    v_head_dim: Annotated[int | None, typer.Option(min=1, help="head_dim of values; that of queries and keys by default.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    block_size: BlockSize = 128,
    backend: Annotated[str, typer.Option(help="triton, hopper, or auto: the one that attention would take.")] = "auto",
    limit: Annotated[int, typer.Option(min=1, help="Seconds in total; the candidate that runs at their end is finished.")] = 300,
) -> None:
    """Chooses tile sizes by measuring them on this GPU. Optional: for GPUs and shapes on which the built-in ones were not
    measured."""
    import torch

    from sparse_flash.tools import tuning

    console = output_console()
    with user_errors():
        if reason := tuning.unavailable():
            raise ValueError(f"nothing to tune: {reason}")
        problem = tuning.TuningProblem(pattern, tokens, heads, head_dim, block_size, dtype_of(dtype), v_head_dim)
        try:
            tasks = tuning.make_tasks(problem, torch.device("cuda", torch.cuda.current_device()), backend)
            if not tasks:
                console.print(_NOTHING)
                return
            results, lost = _run(tasks, limit, console)
        except torch.OutOfMemoryError:
            raise ValueError(f"{heads} heads of {tokens} tokens do not fit this GPU's free memory; pass fewer") from None
    for result in results:
        console.print(_table(result))
        if result.left_out:
            console.print(Text(f"{_left_out(result.left_out)} left out: this GPU has less shared memory than they take.", "dim"))
        if result.unreached:
            console.print(Text(_why_unreached(result), "dim"))
        console.print()
    faster = sum(result.gain > 0 for result in results)
    console.print(f"{faster} of {len(results)} kernels run at least {tuning.LEAST_GAIN:.0%} faster with another config.")
    if state := tuning.cache_state():
        said = f"{state}; calls of their shapes use them from now on. Delete the file to go back."
        console.print(said, markup=False, soft_wrap=True)
    if lost:
        error_console().print(f"error: tuning stopped, as the GPU did not survive a candidate: {lost}", markup=False)
        raise typer.Exit(1)


def _run(tasks, limit: int, console: Console) -> tuple[list, str | None]:
    """The results, and what broke the GPU, if anything did."""
    from sparse_flash.tools import tuning

    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=sum(len(task.candidates) for task in tasks))

        def advance(task, _):
            progress.update(bar, advance=1, description=f"{task.key.kernel}, {task.mask}")

        try:
            for result in tuning.tune(tasks, limit, advance=advance):
                results.append(result)  # one by one: results from before a GPU was lost are still printed
        except tuning.GpuLost as error:
            return results, str(error)
    return results, None


def _left_out(count: int) -> str:
    return "1 candidate was" if count == 1 else f"{count} candidates were"


def _why_unreached(result) -> str:
    if result.trials[0].milliseconds is None:
        return "The built-in config does not run here, so there is nothing to compare with: please report this."
    return f"{result.unreached} more candidates were not reached within the limit; --limit takes seconds."


def _table(result) -> Table:
    from sparse_flash.tools import tuning

    key = result.task.key
    title = f"{key.kernel} ({key.backend}), {result.task.mask}, {key.dtype}, head_dim {_head_dims(key)}"
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="bold")
    table.add_column("candidate")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("gain", justify="right", no_wrap=True)
    table.add_column("")
    builtin = result.trials[0]
    for trial in result.trials:
        name, chosen = tuning.describe(trial.config), trial.config == result.chosen
        notes = ["chosen"] * chosen + ["built in"] * (trial is builtin)
        if not trial.fits and trial is not builtin:
            continue
        if trial.milliseconds is None:
            table.add_row(name, "", "", Text(f"skipped: {trial.reason}", "yellow"))
            continue
        gain = result.gain if chosen else builtin.milliseconds / trial.milliseconds - 1
        gain_text = "" if trial is builtin else f"{gain:+.1%}"
        table.add_row(name, f"{trial.milliseconds:.3f} ms", gain_text, ", ".join(notes), style="green" if chosen else None)
    return table


def _head_dims(key) -> str:
    return str(key.head_dim) if key.v_head_dim == key.head_dim else f"{key.head_dim} of q and k, {key.v_head_dim} of v"
