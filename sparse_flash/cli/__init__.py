"""The command line: ``sparse-flash patterns | show | gallery | explain | bench | doctor``. Arguments and printing only."""

from __future__ import annotations

from typing import Annotated

import typer

import sparse_flash

from . import bench, doctor, masks

app = typer.Typer(
    help="Block-sparse attention whose cost is proportional to what the mask keeps.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (masks.patterns, masks.show, masks.gallery, masks.explain, bench.bench, doctor.doctor):
    app.command()(_command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"sparse-flash {sparse_flash.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Prints the version.")] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of ``sparse-flash`` and of ``python -m sparse_flash``."""
    app(prog_name="sparse-flash")
