"""Compiles the kernels of packed documents for sm_90 without a GPU and prints the outcome of each, like ``sm90.py``."""

import json

import triton
from sm90 import TARGET, resources
from triton.compiler import ASTSource

from sparse_flash.kernels.launch.launch import FUSED
from sparse_flash.kernels.packed import document_blocks, repack, spans, splits

ALIGNED = {"dim", "source_row", "source_head", "target_row", "target_head"}
SCALARS = {"documents", "rows", "before", "run_tiles", "bit_tiles", "heads", *ALIGNED}
SCALARS |= {"k_rows", "masks", "least", "lines", "tokens", "q_tokens", "k_tokens", "q_longest", "k_longest", "longest"}
# Of fill_spans_kernel, where blocks start at multiples of their size.
ON_GRID = {"starts": None, "work": None, "k_work": None}


def compiled(kernel, warps: int, target=TARGET, **constants):
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        pointer = name not in SCALARS
        signature[name] = ("*bf16" if name in ("source", "target") else "*i32") if pointer else "i32"
        if pointer or name in ALIGNED:
            attributes[(position,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {place: what for place, what in attributes.items() if kernel.arg_names[place[0]] not in constants}
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options={"num_warps": warps} | FUSED)


def report(kernel, warps: int, **constants) -> None:
    result = compiled(kernel, warps, **constants)
    row = {"kernel": kernel.fn.__name__, "wide": result.asm["ptx"].count("ld.global.v4"), **resources(result.asm["cubin"])}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    for same in (True, False):
        report(repack.lay_out_kernel, 4, BLOCK=128, CHUNK=32, SAME=same)
        for queries in (True, False):
            report(repack.find_rows_kernel, 1, BLOCK=128, QUERIES=queries, SAME=same)
    for queries in (True, False):
        for shared in (True, False):
            report(repack.fill_rows_kernel, 1, BLOCK=128, CHUNK=128, ROWS=512, QUERIES=queries, SHARED=shared)
    report(repack.take_rows_kernel, 4, ROWS=32, DIM=128, FILL=0.0, source_dim=1)
    report(repack.take_rows_kernel, 4, ROWS=1024, DIM=1, FILL=float("-inf"), source_dim=1)
    report(spans.find_spans_kernel, 4, BLOCK=128)
    report(spans.count_spans_kernel, 4, ROWS=512)
    for given in (ON_GRID, {}):
        report(spans.fill_spans_kernel, 4, BLOCK=128, TILES=16, ROWS=512, **given)
    report(document_blocks.find_own_spans_kernel, 4, BLOCK=128, CHUNK=512)
    report(splits.split_rows_kernel, 4, SPLITS=64, ROOM=64, K_ROOM=64, ITEMS=128, MASKS=16)
