"""Triton and Gluon code: arrays in, arrays out. Its rooms import nothing of the package but the rooms of kernels below them."""
