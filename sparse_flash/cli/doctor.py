"""``doctor``: what this machine has, and which back ends run here."""

import os
import platform
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from sparse_flash.compat.extras import EXTRAS

from .options import output_console


def doctor() -> None:
    """Versions, the GPU, what Triton needs, and why each back end can or cannot run."""
    import torch

    from sparse_flash.benchmarks.results import installed_version

    console, cuda = output_console(), torch.cuda.is_available()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    versions = {name: installed_version(name) for name in ("sparse-flash", "torch", "triton", "numpy", "scipy", *EXTRAS)}
    for name, version in versions.items():
        table.add_row(Text(f"{name} [{EXTRAS[name]}]" if name in EXTRAS else name), version or "not installed")
    if versions["triton"]:
        for what, (found, said) in (("C compiler", find_compiler()), ("Python.h", find_headers())):
            table.add_row(what, Text(said, "" if found else "red", overflow="fold"))
    for index in range(torch.cuda.device_count() if cuda else 0):
        p = torch.cuda.get_device_properties(index)
        table.add_row(f"GPU {index}", f"{p.name}, {p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor}")
    if not cuda:
        table.add_row("GPU", "none" if torch.version.cuda or torch.version.hip else "none; this torch is built without GPU support")
    console.print(table)
    console.print()
    console.print(_back_ends(cuda))
    console.print("\n'auto' takes the first back end of a column that runs ('reference' only by name).")


def find_compiler() -> tuple[bool, str]:
    """Whether Triton finds a C compiler, and its path or what to do. Its rule: CC, otherwise gcc, otherwise clang on PATH."""
    named = os.environ.get("CC")
    if path := shutil.which(named) if named is not None else shutil.which("gcc") or shutil.which("clang"):
        return True, path
    if named is not None:
        return False, f"CC is {named!r}, but there is no such program: name one, or unset it"
    return False, "none, and Triton's first call needs one: apt-get install gcc, dnf install gcc, or set CC to its path"


def find_headers() -> tuple[bool, str]:
    """Whether the folder that Triton searches has this Python's Python.h, and that folder or what to do."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's system Python; Triton does the same
        scheme = "posix_prefix"
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    if header.is_file():
        return True, str(header.parent)
    package = f"apt-get install python{sysconfig.get_python_version()}-dev, dnf install python3-devel"
    return False, f"there is no {header}, and Triton's first call needs it: {package}, or a Python that comes with its headers"


def _back_ends(cuda: bool) -> Table:
    """Returns which back ends run a call under a mask, and why the others do not. cuda: whether there is a GPU."""
    import torch

    from sparse_flash.core import backends
    from sparse_flash.core.description import Call

    sizes: Any = {"batch": 1, "heads": 8, "kv_heads": 8, "q_len": 4096, "kv_len": 4096, "head_dim": 128, "block_size": 128}
    calls = {"float32 on the CPU": Call(torch.device("cpu"), torch.float32, **sizes)}
    if cuda:
        calls["bfloat16 on the GPU"] = Call(torch.device("cuda"), torch.bfloat16, **sizes)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("back end", *calls):
        table.add_column(heading, overflow="fold")
    for name in backends.NAMES:
        try:
            backend = backends.get_backend(name)
            reasons = [backend.why_unavailable() or backend.supports(call) for call in calls.values()]
        except ImportError as error:
            reasons = [f"it cannot be imported: {error}"] * len(calls)
        verdicts = (Text(f"no: {reason}", "red", overflow="fold") if reason else Text("runs", "green") for reason in reasons)
        table.add_row(Text(name, "cyan"), *verdicts)
    return table
