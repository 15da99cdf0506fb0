"""Prints how many of the package's lines a run with coverage saw, and the files in which it saw less than nine tenths.

make test COVERAGE=1
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ENOUGH = 90.0  # per cent


def table(report: dict) -> list[str]:
    """Lines of text. report: what ``coverage json`` writes."""
    shares = {name: file["summary"] for name, file in report["files"].items() if file["summary"]["num_statements"]}
    few = sorted((found["percent_covered"], name) for name, found in shares.items() if found["percent_covered"] < ENOUGH)
    total = report["totals"]
    first = f"{total['percent_covered']:.1f} % of {total['num_statements']} lines were run; below {ENOUGH:.0f} %: "
    return [first + (str(len(few)) if few else "none"), *(f"{share:5.1f} %  {name}" for share, name in few)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "coverage.json"
        subprocess.run([sys.executable, "-m", "coverage", "json", "--quiet", "-o", str(path)], check=True)
        print(*table(json.loads(path.read_text())), sep="\n")
