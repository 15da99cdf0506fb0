"""Compiles the kernels for sm_90 without a GPU and prints the outcome of each, one JSON object per line.

    python tests/sm90.py             the kernels that the tests compile
    python tests/sm90.py --record    these, float16 and head_dim 256, with this Triton; writes tests/kernels/recorded.json, and says
                                     which differ from what it held

Run it as a separate process: kernels defined under TRITON_INTERPRET cannot be compiled.
"""

import contextlib
import io
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparse_flash.kernels.common.gluon import Constants, GluonASTSource
from sparse_flash.kernels.common.tiles import Rows, TableTensors
from sparse_flash.kernels.common.variant import NO_SWITCHES, NO_VARIANT, KernelVariant, launch_options
from sparse_flash.kernels.hopper import backward as hopper_backward
from sparse_flash.kernels.hopper import configs as hopper_configs
from sparse_flash.kernels.hopper import forward as hopper_forward
from sparse_flash.kernels.hopper.backward_arguments import BackwardPointers
from sparse_flash.kernels.hopper.descriptors import FLOAT_LAYOUT, ROW_LAYOUT, TILE_LAYOUT
from sparse_flash.kernels.hopper.scheduler import TablePointers
from sparse_flash.kernels.launch.launch import FUSED
from sparse_flash.kernels.launch.replay import parameter_sizes, parameter_types
from sparse_flash.kernels.portable import backward, configs, decode, forward

KERNELS = {
    "forward": (forward.attention_forward_kernel, configs._FORWARD),
    "grad_q": (backward.grad_q_kernel, configs._GRAD_Q),
    "grad_kv": (backward.grad_kv_kernel, configs._GRAD_KV),
}
OF_QUERIES = {"q_tensor", "out_tensor", "dout_tensor", "dq_tensor"}
OF_VALUES = {"v_tensor", "out_tensor", "dout_tensor", "dv_tensor"}
FLOATS = {"scale", "score_scale", "dropout_p"}
FLOAT_POINTERS = {"lse_ptr", "dlse_ptr", "delta_ptr", "split_out", "split_lse", "split_results"}
INT_POINTERS = {"mask_index", "row_ptr", "row_split", "row_order", "col_ptr", "col_split", "col_order", "col_idx", "row_idx"}
INT_POINTERS |= {"tile_idx", "col_tile_idx", "tile_runs", "tile_bits", "work", "counters", "arrived", "kv_lens", "block_table"}
HALF_POINTERS = {"q_ptr", "k_ptr", "v_ptr", "out_ptr"}
TARGET = GPUTarget("cuda", 90, 32)
FORWARD, BACKWARD = hopper_forward.attention_forward_kernel, hopper_backward.attention_backward_kernel


@triton.jit
def doubled(score, batch, head, q_pos, k_pos, params):
    return score * 2.0 + tl.load(params[0] + head)


@triton.jit
def derivative_of_doubled(score, batch, head, q_pos, k_pos, params):
    return 2.0


@triton.jit
def by_pair(score, batch, head, q_pos, k_pos, params):
    return score + tl.load(params[0] + (q_pos * 65536 + k_pos))


@triton.jit
def derivative_of_by_pair(score, batch, head, q_pos, k_pos, params):
    return 1.0


EVERY_TERM = KernelVariant("*i64", "fp32", *["*i32"] * 4, "*fp32", "fp32", "*fp32", "*fp32", ("*fp32",))
DROPOUT = KernelVariant("*i64", "fp32")
EVERY_SWITCH = {"SCORED": True, "REACH": 128, "SCORE": doubled, "DERIVATIVE": derivative_of_doubled}
SCORED = NO_SWITCHES | {"SCORED": True}
OF_VARIANTS = {  # of Hopper's kernels: a variant, and its switches
    "softcap": (KernelVariant(softcap="fp32"), SCORED),
    "alibi": (KernelVariant(alibi_slopes="*fp32"), SCORED),
    "own": (KernelVariant(params=("*fp32",)), EVERY_SWITCH | {"REACH": 0}),
    "lengths": (KernelVariant(q_starts="*i32", q_lens="*i32", kv_starts="*i32", kv_lens="*i32"), NO_SWITCHES),
}


