"""What a full test run must satisfy: each back end computed as much as it should, and no file lost tests or skips more.

conftest.py registers it. Every run prints how much each back end computed; a partial run is not checked.

    make test ARGS="--record-counts"            # into recorded_counts.json, of the files that were run: on a CPU, when tests go
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from importlib import metadata
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RECORD = HERE / "recorded_counts.json"

# The fewest results that a run compares with the oracle, by back end: three quarters of the cases that ask for them, as counted on
# 2026-11-22. Chance or a rewritten test loses fewer; if a file's inputs come to be refused, more are lost.
ON_A_CPU = {"torch": 260, "triton": 150, "reference": 180}
# Of other GPUs none has counted yet: of the calls that tests/simulated.py counts. On two H100, 2026-11-25, the tests of the folders
# that run kernels computed 1,166 by hopper, 1,087 by triton, 470 by torch and 206 by reference.
ON_A_GPU = {"torch": 260, "triton": 600, "reference": 180}
ON_HOPPER = {"torch": 350, "triton": 810, "reference": 180, "hopper": 870}


def least_computed() -> dict[str, int]:
    """On this machine."""
    import torch

    if not torch.cuda.is_available():
        return ON_A_CPU
    is_hopper = torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
    return ON_HOPPER if is_hopper else ON_A_GPU


def versions() -> dict[str, str]:
    """The release series of what decides which tests are skipped."""
    found = {}
    for name in ("torch", "triton", "transformers"):
        try:
            found[name] = ".".join(metadata.version(name).split(".")[:2])
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def too_few(computed: dict[str, int], least: dict[str, int]) -> list[str]:
    return [
        f"{name} computed {computed.get(name, 0)} results that were compared with the oracle; {count} are the least"
        for name, count in least.items()
        if computed.get(name, 0) < count
    ]


def lost(files: dict[str, dict[str, int]], record: dict[str, dict[str, int]]) -> list[str]:
    """What a run lost compared with the record. Both are by file: {"tests": ..., "skipped": ...}."""
    faults = []
    for name, before in record.items():
        now = files.get(name, {"tests": 0, "skipped": 0})
        if now["tests"] < before["tests"]:
            faults.append(f"{name} has {now['tests']} tests; {before['tests']} are recorded")
        if now["skipped"] > before["skipped"]:
            faults.append(f"{name} skips {now['skipped']} tests; {before['skipped']} are recorded")
    return [f"{fault} (pytest --record-counts records it anew)" for fault in faults]


class Counts:
    def __init__(self, config: pytest.Config):
        self.config = config
        self.computed: Counter[str] = Counter()
        self.files: dict[str, dict[str, int]] = defaultdict(lambda: {"tests": 0, "skipped": 0})
        self.faults: list[str] = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or (report.when == "setup" and not report.passed):
            of_file = self.files[report.nodeid.partition("::")[0]]
            of_file["tests"] += 1
            of_file["skipped"] += report.skipped

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        """Called when one of pytest-xdist's processes has ended."""
        self.computed.update(getattr(node, "workeroutput", {}).get("computed", {}))

    def pytest_sessionfinish(self, session):
        oracle = sys.modules.get("oracle")
        if oracle is not None:
            self.computed.update(oracle.compared)
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["computed"] = dict(self.computed)
            return
        least = least_computed()
        on_a_cpu = least is ON_A_CPU
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and self._is_of_files():
            if self.config.option.record_counts and on_a_cpu:
                self._record()
            elif self._is_whole():
                self.faults = too_few(self.computed, least)
                record = json.loads(RECORD.read_text()) if RECORD.exists() else {"versions": None}  # until the first record is made
                if on_a_cpu and record["versions"] == versions():
                    self.faults += lost(self.files, record["files"])
        if self.faults and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.computed:
            told = ", ".join(f"{name} {count}" for name, count in sorted(self.computed.items()))
            terminalreporter.write_line(f"results compared with the oracle: {told}")
        for fault in self.faults:
            terminalreporter.write_line(f"FAILED {fault}", red=True)

    def _is_of_files(self) -> bool:
        """Whether whole files or folders were run, with no selection within them."""
        option = self.config.option
        if option.markexpr not in ("", "not ranks and not compiles"):  # pyproject.toml's own, and none
            return False
        narrowing = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "stepwise", "collectonly", "maxfail")
        return not any(getattr(option, name, None) for name in narrowing) and not any("::" in arg for arg in self.config.args)

    def _is_whole(self) -> bool:
        return {(self.config.invocation_params.dir / arg).resolve() for arg in self.config.args} == {HERE}

    def _record(self) -> None:
        before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        kept = {} if self._is_whole() or before.get("versions") != versions() else before["files"]
        files = dict(sorted({**kept, **self.files}.items()))
        RECORD.write_text(json.dumps({"versions": versions(), "files": files}, indent=1) + "\n")
