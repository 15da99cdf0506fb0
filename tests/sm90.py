"""Compiles the kernels for sm_90 without a GPU and prints the outcome of each, one JSON object per line.

Compare its lines before and after a change that should not affect the compiled code. Run it as a separate process: kernels defined
under TRITON_INTERPRET cannot be compiled.
"""

import contextlib
import io
import json
import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

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
from sparse_flash.kernels.hopper.descriptors import EIGHT_BIT_LAYOUTS, FLOAT_LAYOUT, ROW_LAYOUT, TILE_LAYOUT
from sparse_flash.kernels.hopper.division import plain_backward_config
from sparse_flash.kernels.hopper.scheduler import TablePointers
from sparse_flash.kernels.launch.launch import FUSED
from sparse_flash.kernels.launch.replay import parameter_sizes, parameter_types
from sparse_flash.kernels.portable import backward, configs, decode, forward

TILES = {name: {dim: configs.HOPPER.config(name, torch.bfloat16, dim) for dim in (64, 128, 256)} for name in configs.KERNELS}
KERNELS = {
    "forward": (forward.attention_forward_kernel, TILES["forward"]),
    "grad_q": (backward.grad_q_kernel, TILES["grad_q"]),
    "grad_kv": (backward.grad_kv_kernel, TILES["grad_kv"]),
}
FORWARD, BACKWARD = hopper_forward.attention_forward_kernel, hopper_backward.attention_backward_kernel
OF_QUERIES = {"q_tensor", "out_tensor", "dout_tensor", "dq_tensor"}
OF_VALUES = {"v_tensor", "out_tensor", "dout_tensor", "dv_tensor"}
FLOATS = {"scale", "score_scale", "dropout_p"}
FLOAT_POINTERS = {"lse_ptr", "dlse_ptr", "delta_ptr", "split_out", "split_lse", "split_results", "k_scale", "v_scale"}
INT_POINTERS = {"mask_index", "row_ptr", "row_split", "row_order", "col_ptr", "col_split", "col_order", "col_idx", "row_idx"}
INT_POINTERS |= {"tile_idx", "col_tile_idx", "tile_runs", "tile_bits", "work", "counters", "arrived", "kv_lens", "block_table"}
INT_POINTERS.add("kv_starts")
HALF_POINTERS = {"q_ptr", "k_ptr", "v_ptr", "out_ptr"}
TARGET = GPUTarget("cuda", 90, 32)


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
        types["outputs"] = hopper_forward.Outputs("*bf16", *["*fp32"] * 3)
        types["scales"] = hopper_forward.Scales(*["*fp32"] * 4) if shape.EIGHT else hopper_forward.NO_SCALES
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
            kind, layout = dtype, TILE_LAYOUT
            if kernel is FORWARD and shape.EIGHT and name != "out_tensor":
                tile = tile[::-1] if name == "v_tensor" else tile
                kind, layout = "fp8e4nv", EIGHT_BIT_LAYOUTS[tile[1]]
            types[name] = f"tensordesc<{kind}[1,1,{tile[0]},{tile[1]}],{layout!r}>"
    constants = {"SHAPE": Constants(shape), "SCORE": switches["SCORE"], "DERIVATIVE": switches["DERIVATIVE"]}
    if "dkv_rows" in types and shape.DIM > 128:
        constants["dkv_rows"] = None
    source = GluonASTSource(kernel, *arguments(kernel, types, constants))
    return triton.compile(source, target=TARGET, options=config.options | FUSED)


def compiled_columns(kernel, config, dim: int, sparse: bool, dim_v: int):
    """Compiles the kernel that combines splits of columns in dK and dV of unequal widths."""
    constants = {"DIM": dim, "DIM_V": dim_v, "TILE": config.keys, "TABLE_BLOCK": 128}
    tensors = {f"d{name}_tensor": f"tensordesc<bf16[1,1,{config.keys},{width}]>" for name, width in (("k", dim), ("v", dim_v))}
    types = tensors | {"sums_ptr": "*fp32", "split_columns": "*i32", "dk_factor": "fp32", "dv_factor": "fp32"}
    source = ASTSource(kernel, *arguments(kernel, types, constants))
    return triton.compile(source, target=TARGET, options={"num_warps": 8} | FUSED)


