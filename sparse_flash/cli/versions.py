"""Which versions were tested together, and what Triton's first call needs from the machine."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from pathlib import Path
from typing import NamedTuple


class Tested(NamedTuple):
    """A combination that passed, on Linux. One row implies nothing about another."""

    python: str
    torch: str
    triton: str
    device: str  # "CPU", or the name of the GPU
    what: str

    def __str__(self) -> str:
        return f"torch {self.torch} with triton {self.triton} on Python {self.python}, {self.device} ({self.what})"


# The CPU rows follow constraints-oldest.txt, constraints.txt (CI), constraints-newest.txt and, in between, the Makefile's BETWEEN,
# which `make matrix` and `.ci/run` repeat; docs/versions.md has the same rows. Tests compare all of them, and the range in
# pyproject.toml.
TESTED = (
    Tested("3.11", "2.11.0", "3.6.0", "CPU", "all tests, with the lower bound of every dependency"),
    Tested("3.13", "2.12.1", "3.7.1", "CPU", "all tests"),
    Tested("3.11", "2.13.0", "3.9.0", "CPU", "all tests"),
    Tested("3.13", "2.14.1", "3.8.0", "CPU", "all tests"),
    Tested("3.13", "2.15.0", "3.9.0", "CPU", "all tests, with the newest version of every dependency"),
    Tested("3.12", "2.11.0", "3.6.0", "NVIDIA H200", "GPU tests, 19,398 random calls of the back end hopper, benchmarks"),
    Tested("3.12", "2.11.0", "3.9.0", "NVIDIA H200", "1,027 random calls of the back end hopper, speed"),
)


def release(version: str) -> tuple[int, ...]:
    """(2, 15) of "2.15.0+cu130", "2.15.0rc1" and "2.15"."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def verdict(python: str, torch: str, triton: str, gpu: bool) -> tuple[bool, str]:
    """Whether these versions were tested together on such a device, and which were. Only the first two numbers count.

    triton: "" if it is not installed.
    """
    rows = [row for row in TESTED if (row.device != "CPU") == gpu]
    asked = python, release(torch), release(triton)
    same = [row for row in rows if (row.python, release(row.torch), release(row.triton)) == asked]
    return bool(same), ("tested: " if same else "not tested together; tested: ") + "; ".join(map(str, same or rows))


def compiler() -> tuple[bool, str]:
    """Whether Triton finds a C compiler, and its path or what to do. Its rule: CC, otherwise gcc, otherwise clang on PATH."""
    named = os.environ.get("CC")
    if path := shutil.which(named) if named is not None else shutil.which("gcc") or shutil.which("clang"):
        return True, path
    if named is not None:
        return False, f"CC is {named!r}, but there is no such program: name one, or unset it"
    return False, "none, and Triton's first call needs one: apt-get install gcc, dnf install gcc, or set CC to its path"


def headers() -> tuple[bool, str]:
    """Whether the folder that Triton searches has this Python's Python.h, and that folder or what to do."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's system Python; Triton does the same
        scheme = "posix_prefix"
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    if header.is_file():
        return True, str(header.parent)
    version = sysconfig.get_python_version()
    return False, (
        f"there is no {header}, and Triton's first call needs it: apt-get install python{version}-dev (python3-dev for the "
        f"system's own Python), dnf install python3-devel, or a Python that comes with its headers (pyenv, uv, conda)"
    )
