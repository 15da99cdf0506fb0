"""Programs that compile kernels. They are processes of their own: kernels defined under TRITON_INTERPRET cannot be compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path


def outcomes_of(program: str) -> list[dict]:
    """Runs a program of this folder; returns what it reports about the kernels that it compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = Path(__file__).with_name(program)
    run = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]
