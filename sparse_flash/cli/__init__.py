"""The command line: ``sparse-flash patterns | show | gallery | explain | bench | tune | warm | doctor``."""


def main() -> None:
    """Entry point of ``sparse-flash``."""
    from .app import app

    app(prog_name="sparse-flash")
