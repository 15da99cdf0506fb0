"""Kernels for every GPU that Triton supports: forward, backward, decoding, with their launchers and tile sizes."""
