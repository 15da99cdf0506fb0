"""Compiles the kernels that choose blocks for sm_90 without a GPU and prints the outcome by kind of scores, like ``sm90.py``."""

import json
from functools import partial
from unittest import mock

import torch
from sm90 import resources
from sm90_selection import compiled

from sparse_flash.kernels.selection import pick_blocks
from sparse_flash.selection.choice import BlockChoice

TOKENS = 1024
# (kind, query heads that share a choice, block, whether of packed documents)
CASES = [(kind, *case, False) for kind in ("mean", "max", "softmax") for case in ((4 if kind == "mean" else 1, 128), (16, 64))]
CASES += [("given", 1, 128, False), ("mean", 4, 128, True), ("given", 1, 128, True)]


def report(case: tuple, kernel, grid, arguments, constants, options, specialized) -> None:
    result = compiled(kernel, arguments, constants, options)
    row = {"kernel": kernel.fn.__name__, "kind": case[0], "case": case, "shared": result.metadata.shared}
    print(json.dumps(row | {"wgmma": result.asm["ptx"].count("wgmma.mma_async"), **resources(result.asm["cubin"])}), flush=True)


def choose(kind: str, shared: int, block: int, bounded: bool) -> None:
    source, keys, compression = torch.empty(1, shared, TOKENS, 128, dtype=torch.bfloat16), None, None
    if kind == "given":
        source = torch.empty(1, 1, TOKENS, TOKENS // block)
    elif kind == "mean":
        keys = torch.empty(1, 1, TOKENS // block, 128)
    elif kind == "max":
        keys = source[:, :1]
    else:
        keys, compression = source[:, :1, : TOKENS // 16], pick_blocks.Compressed(32, 16, None)
    bounds = torch.empty(TOKENS, 2, dtype=torch.int32) if bounded else None
    pick_blocks.pick_blocks(source, keys, kind, BlockChoice(1, 16, 1, block, TOKENS, TOKENS, bounds), compression=compression)


if __name__ == "__main__":
    for case in CASES:
        as_on_a_gpu = mock.patch.object(pick_blocks, "_precision", lambda source: "tf32")
        with as_on_a_gpu, mock.patch.object(pick_blocks, "launch", partial(report, case)):
            choose(*case)
