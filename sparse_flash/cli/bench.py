"""``bench``: measures, and prints the tables."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparse_flash.benchmarks.workload import DEFAULT, FULL_RUN, SUITES

from .options import Imports, dtype_of, output_console, user_errors


def bench(
    specs: Annotated[
        list[str] | None, typer.Argument(metavar="[SPEC]...", help="Masks to measure instead of the suites' own.")
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(SUITES)} or all; may be given several times. By default {', '.join(DEFAULT)}."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for results; runs/bench-DEVICE by default, with SPECs one for each choice."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU by default where there is one.")] = None,
    backend: Annotated[str, typer.Option(help="The back end of sparse_flash.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A few small cases of every suite, in seconds.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every suite but paper, and on a CPU all masks and lengths.")] = False,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Continue from earlier results, or set them aside.")] = True,
    retry: Annotated[bool, typer.Option("--retry", help="Measure cases again that gave no numbers, or doubtful ones.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run only cases whose line contains this, or ends so if it ends in $; may be given several times."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Seconds a case may take: 60 on a CPU, 90 on a GPU by default.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases and stop.")] = False,
    report_only: Annotated[Path | None, typer.Option(help="Rewrite tables, plots and report from this folder's results.")] = None,
    q_len: Annotated[
        int | None, typer.Option("--q-len", "-n", help="Queries and keys, in tokens; the suites' own by default.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="Heads of keys and values; --heads by default.")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", help="Elements of a head.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; bf16 on a GPU and fp32 on a CPU by default.")] = None,
    imports: Imports = None,
) -> None:
    """Measures speed and memory, also of PyTorch's attention and FlashAttention-4, and writes a report."""
    import torch

    import sparse_flash
    from sparse_flash.benchmarks.results import Results
    from sparse_flash.benchmarks.run import Options, device_type, run, select_cases
    from sparse_flash.benchmarks.workload import suites
    from sparse_flash.benchmarks.workload.cases import CallSizes

    console = output_console()
    with user_errors():
        asked = _choose_suites(suite, full or (quick and not specs))
        named = str(dtype_of(dtype)).removeprefix("torch.") if dtype else None
        sizes = CallSizes(q_len, batch, heads, kv_heads, head_dim, dtype=named)
        if report_only:
            from sparse_flash.benchmarks.report import page

            results = Results.read(report_only)
            page.write(results)
            return _print_results(results, console)
        masks, all_lengths = tuple(str(sparse_flash.parse(spec)) for spec in specs or ()), full or bool(suite)
        if list_cases:
            kind = device_type(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            for name, case in select_cases(suites.choose(asked, kind, quick, masks, backend, sizes, all_lengths), only or ()):
                console.print(f"{name}: {case.key}", markup=False, soft_wrap=True)
            return
        # fmt: off
        options = Options(masks, asked, out, device, backend, quick, resume=resume, retry=retry,
                          only=tuple(only or ()), limit=limit, sizes=sizes, full=all_lengths, imports=tuple(imports or ()))
        # fmt: on
        if out:
            out.mkdir(parents=True, exist_ok=True)  # fails before the first measurement, not after it
        results = run(options, console)
    _print_results(results, console)


def _print_results(results, console: Console) -> None:
    from sparse_flash.benchmarks.report import page
    from sparse_flash.benchmarks.report.rows import TEXT_COLUMNS
    from sparse_flash.benchmarks.report.tables import tables

    said: set[str] = set()
    for table in tables(results.data):
        console.print()
        console.print(_to_rich_table(table, TEXT_COLUMNS))
        for note in dict.fromkeys(note for note in table.notes if note not in said):
            console.print(Text(note, "dim"))
        said.update(table.notes)
    console.print(f"\nreport: {results.folder / page.PAGE}\nnumbers: {results.path}", markup=False, soft_wrap=True)


def _choose_suites(asked: list[str] | None, full: bool) -> tuple[str, ...]:
    if not asked:
        return FULL_RUN if full else DEFAULT
    if unknown := [name for name in asked if name not in (*SUITES, "all")]:
        raise ValueError(f"unknown suite {unknown[0]!r}; choose from {', '.join(SUITES)}, all")
    return SUITES if "all" in asked else tuple(dict.fromkeys(asked))


def _to_rich_table(table, text_columns: tuple[str, ...]) -> Table:
    printed = Table(title=table.title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(table.columns):
        text = number == 0 or column in text_columns
        printed.add_column(column, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    for row in table.rows:
        printed.add_row(*(Text(cell, "bold red" if cell == "NO" else "") for cell in row))
    return printed
