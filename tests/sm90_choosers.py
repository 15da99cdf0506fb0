"""Compiles the kernels that score blocks for choosers for sm_90, without a GPU and without running them. Prints the outcome of
each, like ``sm90.py``."""

import contextlib
import io
import json
import re
from unittest import mock

import torch
from sm90 import resources
from sm90_selection import compiled
from triton import knobs

from sparse_flash.choosers.built_in import Antidiagonal, Sampled
from sparse_flash.choosers.features import Content
from sparse_flash.kernels.choosers import hopper_log_sums, log_sums
from sparse_flash.masks.chooser import Chooser
from sparse_flash.masks.grid import BlockGrid

CASES = [(chooser, dim) for chooser in (Sampled(8, floor=0.1), Sampled(8, floor=0.1, block=64)) for dim in (64, 128)]
CASES += [(Antidiagonal(8, floor=0.1), 128), (Antidiagonal(16, floor=0.1, block=64), 64)]


def report(case: tuple[Chooser, int], kernel, grid, arguments, constants, options, specialized=()) -> None:
    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        result = compiled(kernel, arguments, constants, options)
    row = {"kernel": kernel.fn.__name__.removesuffix("_kernel"), "case": str(case[0]), "dim": case[1]}
    row |= {"shared": result.metadata.shared, "wgmma": result.asm["ptx"].count("wgmma.mma_async")}
    row |= {"serialized": sorted(set(re.findall(r"C75\d\d", log.getvalue())))} | resources(result.asm["cubin"])
    print(json.dumps(row), flush=True)


def main() -> None:
    knobs.compilation.always_compile = True  # a result from Triton's cache has no log
    for case in CASES:
        chooser, dim = case
        q, k = (torch.zeros(1, heads, 1024, dim, dtype=torch.bfloat16) for heads in (32, 8))
        grid = BlockGrid(1024, 1024, chooser.block_size)
        of = chooser.compared_features(Content(q, k, grid, True, dim**-0.5))
        for by in (log_sums.log_sums, hopper_log_sums.log_sums):
            with contextlib.ExitStack() as stack:
                for module in (log_sums, hopper_log_sums):
                    stack.enter_context(mock.patch.object(module, "launch", lambda *launched, case=case: report(case, *launched)))
                log_sums.scores_of_blocks(of, grid.kv_blocks, 0, grid.q_blocks, False, False, by)


if __name__ == "__main__":
    main()
