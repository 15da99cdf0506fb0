"""What a call does besides its mask: lengths, dropout, changes of scores. Knows tensors; no mask, no back end."""
