"""The command line: ``sparse-flash patterns | show | gallery | explain | bench | doctor``."""


def main() -> None:
    """Entry point of ``sparse-flash`` and of ``python -m sparse_flash``."""
    from .app import app

    app(prog_name="sparse-flash")
