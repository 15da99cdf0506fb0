"""From a pattern to its table: notation, algebra, compiler, BlockMask. Knows positions, blocks and the kernels that
make tables, but not calls or back ends."""