def compiled(
    kernel,
    config,
    dim: int,
    sparse: bool,
    block: int = 128,
    variant=NO_VARIANT,
    switches=NO_SWITCHES,
    dim_v: int | None = None,
    dtype: str = "bf16",
    target: GPUTarget = TARGET,
    descriptors: bool = True,
):
    """variant: the types of its fields, None for absent ones. dim_v: of v, padded; dim by default. descriptors: whether the target
    can address tiles."""
    widths = dim, dim_v or dim
    constants = {"DIM": dim, "DIM_V": widths[1], "TILE_M": config.tile_m, "TILE_N": config.tile_n}
    constants |= {"TABLE_BLOCK": block, "SPARSE": sparse, **switches}
    constants |= {"HAS_DLSE": False} if "HAS_DLSE" in kernel.arg_names else {}
    tensors = {
        name: f"tensordesc<{dtype}[1,1,{config.tile_m if name in OF_QUERIES else config.tile_n},{widths[name in OF_VALUES]}]>"
        if descriptors
        else Rows(f"*{dtype}", *["i32"] * 4, None)
        for name in kernel.arg_names
        if name.endswith("_tensor")
    }
    signature, constants, attributes = arguments(kernel, {**tensors, "variant": variant}, constants)
    source = ASTSource(kernel, signature, constants, attributes)
    rows = {backward.grad_kv_kernel: config.tile_n, backward.grad_qkv_kernel: max(config.tile_m, config.tile_n)}
    options = launch_options(config, variant, switches, rows.get(kernel, config.tile_m))
    return triton.compile(source, target=target, options=options | FUSED)


def compiled_for_hopper(
    kernel,
    config,
    dim: int,
    sparse: bool,
    block: int = 128,
    split: bool = False,
    added: bool = False,
    fixed: bool = False,
    dropout: bool = False,
    ragged: bool = False,
    dtype: str = "bf16",
    variant=NO_VARIANT,
    switches=NO_SWITCHES,
    dim_v: int | None = None,
    own_starts: bool = False,
    together: bool = False,
):
    """dim, dim_v: columns in use; dim_v: of v, dim by default."""
    dim_v = dim_v or dim
    scored = switches["SCORED"], switches["REACH"]
    types = {"variant": variant._replace(seed="*i64", dropout_p="fp32") if dropout else variant, "score_scale": "fp32"}
    types["table"] = TablePointers(*["*i32"] * 6)
    if kernel is FORWARD:
        shape = replace(hopper_forward.forward_shape(config, dim, dim_v, block, own_starts, split, *scored), SPARSE=sparse)
        rows, keys, width = 64, shape.KEYS, shape.DIM // shape.PIECES
        types["outputs"] = hopper_forward.Outputs(f"*{dtype}", *["*fp32"] * 3)
    else:
        flags = own_starts, together, added, split, fixed, ragged
        shape = replace(hopper_backward.backward_shape(config, dim, dim_v, block, *flags, *scored), SPARSE=sparse)
        rows, keys, width = shape.QUERIES, shape.KEYS, shape.WIDTH
        grads = [f"*{dtype}" if own_starts else None] * 2
        types["pointers"] = BackwardPointers("*fp32", *grads, "*i32")
        sums = "i32" if fixed else "fp32"
        types["dq_rows"] = f"tensordesc<{sums}[{hopper_backward.rows_sent(shape)},256],{FLOAT_LAYOUT!r}>"
        types["dkv_rows"] = f"tensordesc<fp32[{keys * shape.DIM // 512},256],{FLOAT_LAYOUT!r}>"
        types |= dict.fromkeys(("lse_rows", "delta_rows", "unit_rows"), f"tensordesc<fp32[{rows}],{ROW_LAYOUT!r}>")
    for name in kernel.arg_names:
        if name.endswith("_tensor"):
            tile = rows if name in OF_QUERIES else keys, shape.DIM_V if name in OF_VALUES else width
            types[name] = f"tensordesc<{dtype}[1,1,{tile[0]},{tile[1]}],{TILE_LAYOUT!r}>"
    constants = {"SHAPE": Constants(shape), "SCORE": switches["SCORE"], "DERIVATIVE": switches["DERIVATIVE"]}
    if "dkv_rows" in types and shape.DIM > 128:
        constants["dkv_rows"] = None
    source = GluonASTSource(kernel, *arguments(kernel, types, constants))
    return triton.compile(source, target=TARGET, options=config.options | FUSED)


