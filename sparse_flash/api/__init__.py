"""The user-facing calls: they check arguments once, choose the back end and finish the result."""
