"""Triton and Gluon code: arrays in, arrays out. Its rooms import nothing of the package except lower rooms of kernels."""
