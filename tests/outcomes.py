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


def record(kernels: list[dict]) -> None:
    import triton

    lines = (f"  {json.dumps(name)}: {most}" for name, most in sorted(spills_of(kernels).items()))
    SPILLS.write_text(f'{{"triton": "{triton.__version__}", "spills": {{\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    record(outcomes_of("sm90.py"))
