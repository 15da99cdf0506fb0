"""Compiles kernels with dropout of a part of a sequence for sm_90, without a GPU, and prints their outcomes, like ``sm90.py``."""

import json
import re

from sm90 import DROPOUT, KERNELS, compiled, resources

DIM = 128

if __name__ == "__main__":
    placed = DROPOUT._replace(q_positions="*i32", kv_positions="*i32", batch_heads="*i32")
    for name in ("forward", "grad_kv"):
        kernel, table = KERNELS[name]
        config = table[DIM]
        result = compiled(kernel, config, DIM, True, variant=placed)
        threads = 32 * result.metadata.num_warps
        row = {"kernel": name, "draws": config.tile_m * config.tile_n // threads // 4, "shared": result.metadata.shared}
        row["products"] = len(re.findall(r"\bmul\.(?:wide|hi)\.u32", result.asm["ptx"]))
        print(json.dumps(row | resources(result.asm["cubin"])), flush=True)
