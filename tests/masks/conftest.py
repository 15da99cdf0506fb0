import pytest

from sparse_flash.masks import registry


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """A registry of names that a test may add to."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
