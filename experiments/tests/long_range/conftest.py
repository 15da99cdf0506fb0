"""A prepared folder of expressions, and runs in new folders."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_classifier import ON_CPU, SETTINGS, SHORT

from experiments.long_range.data import prepare
from experiments.long_range.settings import check_settings
from experiments.long_range.train import Run


@pytest.fixture(scope="session")
def short(tmp_path_factory) -> Path:
    """2,000 expressions of one operator to train on, 200 held out."""
    folder = tmp_path_factory.mktemp("examples") / "short"
    prepare(folder, SHORT, 2000, 200)
    return folder


@pytest.fixture
def run(short, tmp_path):
    """Makes a Run in the folder ``folder``, of SETTINGS with changes."""

    def make(folder: str = "run", fresh: bool = False, start: Path | None = None, **changes) -> Run:
        return Run(check_settings(replace(SETTINGS, **changes)), tmp_path / folder, short, ON_CPU, fresh, start)

    return make
