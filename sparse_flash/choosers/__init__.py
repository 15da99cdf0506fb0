"""Blocks of keys chosen for blocks of queries, from q and k: scores, rules, and the masks that follow. ``masks/chooser`` declares what
is chosen. May know masks, back ends and kernels; not attention, nor how arguments are checked."""
