"""Launches every kernel on tensors of many shapes, with Triton's compiler replaced and no GPU. Prints one JSON object per kernel:
how often it was compiled and launched again, and the arguments for which the code would have been specialized on another call's
value.

``launch`` looks up compiled code by what it believes Triton specializes on. Triton specializes on integers that are 1 and on
multiples of 16, even in fields of a tuple for which the kernel says otherwise. Here Triton's own code says what a launch is
specialized on, and every launch that reuses another one's code is compared with that.

Run it as a separate process: kernels defined under TRITON_INTERPRET cannot be compiled.
"""

import json
import sys
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import product
from unittest import mock

import torch
from oracle import heavy_rows_split
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import sparse_flash as sf
from sparse_flash.backends import QueryRows
from sparse_flash.choosers.built_in import Antidiagonal, Pooled, Sampled
from sparse_flash.choosers.features import Content
from sparse_flash.kernels.choosers import log_sums, rules
from sparse_flash.kernels.hopper import backward as hopper_backward
from sparse_flash.kernels.hopper import descriptors
from sparse_flash.kernels.hopper import forward as hopper_forward
from sparse_flash.kernels.launch import launch
from sparse_flash.kernels.packed import document_blocks, repack, select, spans, splits
from sparse_flash.kernels.packed import rows as moved_rows
from sparse_flash.kernels.portable import backward, configs, decode, forward
from sparse_flash.kernels.selection import backward as selection_backward
from sparse_flash.kernels.selection import decode as selection_decode
from sparse_flash.kernels.selection import division, lists, pick_blocks
from sparse_flash.kernels.selection import forward as selection_forward
from sparse_flash.kernels.selection import hopper_backward as selection_hopper_backward
from sparse_flash.kernels.selection import hopper_forward as selection_hopper_forward
from sparse_flash.masks.grid import BlockGrid
from sparse_flash.selection import triton as selection_triton
from sparse_flash.selection.choice import BlockChoice
from sparse_flash.variant.variant import Variant

SELECTION = (
    pick_blocks,
    lists,
    selection_forward,
    selection_backward,
    selection_hopper_forward,
    selection_hopper_backward,
    selection_decode,
)
PACKED = (repack, moved_rows, spans, document_blocks, splits, select)
MODULES = (forward, backward, decode, hopper_forward, hopper_backward, log_sums, rules, *PACKED, *SELECTION)
LENGTHS = (1, 16, 33)
HEADS = ((1, 1), (2, 1), (16, 1), (16, 16), (3, 3))
TARGET = GPUTarget("cuda", 90, 32)
BACKEND = make_backend(TARGET)


class Kernel:
    """Stands in for a kernel: instead of compiling, it asks Triton what it would specialize on."""

    def __init__(self, kernel: JITFunction):
        self.fn, self.params = kernel.fn, kernel.params
        self.binder = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
        self.compiled = self.again = 0
        self.wrong: set[str] = set()

    def __getitem__(self, grid):
        return lambda *arguments, **options: Compiled(self, arguments, options)

    def warmup(self, *arguments, grid, **options) -> None:
        """Does nothing: a launch asks again for what was compiled ahead of it."""

    def specialization(self, arguments, options) -> dict[str, tuple]:
        """(type, specialization on its value) of each argument."""
        return dict(zip((p.name for p in self.params), self.binder(*arguments, **options)[1], strict=True))


class Compiled:
    """Code compiled for the arguments of one launch, and launched again with others."""

    def __init__(self, kernel: Kernel, arguments, options):
        kernel.compiled += 1
        self.kernel, self.made_for = kernel, kernel.specialization(arguments, options)

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments):
        self.kernel.again += 1
        for name, found in self.kernel.specialization(arguments, {}).items():
            if found != self.made_for[name]:
                self.kernel.wrong.add(f"{name}: {self.made_for[name]}, then {found}")


def tensors(batch, heads, kv_heads, q_len, kv_len, dtype, head_dim=64):
    q, k, v = (torch.zeros(batch, *of, head_dim, dtype=dtype) for of in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)))
    return q, k, v, torch.zeros(batch, heads, q_len)


def checked_variant(batch: int, heads: int) -> tuple[Variant | None, ...]:
    lengths = dict.fromkeys(("q_starts", "q_lens", "kv_starts", "kv_lens"), torch.zeros(batch, dtype=torch.int32))
    dropout = {"seed": torch.zeros(1, dtype=torch.int64), "dropout_p": 0.5}
    return None, Variant(**lengths, **dropout, alibi_slopes=torch.zeros(batch, heads), softcap=2.0)


compile_mask = cache(sf.compile_mask)


@cache
def masks_of(heads: int, q_len: int, kv_len: int, block_size: int):
    mask = compile_mask("causal", q_len, kv_len, block_size)
    other = compile_mask("causal & local(8)", q_len, kv_len, block_size)
    return None, mask, sf.BlockMask.per_head([mask if head % 2 else other for head in range(heads)])


