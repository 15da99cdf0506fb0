"""``python -m sparse_flash``: the command line, see ``cli``."""

from .cli import main

if __name__ == "__main__":
    main()
