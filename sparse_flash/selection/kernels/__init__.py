"""Kernels for blocks of keys chosen by query: the choice, attention over chosen blocks, and decoding; those for Hopper GPUs are in
modules ``hopper_*``. Knows arrays of picks, and the kernels of masks, but not what a selection means."""
