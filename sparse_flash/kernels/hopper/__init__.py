"""Gluon kernels for compute capability 9.0. Knows nothing of the portable kernels."""
