"""Asks Triton about every kernel on tensors of many shapes, without compiling any. Prints one JSON object per kernel.

    python tests/specialization.py         how often code was made and launched again, and the arguments for whose value in one call
                                           it was made, though another launches it
    python tests/specialization.py ones    what Triton's front end says against the portable kernels, for lengths and strides of 1

``launch`` looks up compiled code by what it believes Triton specializes on. Triton specializes on integers that are 1 and on
multiples of 16, even in fields of a tuple for which the kernel says otherwise. Here Triton's own code says what a launch is
specialized on, and every launch that reuses another one's code is compared with that. Within records, Triton's releases differ in
where they lose a 1.
"""

import json
import sys
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import product
from unittest import mock

import launches
import torch
from launches import SM90, Launch, Shape, variant_of
from oracle import heavy_rows_split
from triton._C.libtriton import ir
from triton.compiler import ASTSource, make_backend

import sparse_flash as sf
from sparse_flash.choosers.built_in import Antidiagonal, Pooled, Sampled
from sparse_flash.choosers.kernels import hopper_log_sums, log_sums, rules
from sparse_flash.masks import select_blocks
from sparse_flash.selection.kernels import division

LENGTHS = (1, 16, 33)
HEADS = ((1, 1), (16, 1), (3, 3), (32, 16))
BACKEND = make_backend(SM90)
VARIANT = "lengths dropout alibi softcap sinks"
compile_mask = cache(sf.compile_mask)


class Counted:
    """Stands in for a kernel: instead of compiling, it asks Triton what it would specialize on."""

    def __init__(self, kernel):
        self.kernel, self.fn, self.params = kernel, kernel.fn, kernel.params
        self.compiled = self.again = 0
        self.wrong: set[str] = set()

    def warmup(self, *arguments, grid, **given) -> None:
        """Does nothing: a launch asks again for what was compiled ahead of it."""

    def __getitem__(self, grid):
        return self.make

    def make(self, *arguments, **given):
        """Code for the arguments of one launch, by a grid. It is launched again with others."""
        self.compiled += 1
        made_for = self.specialization(arguments, given)

        def launch(*arguments) -> None:
            self.again += 1
            found = self.specialization(arguments, {})
            self.wrong |= {f"{name}: {made_for[name]}, then {found[name]}" for name in found if found[name] != made_for[name]}

        return defaultdict(lambda: launch)

    def specialization(self, arguments, given) -> dict[str, tuple]:
        """(type, specialization on its value) of each argument."""
        binder = launches.binder_of(self.kernel, BACKEND)
        return dict(zip((p.name for p in self.params), binder(*arguments, **given)[1], strict=True))


@cache
def masks_of(heads: int, q_len: int, kv_len: int, block_size: int):
    mask, other = (compile_mask(spec, q_len, kv_len, block_size) for spec in ("causal", "causal & local(8)"))
    return None, mask, sf.BlockMask.per_head([mask if head % 2 else other for head in range(heads)])


def shapes(q_lens, kv_lens=None, batches=(1, 2), **more):
    """Of all batches and heads, and of these lengths."""
    for batch, (heads, kv_heads), q_len, kv_len in product(batches, HEADS, q_lens, kv_lens or q_lens):
        yield Shape(batch, heads, kv_heads, q_len, kv_len, **more)


def portable() -> None:
    for shape in shapes(LENGTHS, dtype=torch.float32):
        masks, lens = masks_of(shape.heads, shape.q_len, shape.kv_len, 64), torch.ones(shape.batch, dtype=torch.int32)
        for mask, names in product(masks, ("", VARIANT)):
            launches.portable_attention(shape, mask, variant_of(names, shape.batch, shape.heads))
        for kv_lens in (None, lens):
            launches.decoding(shape, kv_lens=kv_lens, causal=True, splits=2)
        for mask in masks[1:]:
            launches.decoding(shape, mask, at_end=False)
        launches.decoding(shape, page=16)


def hopper() -> None:
    for shape in shapes((1, 16, 385), batches=(1, 2, 3)):
        launches.hopper_attention(shape, None, variant_of(VARIANT, shape.batch, shape.heads))
        launches.hopper_attention(shape, None, passes=("eight bits",))
        for mask in masks_of(shape.heads, shape.q_len, shape.kv_len, 128):
            for deterministic in (False, True):
                launches.hopper_attention(shape, mask, deterministic=deterministic)
            for dim, dim_v in ((256, 256), (192, 128)):
                launches.hopper_attention(shape._replace(dim=dim, dim_v=dim_v), mask, passes=("backward",))


def packed() -> None:
    for documents, tokens, rows in product(LENGTHS, repeat=3):
        launches.packed(documents, tokens, rows)


def merges() -> None:
    for heads, tokens, dim in product((1, 16, 3), (32, 66), (16, 33)):
        launches.merges(torch.float32, dim, True, heads, tokens)