def compiled_columns(dim: int, dim_v: int, keys: int):
    """The kernel that combines splits of columns in dK and dV of unequal widths."""
    kernel, constants = hopper_backward.combine_columns_kernel, {"DIM": dim, "DIM_V": dim_v, "TILE": keys, "TABLE_BLOCK": 128}
    tensors = {f"d{name}_tensor": f"tensordesc<bf16[1,1,{keys},{width}]>" for name, width in (("k", dim), ("v", dim_v))}
    types = tensors | {"sums_ptr": "*fp32", "split_columns": "*i32", "dk_factor": "fp32", "dv_factor": "fp32"}
    source = ASTSource(kernel, *arguments(kernel, types, constants))
    return triton.compile(source, target=TARGET, options={"num_warps": 8} | FUSED)


def compiled_for_decoding(
    config,
    dim: int,
    sparse: bool,
    rows: int,
    q_len: int,
    page: int,
    dim_v: int | None = None,
    dtype: str = "bf16",
    target: GPUTarget = TARGET,
):
    """rows: of stacked queries. page: tokens per page, 0 for none. dim_v: of v; dim by default."""
    dim_v = dim_v or dim
    constants = {"HEAD_DIM": dim, "DIM": dim, "HEAD_DIM_V": dim_v, "DIM_V": dim_v}
    constants |= {"TILE_M": config.tile_m, "TILE_N": config.tile_n, "ROWS": rows}
    constants |= {"COMBINED": decode.combined_at_a_time(rows, dim_v), "SPLIT": True, "SPARSE": sparse}
    constants |= {"TABLE_BLOCK": 128 if sparse else config.tile_n, "CAUSAL": q_len > 1 and not sparse, "SEVERAL": q_len > 1}
    constants |= {"AT_END": True, "HAS_LENS": True, "PAGE": page}
    constants["VECTOR"] = 4 if dtype == "fp32" else 8
    source = ASTSource(decode.decode_kernel, *arguments(decode.decode_kernel, dict.fromkeys(HALF_POINTERS, f"*{dtype}"), constants))
    return triton.compile(source, target=target, options=config.options | FUSED)


def arguments(kernel, types: dict[str, str | tuple], constants: dict) -> tuple[dict, dict, dict]:
    """(signature, constants, attributes) of a kernel, as the compiler expects them. types: of arguments whose names do not
    determine them; a tuple's by field, None for absent ones. Pointers are aligned to 16 bytes."""
    signature, attributes, constants = {}, {}, dict(constants)
    types = {**dict.fromkeys(("table", "columns", "rows"), TableTensors(*["*i32"] * len(TableTensors._fields))), **types}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(types.get(name), tuple):
            fields = types[name]
            signature[name] = type(fields)(*("constexpr" if field is None else field for field in fields))
            constants |= {(position, number): None for number, field in enumerate(fields) if field is None}
            if isinstance(fields, Rows):
                attributes[(position, 0)] = [["tt.divisibility", 16]]
            elif not isinstance(fields, KernelVariant):
                attributes |= {(position, number): [["tt.divisibility", 16]] for number, field in enumerate(fields) if field}
        elif name in types:
            signature[name] = types[name]
            if types[name].startswith("*"):
                attributes[(position,)] = [["tt.divisibility", 16]]
        elif name in FLOAT_POINTERS | INT_POINTERS | HALF_POINTERS:
            signature[name] = "*fp32" if name in FLOAT_POINTERS else "*i32" if name in INT_POINTERS else "*bf16"
            attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = (
                "*i64" if name == "seed" else "fp32" if name in FLOATS else kernel.params[position].annotation_type or "i32"
            )
    return signature, constants, attributes


