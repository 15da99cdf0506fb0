"""Replaces `<!-- command line -->` in a page by the command line's own help."""

import re

import typer
from typer.cli import get_docs_for_click

from sparse_flash.cli import app

PLACE = "<!-- command line -->"


def on_page_markdown(markdown, page, config, files):
    if PLACE not in markdown:
        return markdown
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="sparse-flash")
    # Without its title and its list of commands, whose sentences typer cuts short; the page's table of contents has them.
    text = re.sub(r"\*\*Commands\*\*:.*?(?=## )", "", text.partition("\n")[2], flags=re.S)
    return markdown.replace(PLACE, text)
