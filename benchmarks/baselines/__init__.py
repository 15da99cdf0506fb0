"""Against whom: what a peer is, and a module for each. Knows problems; times nothing."""
