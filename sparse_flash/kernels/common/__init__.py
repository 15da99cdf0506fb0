"""What all kernels share: tiles, random numbers, configs, the variant that a kernel is compiled for, and what differs between
releases of Triton and Gluon. Knows Triton; knows no kernel and no launch."""
