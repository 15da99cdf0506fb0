"""Shared by all kernels: tiles, random numbers, configs, the variant that a kernel is compiled for, and differences between
releases of Triton and Gluon. Knows Triton, but not kernels or launches."""
