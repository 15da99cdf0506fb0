"""Layers whose queries choose their blocks of keys while the model trains: MoBA, NSA, MSA and VSA, each a page to copy. VSA stands
alone, and experiments/video trains it on video. The others build on examples/train_lm; experiments/selection_layers trains them on
associative recall beside causal attention and a window.

moba    mean keys choose                        nsa     attention to compressed blocks chooses; three branches, three gates
msa     a small indexer chooses, and learns from the masses of what it picked
vsa     tiles of a video attend to tiles, and choose by it; two branches, two gates
shared  what the layers of examples/train_lm have in common
"""
