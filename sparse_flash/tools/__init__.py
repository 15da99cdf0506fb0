"""What looks at masks before they run: pictures, what they cost and what they see. Knows tables, and what back ends take; makes
no calls."""
