"""Files of results: how several become one, and what pages say of them."""

import json
from pathlib import Path

from experiments import row_files
from experiments.choosers import report, tables
from experiments.choosers.rows import rows

ROOT = Path(__file__).parents[3]
KEPT, GUIDE = ROOT / "benchmarks/results/choosers/h200-2026-11-27-smollm2.json", ROOT / "docs/guides/choosers.md"


def test_the_guide_has_the_tables_of_the_kept_results():
    found, page = row_files.read([KEPT]), GUIDE.read_text()
    assert json.loads(KEPT.read_text()) == report.drop_details(found)
    assert all(row["row"] in rows(recorded=True) for row in found["rows"])
    assert row_files.replace_tables(page, tables.guide_tables(found)) == page
