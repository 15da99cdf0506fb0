"""The peers: their interface, and a module for each. Knows problems; times nothing."""
