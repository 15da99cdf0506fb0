"""Workloads: cases, suites, the masks of their rows, the tensors of a case. Plain data except for the tensors."""

SUITES = ("speedup", "length", "peers", "compile", "paper")  # ``suites`` says what each holds
FULL_RUN = tuple(name for name in SUITES if name != "paper")  # of --full, and of --quick
DEFAULT = ("speedup", "length", "compile")
