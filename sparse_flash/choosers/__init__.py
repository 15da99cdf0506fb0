"""Blocks of keys chosen for blocks of queries, from q and k: scores, rules, and the masks that follow.

May know masks, which hold the declarations of choosers, back ends and kernels; not attention, nor how arguments are checked.
"""
