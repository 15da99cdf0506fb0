"""Trains a long-context language model with sparse attention. A program to copy: change what you need.

settings    what a run is, its presets, and what cannot work, said before anything starts
model       the decoder and the loss
data        text -> deduplicated, held out by package, tokens in a file -> batches by position
parallel    one process or several: DDP and FSDP2, sequences that several share
checkpoint  saving whole or not at all, resuming on any number of GPUs
memory      what a run will take, before it starts
train       the loop
report      progress, CSV, TensorBoard, plots
evaluate    loss by position, at any length          generate   text from a checkpoint
export      to a Hugging Face model (hf_model)
"""
