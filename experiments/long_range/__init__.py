"""Trains classifiers whose answer depends on far tokens: Pathfinder at 32 to 256 pixels a side, and ListOps. Dense or sparse.

paths       paths that grow without touching each other
pathfinder  images of paths, and whether one of them joins two dots      listops  nested expressions, and their values
data        examples made ahead of time into mapped files
settings    what a run is, and attention by name
model       the encoder: train_lm's blocks in both directions
train       the loop                                                     checkpoint  one file
report      progress, CSV, plots, tables
"""
