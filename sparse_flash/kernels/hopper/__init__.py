"""Kernels for compute capability 9.0, in Gluon. Knows nothing of the portable kernels."""
