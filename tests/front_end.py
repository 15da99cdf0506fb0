"""Has Triton's front end read the portable kernels for tensors whose lengths and strides are 1, without a GPU. Prints the kernels
that it has read as a JSON object, and one for each code that it refuses: the kernel, and why.

Triton makes constants of integers that are 1, also within records, and its releases differ in where they lose one.

Run it as a separate process: kernels defined under TRITON_INTERPRET cannot be compiled.
"""

import json
import sys
from collections import defaultdict
from itertools import product
from unittest import mock

import torch
from specialization import BACKEND, TARGET, checked_variant, masks_of, tensors
from triton._C.libtriton import ir
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

import sparse_flash as sf
from sparse_flash.backends import QueryRows
from sparse_flash.kernels.launch import launch
from sparse_flash.kernels.portable import backward, configs, decode, forward
from sparse_flash.kernels.selection import backward as selection_backward
from sparse_flash.kernels.selection import forward as selection_forward
from sparse_flash.kernels.selection import lists
from sparse_flash.selection import triton as selection_triton

LENGTHS = ((1, 1), (1, 33), (33, 1))  # of queries and of keys
HEAD_DIM = 8  # 16 bytes, which is the unit of strides
READ, REFUSED = set(), {}


class Kernel:
    """Stands in for a kernel: instead of launching it, has it read."""

    def __init__(self, kernel: JITFunction):
        self.kernel, self.fn, self.params = kernel, kernel.fn, kernel.params
        self.binder = create_function_from_signature(kernel.signature, kernel.params, BACKEND)

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.warmup(*arguments, grid=grid, **options) or defaultdict(lambda: lambda *_: None)

    def warmup(self, *arguments, grid, **options) -> None:
        name = self.fn.__name__
        bound, specialization, rest = self.binder(*arguments, **options)
        options, *code = self.kernel._pack_args(BACKEND, options, bound, specialization, rest)
        if (known := f"{name} {code}") in READ:
            return
        READ.add(known)
        context = ir.context()
        ir.load_dialects(context)
        BACKEND.load_dialects(context)
        try:
            beside = BACKEND.get_codegen_implementation(options), BACKEND.get_module_map()
            ASTSource(self.kernel, *code).make_ir(TARGET, options, *beside, context)
        except Exception as error:
            while error.__cause__:
                error = error.__cause__
            REFUSED[name, str(error)] = None


def attention_calls() -> None:
    for q_len, kv_len in LENGTHS:
        q, k, v, lse = tensors(1, 1, 1, q_len, kv_len, torch.bfloat16, HEAD_DIM)
        calls = list(product(masks_of(1, q_len, kv_len, 64)[:2], checked_variant(1, 1)))
        for mask, variant in calls if q_len == kv_len else (calls[0], calls[-1]):
            forward.attention_forward(q, k, v, mask, 1.0, variant)
            for dlse, most in product((None, lse), (0, 1 << 30)):  # two launches and one
                with mock.patch.object(configs, "ONE_LAUNCH_TOKENS", most):
                    backward.attention_backward(q, dlse, q, k, v, q, lse, mask, 1.0, variant)
        decode.attention_decode(q, k, v, None, 1.0, kv_lens=torch.ones(1, dtype=torch.int32), causal=True, splits=2)


def selection_calls() -> None:
    for (q_len, kv_len), beside in product(LENGTHS, (False, True)):
        q, k, v, lse = tensors(1, 1, 1, q_len, kv_len, torch.bfloat16, HEAD_DIM)
        always = sf.compile_mask("sinks(4)", q_len, kv_len, 32) if beside else None
        selection = sf.BlockSelection(torch.zeros(1, 1, q_len, 3, dtype=torch.int32), q_len, kv_len, 64, always=always)
        selection_triton.forward(q, k, v, selection, 1.0)
        selection_triton.backward(QueryRows(q, q, None, q, lse), k, v, selection, 1.0)


def main() -> None:
    for module in (forward, backward, decode, selection_backward, selection_forward, lists):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                setattr(module, name, Kernel(value))
    with (
        mock.patch.object(launch, "keep_for_replay", lambda *_: None),
        mock.patch.object(launch, "can_address_tiles", lambda device: False),
    ):
        attention_calls()
        selection_calls()
    print(json.dumps({"read": sorted({known.split()[0] for known in READ})}))
    for kernel, why in REFUSED:
        print(json.dumps({"kernel": kernel, "why": why}))


if __name__ == "__main__":
    sys.exit(main())
