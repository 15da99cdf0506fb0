"""What looks at masks before they run: pictures, what they cost and what they see. Knows tables; knows no calls, no back ends."""
