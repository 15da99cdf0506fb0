"""The commands and their options."""

from __future__ import annotations

from typing import Annotated

import typer

from . import bench, doctor, masks, tune, warm

app = typer.Typer(
    help="Block-sparse attention whose cost is proportional to what the mask keeps.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("patterns")(masks.patterns)
app.command("show")(masks.show)
app.command("gallery")(masks.gallery)
app.command("explain")(masks.explain)
app.command("bench")(bench.bench)
app.command("tune")(tune.tune)
app.command("warm")(warm.warm)
app.command("doctor")(doctor.doctor)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"sparse-flash {version('sparse-flash')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Prints the version.")] = False,
) -> None:
    pass
