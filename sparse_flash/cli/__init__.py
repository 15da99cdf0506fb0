"""The command line: ``sparse-flash patterns | show | explain | bench | doctor``."""


def main() -> None:
    """Entry point of ``sparse-flash``."""
    from .app import app

    app(prog_name="sparse-flash")
