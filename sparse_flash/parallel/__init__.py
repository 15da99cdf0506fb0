"""Context parallelism: one sequence over several ranks. Plans on the host from a mask's table; exchanges through torch.distributed.
Knows the calls of ``api``, and nothing of models or of other libraries."""

from .plan import ContextPlan, ContextPlans, context_parallel
from .planner import ContextParallel, PendingPlan

__all__ = ["ContextParallel", "ContextPlan", "ContextPlans", "PendingPlan", "context_parallel"]
