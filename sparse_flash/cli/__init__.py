"""The command line: ``sparse-flash patterns | show | gallery | explain | bench | doctor``. Arguments and printing only."""

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


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Prints the version.")] = False) -> None:
    if version:
        typer.echo(f"sparse-flash {sparse_flash.__version__}")
        raise typer.Exit
