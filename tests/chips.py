"""Compiles the portable kernels for other chips, without having one, and writes what each takes there to docs/chips.csv.

    make chips                          what is missing from the file or out of date in it
    make chips ARGS=--representatives   one case of each kernel for each chip, as CI runs it; writes nothing

Exit status 1: a kernel did not compile, or takes more shared memory than its chip has.
"""

import argparse
import ast
import csv
import hashlib
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

import sparse_flash as sf
from sparse_flash.kernels.common.variant import kernel_variant
from sparse_flash.kernels.portable import configs

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "chips.csv"
CHIPS = {
    "8.0": configs.Gpu((8, 0), 166912),
    "8.6": configs.Gpu((8, 6), 101376),
    "8.9": configs.Gpu((8, 9), 101376),
    "9.0": configs.Gpu((9, 0), 232448),
    "10.0": configs.Gpu((10, 0), 232448),
    "12.0": configs.Gpu((12, 0), 101376),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LOOP = ("kernels/portable/row_loop", "kernels/portable/lengths", "kernels/portable/scores", "kernels/portable/dropout")
COMMON = (*LOOP, "kernels/common/tiles", "kernels/common/philox", "kernels/common/variant")
SOURCES = {
    "forward": ("kernels/portable/forward", "kernels/portable/softmax", *COMMON),
    "grad_q": ("kernels/portable/backward", *COMMON),
    "grad_kv": ("kernels/portable/backward", *COMMON),
    "grad_qkv": ("kernels/portable/backward", *COMMON),
    "decode": ("kernels/portable/decode", "kernels/portable/softmax", "kernels/common/tiles"),
    "packed": ("packed/kernels/spans", "kernels/tables/splits"),
}


class Case(NamedTuple):
    """What a kernel is compiled for. variant: "", "dropout", "scores", "lengths", or for packed documents the kernel's name. block:
    the table's; 0: dense. page: for decoding."""

    kernel: str
    dtype: str = "bf16"
    dim: int = 128
    block: int = 128
    variant: str = ""
    page: int = 0


# Of a row. registers: per thread. spilled: bytes of stack per thread. products: the instruction. sources: a hash of what is
# compiled.
KNOWN = ("chip", "kernel", "dtype", "head_dim", "table_block", "variant", "page", "tile_m", "tile_n", "warps", "stages")
COLUMNS = (*KNOWN, "shared", "registers", "spilled", "products", "triton", "sources")


def key_of(row: dict[str, str]) -> tuple[str, ...]:
    """Everything but the compiler's output: a row with the same key need not be compiled again."""
    return *(row[name] for name in KNOWN), row["sources"]


REPRESENTATIVES = [Case(kernel, dim=128, block=0) for kernel in configs.KERNELS]
REPRESENTATIVES += [
    Case("grad_qkv", dim=128, block=0),
    Case("decode", dim=128, page=128),
    Case("packed", variant="fill_spans_kernel"),
]


def cases() -> list[Case]:
    """A subset that covers each limit: head dimensions whose tiles differ most; float32, which takes twice the room; dropout, whose
    draws take registers; all score changes at once with a function that loads a number per pair, and lengths, which take the most
    shared memory. float16 compiles like bfloat16, and tables of small blocks take less."""
    found = list(REPRESENTATIVES)
    for kernel in configs.KERNELS:
        found += [Case(kernel, dim=64), Case(kernel, dim=256), Case(kernel, "fp32", 256, 0)]
        found += [Case(kernel, block=0, variant="dropout"), Case(kernel, variant="scores"), Case(kernel, variant="lengths")]
    return [*found, Case("decode", dim=256)]


def config_of(case: Case, chip: str) -> configs.Config:
    of = CHIPS[chip]
    dtype = DTYPES[case.dtype]
    if case.kernel == "decode":
        return configs.decode_config(dtype, case.dim, case.block or None, 32, None, of)
    if case.kernel == "packed":
        return configs.Config(0, 0, 4, 0)
    name = "grad_kv" if case.kernel == "grad_qkv" else case.kernel  # both passes take its tiles
    config = configs.builtin_config(of, name, dtype, case.dim, case.block or None)
    given, switches, _ = kernel_variant(_variant(case))
    return configs.adapt_to_variant(config, "grad_q" if case.kernel == "grad_qkv" else case.kernel, of, given, switches, case.dim)


def hash_of(kernel: str) -> str:
    """Covers a kernel's sources without comments, docstrings and the launchers next to it."""
    digest = hashlib.sha256()
    for name in SOURCES[kernel]:
        for node in ast.parse((ROOT / "sparse_flash" / f"{name}.py").read_text()).body:
            if not _is_launcher(node) and not isinstance(node, ast.Import | ast.ImportFrom):
                _update(digest, [node])
    return digest.hexdigest()[:12]


def _is_launcher(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef):  # kernels take records, which have no methods
        return any(isinstance(one, ast.FunctionDef) for one in node.body)
    return isinstance(node, ast.FunctionDef) and not node.decorator_list and node.name != "launch_options"


def _update(digest, node) -> None:
    """Does not use ast.dump, whose text differs between Python releases."""
    if isinstance(node, list):
        for one in node:
            if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)):
                _update(digest, one)
    elif isinstance(node, ast.AST):
        digest.update(type(node).__name__.encode())
        for name, value in ast.iter_fields(node):
            if value not in (None, []) and name != "kind":
                digest.update(name.encode())
                _update(digest, value)
    else:
        digest.update(repr(node).encode())


