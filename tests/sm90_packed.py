"""Compiles the kernels of packed documents for sm_90 without a GPU and prints the outcome of each, like ``sm90.py``."""

import json
from contextlib import ExitStack
from unittest import mock

import torch
from sm90 import resources
from sm90_selection import compiled

import sparse_flash as sf
from sparse_flash.kernels.packed import document_blocks, repack, rows, spans, splits

# (dtype, shape): tokens; 80 bytes a row; lse; 10 bytes a row. Results are head by head, so heads are not merged.
MOVES = [(torch.bfloat16, (64, 4, 128)), (torch.bfloat16, (64, 4, 40)), (torch.float32, (64, 4, 1)), (torch.bfloat16, (64, 4, 5))]


def take_rows(dtype, shape: tuple) -> None:
    source, index = torch.empty(shape, dtype=dtype), torch.empty(shape[0], dtype=torch.int32)
    target = torch.empty_like(source.transpose(0, 1).contiguous()).transpose(0, 1)
    rows.take_rows_into(source, index, float("-inf") if shape[-1] == 1 else 0.0, target)


def launches() -> list[tuple]:
    """(kernel, arguments, constants, options) of each launch for 512 documents."""
    made: list[tuple] = []
    ends, numbers, runs = (torch.zeros(shape, dtype=torch.int32) for shape in (513, 1024, (2, 1024)))
    mask, tiles = sf.compile_mask("causal", 1024), [torch.zeros(2, 128, dtype=torch.int32)] * 2
    with ExitStack() as stack:
        for module in (document_blocks, repack, rows, spans, splits):
            stack.enter_context(mock.patch.object(module, "launch", lambda kernel, _, *more: made.append((kernel, *more[:3]))))
        for same in (True, False):
            layout = repack.lay_out(ends, ends, 1000, 1000, 1000, 1000, 128, same)
            for queries, table in ((True, mask.by_query), (False, mask.by_key)):
                records = repack.find_rows(layout, table, 8, 0, 128, (numbers, numbers), queries, same)
                if same:
                    repack.fill_rows(layout, records, table, tiles, tiles, 64, 0, 128, queries)
        for move in MOVES:
            take_rows(*move)
        spans.fill_spans(layout, runs, 8, 8, 0, 64, 64, 128)
        document_blocks.fill_document_blocks(layout, runs, 8, 1000, 64, 64, 128)
        splits.split_rows(mask.by_query[:3], mask.by_key[:3], 64, 64, 64, 1024)
    return made


if __name__ == "__main__":
    for kernel, arguments, *more in launches():
        result, first = compiled(kernel, arguments, *more), arguments[0]
        row = {"kernel": kernel.fn.__name__, "shape": list(first.shape), "bits": 8 * first.element_size()}
        ptx = result.asm["ptx"]
        row |= {"wide": ptx.count("ld.global.v4"), "wide_stores": ptx.count("st.global.v4")}
        print(json.dumps(row | resources(result.asm["cubin"])), flush=True)
