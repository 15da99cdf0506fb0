"""Gluon kernels for compute capability 9.0. Of the portable kernels it uses the softmax and the sinks."""