def choices() -> None:
    for shape in shapes(LENGTHS):
        for kind in ("mean", "max", "given"):
            launches.choice(shape, kind, 16, 4)
        for bounds in (None, torch.zeros(shape.q_len, 2, dtype=torch.int32)):
            launches.choice(shape, "max", 64, 4, bounds)
        for compressed in LENGTHS:
            launches.choice(shape, "softmax", 16, 4, compressed=compressed)


def choosers() -> None:
    for shape, causal in product(shapes((1, 16, 2049)), (False, True)):
        bounds = torch.zeros(shape.batch, 3, dtype=torch.int32) if causal else None
        for chooser in (Sampled(8, floor=0.1, block=64), Antidiagonal(8, floor=0.1, block=64), Pooled(floor=0.1, block=64)):
            features, grid = launches.features_of(shape, chooser, causal)
            for low in {0, grid.q_blocks - 1}:
                of = replace(features, bounds=bounds), grid.kv_blocks, low, grid.q_blocks
                scores = log_sums.scores_of_blocks(*of, log_sums)
                if not isinstance(chooser, Pooled):
                    log_sums.scores_of_blocks(*of, hopper_log_sums)
        words, counts = torch.zeros(grid.q_blocks, -(-grid.kv_blocks // 32), dtype=torch.int32), torch.zeros(grid.q_blocks).int()
        bits = torch.zeros(shape.batch, shape.heads, *words.shape, dtype=torch.int32)
        for rule in ("keep", "mass", "floor", "budget"):
            rules.apply_rule(scores, words, words, counts, bits, 0, rule, 0.5, rule == "keep")
        table = compile_mask("causal", shape.q_len, shape.kv_len, 64)
        whole = torch.zeros(shape.batch * shape.heads, *grid.shape, dtype=torch.bool)
        for maps in (bits.flatten(0, 1), whole):
            with mock.patch.object(select_blocks, "can_launch_kernel", lambda maps: True):
                select_blocks._select_both(maps, table.by_query, table.by_key, grid.shape)


def selections() -> None:
    # Many rounds, each with launches of its own.
    with mock.patch.object(division, "WORKSPACE", 1 << 10):
        for shape in shapes(LENGTHS):
            for always in (None, compile_mask("sinks(4)", shape.q_len, shape.kv_len, 32)):
                launches.selected_attention(shape, 3, 64, always=always)
    for shape, page, e4m3, splits in product(shapes(LENGTHS), (0, 16), (False, True), (1, 2)):
        launches.selected_decoding(shape, 3, 64, page, e4m3, splits)


def count() -> None:
    with launches.replaced(Counted) as kernels:
        portable()
        hopper()
        masks_of.cache_clear()
        compile_mask.cache_clear()
        with heavy_rows_split():
            hopper()
        packed()
        merges()
        choices()
        choosers()
        selections()
        with mock.patch.object(launches.launch, "can_address_tiles", lambda device: False):
            portable()
    for name, kernel in kernels.items():
        print(json.dumps({"kernel": name, "compiled": kernel.compiled, "again": kernel.again, "wrong": sorted(kernel.wrong)}))


def calls_of_one_token() -> None:
    for q_len, kv_len in ((1, 1), (1, 33), (33, 1)):
        shape = Shape(1, 1, 1, q_len, kv_len, dim=8)  # 16 bytes, which is the unit of strides
        for mask, names in ((None, ""), (None, VARIANT), (compile_mask("causal", q_len, kv_len, 64), VARIANT)):
            launches.portable_attention(shape, mask, variant_of(names, heads=1))
        launches.decoding(shape, kv_lens=torch.ones(1, dtype=torch.int32), causal=True, splits=2)
        for always in (None, compile_mask("sinks(4)", q_len, kv_len, 32)):
            launches.selected_attention(shape, 3, 64, always=always, hopper=(False,))


def refusal(one: Launch) -> str | None:
    """What Triton's front end says against a kernel."""
    options, *code = one.code(BACKEND)
    context = ir.context()
    ir.load_dialects(context)
    BACKEND.load_dialects(context)
    beside = BACKEND.get_codegen_implementation(options), BACKEND.get_module_map()
    try:
        ASTSource(one.kernel, *code).make_ir(SM90, options, *beside, context)
    except Exception as error:
        while error.__cause__:
            error = error.__cause__
        return str(error)
    return None


def read_where_lengths_are_1() -> None:
    codes = {(one.name, str(one.code(BACKEND)[1:])): one for one in launches.launches_of(calls_of_one_token, by_pointers=True)}
    for (name, _), one in codes.items():
        print(json.dumps({"kernel": name, "refused": refusal(one)}))


if __name__ == "__main__":
    read_where_lengths_are_1() if "ones" in sys.argv else count()
