"""CONTRIBUTING.md's recipes work if followed to the letter in a copy of the tree."""

import ast
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
# How a recipe says where its lines go: FILE, instead of NAME; in NAME, a dict; after LINE; at the end.
PLACE = re.compile(r"^# (\S+\.py), (instead of|in|after|at) ([^;\n]+).*\n", re.M)


def follow(copy: Path, *titles: str) -> None:
    """Writes the files that sections give, and adds their lines to others, in a copy of the tree."""
    for name in ("sparse_flash", "patterns", "benchmarks", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "results", *(["patterns", "benchmarks"] if name == "sparse_flash" else []))
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("patterns", "benchmarks"):
        (copy / "sparse_flash" / name).symlink_to(copy / name)
    for name in ("conftest.py", "pyproject.toml", "docs/chips.csv", "docs/guides/choosers.md"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for title in titles:
        section = re.search(rf"^## {title}\n(.*?)^## ", TEXT, re.S | re.M)[1]
        for block in re.finditer(r"```python\n(.*?)```", section, re.S):
            code = block[1]
            if code.startswith('"""'):
                path = re.findall(r"`(\S+\.py)`", section[: block.start()])[-1]
                (copy / path).write_text(code)
                continue
            _, *steps = PLACE.split(code)
            assert steps
            for path, how, name, lines in zip(*(steps[part::4] for part in range(4)), strict=True):
                put(copy / path, how, name, lines)


def put(path: Path, how: str, name: str, lines: str) -> None:
    name = re.escape(name)
    pattern = {"instead of": rf"^{name} .*\n", "in": rf"^{name} = {{\n", "after": rf"^{name}\n", "at": r"\Z"}[how]
    text = path.read_text()
    (found,) = re.finditer(pattern, text, re.M)
    kept = "" if how == "instead of" else found[0]
    path.write_text(text[: found.start()] + kept + lines + text[found.end() :])


def register_pattern(copy: Path) -> None:
    """Adds the names of the recipe's pattern to their file, in alphabetical order."""
    imported, listed = re.search(r"`(from \.\w+ import \w+ as \w+)` and\s+`(\"\w+\")` in `__all__`", TEXT).groups()
    names = copy / "patterns" / "__init__.py"
    lines = names.read_text().splitlines()
    for new, kind in ((imported, "from "), (f"    {listed},", '    "')):
        lines.insert(lines.index(next(line for line in lines if line.startswith(kind) and line > new)), new)
    names.write_text("\n".join(lines) + "\n")


def run_in(copy: Path, *arguments: str) -> str:
    """Runs Python in a copy of the tree; returns what it prints."""
    environment = os.environ | {"PYTHONPATH": str(copy)}
    done = subprocess.run([sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PYTEST = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
# What a user would run, in one process: it takes seconds to start. The benchmark measures for as short as it may.
PROGRAM = """
import contextlib, runpy, sys, pytest
runpy.run_path("tests/golden.py", run_name="__main__")
from sparse_flash.benchmarks.measure import throughput
from sparse_flash.__main__ import main
throughput.CPU_SECONDS, (sys.argv, tests) = 0.01, {arguments}
with contextlib.suppress(SystemExit):
    main()
sys.exit(pytest.main(tests))
"""


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """A copy of the tree with a pattern, a back end, a chooser and a peer by their recipes, and what was printed there."""
    copy = tmp_path_factory.mktemp("copy")
    follow(copy, "Add a pattern in 20 lines", "Add a back end", "Add a chooser", "Add a peer to the benchmark")
    register_pattern(copy)
    guide, row = copy / "docs" / "guides" / "choosers.md", re.search(r"^\| `newest` .*\n", TEXT, re.M)[0]
    guide.write_text(re.sub(r"^\| `scored` .*\n", lambda line: line[0] + row, guide.read_text(), flags=re.M))
    bench = re.search(r"`sparse-flash (bench .*--only eager)`", TEXT)[1].split()
    files = "test_properties masks/test_chooser patterns/test_golden patterns/test_patterns api/test_choose test_site"
    names = "(short and every) or newest or built_in or those_of_the_docstring or lookback"
    tests = [*PYTEST[2:], "-v", "-rA", *(f"tests/{file}.py" for file in files.split()), "-k", names]
    arguments = ["sparse-flash", *bench, "--device", "cpu", "--out", "found"], tests
    return copy, run_in(copy, "-c", PROGRAM.format(arguments=arguments))


def passed(printed: str, name: str) -> int:
    """The number of tests that passed whose line has this."""
    return len(re.findall(rf"^PASSED .*{name}", printed, re.M))


def test_a_pattern_added_by_its_recipe_has_20_lines_and_passes_all_tests_of_patterns(followed):
    copy, printed = followed
    code = (copy / "patterns" / "lookback.py").read_text()
    docstring, *_ = ast.parse(code).body
    assert len([line for line in code.splitlines()[docstring.end_lineno :] if line.strip()]) <= 20
    for name in ("token_rule_is_the_formula.*lookback", "picture_in_the_docstring.*lookback", "every_built_in_pattern_says"):
        assert passed(printed, name)


def test_a_back_end_added_by_its_recipe_is_held_to_the_rule_by_the_tests_there_are(followed):
    _, printed = followed
    computed = int(re.search(r"compared with the oracle: .*short (\d+)", printed)[1])
    assert passed(printed, "short") >= 28 and computed >= 28  # every dtype, head_dim, block size and memory order
    assert "skipped" not in printed


def test_a_peer_added_by_its_recipe_is_measured_and_found_right(followed):
    (path,) = (followed[0] / "found").glob("*.json")
    cases = json.loads(path.read_text())["cases"]
    assert len(cases) >= 3 and all("eager" in key and case["result"]["correct"] for key, case in cases.items()), cases


def test_a_chooser_added_by_its_recipe_is_held_to_all_tests_of_choosers(followed):
    copy, printed = followed
    assert "2 added" in printed and "newest" in (copy / "tests" / "patterns" / "golden.json").read_text()
    assert passed(printed, "newest") > 10
    assert all(passed(printed, name) for name in ("every_built_in_pattern", "guide_has_every_built_in", "those_of_the_docstring"))


@pytest.mark.compiles
def test_a_kernel_config_added_by_its_recipe_is_compiled_and_written_down(tmp_path):
    pytest.importorskip("triton")
    follow(tmp_path, "Add a kernel config")
    assert "4 compiled, " in run_in(tmp_path, "tests/chips.py", "--workers", "1")
    with (tmp_path / "docs" / "chips.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["chip"], row["kernel"], row["head_dim"]) == ("8.0", "forward", "256")]
    half = [row for row in rows if row["dtype"] == "bf16"]
    assert [(row["tile_m"], row["tile_n"], row["stages"]) for row in half] == [("32", "32", "2")]
    run_in(tmp_path, *PYTEST, "tests/kernels/test_chips.py", "-k", "table or tables")
