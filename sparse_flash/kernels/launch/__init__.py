"""How kernels are launched: the first time, again, and by which tuned config. Knows arguments and compiled code, not what a kernel
computes."""
