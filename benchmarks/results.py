"""The JSON file: results, where they were measured, and which cases need not be measured again.

{"format": 1, "environment": {...}, "settings": {...},
 "suites": {suite: [case key, ...]}, "cases": {key: {"case": {...}, "result": {...}, "at": time}}}
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TypeGuard

FORMAT = 1
FILE = "results.json"
# Numbers are comparable if these agree; ``source`` is a digest of this package's own code.
IDENTITY = ("device", "torch", "triton", "source")


def environment(device) -> dict:
    """The environment on which the numbers depend, as plain data."""
    import torch

    found = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": device_name(device),
        "cpu": _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "load_at_start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
        "sparse_flash": installed_version("sparse-flash"),
        "source": _source_digest(),
        "commit": _commit(),
        **{name: installed_version(name) for name in ("torch", "triton", "numpy", "scipy", "flash-attn-4", "fastvideo-kernel")},
    }
    if device.type == "cuda":
        found |= {
            "cuda": torch.version.cuda or torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "gpu_memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1),
        }
    return found


def device_name(device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU ({_cpu_name()}, {threads} thread{'s' * (threads != 1)})"


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _source_digest() -> str:
    import sparse_flash

    # The code that decides the numbers: not the command line, the pictures or the plots. In a wheel, the other two packages are
    # inside this one.
    package, patterns = (Path(module.__path__[0]) for module in (sparse_flash, sparse_flash.patterns))
    excluded = {"cli", "benchmarks", "patterns", "tools"}
    files = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in excluded]
    digest = hashlib.sha256()
    for path in (*sorted(files), *sorted(patterns.rglob("*.py"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        run = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None


def write_json(path: Path, data: dict) -> None:
    """Replaces a file in one step: an interrupt leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(part, path)


class Results:
    """The file's contents; every ``add`` rewrites it atomically."""

    def __init__(self, folder: Path, data: dict):
        self.folder, self.data = folder, data

    @classmethod
    def read(cls, folder: str | Path) -> Results:
        """Raises ValueError if there is no file of this format."""
        path = Path(folder) / FILE
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"there are no results at {path}; run 'sparse-flash bench --out {folder}' first") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}; move it away and measure again") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(
                f"{path} has format {data.get('format') if isinstance(data, dict) else None!r}; this version reads {FORMAT}"
            )
        return cls(Path(folder), data)

    @classmethod
    def open(cls, folder: str | Path, environment: dict, settings: dict, resume: bool) -> tuple[Results, str | None]:
        """The results to add to: existing ones, or none if those are not comparable or not wanted. Then the old file is renamed,
        and the second value says so. Nothing is deleted."""
        folder = Path(folder)
        fresh = cls(folder, {"format": FORMAT, "environment": environment, "settings": settings, "suites": {}, "cases": {}})
        if not (folder / FILE).exists():
            return fresh, None
        why = "as asked"
        if resume:
            old = cls.read(folder)
            differ = [key for key in IDENTITY if old.data["environment"].get(key) != environment.get(key)]
            before = old.data["settings"]
            differ += [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
            if not differ:
                return old, None
            why = f"{', '.join(differ)} changed"
        aside = folder / f"results-{datetime.now():%Y%m%d-%H%M%S}.json"
        (folder / FILE).rename(aside)
        return fresh, f"starting anew ({why}); earlier results are in {aside.name}"

    @property
    def path(self) -> Path:
        return self.folder / FILE

    def entry(self, key: str) -> dict | None:
        """{"case": ..., "result": ..., "at": time} of a case, or None."""
        return self.data["cases"].get(key)

    def get(self, key: str) -> dict | None:
        """The result of a case, or None."""
        entry = self.entry(key)
        return entry and entry["result"]

    def add(self, case, result: dict) -> None:
        at = datetime.now().astimezone().isoformat(timespec="seconds")
        self.data["cases"][case.key] = {"case": case.as_data(), "result": result, "at": at}
        self.save()

    def save(self) -> None:
        write_json(self.path, self.data)


def has_numbers(result: dict | None) -> TypeGuard[dict]:
    """Whether a result has numbers."""
    if not result:
        return False
    return not any(key in result for key in ("refused", "over_limit", "out_of_memory", "failed"))


def why_not(result: dict) -> str:
    """Why a result has no numbers."""
    if "since" in result:
        return f"{why_gave_up(result)} at {result['since']:,} tokens already"
    if "over_limit" in result:
        return f"no result in {result['over_limit']} s"
    return result.get("refused") or result.get("out_of_memory") or result.get("failed") or ""


def why_gave_up(result: dict) -> str:
    """A word or two on why a longer case would fail too; else empty."""
    return "too long" if "over_limit" in result else "out of memory" if "out_of_memory" in result else ""
