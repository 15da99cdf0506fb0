"""What is measured: cases, suites, the masks of their rows, a case's tensors. Plain data but for the tensors."""
