"""Ranks compare what they were given in messages of one size."""

import pytest

from sparse_flash.parallel import agreement


@pytest.mark.parametrize("character", ["a", "é", "\U0001f600"])
def test_a_long_error_of_any_characters_fits_a_message(character, monkeypatch):
    sizes: list[int] = []
    monkeypatch.setattr(agreement.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(agreement.dist, "all_gather", lambda every, mine, **_: sizes.extend(t.numel() for t in (mine, *every)))
    agreement.Agreement(ValueError(character * 2000), None)
    assert set(sizes) == {1024}
