"""Layers whose queries choose their blocks of keys while the model trains: MoBA, NSA and MSA, each a page to copy. They build on
examples/train_lm; experiments/selection_layers trains them on associative recall beside causal attention and a window.

moba    mean keys choose                        nsa     attention to compressed blocks chooses; three branches, three gates
msa     a small indexer chooses, and learns from the masses of what it picked
shared  what the layers have in common
"""
