"""Programs that compile kernels. They are processes of their own: kernels defined under TRITON_INTERPRET cannot be compiled.

python tests/outcomes.py    writes tests/kernels/spills.json anew, with this Triton
"""

import json
import os
import subprocess
import sys
from pathlib import Path

SPILLS = Path(__file__).with_name("kernels") / "spills.json"


def outcomes_of(program: str, *arguments: str) -> list[dict]:
    """Returns what a program in this folder reports about the kernels that it compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = Path(__file__).with_name(program)
    run = subprocess.run([sys.executable, path, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def spills_of(kernels: list[dict]) -> dict[str, list[int]]:
    """Returns, by kernel and head_dim, the most bytes of stack per thread that a version takes, and the most instructions that
    access them in the loop over full blocks. Kernels that take none are left out."""
    found: dict[str, list[int]] = {}
    for k in kernels:
        most = found.setdefault(f"{k['kernel']} {k['dim']}", [0, 0])
        most[:] = max(most[0], k["stack"]), max(most[1], k["in_full_blocks"])
    return {name: most for name, most in found.items() if any(most)}


def spills_beyond_the_record(kernels: list[dict]) -> dict[str, list[int]]:
    """Returns the entries of ``spills_of`` that exceed what the file has. Skips the test with another Triton than the file's."""
    import pytest
    import triton

    record = json.loads(SPILLS.read_text())
    if triton.__version__ != record["triton"]:
        pytest.skip(f"spills are recorded of Triton {record['triton']}, not of {triton.__version__}")
    known = record["spills"]

    def exceeds(name: str, most: list[int]) -> bool:
        return any(now > before for now, before in zip(most, known.get(name, (0, 0)), strict=True))

    return {name: most for name, most in spills_of(kernels).items() if exceeds(name, most)}


def _record() -> None:
    import triton

    found = spills_of(outcomes_of("sm90.py") + outcomes_of("sm90_launches.py", "selections"))
    lines = (f"  {json.dumps(name)}: {most}" for name, most in sorted(found.items()))
    SPILLS.write_text(f'{{"triton": "{triton.__version__}", "spills": {{\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    _record()
