"""Documents packed back to back: their tables, and rows moved between axes of tokens. Knows operators, but not the calls of
users."""
