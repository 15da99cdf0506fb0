"""Files of results: how several become one, and what pages say of them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments import row_files
from experiments.choosers import report, tables
from experiments.choosers.cli import app
from experiments.choosers.rows import rows

ROOT = Path(__file__).parents[3]
KEPT, GUIDE = ROOT / "benchmarks/results/choosers/h200-2026-11-27-smollm2.json", ROOT / "docs/guides/choosers.md"


def written(path: Path, needles: float, *names: str, texts: str = "a") -> Path:
    length = {"density": 0.1, "recall": 0.9, "error": 0.1, "digits": 1.0, "needles": needles}
    length["loss"] = {kind: [2.0 - needles, 1.0] for kind in tables.TEXTS}
    result = {"lengths": {"128": length}, "by_head": {"density": [[0.1]]}, "shares": None, "seconds": 1}
    made = [{"row": name, **result} for name in names]
    row_files.write(path, {"setup": {"texts": texts, "needles": 4}, "rows": made})
    return path


def test_the_last_file_that_has_a_row_counts(tmp_path):
    first = written(tmp_path / "first.json", 0.75, "own(3) budget 0.15", "sampled(8) budget 0.15", "dense")
    last = written(tmp_path / "last.json", 0.25, "sampled(8) budget 0.15", "sampled(8) budget 0.1")
    found = row_files.read([first, last])
    needles = {row["row"]: row["lengths"]["128"]["needles"] for row in found["rows"]}
    assert needles == {"own(3) budget 0.15": 0.75, "sampled(8) budget 0.15": 0.25, "dense": 0.75, "sampled(8) budget 0.1": 0.25}
    short = report.drop_details(found)["rows"]
    assert [row["row"] for row in short] == ["dense", "sampled(8) budget 0.1", "sampled(8) budget 0.15"]
    assert not any({"by_head", "shares"} & set(row) for row in short)


def test_files_of_different_setups_are_refused(tmp_path):
    files = [written(tmp_path / f"{name}.json", 0.5, "dense", texts=name) for name in "ab"]
    result = CliRunner().invoke(app, ["draw", *map(str, files), "--target", str(tmp_path / "picture.png")])
    assert result.exit_code == 2 and "the files must have one setup" in " ".join(result.output.split())
    assert not (tmp_path / "picture.png").exists()


def test_tables_of_a_page_are_written_anew_and_the_rest_stays():
    page = "before\n| a | b |\n|---|---|\n| old | 1 |\n| old | 2 |\n\nbetween\n| c |\n| --- |\n| old |"
    tables_of_page = ["| a | b |\n| --- | --- |\n| new | 3 |", "| c |\n| --- |\n| new |"]
    assert row_files.replace_tables(page, tables_of_page) == f"before\n{tables_of_page[0]}\n\nbetween\n{tables_of_page[1]}"
    with pytest.raises(ValueError, match="must have a table with the headings"):
        row_files.replace_tables("| a |", ["| b |\n| --- |"])


def test_the_guide_has_the_tables_of_the_kept_results():
    found, page = row_files.read([KEPT]), GUIDE.read_text()
    assert json.loads(KEPT.read_text()) == report.drop_details(found)
    assert all(row["row"] in rows(recorded=True) for row in found["rows"])
    assert row_files.replace_tables(page, tables.guide_tables(found)) == page
