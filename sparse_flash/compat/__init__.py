"""Every private name of PyTorch that the package relies on, each with what it is relied on for; ``tests/compat`` holds them to it,
so that a new release fails there. Knows PyTorch, and nothing of this package. (Kernels import nothing of the package either: the
two names that launches need are in ``kernels/common/streams``. Those of Triton are in ``kernels/common/compat`` and ``gluon``.)"""
