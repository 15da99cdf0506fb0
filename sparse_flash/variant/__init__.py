"""The rest of a call beside its mask: lengths, dropout, score modifications. Knows tensors, but neither masks nor back ends."""
