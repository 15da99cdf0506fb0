"""Kernels for every GPU that Triton supports: forward, backward, decoding, and their tile sizes. Each kernel's launcher is next to
it."""
