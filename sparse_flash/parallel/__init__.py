"""Context parallelism: one sequence over several ranks. Plans on the host from a mask's table; exchanges through torch.distributed.
Knows the calls of ``api``, and nothing of models or of other libraries."""

from .plan import ContextPlan, context_parallel

__all__ = ["ContextPlan", "context_parallel"]
