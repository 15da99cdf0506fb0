"""``python -m sparse_flash``: the command line, see ``cli``."""

from .cli import main

main()
