"""What each kernel is launched with: the package's launchers run on tensors of a CPU, and stand-ins take the place of the kernels.

So the programs that compile kernels (``sm90``, ``chips``) or ask Triton about them (``specialization``) share one list of kernels
and of calls, and no constant is written down twice. They are processes of their own: kernels defined under TRITON_INTERPRET cannot
be compiled.
"""

import pkgutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from typing import NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from oracle import record
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import sparse_flash as sf
from sparse_flash import kernels
from sparse_flash.choosers import kernels as choosers_kernels
from sparse_flash.choosers.features import Content
from sparse_flash.core.results import QueryRows
from sparse_flash.core.variant import Variant
from sparse_flash.kernels.common.gluon import GluonASTSource
from sparse_flash.kernels.hopper import backward as hopper_backward
from sparse_flash.kernels.hopper import descriptors
from sparse_flash.kernels.hopper import forward as hopper_forward
from sparse_flash.kernels.launch import launch
from sparse_flash.kernels.portable import backward, configs, decode, forward, merge
from sparse_flash.kernels.tables import splits
from sparse_flash.masks.grid import BlockGrid
from sparse_flash.packed import kernels as packed_kernels
from sparse_flash.packed.kernels import spans
from sparse_flash.selection import kernels as selection_kernels
from sparse_flash.selection import triton as selection_triton
from sparse_flash.selection.choice import BlockChoice
from sparse_flash.selection.kernels import decode as selection_decode
from sparse_flash.selection.kernels import hopper_backward as gathering
from sparse_flash.selection.kernels import hopper_forward as selection_hopper_forward
from sparse_flash.selection.kernels import hopper_pick_blocks, pick_blocks

SM90 = GPUTarget("cuda", 90, 32)
FOLDERS = kernels, choosers_kernels, packed_kernels, selection_kernels
FOUND = [one for folder in FOLDERS for one in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}.")]
MODULES = [import_module(one.name) for one in FOUND if not one.ispkg]


@cache
def binder_of(kernel: JITFunction, backend) -> Callable:
    """From a launch's arguments to (arguments by name, what Triton specializes on, options)."""
    return create_function_from_signature(kernel.signature, kernel.params, backend)


class Launch(NamedTuple):
    """given: constants and options, by name."""

    kernel: JITFunction
    arguments: tuple
    given: dict

    @property
    def name(self) -> str:
        """Kernels for Hopper, and only these, start with "hopper"."""
        name = self.kernel.fn.__name__.removesuffix("_kernel").removeprefix("attention_")
        return f"hopper_{name}" if self.of_hopper and not name.startswith("hopper") else name

    @property
    def of_hopper(self) -> bool:
        return ".hopper" in self.kernel.fn.__module__

    def code(self, backend) -> tuple:
        """(options, signature, constants, attributes), by which Triton tells codes of a kernel apart."""
        bound, specialization, rest = binder_of(self.kernel, backend)(*self.arguments, **self.given)
        return self.kernel._pack_args(backend, rest, bound, specialization, rest)

    def compiled(self, target: GPUTarget = SM90):
        options, *code = self.code(make_backend(target))
        source = GluonASTSource if self.kernel.is_gluon() else ASTSource
        return triton.compile(source(self.kernel, *code), target=target, options=options.__dict__)


class Taken:
    """Stands in for a kernel: each code that would be compiled goes to ``take``, and nothing is launched."""

    def __init__(self, kernel: JITFunction, take: Callable[[Launch], None]):
        self.kernel, self.fn, self.params, self.take = kernel, kernel.fn, kernel.params, take

    def warmup(self, *arguments, grid, **given) -> None:
        self.take(Launch(self.kernel, arguments, given))

    def __getitem__(self, grid):
        return lambda *arguments, **given: defaultdict(lambda: lambda *_: None)  # code, which is launched again by a grid


@contextmanager
def replaced(stand_in: Callable, chip: configs.Gpu = configs.HOPPER, by_pointers: bool = False):
    """Within it, ``stand_in(kernel)`` takes the place of each kernel. Yields these, by their names. chip: what the portable kernels
    run on. by_pointers: whether it cannot address tiles."""
    made: dict[str, object] = {}
    with ExitStack() as stack:
        for module in MODULES:
            for name, kernel in list(vars(module).items()):
                if isinstance(kernel, JITFunction) and name.endswith("_kernel"):
                    known = f"{kernel.fn.__module__.removeprefix('sparse_flash.')}.{kernel.fn.__name__}"
                    made[known] = made.get(known) or stand_in(kernel)
                    stack.enter_context(mock.patch.object(module, name, made[known]))
            if hasattr(module, "detect_gpu"):
                stack.enter_context(mock.patch.object(module, "detect_gpu", lambda device: chip))
        for owner, name, value in (
            (launch, "keep_for_replay", lambda *_: None),
            (launch, "can_address_tiles", lambda device: not by_pointers),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (descriptors, "raw_stream", lambda device: 0),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.dict(launch.compiled_kernels, clear=True))
        yield made


