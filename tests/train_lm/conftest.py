"""A prepared folder of tokens, and runs in new folders."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_lm import ON_CPU, SETTINGS, random_tokens

from examples.train_lm.train import Run


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    return random_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture
def run(tokens, tmp_path):
    """Makes a Run in a new folder, or in ``folder``."""

    def make(folder: str = "run", fresh: bool = False, start: Path | None = None, **changes) -> Run:
        (tmp_path / folder).mkdir(exist_ok=True)
        return Run(replace(SETTINGS, **changes), tmp_path / folder, tokens, ON_CPU, fresh=fresh, start=start)

    yield make
    torch.use_deterministic_algorithms(False)
