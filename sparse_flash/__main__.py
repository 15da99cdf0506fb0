"""``sparse-flash`` and ``python -m sparse_flash``: the command line, see ``cli``."""

from .compat.extras import naming_extra


def main() -> None:
    """Runs the command line, or says which extra it needs."""
    try:
        with naming_extra():
            from .cli import app
    except ModuleNotFoundError as error:
        raise SystemExit(f"error: {error}") from None
    app(prog_name="sparse-flash")


if __name__ == "__main__":
    main()
