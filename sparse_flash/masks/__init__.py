"""From a pattern to its table: notation, algebra, compiler, BlockMask. Knows positions and blocks, but not calls, back ends or
kernels."""
