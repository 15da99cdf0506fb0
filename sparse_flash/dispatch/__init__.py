"""How a call enters PyTorch: operators, their gradients and fake implementations, and observers of calls. Knows back ends and
tables, but not users' arguments."""
