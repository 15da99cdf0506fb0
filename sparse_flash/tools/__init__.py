"""Tools around training: pictures, costs, tuning, ahead-of-time compilation. They know tables and back ends, but not users'
calls."""
