"""What examines masks and calls around training: pictures, costs, tuning, compiling ahead, the shadow check. Knows tables, back
ends and observers; nothing of the calls that users make."""
