"""The encoder: its positions, its order of tokens, its masks, and what it takes from a smaller one."""

from dataclasses import replace

import pytest
import torch
from tiny_classifier import SETTINGS, TINY

from examples.train_lm.model import Positions
from experiments.long_range.data import fields_of
from experiments.long_range.model import Classifier
from experiments.long_range.pathfinder import Pathfinder
from experiments.long_range.settings import check_settings


def made(size: int = 32, **changes) -> Classifier:
    torch.manual_seed(0)
    changes = {"attention": "dense", "shape": TINY, **changes}
    model = Classifier(check_settings(replace(SETTINGS, task=fields_of(Pathfinder(size)), **changes)))
    with torch.no_grad():  # as after some training: all that is learned matters
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_a_larger_model_starts_with_positions_repeated_and_everything_else_as_it_was():
    small, large = made(32), made(128)
    large.start_from(small.state_dict(), "small")
    for name, value in large.state_dict().items():
        before = small.state_dict()[name]
        wanted = torch.stack([before[place // 4] for place in range(128)]) if name.startswith("positions.") else before
        assert torch.equal(value, wanted), name
    with pytest.raises(ValueError, match=r"small is of another model: positions\.0 is \(32, 32\) here and \(128, 32\) there"):
        small.start_from(large.state_dict(), "small")
    with pytest.raises(ValueError, match=r"embed\.weight is \(256, 16\) here and \(256, 32\) there; pass the options of its model"):
        made(32, shape=replace(TINY, dim=16)).start_from(small.state_dict(), "small")


def gradient_by_pixel(model: Classifier, token: int) -> torch.Tensor:
    """How much each pixel matters to one token's result of the first block: (tokens,), in the order of attention."""
    x = torch.randn(1, model.order.numel(), 32, requires_grad=True)
    model.blocks[0](x, Positions(model.cos, model.sin), None)[0, token].sum().backward()
    return x.grad[0].abs().sum(-1)


def test_tokens_see_both_ways_what_the_mask_keeps_and_nothing_else():
    assert (gradient_by_pixel(made(), 500) > 0).all()
    seen = gradient_by_pixel(made(attention="local(100)"), 500) > 0
    assert seen.nonzero()[[0, -1], 0].tolist() == [401, 599] and seen.sum() == 199
    seen = gradient_by_pixel(made(attention="butterfly(block=128)"), 500) > 0
    assert seen.view(8, 128).all(1).nonzero()[:, 0].tolist() == [1, 2, 3, 7] and seen.sum() == 512
