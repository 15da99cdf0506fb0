"""Compiles the kernels of packed documents for sm_90 without a GPU and prints the outcome of each, like ``sm90.py``."""

import json
from unittest import mock

import sm90_selection
import torch
import triton
from sm90 import TARGET, resources
from triton.compiler import ASTSource

from sparse_flash.kernels.launch.launch import FUSED
from sparse_flash.kernels.packed import document_blocks, repack, rows, spans, splits

SCALARS = {"documents", "rows", "before", "run_tiles", "bit_tiles", *rows.INTEGERS}
SCALARS |= {"k_rows", "masks", "least", "lines", "tokens", "q_tokens", "k_tokens", "q_longest", "k_longest", "longest"}
# Of fill_spans_kernel, where blocks start at multiples of their size.
ON_GRID = {"starts": None, "work": None, "k_work": None}


def compiled(kernel, warps: int, target=TARGET, **constants):
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        pointer = name not in SCALARS
        kind = "*bf16" if name in ("source", "target") else "*i32"
        signature[name] = kind if pointer else kernel.params[position].annotation_type or "i32"
        if pointer:
            attributes[(position,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {place: what for place, what in attributes.items() if kernel.arg_names[place[0]] not in constants}
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options={"num_warps": warps} | FUSED)


def report(kernel, warps: int, **constants) -> None:
    result = compiled(kernel, warps, **constants)
    row = {"kernel": kernel.fn.__name__, "wide": result.asm["ptx"].count("ld.global.v4"), **resources(result.asm["cubin"])}
    print(json.dumps(row), flush=True)


# (dtype, shape): tokens; 80 bytes a row; lse; 10 bytes a row. Results are head by head, so heads are not merged.
MOVES = [(torch.bfloat16, (64, 4, 128)), (torch.bfloat16, (64, 4, 40)), (torch.float32, (64, 4, 1)), (torch.bfloat16, (64, 4, 5))]


def take_rows(dtype, shape: tuple) -> None:
    source, index = torch.empty(shape, dtype=dtype), torch.empty(shape[0], dtype=torch.int32)
    target = torch.empty_like(source.transpose(0, 1).contiguous()).transpose(0, 1)
    rows.take_rows_into(source, index, float("-inf") if shape[-1] == 1 else 0.0, target)


def report_rows(kernel, grid, arguments, constants, options) -> None:
    result = sm90_selection.compiled(kernel, arguments, constants, options)
    source, ptx = arguments[0], result.asm["ptx"]
    row = {"kernel": kernel.fn.__name__, "shape": list(source.shape), "bits": 8 * source.element_size()}
    wide = {"wide": ptx.count("ld.global.v4"), "wide_stores": ptx.count("st.global.v4")}
    print(json.dumps(row | wide | resources(result.asm["cubin"])), flush=True)


if __name__ == "__main__":
    for same in (True, False):
        report(repack.lay_out_kernel, 4, BLOCK=128, CHUNK=32, SAME=same)
        for queries in (True, False):
            report(repack.find_rows_kernel, 1, BLOCK=128, QUERIES=queries, SAME=same)
    for queries in (True, False):
        report(repack.fill_rows_kernel, 1, BLOCK=128, CHUNK=128, ROWS=512, QUERIES=queries)
    with mock.patch.object(rows, "launch", report_rows):
        for case in MOVES:
            take_rows(*case)
    report(spans.find_spans_kernel, 4, BLOCK=128)
    report(spans.count_spans_kernel, 4, ROWS=512)
    for given in (ON_GRID, {}):
        report(spans.fill_spans_kernel, 4, BLOCK=128, TILES=16, ROWS=512, **given)
    report(document_blocks.find_own_spans_kernel, 4, BLOCK=128, CHUNK=512)
    report(splits.split_rows_kernel, 4, SPLITS=64, ROOM=64, K_ROOM=64, ITEMS=128, MASKS=16)
