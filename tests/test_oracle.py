"""The helpers that tests share leave nothing behind."""

import torch
from oracle import poisoned_memory


def test_functions_compile_as_before_once_memory_is_no_longer_poisoned():
    torch._dynamo.trace_rules.clear_lru_cache()  # as in a process that has compiled nothing yet
    x = torch.ones(3)
    with poisoned_memory():
        torch.compile(torch.sin, backend="eager")(x)

    @torch.compile(backend="eager", fullgraph=True)
    def filled(x):
        return torch.empty_like(x).copy_(x) + torch.empty(3).fill_(1.0)

    assert torch.equal(filled(x), torch.full((3,), 2.0))
