"""How a case is timed, its memory, whether the result is right and whether the figure can be relied on. Knows peers and problems;
nothing of reports."""