def resources(binary: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", text)}


def report(name: str, dim: int, sparse: bool, compile_kernel, *details, **options) -> dict:
    # ptxas reports C7510 to C7518 if it has to serialize products; Triton drops its log on success.
    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        result = compile_kernel(*details, **options)
    ptx = result.asm["ptx"]
    row = {"kernel": name, "dim": dim, "sparse": sparse, "shared": result.metadata.shared}
    row |= {"wgmma": ptx.count("wgmma.mma_async"), "tma": ptx.count("cp.async.bulk.tensor")}
    row |= {"warps": result.metadata.num_warps, "products": len(re.findall(r"\bmul\.(?:wide|hi)\.u32", ptx))}
    row |= {"async": ptx.count("cp.async.cg.shared.global"), "mma": len(re.findall(r"\bmma\.sync", ptx))}
    types = parameter_types(result.src.signature, parameter_sizes(ptx))
    row |= {"repeatable": types is not None and types.count("map") == len(result.metadata.tensordesc_meta or ())}
    row |= {"serialized": sorted(set(re.findall(r"C75\d\d", log.getvalue()))), "log": len(log.getvalue())}
    return row | resources(result.asm["cubin"])


DECODING = ((False, 4, 1, 0), (True, 4, 1, 0), (True, 4, 1, 16), (True, 32, 16, 128))  # sparse, rows, q_len, page


def of_the_tests():
    """Calls of ``report``, one for each kernel that the tests compile."""
    for dim in (64, 128):
        for sparse, rows, q_len, page in DECODING:
            config = configs.decode_config(torch.bfloat16, dim, 128, rows)
            yield partial(report, "decode", dim, sparse, compiled_for_decoding, config, dim, sparse, rows, q_len, page)
        for sparse in (False, True):
            for name, (kernel, table) in KERNELS.items():
                yield partial(report, name, dim, sparse, compiled, kernel, table[dim], dim, sparse)
            for split in (False, True):
                details = FORWARD, hopper_configs.FORWARD[dim], dim, sparse, 128, split
                yield partial(report, "hopper_forward", dim, sparse, compiled_for_hopper, *details)
            details = BACKWARD, hopper_configs.BACKWARD[dim], dim, sparse, 128
            for added, fixed in ((False, False), (True, False), (False, True)):
                yield partial(report, "hopper_backward", dim, sparse, compiled_for_hopper, *details, False, added, fixed)
            if sparse and dim == 128:
                yield partial(
                    report, "hopper_backward_of_heads_together", dim, sparse, compiled_for_hopper, *details, together=True
                )
            # Splits of heavy columns; a last tile with fewer keys.
            more = {"split": True} if sparse else {"ragged": True}
            yield partial(report, "hopper_backward", dim, sparse, compiled_for_hopper, *details, **more)
    for dim in (64, 128):
        details = FORWARD, hopper_configs.FORWARD[dim], dim, False, 128, False, False, False, True
        yield partial(report, "hopper_forward_of_dropout", dim, False, compiled_for_hopper, *details)
        details = BACKWARD, hopper_configs.BACKWARD_OF_DROPOUT[dim], dim, False, 128
        for fixed, ragged in ((False, False), (True, False), (False, True)):
            yield partial(
                report, "hopper_backward_of_dropout", dim, False, compiled_for_hopper, *details, False, False, fixed, True, ragged
            )
        details = backward.grad_qkv_kernel, configs._GRAD_KV[dim], dim, True
        yield partial(report, "grad_qkv", dim, True, compiled, *details)
    for dim in (64, 128):
        details = FORWARD, hopper_configs.FORWARD_OF_64[dim], dim, True, 64, True
        yield partial(report, "hopper_forward_of_64", dim, True, compiled_for_hopper, *details)
        for name, table, sparse in (
            ("192", hopper_configs.FORWARD_OF_192, False),
            ("tall", hopper_configs.FORWARD_OF_192, True),
            ("short", hopper_configs.SHORT_FORWARD, False),
            ("short", hopper_configs.SHORT_FORWARD_OF_TABLES, True),
        ):
            if dim in table:
                details = FORWARD, table[dim], dim, sparse
                yield partial(report, f"hopper_forward_of_{name}", dim, sparse, compiled_for_hopper, *details)
        details = BACKWARD, hopper_configs.BACKWARD_OF_64[dim], dim, True, 64
        for option in ("split", "added", "fixed"):
            yield partial(report, "hopper_backward_of_64", dim, True, compiled_for_hopper, *details, **{option: True})
        details = FORWARD, hopper_configs.FORWARD[dim], dim, True
        yield partial(report, "hopper_forward_of_documents", dim, True, compiled_for_hopper, *details, own_starts=True)
        details = BACKWARD, hopper_configs.BACKWARD[dim], dim, True
        for option in ("sparse", "added", "fixed"):
            options = {option: True, "own_starts": True} if option != "sparse" else {"own_starts": True}
            yield partial(report, "hopper_backward_of_documents", dim, True, compiled_for_hopper, *details, **options)
    # Products over 96 of 128 columns.
    details = FORWARD, hopper_configs.FORWARD[128], 96
    for sparse, split in ((False, False), (True, True)):
        yield partial(report, "hopper_forward", 96, sparse, compiled_for_hopper, *details, sparse, split=split)
    details = BACKWARD, hopper_configs.BACKWARD[128], 96, True
    for option in ("added", "split", "fixed"):
        yield partial(report, "hopper_backward", 96, True, compiled_for_hopper, *details, **{option: True})
    for name, (kernel, table) in KERNELS.items():  # DeepSeek's: 192, padded, and 128 for v
        yield partial(
            report, f"{name}_of_192_and_128", 256, True, compiled, kernel, table[256], 256, True, 128, NO_VARIANT, NO_SWITCHES, 128
        )
        yield partial(report, f"{name}_of_dropout", 64, False, compiled, kernel, table[64], 64, False, 128, DROPOUT)
        yield partial(report, f"{name}_of_terms", 64, False, compiled, kernel, table[64], 64, False, 128, EVERY_TERM, EVERY_SWITCH)
    details = backward.grad_qkv_kernel, configs._GRAD_KV[64], 64, True, 128, EVERY_TERM, EVERY_SWITCH
    yield partial(report, "grad_qkv_of_terms", 64, True, compiled, *details)
    for name, (given, switches) in OF_VARIANTS.items():
        for dim, block in ((64, 128), (128, 128), (128, 64)):
            forward_configs = hopper_configs.FORWARD_OF_64 if block == 64 else hopper_configs.FORWARD
            backward_config = hopper_configs.backward_of_variant(dim, block, switches["SCORED"])
            for kernel, pass_, config in (
                (FORWARD, "forward", forward_configs[dim]),
                (BACKWARD, "backward", backward_config),
            ):
                details = kernel, config, dim, True, block
                row = f"hopper_{pass_}_of_{name}" + ("" if block > 64 else "_of_64" if config.programs > 1 else "_of_64_alone")
                options = {"variant": given, "switches": switches}
                yield partial(report, row, dim, True, compiled_for_hopper, *details, **options)
    yield from of_wide_forward()
    yield from of_wide_backward()


def of_wide_forward():
    """Compiles Hopper's forward kernel for head dimensions above 128, and for v with its own head_dim."""
    for dim, dim_v in ((256, 256), (192, 192), (192, 128)):
        row = "hopper_forward" if dim == dim_v else f"hopper_forward_of_{dim}_and_{dim_v}"
        columns = hopper_forward.columns_of(dim, dim_v)

        def compiles(row, sparse, block, variant=None, plain=True, dim=dim, dim_v=dim_v, columns=columns, **options):
            config = hopper_configs.wide_forward(columns["DIM"], columns["DIM_V"], sparse and block, 1, 0, plain)
            given, switches = OF_VARIANTS[variant] if variant else (NO_VARIANT, NO_SWITCHES)
            options |= {"dim_v": dim_v, "variant": given, "switches": switches}
            details = FORWARD, config, dim, sparse, block
            row += "" if block > 64 else "_of_64" if config.programs > 1 else "_of_64_alone"
            return partial(report, row, dim, sparse, compiled_for_hopper, *details, **options)

        yield compiles(row, False, 128)
        yield compiles(row, True, 128, split=True)
        yield compiles(row, True, 64, split=True)
        yield compiles(f"{row}_of_dropout", False, 128, plain=False, dropout=True)
        for variant in ("alibi", "lengths") if dim != dim_v or dim == 256 else ():
            yield compiles(f"{row}_of_{variant}", True, 128, variant, plain=False)


def of_wide_backward():
    """The backward kernel of wide heads: head_dim 256 and 192, and 192 with 128 for v."""
    kernel, config = BACKWARD, hopper_configs.BACKWARD[256]
    paired = BACKWARD, hopper_configs.PAIRED_BACKWARD
    for dim, dim_v in ((256, 256), (192, 192), (192, 128)):
        name = "hopper_backward" if dim_v == dim else f"hopper_backward_of_{dim}_and_{dim_v}"
        for sparse, option in ((False, "ragged"), (True, "split"), (True, "added"), (True, "fixed")):
            details = *((kernel, config) if dim_v == dim else paired), dim, sparse
            yield partial(report, name, dim, sparse, compiled_for_hopper, *details, dim_v=dim_v, **{option: True})
    details = kernel, hopper_configs.BACKWARD_OF_64[256], 192, True, 64
    yield partial(report, "hopper_backward_of_192_and_128_of_64_alone", 192, True, compiled_for_hopper, *details, dim_v=128)
    yield partial(report, "combine_columns_of_192_and_128", 256, True, compiled_columns, 256, 128, config.keys)
    details = kernel, hopper_configs.BACKWARD_OF_64[256], 256, True, 64
    yield partial(report, "hopper_backward_of_64_alone", 256, True, compiled_for_hopper, *details, split=True)
    details = kernel, hopper_configs.BACKWARD_OF_DROPOUT[256], 256, True
    yield partial(report, "hopper_backward_of_dropout", 256, True, compiled_for_hopper, *details, dropout=True)
    for name, (given, switches) in OF_VARIANTS.items():
        config = hopper_configs.backward_of_variant(256, 128, switches["SCORED"])
        options = {"variant": given, "switches": switches}
        yield partial(report, f"hopper_backward_of_{name}", 256, True, compiled_for_hopper, kernel, config, 256, True, **options)


def of_the_record():
    """Compiles the kernels of the tests, and more that take long."""
    yield from of_the_tests()
    for name, (kernel, table) in KERNELS.items():
        for dim in (64, 128):
            yield partial(report, f"{name}_of_fp16", dim, True, compiled, kernel, table[dim], dim, True, dtype="fp16")
        for sparse in (False, True):
            yield partial(report, name, 256, sparse, compiled, kernel, table[256], 256, sparse)
    for dim in (64, 128):
        for name, kernel, table in (
            ("hopper_forward", FORWARD, hopper_configs.FORWARD),
            ("hopper_backward", BACKWARD, hopper_configs.BACKWARD),
        ):
            yield partial(report, f"{name}_of_fp16", dim, True, compiled_for_hopper, kernel, table[dim], dim, True, dtype="fp16")
    for dim, width, table, block in (
        (64, 64, hopper_configs.BACKWARD, 128),
        (96, 128, hopper_configs.BACKWARD, 128),
        (64, 64, hopper_configs.BACKWARD_OF_64, 64),
        (128, 128, hopper_configs.BACKWARD_OF_64, 64),
    ):
        details = BACKWARD, table[width], dim, True, block
        name = "hopper_backward_of_heads_together" + "_of_64" * (block == 64)
        yield partial(report, name, dim, True, compiled_for_hopper, *details, together=True)
    yield partial(
        report,
        "decode",
        256,
        True,
        compiled_for_decoding,
        configs.decode_config(torch.bfloat16, 256, 128, 32),
        256,
        True,
        32,
        16,
        128,
    )


def outcomes(reports: Iterable[Callable[[], dict]]) -> Iterator[dict]:
    """Returns the results of the calls, in order. As many processes run them as there are cores."""
    global _reports
    _reports = list(reports)  # before the processes are forked
    with multiprocessing.get_context("fork").Pool() as pool:
        yield from pool.imap(_outcome, range(len(_reports)))


def _outcome(number: int) -> dict:
    return _reports[number]()


RECORD = Path(__file__).with_name("kernels") / "recorded.json"
RECORDED = ("kernel", "dim", "sparse", "reg", "stack", "shared")


def write_record(rows: list[dict]) -> int:
    """Returns 1 if anything differs from the record for this Triton, which is then rewritten, else 0."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    before, now = record.get(triton.__version__, []), [[row[name] for name in RECORDED] for row in rows]
    differing = [(old, new) for old, new in zip(before, now, strict=False) if old != new]
    print(f"{len(now)} kernels, {len(before)} before; {len(differing)} differ", *differing, sep="\n", file=sys.stderr)
    record[triton.__version__] = now
    lines = [f"{json.dumps(version)}: [\n" + ",\n".join(map(json.dumps, record[version])) + "\n]" for version in sorted(record)]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return int(before != now)


if __name__ == "__main__":
    knobs.compilation.always_compile = True  # a result from Triton's cache has no log
    if sys.argv[1:] == ["--record"]:
        sys.exit(write_record(list(outcomes(of_the_record()))))
    for row in outcomes(of_the_tests()):
        print(json.dumps(row), flush=True)
