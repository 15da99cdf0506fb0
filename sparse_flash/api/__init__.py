"""The calls that users make: arguments checked once, the back end chosen, the result finished."""
