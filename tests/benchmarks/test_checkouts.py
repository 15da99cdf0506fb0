"""``benchmarks.checkouts``: two checkouts, timed in turns."""

import json
import shutil
from pathlib import Path

import pytest

from sparse_flash.benchmarks import checkouts

ROOT = Path(__file__).parents[2]
DOUBLED = """
attention_of_base = attention
def attention(*arguments, **options):
    return 2 * attention_of_base(*arguments, **options)
"""


@pytest.mark.ranks  # it starts processes
def test_each_checkout_runs_its_own_code_and_other_results_are_named(tmp_path):
    for name in ("sparse_flash", "patterns"):
        shutil.copytree(ROOT / name, tmp_path / "doubled" / name, ignore=shutil.ignore_patterns("__pycache__", "benchmarks"))
    with open(tmp_path / "doubled" / "sparse_flash" / "__init__.py", "a") as file:
        file.write(DOUBLED)
    folders = [str(ROOT), str(tmp_path / "doubled"), str(ROOT)]
    case = "1 4/2 300 64 causal & local(50)"
    assert checkouts.main([*folders, "--case", case, "--rounds", "2", "--out", str(tmp_path)]) == 1
    (row,) = json.loads((tmp_path / "checkouts.json").read_text())["rows"]
    assert row["case"] == case and row["differing"] == ["doubled"]
    assert [len(ms) for ms in row["ms"]] == [2, 2, 2] and all(one > 0 for ms in row["ms"] for one in ms)


def test_a_folder_without_the_package_and_a_backward_pass_in_fp8_are_refused(tmp_path, capsys):
    for arguments, text in (([str(tmp_path)], "no checkout of sparse_flash"), ([str(ROOT), "--precision", "fp8"], "add --forward")):
        with pytest.raises(SystemExit):
            checkouts.main(arguments)
        assert text in capsys.readouterr().err
