"""``doctor``: what this machine has, and which back ends run which calls."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from rich.table import Table
from rich.text import Text

from . import versions
from .options import output_console


def doctor() -> None:
    """Versions and whether they were tested together, the GPU, what Triton needs, and why each back end can or cannot run."""
    import torch

    console = output_console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    for name in ("sparse-flash", "torch", "triton", "numpy", "scipy"):
        table.add_row(name, _version(name) or "not installed")
    table.add_row("together", _versions_text(torch.__version__, torch.cuda.is_available()))
    if _version("triton"):
        for what, (found, said) in (("C compiler", versions.compiler()), ("Python.h", versions.headers())):
            table.add_row(what, Text(said, "" if found else "red", overflow="fold"))
    table.add_row("CPU threads", str(torch.get_num_threads()))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(index)
            table.add_row(f"GPU {index}", f"{p.name}, {p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor}")
            table.add_row("tile sizes", _tile_sizes(torch.device("cuda", index)))
        table.add_row("CUDA", str(torch.version.cuda or torch.version.hip))
    else:
        built = torch.version.cuda or torch.version.hip
        table.add_row("GPU", "none" + ("" if built else "; this torch is built without GPU support"))
    console.print(table)
    console.print()
    console.print(_back_ends())
    console.print("\nA plain entry runs; 'auto' takes the first back end from the left that does ('reference' only by name).")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions_text(torch: str, gpu: bool) -> Text:
    """Whether these versions were tested on such a device."""
    python = ".".join(platform.python_version_tuple()[:2])
    tested, text = versions.verdict(python, torch, _version("triton") or "", gpu)
    said = Text(text, "green" if tested else "yellow", overflow="fold")
    return said if platform.system() == "Linux" else said.append("; all tests were on Linux")


def _tile_sizes(device) -> str:
    """Says how the tile sizes of the portable kernels on this GPU were chosen."""
    from sparse_flash.core import triton

    if reason := triton.why_unavailable():
        return f"none: {reason}"
    from sparse_flash.kernels.portable import configs

    reason = configs.refusal(device)
    return configs.provenance(configs.detect_gpu(device)) if reason is None else f"none: {reason}"


def _typical_calls() -> list[tuple[str, object]]:
    """Typical calls, named by their special feature."""
    import torch

    from sparse_flash.core.description import Call

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    base: dict[str, Any] = {"device": device, "batch": 1, "heads": 8, "kv_heads": 8, "q_len": 4096, "kv_len": 4096, "head_dim": 128}
    base |= {"block_size": 128, "dtype": torch.bfloat16}
    where = f"on {'the GPU' if cuda else 'the CPU'}"
    calls: dict[str, dict[str, Any]] = {
        "float32, sparse, on the CPU": {"device": torch.device("cpu"), "dtype": torch.float32},
        f"bfloat16, sparse, {where}": {},
        f"bfloat16, dense, {where}": {"block_size": None},
        f"float16, grouped-query, {where}": {"dtype": torch.float16, "kv_heads": 2},
        f"float64, sparse, {where}": {"dtype": torch.float64},
        f"bfloat16, blocks of 16, head_dim 40, {where}": {"block_size": 16, "head_dim": 40},
        f"bfloat16, head_dim 192, v of 128, {where}": {"head_dim": 192, "v_head_dim": 128},
        f"bfloat16, dropout, {where}": {"features": ("dropout_p",)},
    }
    return [(name, Call(**base | fields)) for name, fields in calls.items()]


def _back_ends() -> Table:
    from sparse_flash.core import backends

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("call", *backends.NAMES):
        table.add_column(heading, overflow="fold")
    absent = {name: _ask(name, "why_unavailable") for name in backends.NAMES}
    table.add_row(Text("any, on this machine", "cyan"), *map(_verdict, absent.values()))
    for name, call in _typical_calls():
        verdicts = (Text("no", "red") if absent[b] else _verdict(_ask(b, "supports", call)) for b in backends.NAMES)
        table.add_row(Text(name, "cyan"), *verdicts)
    return table


def _ask(name: str, question: str, *arguments) -> str | None:
    from sparse_flash.core import backends

    try:
        return getattr(backends.get_backend(name), question)(*arguments)
    except ImportError as error:
        return f"it cannot be imported: {error}"


def _verdict(reason: str | None) -> Text:
    return Text("runs", "green") if reason is None else Text(f"no: {reason}", "red", overflow="fold")
