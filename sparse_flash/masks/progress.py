"""A progress bar for evaluating many pairs."""

from __future__ import annotations

from typing import Self

_LONG = 1 << 28  # pairs to evaluate beyond which a progress bar is shown


class Progress:
    """A progress bar if the work is long, otherwise nothing."""

    def __init__(self, text: str, total: int, wanted: bool | None):
        self.bar = None
        if wanted or (wanted is None and total > _LONG):
            from rich.console import Console
            from rich.progress import Progress as Bar

            self.bar = Bar(console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task(text, total=total)

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def advance(self, pairs: int) -> None:
        if self.bar:
            self.bar.advance(self.task, pairs)

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()
