"""Kernels of the choice of blocks: log-sums of scores, shares and rules, tables of bits. They know nothing of the package but
``kernels``."""
