"""Attention under a table: a call's record and checks, lengths and changes of scores, operators with their gradients, and the four
back ends. Knows masks and kernels, but not how blocks are chosen."""
