"""Kernels that build tables on the device, for masks of block maps and of packed documents. Knows tables as arrays."""
