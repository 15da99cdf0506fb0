"""The command line: ``sparse-flash patterns | show | explain | bench | tune | doctor``."""


def main() -> None:
    """Entry point of ``sparse-flash``."""
    from .app import app

    app(prog_name="sparse-flash")
