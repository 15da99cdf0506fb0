"""Compiles the portable kernels for sm_90 without a GPU and prints what became of each, one JSON object a line.

Run as a program, in a process of its own: kernels defined under TRITON_INTERPRET cannot be compiled.
"""

import json
import re
import subprocess
import tempfile

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparse_flash.kernels import backward, configs, forward

KERNELS = {
    "forward": (forward.attention_forward_kernel, configs._FORWARD),
    "grad_q": (backward.grad_q_kernel, configs._GRAD_Q),
    "grad_kv": (backward.grad_kv_kernel, configs._GRAD_KV),
}
OF_QUERIES = {"q_tensor", "out_tensor", "dout_tensor", "dq_tensor"}
FLOATS = {"scale", "score_scale"}
FLOAT_POINTERS = {"lse_ptr", "dlse_ptr", "delta_ptr"}
INT_POINTERS = {"mask_index", "row_ptr", "row_split", "row_order", "col_ptr", "col_split", "col_order", "col_idx", "row_idx"}
INT_POINTERS |= {"tile_idx", "tile_runs", "tile_bits"}


def compiled(kernel, config, dim: int, sparse: bool, block: int = 128):
    constants = {"DIM": dim, "TILE_M": config.tile_m, "TILE_N": config.tile_n, "TABLE_BLOCK": block, "SPARSE": sparse}
    constants |= {"HAS_DLSE": False} if "HAS_DLSE" in kernel.arg_names else {}
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_tensor"):
            rows = config.tile_m if name in OF_QUERIES else config.tile_n
            signature[name] = f"tensordesc<bf16[1,1,{rows},{dim}]>"
        elif name in FLOAT_POINTERS | INT_POINTERS:
            signature[name] = "*fp32" if name in FLOAT_POINTERS else "*i32"
            attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def resources(binary: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", text)}


if __name__ == "__main__":
    for name, (kernel, table) in KERNELS.items():
        for dim in (64, 128):
            for sparse in (False, True):
                result = compiled(kernel, table[dim], dim, sparse)
                ptx = result.asm["ptx"]
                row = {"kernel": name, "dim": dim, "sparse": sparse, "shared": result.metadata.shared}
                row |= {"wgmma": ptx.count("wgmma.mma_async"), "tma": ptx.count("cp.async.bulk.tensor")}
                print(json.dumps(row | resources(result.asm["cubin"])), flush=True)
