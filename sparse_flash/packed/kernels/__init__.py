"""Kernels that build the tables of packed documents on the device. Knows tables as arrays."""