def compiled_for_decoding(
    kernel,
    config,
    dim: int,
    sparse: bool,
    rows: int,
    q_len: int,
    page: int,
    dim_v: int | None = None,
    dtype: str = "bf16",
    target: GPUTarget = TARGET,
    scales: str | None = None,
):
    """rows: of stacked queries. page: tokens per page, 0 for none. dim_v: of v; dim by default. scales: "of heads" or
    "of tokens", of an e4m3 cache."""
    dim_v = dim_v or dim
    constants = {"HEAD_DIM": dim, "DIM": dim, "HEAD_DIM_V": dim_v, "DIM_V": dim_v}
    constants |= {"TILE_M": config.tile_m, "TILE_N": config.tile_n, "ROWS": rows}
    constants |= {"COMBINED": decode.combined_at_a_time(rows, dim_v), "SPLIT": True, "SPARSE": sparse}
    constants |= {"TABLE_BLOCK": 128 if sparse else config.tile_n, "CAUSAL": q_len > 1 and not sparse, "SEVERAL": q_len > 1}
    constants |= {"AT_END": True, "HAS_LENS": True, "HAS_STARTS": page == 0, "PAGE": page}
    constants["VECTOR"] = 16 if scales else 4 if dtype == "fp32" else 8
    constants |= {"SCALED": scales is not None, "BY_TOKEN": scales == "of tokens"}
    types = dict.fromkeys(HALF_POINTERS, f"*{dtype}") | (dict.fromkeys(("k_ptr", "v_ptr"), "*fp8e4nv") if scales else {})
    source = ASTSource(kernel, *arguments(kernel, types, constants))
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


