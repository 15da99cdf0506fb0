"""What the package reads by private names of PyTorch, as far as no other test does."""

import re

import pytest
import torch

from sparse_flash.compat import pytorch


def test_a_name_that_a_release_lacks_is_told_with_the_release():
    with pytest.raises(ImportError, match=re.escape(f"PyTorch {torch.__version__} has no _C.no_such_name, which sparse")):
        pytorch.import_private("_C.no_such_name")
    with pytest.raises(ImportError, match=r"utils\._no_such\.name"):
        pytorch.import_private("utils._no_such:name")


def test_function_transforms_are_seen_and_functionalize_is_none_that_differentiates():
    seen = []

    def look(x):
        seen.append((not pytorch.is_plain_eager(x), pytorch.in_differentiating_transform()))
        return x.sum()

    look(torch.ones(2))
    torch.func.grad(look)(torch.ones(2))
    torch.vmap(look)(torch.ones(2, 2))
    torch.func.functionalize(look)(torch.ones(2))
    assert seen == [(False, False), (True, True), (True, True), (True, False)]
