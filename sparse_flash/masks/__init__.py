"""From a pattern to its table: notation, algebra, compiler, BlockMask. Knows positions and blocks; no call, no back end, no
kernel."""