def portable_calls() -> None:
    for batch, (heads, kv_heads), q_len, kv_len in product((1, 2), HEADS, LENGTHS, LENGTHS):
        q, k, v, lse = tensors(batch, heads, kv_heads, q_len, kv_len, torch.float32)
        for mask, variant in product(masks_of(heads, q_len, kv_len, 64), checked_variant(batch, heads)):
            forward.attention_forward(q, k, v, mask, 1.0, variant)
            for most in (0, 1 << 30):  # two launches and one
                with mock.patch.object(configs, "ONE_LAUNCH_TOKENS", most):
                    backward.attention_backward(q, lse, q, k, v, q, lse, mask, 1.0, variant)
        for kv_lens in (None, torch.ones(batch, dtype=torch.int32)):
            decode.attention_decode(q, k, v, None, 1.0, kv_lens=kv_lens, causal=True, splits=2)
        for mask in masks_of(heads, q_len, kv_len, 64)[1:]:
            decode.attention_decode(q, k, v, mask, 1.0, at_end=False)
        pages = torch.zeros(batch, kv_len, dtype=torch.int32)
        decode.attention_decode(
            q, k[:, :, :1].expand(-1, -1, 16, -1), v[:, :, :1].expand(-1, -1, 16, -1), None, 1.0, block_table=pages
        )


def hopper_calls() -> None:
    for batch, (heads, kv_heads), q_len, kv_len in product((1, 2, 3), HEADS, (1, 16, 385), (1, 16, 385)):
        q, k, v, lse = tensors(batch, heads, kv_heads, q_len, kv_len, torch.bfloat16)
        _, variant = checked_variant(batch, heads)
        hopper_forward.attention_forward(q, k, v, None, 1.0, variant)
        hopper_backward.attention_backward(q, None, q, k, v, q, lse, None, 1.0, variant)
        for mask in masks_of(heads, q_len, kv_len, 128):
            hopper_forward.attention_forward(q, k, v, mask, 1.0)
            for deterministic in (False, True):
                hopper_backward.attention_backward(q, None, q, k, v, q, lse, mask, 1.0, deterministic=deterministic)
        q, k, v, lse = tensors(batch, heads, kv_heads, q_len, kv_len, torch.bfloat16, 256)
        for mask in masks_of(heads, q_len, kv_len, 128):
            hopper_backward.attention_backward(q, None, q, k, v, q, lse, mask, 1.0)
            out = q[..., :128]
            hopper_backward.attention_backward(out, None, q[..., :192], k[..., :192], v[..., :128], out, lse, mask, 1.0)


def packed_calls() -> None:
    for documents, tokens, rows, heads in product(LENGTHS, LENGTHS, LENGTHS, (1, 16, 3)):
        ends = torch.zeros(documents + 1, dtype=torch.int32)
        layout = repack.lay_out(ends, ends, tokens, tokens + 15, tokens, rows, 128, False)
        table = compile_mask("causal", 128 * rows).by_query
        numbers = torch.zeros(128 * rows, dtype=torch.int32)
        records = repack.find_rows(layout, table, rows, tokens, 128, (numbers, numbers), True, False)
        tiles = [torch.zeros(count, 128, dtype=torch.int32) for count in (tokens, documents)]
        repack.fill_rows(layout, records, table, tiles, tiles, 64, tokens, 128, True)
        for dim in LENGTHS:
            source = torch.zeros(rows, heads, dim)
            moved_rows.take_rows_into(source, numbers[:rows], 0.0, torch.zeros_like(source))
        splits.split_rows(table[:3], table[:3], 0, 0, 64, 16 * tokens)
        runs = torch.zeros(2, tokens, dtype=torch.int32)
        spans.fill_spans(layout, runs, rows, tokens, tokens, 64, 64, 128)
        document_blocks.fill_document_blocks(layout, runs, rows, tokens, 64, 64, 128)


