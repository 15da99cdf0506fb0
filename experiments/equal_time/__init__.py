"""Compares masks in equal training time: the same model, text and GPU seconds for each.

It uses the trainer of examples/train_lm; docs/evidence.md says what was found. Run ``python -m experiments.equal_time --help``.
"""
