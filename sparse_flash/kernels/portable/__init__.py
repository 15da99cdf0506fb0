"""Kernels for every GPU that Triton supports: forward, backward, decoding, and their tile sizes. A launcher stands beside each
kernel."""
