"""The built-in patterns, one a file; ``sparse_flash`` exports them all."""

from .causal import Causal as causal  # noqa: N813
from .local import Local as local  # noqa: N813

__all__ = ["causal", "local"]