def choice_calls() -> None:
    for batch, (heads, kv_heads), q_len, kv_len in product((1, 2), HEADS, LENGTHS, LENGTHS):
        q, k, *_ = tensors(batch, heads, kv_heads, q_len, kv_len, torch.bfloat16)
        means, scores = torch.zeros(batch, kv_heads, kv_len // 16, 64), torch.zeros(batch, heads, q_len, -(-kv_len // 16))
        asked = BlockChoice(heads, 4, 1, 16, q_len, kv_len)
        for source, keys, kind in ((q, means, "mean"), (q, k, "max"), (scores, None, "given")):
            pick_blocks.pick_blocks(source, keys, kind, asked)
        for compressed in (1, 16, 33):
            keys, compression = torch.zeros(batch, kv_heads, compressed, 64, dtype=q.dtype), pick_blocks.Compressed(16, 16, None)
            pick_blocks.pick_blocks(q, keys, "softmax", asked, compression=compression)


def chooser_calls() -> None:
    for batch, (heads, kv_heads), q_len, kv_len, causal in product((1, 2), HEADS, (1, 16, 2049), (1, 16, 2049), (False, True)):
        q, k, *_ = tensors(batch, heads, kv_heads, q_len, kv_len, torch.bfloat16)
        grid = BlockGrid(q_len, kv_len, 64)
        bounds = torch.zeros(batch, 3, dtype=torch.int32) if causal else None
        for chooser in (Sampled(8, floor=0.1), Antidiagonal(8, floor=0.1), Pooled(floor=0.1)):
            of = replace(chooser.compared_features(Content(q, k, grid, causal, 1.0)), bounds=bounds)
            for low in {0, grid.q_blocks - 1}:
                options = low, grid.q_blocks, causal, heads > kv_heads
                scores = log_sums.scores_of_blocks(of, grid.kv_blocks, *options)
        words, counts = torch.zeros(grid.q_blocks, -(-grid.kv_blocks // 32), dtype=torch.int32), torch.zeros(grid.q_blocks).int()
        bits = torch.zeros(batch, heads, *words.shape, dtype=torch.int32)
        for rule in ("keep", "mass", "floor", "relative", "budget"):
            rules.apply_rule(scores, words, words, counts, bits, 0, rule, 0.5)
        table = compile_mask("causal", q_len, kv_len, 64)
        for maps, by_key in product((bits.flatten(0, 1), torch.zeros(batch * heads, *grid.shape, dtype=torch.bool)), (False, True)):
            select.select_entries(maps, table.by_key if by_key else table.by_query, by_key, grid.shape, 2048)


def selection_calls() -> None:
    always = {(q_len, kv_len): compile_mask("sinks(4)", q_len, kv_len, 32) for q_len, kv_len in product(LENGTHS, LENGTHS)}
    # Many turns, each with launches of its own.
    with mock.patch.object(division, "WORKSPACE", 1 << 10):
        for batch, (heads, kv_heads), (q_len, kv_len), beside in product((1, 2), HEADS, always, (False, True)):
            q, k, v, lse = tensors(batch, heads, kv_heads, q_len, kv_len, torch.bfloat16)
            picks = torch.zeros(batch, kv_heads, q_len, 3, dtype=torch.int32)
            selection = sf.BlockSelection(picks, q_len, kv_len, 64, always=always[q_len, kv_len] if beside else None)
            for parts_kernel, gathering in ((None, None), (selection_hopper_forward.picked_parts, selection_hopper_backward)):
                selection_triton.forward(q, k, v, selection, 1.0, parts_kernel=parts_kernel)
                selection_triton.backward(QueryRows(q, q, None, q, lse), k, v, selection, 1.0, gathering=gathering)


def picked_decoding_calls() -> None:
    for batch, (heads, kv_heads), q_len, kv_len, paged in product((1, 2), HEADS, LENGTHS, LENGTHS, (False, True)):
        q, k, v, _ = tensors(batch, heads, kv_heads, q_len, kv_len, torch.bfloat16)
        picks, lens = torch.zeros(batch, kv_heads, q_len, 3, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
        options = {"kv_lens": lens, "block_table": torch.zeros(batch, 3, dtype=torch.int32)} if paged else {}
        if paged:
            k, v = (torch.zeros(kv_len, kv_heads, 16, 64, dtype=q.dtype) for _ in range(2))
        eighths = torch.zeros_like(k, dtype=torch.float8_e4m3fn)
        scales = dict.fromkeys(("k_scale", "v_scale"), torch.zeros(*k.shape[:2], 1).expand(k.shape[:3]))
        for programs in (1, 2):
            selection_decode.selection_decode(q, k, v, picks, 64, 1, 1.0, splits=programs, **options)
            selection_decode.selection_decode(q, eighths, eighths, picks, 64, 1, 1.0, splits=programs, **options, **scales)


def main() -> None:
    kernels = defaultdict(list)
    for module in MODULES:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                setattr(module, name, Kernel(value))
                kernels[f"{module.__name__.removeprefix('sparse_flash.kernels.')}.{name}"] = getattr(module, name)
    not_capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False)
    one_stream = mock.patch.object(descriptors, "raw_stream", lambda device: 0)
    with mock.patch.object(launch, "keep_for_replay", lambda *_: None), not_capturing, one_stream:
        portable_calls()
        hopper_calls()
        masks_of.cache_clear()
        compile_mask.cache_clear()
        with heavy_rows_split():
            hopper_calls()
        packed_calls()
        choice_calls()
        chooser_calls()
        selection_calls()
        picked_decoding_calls()
        with mock.patch.object(launch, "can_address_tiles", lambda device: False):
            portable_calls()
    for name, kernel in kernels.items():
        print(json.dumps({"kernel": name, "compiled": kernel.compiled, "again": kernel.again, "wrong": sorted(kernel.wrong)}))


if __name__ == "__main__":
    sys.exit(main())
