"""Every private PyTorch name that the package relies on, each with what it is relied on for; ``tests/compat`` checks them, so a new
release fails there. Also ``names``, by which other libraries know this package, and ``extras``, those that may be missing. Knows
PyTorch, and nothing else of this package. (Kernels import nothing of the package either: the two names that launches need are in
``kernels/common/streams``, Triton's are in ``kernels/common/gluon``.)"""
