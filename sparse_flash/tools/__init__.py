"""Tools around training: pictures, costs, ahead-of-time compilation, the shadow check. They know tables, back ends and
observers, but not users' calls."""
