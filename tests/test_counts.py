"""A full test run fails if back ends computed too little or files lost tests; a partial run does not."""

import json
import subprocess
import sys

import counts
import covered
import pytest
from oracle import BACKENDS

FILES = {"a.py": {"tests": 5, "skipped": 1}, "b.py": {"tests": 2, "skipped": 0}}


def test_a_back_end_below_its_floor_is_named_and_one_that_has_none_is_not():
    assert counts.too_few({"torch": 5, "triton": 9}, {"torch": 5, "triton": 9}) == []
    (said,) = counts.too_few({"torch": 5}, {"torch": 5, "triton": 9})
    assert said == "triton computed 0 results that were compared with the oracle; 9 are the least"


def test_every_back_end_has_a_floor_where_it_runs():
    assert counts.ON_HOPPER.keys() == set(BACKENDS)
    assert all(least > 0 for floors in (counts.ON_A_CPU, counts.ON_A_GPU, counts.ON_HOPPER) for least in floors.values())


@pytest.mark.parametrize(
    "now, said",
    [
        (FILES, []),
        ({**FILES, "a.py": {"tests": 6, "skipped": 0}}, []),
        ({**FILES, "a.py": {"tests": 4, "skipped": 0}}, ["a.py has 4 tests; 5 are recorded"]),
        ({**FILES, "b.py": {"tests": 2, "skipped": 2}}, ["b.py skips 2 tests; 0 are recorded"]),
        ({"a.py": FILES["a.py"]}, ["b.py has 0 tests; 2 are recorded"]),
    ],
)
def test_a_file_that_lost_tests_or_skips_more_is_named(now, said):
    assert counts.lost(now, FILES) == [f"{text} (pytest --record-counts records it anew)" for text in said]


TESTS = """
import oracle, pytest

def test_one():
    oracle.compared["torch"] += {torch}

@pytest.mark.skip
def test_other():
    pass
"""
RECORD = {"versions": counts.versions(), "files": {"tests/test_it.py": {"tests": 2, "skipped": 1}}}


@pytest.fixture
def run(tmp_path):
    """Runs pytest on a folder of tests with this folder's counts and settings: (exit status, what it prints)."""
    (tmp_path / "tests").mkdir()
    for name in ("counts", "conftest", "interpreted"):
        text = (counts.HERE / f"{name}.py").read_text()
        (tmp_path / "tests" / f"{name}.py").write_text(text)
    (tmp_path / "tests" / "oracle.py").write_text("from collections import Counter\n\ncompared = Counter()\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")

    def run(*arguments, torch, record=RECORD):
        (tmp_path / "tests" / "test_it.py").write_text(TESTS.format(torch=torch))
        (tmp_path / "tests" / "recorded_counts.json").write_text(json.dumps(record))
        program = "import counts, pytest, sys; counts.ON_A_CPU = counts.ON_A_GPU = counts.ON_HOPPER = {'torch': 4}; "
        program += f"sys.exit(pytest.main({['-p', 'no:cacheprovider', *arguments]}))"
        environment = {"PYTHONPATH": f"{tmp_path / 'tests'}:{counts.HERE.parent}"}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize(
    "given, torch, failed", [(("-m", "not ranks and not compiles"), 3, 1), (("-n", "2"), 4, 0)], ids=["alone", "two workers"]
)
def test_a_whole_run_is_held_to_floors(run, given, torch, failed):
    status, printed = run(*given, torch=torch)
    assert status == failed and f"results compared with the oracle: torch {torch}" in printed, printed
    assert printed.count("FAILED torch computed 3 results that were compared with the oracle; 4 are the least") == failed


def test_a_part_of_the_tests_is_held_to_nothing(run):
    status, printed = run("-k", "one", torch=3)
    assert status == 0 and "torch 3" in printed, printed


@pytest.mark.skipif(counts.least_computed() is not counts.ON_A_CPU, reason="the record is of a CPU")
def test_a_whole_run_is_held_to_the_record_which_is_written_where_asked(run, tmp_path):
    record = {**RECORD, "files": {"tests/test_it.py": {"tests": 3, "skipped": 1}}}
    status, printed = run(torch=4, record=record)
    assert status == 1 and "FAILED tests/test_it.py has 2 tests; 3 are recorded" in printed, printed
    assert run("--record-counts", torch=4, record=record)[0] == 0
    assert json.loads((tmp_path / "tests" / "recorded_counts.json").read_text()) == RECORD


def test_files_that_tests_run_little_of_are_named_the_least_first():
    def summary(lines, share):
        return {"num_statements": lines, "percent_covered": share}

    shares = {"a.py": (10, 89.9), "b.py": (10, 90.0), "c.py": (4, 25.0), "empty.py": (0, 0.0)}
    report = {"totals": summary(24, 79.2), "files": {name: {"summary": summary(*share)} for name, share in shares.items()}}
    assert covered.table(report) == ["79.2 % of 24 lines were run; below 90 %: 2", " 25.0 %  c.py", " 89.9 %  a.py"]
