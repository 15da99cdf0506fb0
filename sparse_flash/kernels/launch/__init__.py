"""How kernels are launched: first launches, replays, and tuned configs. Knows arguments and compiled code, but not what a kernel
computes."""