def dumped(binary: bytes, option: str) -> str:
    """Returns what cuobjdump prints about a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(binary: bytes) -> dict[str, int]:
    """Returns registers per thread ("reg") and bytes of stack per thread ("stack")."""
    text = dumped(binary, "--dump-resource-usage")
    return {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", text)}


def spills_in_full_blocks(binary: bytes) -> int:
    """Returns how many instructions access the stack in the loop over full blocks. It is the innermost loop with products that
    loads least from global memory, as the others load masks."""
    code = [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", dumped(binary, "-sass"))]
    jumps = ((re.match(r"@\S+ BRA\S*.*?0x([0-9a-f]+)", text), end) for end, text in code)
    loops = [(int(to[1], 16), end) for to, end in jumps if to and int(to[1], 16) <= end]

    def count(loop: tuple[int, int], names: str) -> int:
        begin, end = loop
        return sum(begin <= address <= end and re.search(rf"\b({names})\b", text) is not None for address, text in code)

    loops = [loop for loop in loops if count(loop, "HGMMA|QGMMA|HMMA")]
    innermost = [(a, b) for a, b in loops if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)]
    loads = [count(loop, "LDG|LDGSTS") for loop in innermost]
    return max((count(loop, "LDL|STL") for loop, n in zip(innermost, loads, strict=True) if n == min(loads)), default=0)


def report(name: str, compile_kernel, kernel, config, dim: int, sparse: bool, *details, **options) -> dict:
    # ptxas reports C7510 to C7518 if it has to serialize products; Triton drops its log on success.
    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        result = compile_kernel(kernel, config, dim, sparse, *details, **options)
    ptx = result.asm["ptx"]
    row = {"kernel": name, "dim": dim, "sparse": sparse, "shared": result.metadata.shared, "keys": getattr(config, "tile_n", None)}
    row |= {"wgmma": ptx.count("wgmma.mma_async"), "e4m3": len(re.findall(r"wgmma\.mma_async\S*\.e4m3\.e4m3", ptx))}
    row |= {"tma": ptx.count("cp.async.bulk.tensor")}
    row |= {"warps": result.metadata.num_warps, "products": len(re.findall(r"\bmul\.(?:wide|hi)\.u32", ptx))}
    row |= {
        "converted": ptx.count("cvt.rn.f16x2.e4m3x2"),
        "async": ptx.count("cp.async.cg.shared.global"),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
    }
    types = parameter_types(result.src.signature, parameter_sizes(ptx))
    row |= {"repeatable": types is not None and types.count("map") == len(result.metadata.tensordesc_meta or ())}
    row |= {"serialized": sorted(set(re.findall(r"C75\d\d", log.getvalue()))), "log": len(log.getvalue())}
    row |= resources(result.asm["cubin"])
    return row | {"in_full_blocks": spills_in_full_blocks(result.asm["cubin"]) if row["stack"] else 0}


DECODING = ((False, 4, 1, 0), (True, 4, 1, 0), (True, 4, 1, 16), (True, 32, 16, 128))  # sparse, rows, q_len, page


def _of_portable(name: str, *details, **options) -> Callable[[], dict]:
    return partial(report, name, compiled, *details, **options)


def _of_hopper(name: str, *details, **options) -> Callable[[], dict]:
    """details: kernel, config, dim, sparse. options: as of ``compiled_for_hopper``."""
    return partial(report, f"hopper_{name}", compiled_for_hopper, *details, **options)


def of_the_tests() -> Iterator[Callable[[], dict]]:
    """Yields calls of ``report``, one for each kernel that the tests compile."""
    for dim in (64, 128):
        yield from of_portable(dim)
        yield from of_hopper(dim)
    yield from of_small_blocks()
    # 192 columns of q and k, padded, and 128 of v, as in DeepSeek's models.
    for name, (kernel, table) in KERNELS.items():
        yield _of_portable(f"{name}_of_192_and_128", kernel, table[256], 256, True, dim_v=128)
        yield _of_portable(f"{name}_of_dropout", kernel, table[64], 64, False, variant=DROPOUT)
        yield _of_portable(f"{name}_of_terms", kernel, table[64], 64, False, variant=EVERY_TERM, switches=EVERY_SWITCH)
    placed = DROPOUT._replace(q_positions="*i32", kv_positions="*i32", batch_heads="*i32")
    for name in ("forward", "grad_kv"):
        kernel, table = KERNELS[name]
        yield _of_portable(f"{name}_of_positions", kernel, table[128], 128, True, variant=placed)
    details = backward.grad_qkv_kernel, TILES["grad_kv"][64], 64, True
    yield _of_portable("grad_qkv_of_terms", *details, variant=EVERY_TERM, switches=EVERY_SWITCH)
    # Products over 96 of 128 columns.
    for sparse in (False, True):
        yield _of_hopper("forward", FORWARD, hopper_configs.FORWARD[128], 96, sparse, split=sparse)
    for option in ("added", "split", "fixed"):
        yield _of_hopper("backward", BACKWARD, hopper_configs.PAIRED_BACKWARD[128], 96, True, **{option: True})
    yield from of_wide_forward()
    yield from of_wide_backward()


def of_portable(dim: int) -> Iterator[Callable[[], dict]]:
    for sparse, rows, q_len, page in DECODING:
        config = configs.decode_config(torch.bfloat16, dim, 128, rows)
        yield partial(report, "decode", compiled_for_decoding, decode.decode_kernel, config, dim, sparse, rows, q_len, page)
        for scales in ("of heads", "of tokens"):
            alike = scales == "of heads" and page in (0, 128)
            config = configs.decode_config(torch.bfloat16, dim, 128 if sparse else None, rows, e4m3=True, alike=alike)
            details = decode.decode_kernel, config, dim, sparse, rows, q_len, page
            yield partial(report, "decode_e4m3", compiled_for_decoding, *details, scales=scales)
    for sparse in (False, True):
        for name, (kernel, table) in KERNELS.items():
            yield _of_portable(name, kernel, table[dim], dim, sparse)
    yield _of_portable("grad_qkv", backward.grad_qkv_kernel, TILES["grad_kv"][dim], dim, True)


def of_small_blocks() -> Iterator[Callable[[], dict]]:
    """Yields the portable kernels of wide heads in blocks of 32, which spilled thousands of bytes before their tiles followed
    head_dim."""
    for name, (kernel, _) in KERNELS.items():
        for dim in (128, 256):
            config = configs.builtin_config(configs.HOPPER, name, torch.bfloat16, dim, 32)
            yield _of_portable(f"{name}_of_small_blocks", kernel, config, dim, True, block=32)


def of_hopper(dim: int) -> Iterator[Callable[[], dict]]:
    forward = FORWARD, hopper_configs.FORWARD[dim], dim
    backward = BACKWARD, plain_backward_config(dim, dim, 128), dim
    for sparse in (False, True):
        for split in (False, True):
            yield _of_hopper("forward", *forward, sparse, split=split)
        # Splits of heavy columns; a last tile with fewer keys.
        for options in ({}, {"added": True}, {"fixed": True}, {"split": True} if sparse else {"ragged": True}):
            yield _of_hopper("backward", *backward, sparse, **options)
    if dim == 128:
        yield _of_hopper("backward_of_heads_together", *backward, True, together=True)
    yield _of_hopper("forward_of_documents", *forward, True, own_starts=True)
    for options in ({}, {"added": True}, {"fixed": True}):
        yield _of_hopper("backward_of_documents", *backward, True, own_starts=True, **options)
    yield _of_hopper("forward_of_dropout", *forward, False, dropout=True)
    for options in ({}, {"fixed": True}, {"ragged": True}):
        details = BACKWARD, hopper_configs.VARIANT_BACKWARD[dim], dim, False
        yield _of_hopper("backward_of_dropout", *details, dropout=True, **options)
    for name, table, sparse in (
        ("192", hopper_configs.TALL_FORWARD, False),
        ("tall", hopper_configs.TALL_FORWARD, True),
        ("short", hopper_configs.SHORT_FORWARD, False),
        ("short", hopper_configs.SHORT_FORWARD_OF_TABLES, True),
        ("eight_bits_of_192", hopper_configs.TALL_EIGHT_BITS, False),
        ("eight_bits_of_tall", hopper_configs.TALL_EIGHT_BITS, True),
    ):
        if dim in table:
            yield _of_hopper(f"forward_of_{name}", FORWARD, table[dim], dim, sparse)
    yield _of_hopper("forward_of_eight_bits_of_64", FORWARD, hopper_configs.EIGHT_BITS_OF_64[dim], dim, True, block=64)
    for sparse in (False, True):
        yield _of_hopper("forward_of_eight_bits", FORWARD, hopper_configs.EIGHT_BITS[dim], dim, sparse, split=sparse)
    yield _of_hopper("forward_of_64", FORWARD, hopper_configs.FORWARD_OF_64[dim], dim, True, block=64, split=True)
    for option in ("split", "added", "fixed"):
        details = BACKWARD, hopper_configs.BACKWARD_OF_64[dim], dim, True
        yield _of_hopper("backward_of_64", *details, block=64, **{option: True})
    for name, (variant, switches) in OF_VARIANTS.items():
        for block in (128, 64) if dim == 128 else (128,):
            for pass_, kernel, config in (
                ("forward", FORWARD, hopper_configs.variant_forward_config(dim, block)),
                ("backward", BACKWARD, hopper_configs.variant_backward_config(dim, block, switches["SCORED"])),
            ):
                row = f"{pass_}_of_{name}{_of_blocks(block, config)}"
                yield _of_hopper(row, kernel, config, dim, True, block=block, variant=variant, switches=switches)


def _of_blocks(block: int, config) -> str:
    return "" if block > 64 else "_of_64" if config.programs > 1 else "_of_64_alone"


def of_wide_forward() -> Iterator[Callable[[], dict]]:
    """Yields Hopper's forward kernels for head dimensions above 128, and for v of another head_dim."""
    for dim, dim_v in ((256, 256), (192, 192), (192, 128)):
        row = "forward" if dim == dim_v else f"forward_of_{dim}_and_{dim_v}"
        columns = hopper_forward.column_constants(dim, dim_v)

        def compiles(row, sparse, block, variant=None, plain=True, dim=dim, dim_v=dim_v, columns=columns, **options):
            config = hopper_configs.wide_forward_config(columns["DIM"], columns["DIM_V"], sparse and block, 1, 0, plain)
            given, switches = OF_VARIANTS[variant] if variant else (NO_VARIANT, NO_SWITCHES)
            options |= {"dim_v": dim_v, "variant": given, "switches": switches, "block": block}
            return _of_hopper(row + _of_blocks(block, config), FORWARD, config, dim, sparse, **options)

        yield compiles(row, False, 128)
        yield compiles(row, True, 128, split=True)
        yield compiles(row, True, 64, split=True)
        yield compiles(f"{row}_of_dropout", False, 128, plain=False, dropout=True)
        for variant in ("alibi", "lengths") if dim != dim_v or dim == 256 else ():
            yield compiles(f"{row}_of_{variant}", True, 128, variant, plain=False)


