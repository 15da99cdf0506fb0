"""Compiles the kernels that merge results for sm_90 without a GPU and prints the outcome of each, like ``sm90.py``."""

import json
from unittest import mock

import torch
from sm90 import resources
from sm90_selection import compiled

from sparse_flash.kernels.portable import merge

CASES = ((torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 256), (torch.bfloat16, 40), (torch.float16, 32))


def report(kernel, grid, arguments, constants, options, specialized) -> None:
    result = compiled(kernel, arguments, constants, options)
    dtype = str(arguments[0].dtype).removeprefix("torch.")
    row = {"kernel": kernel.fn.__name__, "dtype": dtype, "dim": arguments[1].shape[3]}
    row["copies"] = constants.get("TAKES", False)
    ptx = result.asm["ptx"]
    row |= {"wide": ptx.count("ld.global.v4"), "shared": result.metadata.shared}
    row |= {"waits": "bar.sync" in ptx[ptx.rindex("ld.global.b", 0, ptx.index("st.global")) : ptx.index("st.global")]}
    print(json.dumps(row | resources(result.asm["cubin"])), flush=True)


if __name__ == "__main__":
    rows = torch.arange(2)
    with mock.patch.object(merge, "launch", report):
        for dtype, dim in CASES:
            out = torch.empty(1, 4, 256, dim, dtype=dtype)
            lse = torch.empty(1, 4, 256)
            merge.merge_results(out, lse, out, lse)
            merge.add_rows(out, out, rows, 128)
            merge.add_rows(out, out, rows, 128, (torch.arange(3), rows))
            merge.copy_rows(out, out, rows, 128)
        out, lse = torch.empty(1, 4, 256, 128, dtype=torch.float64), torch.empty(1, 4, 256, dtype=torch.float64)
        merge.merge_results(out, lse, out, lse)
