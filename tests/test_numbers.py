"""Compares docs/numbers.md with what is computed."""

import re
from pathlib import Path

import numerics
import pytest

TEXT = (Path(__file__).parent.parent / "docs" / "numbers.md").read_text()


def test_the_table_of_errors_is_what_the_script_finds():
    """On a CPU. Other versions of PyTorch and other processors compute other exponentials: lse, a largest difference, was seen to
    differ by a factor of 2.5."""
    if numerics.DEVICE != "cpu":
        pytest.skip("the table is of a CPU")
    told = [line for line in TEXT.splitlines() if line.startswith(("| `full`", "| `causal"))]
    found = numerics.table()[2:]
    assert len(told) == len(found) == 6
    for line, now in zip(told, found, strict=True):
        (*names, figures), (*names_now, figures_now) = (text.replace("\\|", "").split("|", 3)[1:] for text in (line, now))
        assert names == names_now
        for said, seen in zip(*(map(float, re.findall(r"[\d.]+e-\d+", text)) for text in (figures, figures_now)), strict=True):
            assert said / 3 <= seen <= said * 3, line