def known_fields(case: Case, chip: str) -> list[str]:
    """``KNOWN`` of a row."""
    config = config_of(case, chip)
    tile = config.tile_m, config.tile_n, config.num_warps, config.num_stages
    return [chip, *map(str, (*case, *tile))]


def wanted(only: list[Case] | None = None) -> dict[tuple[str, ...], tuple[Case, str]]:
    """What the file should hold, by row key."""
    hashes = {kernel: hash_of(kernel) for kernel in SOURCES}
    jobs = [(case, chip) for chip in CHIPS for case in dict.fromkeys(only or cases())]
    return {(*known_fields(case, chip), hashes[case.kernel]): (case, chip) for case, chip in jobs}


def read() -> list[dict[str, str]]:
    return list(csv.DictReader(TABLE.read_text().splitlines())) if TABLE.exists() else []


def write(rows: list[dict[str, str]]) -> None:
    order = {key: number for number, key in enumerate(wanted())}
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: order[key_of(row)]))


def compiled(case: Case, chip: str) -> dict[str, str]:
    """Runs in a separate process, because kernels defined under TRITON_INTERPRET cannot be compiled."""
    import launches
    import triton
    from sm90 import resources
    from triton.backends.compiler import GPUTarget

    major, minor = CHIPS[chip].capability
    name = case.variant.removesuffix("_kernel") if case.kernel == "packed" else case.kernel
    found = launches.launches_of(lambda: _call(case), chip=CHIPS[chip], by_pointers=major not in (9, 10))
    launch = next(one for one in found if one.name == name)
    result = launch.compiled(GPUTarget("cuda", 10 * major + minor, 32))
    said = resources(result.asm["cubin"])
    kinds = ("tcgen05.mma", "wgmma.mma_async", "mma.sync", "fma.rn.f32")
    products = next((kind for kind in kinds if kind in result.asm["ptx"]), "")
    outcome = result.metadata.shared, said["reg"], said["stack"], products, triton.__version__, hash_of(case.kernel)
    return dict(zip(COLUMNS, (*known_fields(case, chip), *map(str, outcome)), strict=True))


def _call(case: Case) -> None:
    import launches

    if case.kernel == "packed":
        launches.packed(512, 1000, 8)
        return
    mask = sf.compile_mask("causal", 1024, block_size=case.block) if case.block else None
    shape = launches.Shape(dim=case.dim, dtype=DTYPES[case.dtype])
    if case.kernel == "decode":
        lens = torch.zeros(1, dtype=torch.int32)
        launches.decoding(shape._replace(kv_heads=1, q_len=16), mask, case.page, kv_lens=lens, causal=mask is None, splits=2)
    else:
        passes = {"forward": "forward", "grad_qkv": "one"}.get(case.kernel, "two")
        launches.portable_attention(shape, mask, _variant(case), False, (passes,))


def _variant(case: Case):
    """Of the scores, the gradient of a learned bias too where a kernel adds to it."""
    from launches import variant_of

    bias = "bias" if case.kernel == "grad_q" else "frozen_bias"
    return variant_of(f"lengths dropout alibi softcap own {bias}" if case.variant == "scores" else case.variant)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--representatives", action="store_true", help="one case of each kernel for each chip")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes, by default one for each core")
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    jobs = wanted(REPRESENTATIVES if arguments.representatives else None)
    rows = [] if arguments.representatives else [row for row in read() if key_of(row) in jobs]
    known, failed = set(map(key_of, rows)), []
    missing = [job for key, job in jobs.items() if key not in known]
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        os.environ["TRITON_CACHE_DIR"] = folder
        running = {pool.submit(compiled, *job): job for job in missing}
        for done in as_completed(running):
            case, chip = running[done]
            name = " ".join([chip, *(str(field) for field in case if field)])
            print(name, flush=True)
            if error := done.exception():
                failed.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
                continue
            rows.append(done.result())
            if int(rows[-1]["shared"]) > CHIPS[chip].shared:
                failed.append(f"{name}: {rows[-1]['shared']} bytes of shared memory, {CHIPS[chip].shared} are there")
            if not arguments.representatives:
                write(rows)
    if not arguments.representatives:  # without the rows of what is no more
        write(rows)
    print(f"{len(missing)} compiled, {len(known)} known; {len(failed)} failed or do not fit", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
