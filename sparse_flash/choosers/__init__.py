"""Blocks of keys chosen for blocks of queries, from q and k: scores, rules, and the masks that follow.

Knows masks, which hold the declarations of choosers, checks, back ends and kernels, but not users' calls.
"""
