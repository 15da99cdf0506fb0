"""What a call does besides its mask: lengths, dropout, score modifications. Knows tensors, but neither masks nor back ends."""
