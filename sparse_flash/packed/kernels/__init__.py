"""Kernels that build the tables of packed documents on the device, and one that moves rows of tensors. Knows tables as arrays."""
