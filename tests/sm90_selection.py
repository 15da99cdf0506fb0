"""Compiles the kernels of key blocks chosen by query for sm_90, as their launchers ask for them, without a GPU and without running
them. Prints the outcome of each, like ``sm90.py``.

    python tests/sm90_selection.py          the kernels that the tests compile
    python tests/sm90_selection.py --all    other groups of heads, block sizes and head dims too
"""

import contextlib
import io
import json
import re
import sys
from functools import partial
from unittest import mock

import torch
import triton
from sm90 import TARGET, resources, spills_in_full_blocks
from triton import knobs
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

import sparse_flash as sf
from sparse_flash.backends import RowResults
from sparse_flash.kernels.common.gluon import GluonASTSource
from sparse_flash.kernels.launch.launch import FUSED, Recording
from sparse_flash.kernels.selection import backward, decode, forward, hopper_backward, hopper_forward, lists
from sparse_flash.selection import hopper as selection_hopper
from sparse_flash.selection import triton as selection_triton

MODULES = backward, forward, lists, hopper_backward, hopper_forward
# heads, key heads, head_dim, block, every, always
CASES = [(16, 4, dim, block, 1, None) for dim in (64, 128) for block in (64, 128)]
CASES += [(16, 4, 128, 128, 16, None), (16, 4, 128, 256, 1, None), (16, 4, 128, 64, 1, "sinks(4) | local(128)")]
OTHERS = [(64, 4, dim, block, 1, None) for dim in (64, 128) for block in (64, 128)]
OTHERS += [(16, 4, 128, 32, 1, None), (8, 8, 128, 512, 1, None), (8, 2, 256, 128, 1, None)]


def compiled(kernel, arguments, constants, options, target=TARGET):
    """The result of Triton's compiler for the arguments of a launch."""
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, left = binder(*arguments, **constants, **options, **FUSED, debug=False)
    options, signature, constants, attributes = kernel._pack_args(backend, left, bound, specialization, left)
    source = GluonASTSource if of_hopper(kernel) else ASTSource
    return triton.compile(source(kernel, signature, constants, attributes), target=target, options=options.__dict__)


def of_hopper(kernel) -> bool:
    return ".hopper" in kernel.fn.__module__


def report(case: tuple, known: set, kernel, grid, arguments, constants, options, specialized=()) -> None:
    name = "hopper_" * of_hopper(kernel) + kernel.fn.__name__.removesuffix("_kernel")
    key = name, *constants.values(), *options.values()
    if key in known:
        return
    known.add(key)
    # See ``sm90.report``.
    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        result = compiled(kernel, arguments, constants, options)
    ptx = result.asm["ptx"]
    row = {
        "kernel": name,
        "case": case,
        "dim": case[2],
        "tile_n": constants["C"].TILE_N if "C" in constants else constants.get("TILE_N"),
        **options,
        "shared": result.metadata.shared,
    }
    row |= {"wgmma": ptx.count("wgmma.mma_async"), "mma": ptx.count("mma.sync"), "async": ptx.count("cp.async.cg.shared.global")}
    row |= {"tma": ptx.count("cp.async.bulk.tensor"), "serialized": sorted(set(re.findall(r"C75\d\d", log.getvalue())))}
    row |= resources(result.asm["cubin"])
    row["in_full_blocks"] = spills_in_full_blocks(result.asm["cubin"]) if row["stack"] else 0
    print(json.dumps(row), flush=True)


def report_decoding(case: tuple, known: set, kernel, mask, key, inputs, run):
    """In place of ``launch_or_repeat``."""
    recording = Recording()
    recording.launch = lambda kernel, prepared: report(case, known, kernel, *prepared)
    return run(recording)


def compile_case(case: tuple, known: set, dtype=torch.bfloat16) -> None:
    heads, kv_heads, dim, block, every, always = case
    q_len, slots = 1024, 16
    q = torch.zeros(1, heads, q_len, dim, dtype=dtype)
    k = torch.zeros(1, kv_heads, q_len, dim, dtype=dtype)
    lse = torch.zeros(1, heads, q_len)
    picks = torch.zeros(1, kv_heads, -(-q_len // every), slots, dtype=torch.int32)
    mask = always and sf.compile_mask(always, q_len, block_size=min(block, 256))
    selection = sf.BlockSelection(picks, q_len, q_len, block, every, always=mask)
    with contextlib.ExitStack() as stack:
        for module in MODULES:
            stack.enter_context(mock.patch.object(module, "launch", partial(report, case, known)))
        selection_triton.forward(q, k, k, selection, 1.0)
        selection_triton.backward(RowResults(q, None, q, lse), q, k, k, selection, 1.0)
        if always is None:
            masses = selection_triton.block_lse(q, k, selection, 1.0)
            selection_triton.block_lse_backward(masses, q, k, masses, selection, 1.0)
        launch_or_repeat = partial(report_decoding, case, known)
        stack.enter_context(mock.patch.object(decode, "launch_or_repeat", launch_or_repeat))
        for page in (0, 64):
            pages = torch.zeros(1, q_len // 64, dtype=torch.int32) if page else None
            cache = torch.zeros(q_len // 64, kv_heads, 64, dim, dtype=dtype) if page else k
            lens = torch.zeros(1, dtype=torch.int32)
            newest = picks[:, :, :1].contiguous(), block, 1, 1.0
            decode.selection_decode(q[:, :, :1], cache, cache, *newest, kv_lens=lens, block_table=pages)
        if block in selection_hopper.BLOCK_SIZES and dim in (64, 128):
            selection_hopper.forward(q, k, k, selection, 1.0)
            selection_hopper.backward(RowResults(q, None, q, lse), q, k, k, selection, 1.0)


if __name__ == "__main__":
    knobs.compilation.always_compile = True  # a result from Triton's cache has no log
    known: set = set()
    for case in [*CASES, *OTHERS] if "--all" in sys.argv else CASES:
        compile_case(case, known)
