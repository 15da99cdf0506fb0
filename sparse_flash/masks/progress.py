"""A progress bar for evaluating many pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LONG = 1 << 28  # pairs to evaluate beyond which a progress bar is shown


@contextmanager
def progress_bar(text: str, total: int, wanted: bool | None) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of pairs that were just evaluated; it moves a bar if the work is long."""
    if not (wanted or (wanted is None and total > _LONG)):
        yield lambda pairs: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda pairs: bar.advance(task, pairs)
