"""Layers whose queries choose their blocks of keys while the model trains: MoBA, NSA and MSA, each a page, trained on associative
recall beside causal attention and a window. Programs to copy; they build on examples/recall and examples/train_lm.

moba    mean keys choose                        nsa     attention to compressed blocks chooses; three branches, three gates
msa     a small indexer chooses, and learns from the masses of what it picked
shared  what the layers have in common          compare what is trained, at which sizes, what it attends to
"""
