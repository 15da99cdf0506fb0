"""Blocks of keys chosen for each query: the choice, and attention over chosen blocks. Knows operators and back ends, but not users'
calls."""
