"""Workloads: cases, suites, the masks of their rows, the tensors of a case. Plain data except for the tensors."""
