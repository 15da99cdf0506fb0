"""Compiles the kernel that chooses blocks for sm_90 without a GPU and prints the outcome by kind of scores, like ``sm90.py``."""

import json

import triton
from sm90 import TARGET, resources
from triton.compiler import ASTSource

from sparse_flash.kernels.launch.launch import FUSED
from sparse_flash.kernels.selection import pick_blocks

ALIGNED = {"head_dim", "q_batch", "q_head", "q_token", "k_batch", "k_head", "k_token"}


LENGTH, STRIDE = 32, 16  # of compressed keys


def compiled(kind: str, shared: int, block: int, slots: int = 16, target=TARGET, bounded: bool = False):
    """shared: query heads that share a choice. slots: blocks of a choice. bounded: of packed documents."""
    kernel, config = pick_blocks.pick_blocks_kernel, pick_blocks._CONFIGS[kind]
    constants = {"EVERY": 1, "BLOCK": block, "CHOSEN": slots - 1, "OWN": 1, "SLOTS": slots, "SHARED": shared}
    constants |= {
        "KIND": kind,
        "BOUNDED": bounded,
        "TILE": config.tile_m,
        "COLUMNS": config.tile_n,
        "KEYS": 64,
        "LENGTH": LENGTH,
        "STRIDE": STRIDE,
    }
    constants |= {"DIM": 16 if kind == "given" else 128, "PRECISION": "tf32"}
    types = {
        "source": "*fp32" if kind == "given" else "*bf16",
        "keys": "*fp32" if kind == "mean" else "*bf16",
        "picks": "*i32",
        "bounds": "*i32",
        "logs": "*fp32",
        "factor": "fp32",
    }
    return _of_kernel(kernel, config, constants, types, target)


def compiled_lse(target=TARGET):
    """The kernel that sums the softmax over compressed keys."""
    constants = {"EVERY": 1, "LENGTH": LENGTH, "STRIDE": STRIDE, "TILE": 64, "KEYS": 64, "DIM": 128, "PRECISION": "tf32"}
    types = {"q": "*bf16", "keys": "*bf16", "logs": "*fp32", "factor": "fp32"}
    return _of_kernel(pick_blocks.compressed_lse_kernel, pick_blocks._CONFIGS["softmax"], constants, types, target)


def _of_kernel(kernel, config, constants: dict, types: dict, target):
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if types.get(name, "").startswith("*") or name in ALIGNED
    }
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=config.options | FUSED)


if __name__ == "__main__":
    kinds = (
        ("mean", 4, 128),
        ("mean", 16, 64),
        ("max", 1, 128),
        ("max", 16, 64),
        ("softmax", 1, 128),
        ("softmax", 16, 64),
        ("given", 1, 128),
    )
    cases = [*((*kind, False) for kind in kinds), ("mean", 4, 128, True), ("given", 1, 128, True)]
    for kind, shared, block, bounded in [*cases, ("lse", 1, 64, False)]:
        result = compiled_lse() if kind == "lse" else compiled(kind, shared, block, bounded=bounded)
        row = {"kind": kind, "bounded": bounded, "shared heads": shared, "block": block, "shared": result.metadata.shared}
        print(json.dumps(row | {"wgmma": result.asm["ptx"].count("wgmma.mma_async"), **resources(result.asm["cubin"])}), flush=True)
