"""Compiles kernels for sm_90 as their launchers ask for them, without a GPU and without running them. Prints the outcome of each
launch, one JSON object per line, like ``sm90.py``.

    python tests/sm90_launches.py GROUP               selections, choices, choosers, merges or packed
    python tests/sm90_launches.py selections --all    other groups of heads, block sizes and head dims too
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
from sparse_flash.backends import QueryRows
from sparse_flash.choosers.built_in import Antidiagonal, Sampled
from sparse_flash.choosers.features import Content
from sparse_flash.kernels.choosers import hopper_log_sums, log_sums
from sparse_flash.kernels.common.gluon import GluonASTSource
from sparse_flash.kernels.launch.launch import FUSED, Recording
from sparse_flash.kernels.packed import document_blocks, repack, rows, spans, splits
from sparse_flash.kernels.portable import merge
from sparse_flash.kernels.selection import backward, decode, forward, hopper_backward, hopper_forward, lists, pick_blocks
from sparse_flash.masks.grid import BlockGrid
from sparse_flash.selection import hopper as selection_hopper
from sparse_flash.selection import triton as selection_triton
from sparse_flash.selection.choice import BlockChoice


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


def report(case: tuple, dim: int | None, known: set | None, kernel, grid, arguments, constants, options, specialized=()) -> None:
    """In place of ``launch``. known: codes that were compiled, which are not compiled again."""
    name = kernel.fn.__name__.removesuffix("_kernel")
    name = f"hopper_{name}" if of_hopper(kernel) and not name.startswith("hopper") else name
    key = name, *constants.values(), *options.values()
    if known is not None:
        if key in known:
            return
        known.add(key)
    # See ``sm90.report``.
    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        result = compiled(kernel, arguments, constants, options)
    ptx, first = result.asm["ptx"], arguments[0]
    row = {"kernel": name, "case": [str(part) for part in case], "dim": dim, "shared": result.metadata.shared, **options}
    row["tile_n"] = constants["C"].TILE_N if "C" in constants else constants.get("TILE_N")
    row["copies"] = constants.get("TAKES", False)
    row |= {"wgmma": ptx.count("wgmma.mma_async"), "mma": ptx.count("mma.sync"), "async": ptx.count("cp.async.cg.shared.global")}
    row |= {"tma": ptx.count("cp.async.bulk.tensor"), "wide": ptx.count("ld.global.v4"), "wide_stores": ptx.count("st.global.v4")}
    if isinstance(first, torch.Tensor):
        row["bytes"] = first.shape[-1] * first.element_size()  # of a row
    if name == "merge":  # whether all have read what the first store may change
        row["waits"] = "bar.sync" in ptx[ptx.rindex("ld.global.b", 0, ptx.index("st.global")) : ptx.index("st.global")]
    row |= {"serialized": sorted(set(re.findall(r"C75\d\d", log.getvalue())))} | resources(result.asm["cubin"])
    row["in_full_blocks"] = spills_in_full_blocks(result.asm["cubin"]) if row["stack"] else 0
    print(json.dumps(row), flush=True)


@contextlib.contextmanager
def launching(modules, launch):
    """Within it, launches of the modules' kernels go to ``launch``."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "launch", launch))
        yield


# heads, key heads, head_dim, block, every, always
SELECTIONS = [(16, 4, dim, block, 1, None) for dim in (64, 128) for block in (64, 128)]
SELECTIONS += [(16, 4, 128, 128, 16, None), (16, 4, 128, 256, 1, None), (16, 4, 128, 64, 1, "sinks(4) | local(128)")]
OTHERS = [(64, 4, dim, block, 1, None) for dim in (64, 128) for block in (64, 128)]
OTHERS += [(16, 4, 128, 32, 1, None), (8, 8, 128, 512, 1, None), (8, 2, 256, 128, 1, None)]


def selections() -> None:
    """Key blocks chosen by query."""
    known: set = set()
    for case in [*SELECTIONS, *OTHERS] if "--all" in sys.argv else SELECTIONS:
        with launching((backward, forward, lists, hopper_backward, hopper_forward), partial(report, case, case[2], known)):
            select(case, known)