def launches_of(call: Callable[[], object], **options) -> list[Launch]:
    """One launch for each code that a call needs. options: of ``replaced``."""
    found: list[Launch] = []
    with replaced(lambda kernel: Taken(kernel, found.append), **options):
        call()
    return found


# What is added to scores.


@triton.jit
def by_pair(score, batch, head, q_pos, k_pos, params):
    return score + tl.load(params[0] + (q_pos * 65536 + k_pos))


@triton.jit
def derivative_of_by_pair(score, batch, head, q_pos, k_pos, params):
    return 1.0


def in_torch(score, batch, head, q_pos, k_pos, params):
    return score


OWN = {"score_mod": sf.ScoreFunction(in_torch, by_pair, derivative_of_by_pair), "score_params": (torch.zeros(4),)}


def variant_of(names: str, batch: int = 1, heads: int = 2) -> Variant | None:
    """names: of what a call adds, separated by spaces; none: None."""
    lengths = torch.zeros(batch, dtype=torch.int32)
    of_heads = torch.zeros(batch, heads)
    every = {
        "dropout": {"seed": torch.zeros(1, dtype=torch.int64), "dropout_p": 0.5},
        "lengths": dict.fromkeys(("q_starts", "q_lens", "kv_starts", "kv_lens"), lengths),
        "alibi": {"alibi_slopes": of_heads},
        "softcap": {"softcap": 2.0},
        "bias": {"rel_bias": torch.zeros(heads, 257), "learned": True},
        "frozen_bias": {"rel_bias": torch.zeros(heads, 257)},
        "own": OWN,
        "sinks": {"sinks": torch.zeros(heads, dtype=torch.bfloat16), "learned_sinks": True},
    }
    fields: dict = {}
    for name in names.split():
        fields |= every[name]
    return Variant(**fields) if fields else None


# Calls.


