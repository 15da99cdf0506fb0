"""Tools around training: pictures and costs of masks. They know tables and back ends, but not users' calls."""
