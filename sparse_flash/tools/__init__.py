"""Tools around training: pictures, costs, tuning, compiling ahead, the shadow check. They know tables, back ends and observers,
and nothing of the calls that users make."""
