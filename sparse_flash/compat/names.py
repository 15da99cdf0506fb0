"""Names that other libraries know this package by. They depend on the name under which the package is imported.

So several versions run in one process, as the Hub's ``kernels`` library loads them: each has operators of its own. PyTorch replaces
an operator in silence if another one of its name is defined.
"""

import re

PACKAGE = __name__.removesuffix(".compat.names")  # "sparse_flash", or the name of a copy
NAMESPACE = re.sub(r"\W", "_", PACKAGE)  # torch.ops.<NAMESPACE>


def operator_name(name: str) -> str:
    """The name of one of the package's operators, with its namespace: "sparse_flash::attention"."""
    return f"{NAMESPACE}::{name}"
