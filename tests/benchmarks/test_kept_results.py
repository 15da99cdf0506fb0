"""benchmarks/results holds the newest figures of claims that still stand, and no more (CONTRIBUTING.md)."""

import re
from pathlib import Path

from sparse_flash.benchmarks import pages

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FOLDERS, BYTES, DISK_BLOCK = 20, 3 * 2**20, 4096
CITED = re.compile(r"benchmarks/results/([\w./-]*\w)")


def cited() -> set[str]:
    """Paths below benchmarks/results that pages and code of the project name."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    folders = ("sparse_flash", "patterns", "benchmarks", "tests", "examples", "experiments")
    code = [path for name in folders for path in (ROOT / name).rglob("*.py")]
    texts = (path.read_text() for path in (*pages, *code))
    return {name for text in texts for name in CITED.findall(text)}


def test_results_stay_few_and_small():
    folders = [path for path in RESULTS.rglob("*") if path.is_dir()]
    sizes = [-(-path.stat().st_size // DISK_BLOCK) * DISK_BLOCK for path in RESULTS.rglob("*") if path.is_file()]
    assert len(folders) <= FOLDERS and sum(sizes) <= BYTES, (len(folders), sum(sizes))


def test_every_folder_of_results_is_cited_and_every_cited_file_is_there():
    names = cited()
    assert not [name for name in names if not (RESULTS / name).exists()]
    assert not [path.name for path in RESULTS.iterdir() if not any(name.split("/")[0] == path.name for name in names)]


def test_tables_of_pages_are_those_of_their_results():
    """`python -m sparse_flash.benchmarks.pages` makes them again."""
    found = [path for path in pages.pages() if pages.TABLE.search(path.read_text())]
    assert len(found) >= 2 and [path.name for path in found if pages.fill(path.read_text()) != path.read_text()] == []


def test_every_result_names_its_machine_and_its_date():
    machine = re.compile(r"(^|/)(cpu|[a-z]+\d+(x\d+)?)-\d{4}-\d\d-\d\d(?!\d)")
    files = [path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.is_file()]
    assert files and not [name for name in files if not machine.search(name)]