def select(case: tuple, known: set, dtype=torch.bfloat16) -> None:
    heads, kv_heads, dim, block, every, always = case
    q_len, slots = 1024, 16
    q = torch.zeros(1, heads, q_len, dim, dtype=dtype)
    k = torch.zeros(1, kv_heads, q_len, dim, dtype=dtype)
    lse = torch.zeros(1, heads, q_len)
    picks = torch.zeros(1, kv_heads, -(-q_len // every), slots, dtype=torch.int32)
    mask = always and sf.compile_mask(always, q_len, block_size=min(block, 256))
    selection = sf.BlockSelection(picks, q_len, q_len, block, every, always=mask)
    selection_triton.forward(q, k, k, selection, 1.0)
    selection_triton.backward(QueryRows(q, q, None, q, lse), k, k, selection, 1.0)
    if always is None:
        masses = selection_triton.block_lse(q, k, selection, 1.0)
        selection_triton.block_lse_backward(masses, q, k, masses, selection, 1.0)
    for page in (0, 64):
        pages = torch.zeros(1, q_len // 64, dtype=torch.int32) if page else None
        cache = torch.zeros(q_len // 64, kv_heads, 64, dim, dtype=dtype) if page else k
        lens = torch.zeros(1, dtype=torch.int32)
        newest = picks[:, :, :1].contiguous(), block, 1, 1.0
        with mock.patch.object(decode, "launch_or_repeat", partial(report_decoding, case, known)):
            decode.selection_decode(q[:, :, :1], cache, cache, *newest, kv_lens=lens, block_table=pages)
    if block in selection_hopper.BLOCK_SIZES and dim in (64, 128):
        selection_hopper.forward(q, k, k, selection, 1.0)
        selection_hopper.backward(QueryRows(q, q, None, q, lse), k, k, selection, 1.0)


def report_decoding(case: tuple, known: set, kernel, mask, key, inputs, run):
    """In place of ``launch_or_repeat``."""
    recording = Recording()
    recording.launch = lambda kernel, prepared: report(case, case[2], known, kernel, *prepared)
    return run(recording)


def choices(tokens: int = 1024) -> None:
    """The kernel that picks blocks, by kind of scores."""
    # kind, query heads that share a choice, block, whether of packed documents
    cases = [(kind, *case, False) for kind in ("mean", "max", "softmax") for case in ((4 if kind == "mean" else 1, 128), (16, 64))]
    for case in [*cases, ("given", 1, 128, False), ("mean", 4, 128, True), ("given", 1, 128, True)]:
        kind, shared, block, bounded = case
        source, keys, compression = torch.empty(1, shared, tokens, 128, dtype=torch.bfloat16), None, None
        if kind == "given":
            source = torch.empty(1, 1, tokens, tokens // block)
        elif kind == "mean":
            keys = torch.empty(1, 1, tokens // block, 128)
        elif kind == "max":
            keys = source[:, :1]
        else:
            keys, compression = source[:, :1, : tokens // 16], pick_blocks.Compressed(32, 16, None)
        bounds = torch.empty(tokens, 2, dtype=torch.int32) if bounded else None
        as_on_a_gpu = mock.patch.object(pick_blocks, "_precision", lambda source: "tf32")
        with as_on_a_gpu, launching((pick_blocks,), partial(report, case, None, None)):
            asked = BlockChoice(1, 16, 1, block, tokens, tokens, bounds)
            pick_blocks.pick_blocks(source, keys, kind, asked, compression=compression)


def choosers() -> None:
    """The kernels that score blocks for choosers."""
    cases = [(chooser, dim) for chooser in (Sampled(8, floor=0.1), Sampled(8, floor=0.1, block=64)) for dim in (64, 128)]
    for chooser, dim in [*cases, (Antidiagonal(8, floor=0.1), 128), (Antidiagonal(16, floor=0.1, block=64), 64)]:
        q, k = (torch.zeros(1, heads, 1024, dim, dtype=torch.bfloat16) for heads in (32, 8))
        grid = BlockGrid(1024, 1024, chooser.block_size)
        of = chooser.compared_features(Content(q, k, grid, True, dim**-0.5))
        with launching((log_sums, hopper_log_sums), partial(report, (chooser, dim), dim, None)):
            for by in (log_sums.log_sums, hopper_log_sums.log_sums):
                log_sums.scores_of_blocks(of, grid.kv_blocks, 0, grid.q_blocks, False, False, by)


def merges() -> None:
    """The kernels that merge results."""
    cases = [(torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 256), (torch.bfloat16, 40), (torch.float16, 32)]
    some = torch.arange(2)
    for dtype, dim in [*cases, (torch.float64, 128)]:
        out = torch.empty(1, 4, 256, dim, dtype=dtype)
        lse = torch.empty(1, 4, 256, dtype=torch.promote_types(dtype, torch.float32))
        with launching((merge,), partial(report, (dtype, dim), dim, None)):
            merge.merge_results(out, lse, out, lse)
            if dtype != torch.float64:
                merge.add_rows(out, out, some, 128)
                merge.add_rows(out, out, some, 128, (torch.arange(3), some))
                merge.copy_rows(out, out, some, 128)


# (dtype, shape): tokens; 80 bytes a row; lse; 10 bytes a row. Results are head by head, so heads are not merged.
MOVES = [(torch.bfloat16, (64, 4, 128)), (torch.bfloat16, (64, 4, 40)), (torch.float32, (64, 4, 1)), (torch.bfloat16, (64, 4, 5))]


def packed(launch=None) -> None:
    """The kernels of packed documents, for 512 documents. launch: in place of ``report``."""
    ends, numbers, runs = (torch.zeros(shape, dtype=torch.int32) for shape in (513, 1024, (2, 1024)))
    mask, tiles = sf.compile_mask("causal", 1024), [torch.zeros(2, 128, dtype=torch.int32)] * 2
    with launching((document_blocks, repack, rows, spans, splits), launch or partial(report, (), None, None)):
        for same in (True, False):
            layout = repack.lay_out(ends, ends, 1000, 1000, 1000, 1000, 128, same)
            for queries, table in ((True, mask.by_query), (False, mask.by_key)):
                records = repack.find_rows(layout, table, 8, 0, 128, (numbers, numbers), queries, same)
                if same:
                    repack.fill_rows(layout, records, table, tiles, tiles, 64, 0, 128, queries)
        for dtype, shape in MOVES:
            source, index = torch.empty(shape, dtype=dtype), torch.empty(shape[0], dtype=torch.int32)
            target = torch.empty_like(source.transpose(0, 1).contiguous()).transpose(0, 1)
            rows.take_rows_into(source, index, float("-inf") if shape[-1] == 1 else 0.0, target)
        spans.fill_spans(layout, runs, 8, 8, 0, 64, 64, 128)
        document_blocks.fill_document_blocks(layout, runs, 8, 1000, 64, 64, 128)
        splits.split_rows(mask.by_query[:3], mask.by_key[:3], 64, 64, 64, 1024)


GROUPS = {group.__name__: group for group in (selections, choices, choosers, merges, packed)}

if __name__ == "__main__":
    knobs.compilation.always_compile = True  # a result from Triton's cache has no log
    GROUPS[sys.argv[1]]()
