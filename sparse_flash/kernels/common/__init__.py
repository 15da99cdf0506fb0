"""Shared by all kernels: tiles, random numbers, configs, variants, and differences between releases of Triton and Gluon. Knows
Triton, but not kernels or launches."""
