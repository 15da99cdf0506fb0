"""A run of all tests fails if back ends computed too little; a run of some tests does not."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
import oracle

def test_one():
    oracle.compared["torch"] += 3

def test_other():
    oracle.compared["torch"] += 1
"""


@pytest.mark.parametrize(
    "given, least, status, counted",
    [(["-n", "2"], 4, 0, 4), ([], 5, 1, 4), (["-n", "2"], 5, 1, 4), (["-k", "one"], 5, 0, 3)],
    ids=["enough", "too few", "too few of two processes", "a part"],
)
def test_a_run_of_all_tests_is_held_to_the_floors(given, least, status, counted, tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir()
    # Nothing here computes: without its fixtures, and a stub for torch, conftest.py loads in no time.
    ending = f"del unsettled, interpreted, as_long_calls\nFLOORS = dict.fromkeys(FLOORS, {{'torch': {least}}})\n"
    (tmp_path / "conftest.py").write_text(f"{(ROOT / 'conftest.py').read_text()}\n\n{ending}")
    (tests / "torch.py").write_text("from types import SimpleNamespace\n\ncuda = SimpleNamespace(is_available=lambda: False)\n")
    (tests / "interpreted.py").write_text("hasten = None\n")
    (tests / "oracle.py").write_text("from collections import Counter\n\ncompared = Counter()\n")
    (tests / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *given]
    environment = {"PYTHONPATH": str(tests)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == status and f"results compared with the oracle: torch {counted}" in done.stdout, done.stdout
    assert (f"FAILED torch compared {counted}; {least} are the least" in done.stdout) == bool(status)
