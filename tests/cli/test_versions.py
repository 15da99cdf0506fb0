"""Versions: what was tested, what is allowed, what the matrix installs and what the docs say all agree; what Triton needs."""

import importlib
import importlib.metadata
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparse_flash.cli import app, doctor
from sparse_flash.core import triton as triton_backend

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(name: str) -> dict[str, str]:
    lines = (line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#"))
    return {package.lower(): version for package, version in (line.split("==") for line in lines)}


def bounds() -> dict[str, tuple[str, str | None]]:
    """For each dependency, the first version that pyproject.toml allows and the first that it does not."""
    extras = PROJECT["optional-dependencies"]
    requirements = [*PROJECT["dependencies"], *extras["cli"], *extras["plots"], *extras["transformers"], *extras["diffusers"]]
    found = (re.fullmatch(r"(\w+)(?:\[\w+\])?>=([\d.]+)(?:,<([\d.]+))?(?:;.*)?", one).groups() for one in requirements)
    return {name: (first, stop) for name, first, stop in found}


OLDEST, CI, NEWEST = (pins(f"constraints{name}.txt") for name in ("-oldest", "", "-newest"))
# What the matrix has between the oldest and the newest: the series of torch, and of its Triton.
BETWEEN = dict(re.findall(r"^TRITON_(\S+) := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
# The table of what passed: torch, Triton, and the device.
TESTED = re.findall(r"^\| (\d\S+) \| (\d\S+) \| \d\S+ \| ([^|]+) \|", (ROOT / "docs" / "versions.md").read_text(), re.MULTILINE)
ON_CPU = [(torch, triton) for torch, triton, device in TESTED if device == "CPU"]


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def series(*names: str) -> tuple[str, ...]:
    return tuple(".".join(map(str, release(name))) for name in names)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_range_ends_at_the_oldest_and_the_newest_version_tested(name):
    tested = [release(row[name == "triton"]) for row in TESTED]
    first, stop = map(release, bounds()[name])
    assert first == min(tested) == release(OLDEST[name])
    assert (stop[0], stop[1] - 1) == max(tested) == release(NEWEST[name])


def test_what_ci_and_the_matrix_install_is_what_is_called_tested_on_a_cpu():
    pinned = {(OLDEST["torch"], OLDEST["triton"]), (NEWEST["torch"], NEWEST["triton"]), (CI["torch"], NEWEST["triton"])}
    assert {pair for pair in ON_CPU if series(*pair)[0] not in BETWEEN} == pinned
    assert {series(*pair) for pair in ON_CPU} == {series(*pair) for pair in pinned} | set(BETWEEN.items())
    oldest, newest = (release(environment["triton"])[1] for environment in (OLDEST, NEWEST))
    assert {release(triton)[1] for _, triton in ON_CPU} == set(range(oldest, newest + 1))  # each Triton of the range


def test_the_oldest_environment_has_the_lower_bound_of_every_dependency():
    assert all(OLDEST[name] == ".".join(f"{first}.0.0".split(".")[:3]) for name, (first, _) in bounds().items())


def test_what_triton_needs_and_does_not_find_is_said_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "apt-get install gcc" in CliRunner().invoke(app, ["doctor"]).output
    monkeypatch.setenv("CC", "no-such-cc")
    assert "CC is 'no-such-cc'" in doctor.find_compiler()[1]
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    found, said = doctor.find_headers()
    assert not found and f"there is no {tmp_path / 'Python.h'}" in said and "-dev" in said
    (tmp_path / "Python.h").touch()
    assert doctor.find_headers() == (True, str(tmp_path))


@pytest.mark.parametrize(
    "triton, numpy, fails",
    [("3.6.0", "2.4.6", True), ("3.6.0", "2.10.0", True), ("3.6.0", "2.3.5", False), ("3.7.0", "2.5.5", False)],
)
def test_an_interpreter_that_fails_with_this_numpy_is_a_refusal(triton, numpy, fails):
    reason = triton_backend._interpreter_refusal(triton, numpy)
    assert (reason is not None) is fails and (not fails or "pip install 'numpy<2.4'" in reason)


@pytest.mark.parametrize("library, extra, older", [("transformers", "[torch]", "5.7.1"), ("diffusers", "", "0.41.0")])
def test_an_older_library_is_refused_with_the_way_out(library, extra, older, monkeypatch):
    installed = pytest.importorskip(library)
    module = importlib.import_module(f"sparse_flash.integrations.{library}").__name__  # its parts belong to this one
    monkeypatch.setattr(installed, "__version__", older)
    monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ImportError) as refused:
        importlib.import_module(module)
    said = str(refused.value)
    assert f"pip install '{library}{extra}>={bounds()[library][0]}'" in said and f"got {older}" in said