class Shape(NamedTuple):
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    q_len: int = 1024
    kv_len: int = 1024
    dim: int = 64
    dim_v: int = 0  # dim
    dtype: torch.dtype = torch.bfloat16

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, out and lse."""
        queries, keys = (self.batch, self.heads, self.q_len), (self.batch, self.kv_heads, self.kv_len)
        dim_v = self.dim_v or self.dim
        sizes = (*queries, self.dim), (*keys, self.dim), (*keys, dim_v), (*queries, dim_v)
        return *(torch.zeros(size, dtype=self.dtype) for size in sizes), torch.zeros(queries)


def portable_attention(
    shape: Shape, mask, variant=None, has_dlse: bool = True, passes: tuple[str, ...] = ("forward", "two", "one")
):
    """passes: "two" and "one": the backward pass in so many launches."""
    q, k, v, out, lse = shape.tensors()
    call = record(q, k, v, mask, 1.0, variant)
    if "forward" in passes:
        forward.attention_forward(call)
    for name, most in (("two", 0), ("one", 1 << 30)):
        if name in passes:
            with mock.patch.object(configs, "ONE_LAUNCH_TOKENS", most):
                backward.attention_backward(call, out, lse if has_dlse else None, out, lse)


def hopper_attention(shape: Shape, mask, variant=None, deterministic: bool = False, passes=("forward", "backward")):
    q, k, v, out, lse = shape.tensors()
    call = record(q, k, v, mask, 1.0, variant, deterministic)
    if "forward" in passes:
        hopper_forward.attention_forward(call)
    if "eight bits" in passes:
        hopper_forward.attention_forward_of_eight_bits(call)
    if "backward" in passes:
        hopper_backward.attention_backward(call, out, None, out, lse)


def decoding(shape: Shape, mask=None, page: int = 0, scales: str = "", **options):
    """scales: "of heads" or "of tokens", of a cache in e4m3."""
    q, k, v, *_ = shape.tensors()
    if page:
        options["block_table"] = torch.zeros(shape.batch, -(-shape.kv_len // page), dtype=torch.int32)
        k, v = (torch.zeros(shape.kv_len, shape.kv_heads, page, t.shape[3], dtype=t.dtype) for t in (k, v))
    if scales:
        k, v = (t.to(torch.float8_e4m3fn) for t in (k, v))
        scale = torch.zeros(k.shape[:3]) if scales == "of tokens" else torch.zeros(*k.shape[:2], 1).expand(k.shape[:3])
        options |= {"k_scale": scale, "v_scale": scale}
    decode.attention_decode(q, k, v, mask, 1.0, **options)


def selected_attention(shape: Shape, picks: int, block: int, always=None, hopper=(False, True), masses=False):
    """Over blocks that queries picked. hopper: whether by the kernels for these chips. masses: of the blocks too."""
    q, k, v, out, lse = shape.tensors()
    picked = torch.zeros(shape.batch, shape.kv_heads, shape.q_len, picks, dtype=torch.int32)
    selection = sf.BlockSelection(picked, shape.q_len, shape.kv_len, block, always=always)
    for of_hopper in hopper:
        own = {"parts_kernel": selection_hopper_forward.picked_parts} if of_hopper else {}
        selection_triton.forward(q, k, v, selection, 1.0, **own)
        rows = QueryRows(out, out, None, out, lse)
        selection_triton.backward(rows, k, v, selection, 1.0, **({"gathering": gathering} if of_hopper else {}))
    if masses:
        of_blocks = selection_triton.block_lse(q, k, selection, 1.0)
        selection_triton.block_lse_backward(of_blocks, q, k, of_blocks, selection, 1.0)


def selected_decoding(shape: Shape, picks: int, block: int, page: int = 0, e4m3: bool = False, splits: int | None = None):
    q, k, v, *_ = shape.tensors()
    picked, options = torch.zeros(shape.batch, shape.kv_heads, shape.q_len, picks, dtype=torch.int32), {}
    if page:
        table = torch.zeros(shape.batch, -(-shape.kv_len // page), dtype=torch.int32)
        options = {"kv_lens": torch.zeros(shape.batch, dtype=torch.int32), "block_table": table}
        k, v = (torch.zeros(shape.kv_len, shape.kv_heads, page, t.shape[3], dtype=t.dtype) for t in (k, v))
    if e4m3:
        k, v = (t.to(torch.float8_e4m3fn) for t in (k, v))
        options |= dict.fromkeys(("k_scale", "v_scale"), torch.zeros(*k.shape[:2], 1).expand(k.shape[:3]))
    selection_decode.selection_decode(q, k, v, picked, block, 1.0, splits=splits, **options)


def choice(shape: Shape, kind: str, block: int, picks: int, bounds=None, compressed: int = 16):
    """Of blocks by their scores. kind: "mean", "max", "softmax" or "given". compressed: how many keys, of "softmax"."""
    q, k, *_ = shape.tensors()
    queries, keys, lse = q, k, None
    if kind == "mean":
        keys = torch.zeros(shape.batch, shape.kv_heads, shape.kv_len // block, shape.dim)
    elif kind == "softmax":
        keys = torch.zeros(shape.batch, shape.kv_heads, compressed, shape.dim, dtype=shape.dtype)
        lse = torch.zeros(q.shape[:3])
    elif kind == "given":
        queries, keys = torch.zeros(shape.batch, shape.heads, shape.q_len, -(-shape.kv_len // block)), None
    pickers = shape.heads if kind == "given" else shape.kv_heads
    asked = BlockChoice(kind, pickers, picks, block, shape.kv_len, 32, 16)
    pick_blocks.pick_blocks(queries, keys, asked, bounds, lse)
    if hopper_pick_blocks.supports(queries, alone := asked._replace(heads=shape.heads)):
        hopper_pick_blocks.pick_blocks(queries, keys, alone, bounds)


def features_of(shape: Shape, chooser, causal: bool):
    """What a chooser compares, and the grid of its blocks."""
    q, k, *_ = shape.tensors()
    grid = BlockGrid(shape.q_len, shape.kv_len, chooser.block_size)
    return chooser.compared_features(Content(q, k, grid, causal, 1.0)), grid


def packed(documents: int, tokens: int, rows: int):
    """The tables of packed documents."""
    ends = torch.zeros(documents + 1, dtype=torch.int32)
    queries, keys = spans.lay_out(ends, tokens, tokens), spans.lay_out(ends, tokens + 15, rows)
    mask = sf.compile_mask("causal", 128 * rows)
    splits.split_rows(mask.by_query[:3], mask.by_key[:3], 64, 64, 64, 16 * tokens)
    runs = torch.zeros(2, tokens, dtype=torch.int32)
    spans.fill_spans(queries, keys, runs, rows, tokens, tokens, 64, 64, 128)
    spans.fill_spans(queries, queries, runs, rows, rows, 0, 64, 64, 128, tokens)


def merges(dtype: torch.dtype, dim: int, moved: bool, heads: int = 4, tokens: int = 256):
    """Of results, and where rows are moved of gradients."""
    out, some = torch.empty(1, heads, tokens, dim, dtype=dtype), torch.arange(2)
    lse = torch.empty(1, heads, tokens, dtype=torch.promote_types(dtype, torch.float32))
    merge.merge_results(out, lse, out, lse)
    if moved:
        merge.add_rows(out, out, some, tokens // 2, (torch.arange(3), some))
        merge.copy_rows(out, out, some, tokens // 2)
