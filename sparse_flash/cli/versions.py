"""Which versions were tested together, and what Triton's first call needs from the machine."""

from __future__ import annotations

import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tested:
    """A combination that passed, on Linux. One row implies nothing about another."""

    python: str
    torch: str
    triton: str
    device: str  # "CPU", or the name of the GPU
    what: str

    @property
    def on_gpu(self) -> bool:
        return self.device != "CPU"

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


def release(version: str) -> tuple[int, int]:
    """(2, 15) of "2.15.0+cu130", "2.15.0rc1" and "2.15"."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()))


def verdict(python: str, torch: str, triton: str | None, gpu: bool) -> tuple[bool, str]:
    """Whether these versions were tested together on such a device, and the tests of this or the nearest combination.

    python, torch, triton: versions; triton is None if not installed. Only the first two numbers count.
    """
    for name, version in (("torch", torch), ("triton", triton)):
        releases = sorted(release(getattr(row, name)) for row in TESTED)
        if version is not None and not releases[0] <= release(version) <= releases[-1]:
            (major, oldest), newest = releases[0], releases[-1][1]
            return (
                False,
                f"{name} {version} is not supported: pip install '{name}>={major}.{oldest},<{major}.{newest + 1}'",
            )
    same = [row for row in TESTED if _count_matches(row, torch, triton) == 2]
    there = [row for row in same if row.on_gpu == gpu]
    if exact := [row for row in there if row.python == python]:
        return True, "; ".join(f"tested: {row}" for row in exact)
    if triton is None:
        missing = "without triton"
    else:
        missing = f"on Python {python}" if there else f"on {'a GPU' if gpu else 'a CPU'}" if same else "together"
    near = same + [row for row in TESTED if row.on_gpu == gpu and _count_matches(row, torch, triton) == 1]
    near = near or [row for row in TESTED if row.on_gpu == gpu]
    return False, f"not tested {missing}; tested: {'; '.join(map(str, near))}"


def _count_matches(row: Tested, torch: str, triton: str | None) -> int:
    """How many of the two versions match the row."""
    return (release(row.torch) == release(torch)) + (triton is not None and release(row.triton) == release(triton))


def why_no_compiler() -> str | None:
    """Why Triton finds no C compiler, or None. Its rule: CC, otherwise gcc, otherwise clang on PATH."""
    if compiler():
        return None
    if "CC" in os.environ:
        return f"CC is {os.environ['CC']!r}, but there is no such program: name one, or unset it"
    return "none, and Triton's first call needs one: apt-get install gcc, dnf install gcc, or set CC to its path"


def compiler() -> str | None:
    """Path of the C compiler that Triton uses, or None."""
    named = os.environ.get("CC")
    return shutil.which(named) if named is not None else shutil.which("gcc") or shutil.which("clang")


def why_no_headers() -> str | None:
    """Why C code that includes Python.h does not compile for this Python, judged by the folder that Triton searches."""
    header = headers() / "Python.h"
    if header.is_file():
        return None
    version = sysconfig.get_python_version()
    return (
        f"there is no {header}, and Triton's first call needs it: apt-get install python{version}-dev (python3-dev for the "
        f"system's own Python), dnf install python3-devel, or a Python that comes with its headers (pyenv, uv, conda)"
    )


def headers() -> Path:
    """Folder of this Python's headers."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's system Python; Triton does the same
        scheme = "posix_prefix"
    return Path(sysconfig.get_paths(scheme=scheme)["include"])
