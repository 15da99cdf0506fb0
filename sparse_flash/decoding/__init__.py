"""Few queries over a cache of keys and values: the checks of a decoding call, its mask and its cache."""