def of_wide_backward() -> Iterator[Callable[[], dict]]:
    """Yields the backward kernels of wide heads: head_dim 256 and 192, and 192 with 128 for v."""
    wide = BACKWARD, hopper_configs.BACKWARD[256]
    paired = BACKWARD, hopper_configs.PAIRED_BACKWARD[192]
    for dim, dim_v in ((256, 256), (192, 192), (192, 128)):
        name, details = ("backward", wide) if dim_v == dim else (f"backward_of_{dim}_and_{dim_v}", paired)
        for sparse, option in ((False, "ragged"), (True, "split"), (True, "added"), (True, "fixed")):
            yield _of_hopper(name, *details, dim, sparse, dim_v=dim_v, **{option: True})
    yield _of_hopper("backward_of_192_and_128_of_64_alone", *wide, 192, True, block=64, dim_v=128)
    yield _of_hopper("backward_of_64_alone", *wide, 256, True, block=64, split=True)
    yield _of_hopper("backward_of_dropout", *wide, 256, True, dropout=True)
    for name, (variant, switches) in OF_VARIANTS.items():
        yield _of_hopper(f"backward_of_{name}", *wide, 256, True, variant=variant, switches=switches)
    details = hopper_backward.combine_columns_kernel, hopper_configs.BACKWARD[256], 256, True, 128
    yield partial(report, "combine_columns_of_192_and_128", compiled_columns, *details)


def outcomes(reports: Iterable[Callable[[], dict]]) -> Iterator[dict]:
    """Yields what the calls return, in their order; as many processes run them as there are cores."""
    global _reports
    _reports = list(reports)  # before the processes are forked
    with multiprocessing.get_context("fork").Pool() as pool:
        yield from pool.imap(_outcome, range(len(_reports)))


def _outcome(number: int) -> dict:
    return _reports[number]()


if __name__ == "__main__":
    knobs.compilation.always_compile = True  # a result from Triton's cache has no log
    for row in outcomes(of_the_tests()):
        print(json.dumps(row), flush=True)
