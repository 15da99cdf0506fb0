"""Tools around training: pictures, costs, the shadow check. They know tables, back ends and
observers, but not users' calls."""
