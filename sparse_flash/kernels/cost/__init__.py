"""How long kernels take, predicted: arithmetic on a call's sizes and tables. Knows how launchers divide a call, and what was
measured on GPUs. Launches nothing, and needs neither Triton nor a GPU."""
