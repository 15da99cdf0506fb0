"""Documents packed back to back: their tables, and row moves between token axes. Knows operators, but not users' calls."""
