"""Trains the layers of examples/selection_layers on associative recall, beside causal attention and a window.
docs/guides/trained-selection.md has what was found.

compare what is trained, at which sizes, what it attends to          cli     the command
"""
