"""Kernels that build the tables of packed documents on the device and move their rows. Knows tables as arrays."""
