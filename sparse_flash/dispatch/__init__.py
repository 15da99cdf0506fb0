"""How a call enters PyTorch: operators, their gradients and fakes, and who observes calls. Knows back ends and tables; no arguments
of users."""
