"""Launching kernels: first launches, replays, and tile sizes that Triton's autotuner measures. Knows arguments and compiled code,
but not what a kernel computes."""
