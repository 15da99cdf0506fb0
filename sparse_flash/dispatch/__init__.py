"""How a call enters PyTorch: operators, their gradients and fake implementations. Knows back ends and tables, but not users'
arguments."""
