"""Small calls of every entry point, forward and backward, for compute-sanitizer, under which each takes seconds:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitize.py --backend hopper

Between them they have full, run and bit tiles, empty, full and split rows, cut blocks and grouped heads. Results are only checked
for NaN; the tests check whether they are right.
"""

import argparse

import torch
from calls import ENTRIES, name_of
from oracle import Sizes, heavy_rows_split

SPECS = (None, "causal", "causal & local(90)", "causal & dilated(9, 3, block=1)", "local(90) | global_tokens(5)", "~full")
UNDER_EACH = ("attention_under_a_table", "attention_with_terms", "varlen", "decode_in_pages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(",")[0])
    parser.add_argument("--backend", default="auto", choices=("auto", "hopper", "triton", "torch"))
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--v-head-dim", type=int)
    options = parser.parse_args()
    of = {"head_dim": options.head_dim, "v_head_dim": options.v_head_dim or options.head_dim, "backend": options.backend}
    rows = [{"spec": spec, "deterministic": told} for spec in SPECS for told in (False, True)]
    for entry, make in ENTRIES.items():
        for row in rows if entry in UNDER_EACH else rows[:2]:
            sizes = Sizes(q_len=300, kv_len=300, dtype=torch.float16, block_size=128, **of, **row)
            try:
                with heavy_rows_split():
                    assert not any(t.isnan().any() for t in make(sizes).outcome()), entry
            except ValueError as refused:
                print(f"{entry}, {name_of(row)}: {refused}", flush=True)
            else:
                print(f"{entry}, {name_of(row)}", flush=True)


if __name__ == "__main__":
    main()
