"""Runs the flash-attn package's own tests against ``sparse_flash.integrations.flash_attn``.

    python tests/flash_attn_suite.py test_flash_attn.py                # on a GPU
    python tests/flash_attn_suite.py test_flash_attn.py --device cpu --longest 300 --cases 4

test_flash_attn.py is that package's file of this name (https://github.com/Dao-AILab/flash-attention, tests/), fetched by whoever
runs this; none of it is kept here. Its imports from the package are replaced by the functions below; it needs pytest and einops.
For each test, a sample of its cases runs, drawn from --seed, equally many for float16 and bfloat16. Cases that do not apply are
counted with their reason. S_dmask, which our calls do not return, is computed here from dropout's definition, so that cases with
dropout apply.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import random
import sys
import time
import traceback
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

from sparse_flash.integrations import flash_attn as ours
from sparse_flash.variant.definition import Pairs, kept_by_dropout, scored
from sparse_flash.variant.variant import checked_variant

NOT_OURS = {
    "test_flash_attn_generator_arg_must_be_none": "tests an argument of the package's C++ entry points",
    "test_flash_attn_varlen_paged_kv_num_splits": "tests a private function, whose num_splits our calls take without effect",
    "test_flash_attn_kvcache_paged_block_table_bounds": (
        "wants an error for lengths on the GPU, which our calls do not wait for: tokens past the capacity are dropped"
    ),
}
SLOW_ON_A_CPU = {
    "test_flash_attn_race_condition": "250 repetitions of a batch of 60, of races that a CPU does not have",
    "test_flash_attn_bwd_varlen_overflow": "long sequences",
}


def unpad_input(x, exist, unused=None):
    """(batch, tokens, ...) -> (the tokens that exist, where they were, cu_seqlens, the longest, lengths)."""
    lengths = exist.sum(-1, dtype=torch.int32)
    where = exist.flatten().nonzero().flatten()
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    return x.flatten(0, 1)[where], where, ends, int(lengths.max()), lengths


def pad_input(x, where, batch, tokens):
    """The reverse, with zeros for tokens that do not exist."""
    return x.new_zeros(batch * tokens, *x.shape[1:]).index_put((where,), x).unflatten(0, (batch, tokens))


def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0):
    """Rotary positions, starting at seqlen_offsets, by complex numbers."""
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).expand(len(x))
    position = offsets[:, None].long() + torch.arange(x.shape[1], device=x.device)
    half = cos.shape[1]
    pairs = x[..., : 2 * half].float()
    pairs = pairs.unflatten(-1, (half, 2)) if interleaved else pairs.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.complex(cos.float(), sin.float())[position][:, :, None]
    )
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)


def with_s_dmask(name):
    """One of our calls, with the third result replaced by what the package returns for tests: exp(score - the row's maximum), in
    q's dtype, negative if dropout drops the pair. For varlen calls: (sequences, heads, max_seqlen_q, max_seqlen_k), each from the
    first place."""

    def call(*args, **kwargs):
        dropout_p = kwargs.get("dropout_p", args[POSITION[name]] if len(args) > POSITION[name] else 0.0)
        device = args[0].device
        before = rng_state(device)
        results = getattr(ours, name)(*args, **kwargs)
        if not (dropout_p and kwargs.get("return_attn_probs")):
            return results
        after = rng_state(device)
        set_rng_state(device, before)
        q, k, shift = padded(name, args)
        variant = checked_variant(q, k, dropout_p=dropout_p, alibi_slopes=kwargs.get("alibi_slopes"))
        set_rng_state(device, after)
        pairs = Pairs.all(q, k)
        products = q.float() @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).float().transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scored(variant, products, pairs)
        left, right = (int(limit) for limit in kwargs.get("window_size", (-1, -1)))
        right = 0 if kwargs.get("causal") else right
        distance = pairs.key - pairs.q_pos
        seen = (distance >= (-left if left >= 0 else -(1 << 40))) & (distance <= (right if right >= 0 else 1 << 40))
        if shift is not None:
            first, count = (of_keys.view(-1, 1, 1, 1) for of_keys in (shift[1], shift[2]))
            seen = seen & (pairs.key >= first) & (pairs.key < first + count)
        scores = scores.masked_fill(~seen, float("-inf"))
        weights = (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num(0.0)
        signed = torch.where(kept_by_dropout(variant, pairs).expand_as(weights), weights, -weights)
        if shift is not None:
            for b, (first_q, first_k) in enumerate(zip(shift[0].tolist(), shift[1].tolist())):
                signed[b] = signed[b].roll((-first_q, -first_k), (-2, -1))
        return *results[:2], signed.to(q.dtype)

    return call


POSITION = {  # position of dropout_p
    "flash_attn_func": 3,
    "flash_attn_kvpacked_func": 2,
    "flash_attn_qkvpacked_func": 1,
    "flash_attn_varlen_func": 7,
    "flash_attn_varlen_kvpacked_func": 6,
    "flash_attn_varlen_qkvpacked_func": 3,
}


def padded(name, args):
    """q and k as our call passes them to ``attention``, (batch, heads, tokens, head_dim). For sequences on separate axes, also the
    first places of queries and keys, and the number of keys."""
    axis = 1 if "varlen" in name else 2
    packed = name.partition("packed")[0].rpartition("_")[2] if "packed" in name else ""
    q = args[0].detach().unbind(axis)[0] if packed == "qkv" else args[0].detach()
    k = args[0].detach().unbind(axis)[1] if packed == "qkv" else args[1].detach()
    k = k.unbind(axis)[0] if packed == "kv" else k
    if "varlen" not in name:
        return q.transpose(1, 2), k.transpose(1, 2), None
    rest = args[{"": 3, "kv": 2, "qkv": 1}[packed] :]
    q_ends, k_ends, q_most, k_most = (rest[0], rest[0], rest[1], rest[1]) if packed == "qkv" else rest[:4]
    sides, firsts = [], []
    for x, ends, longest in ((q, q_ends, q_most), (k, k_ends, k_most)):
        first, count, _, token_of_row = ours._rows(ends, len(x), longest, at_end=packed != "qkv")
        rows = x[token_of_row.clamp(min=0).long()].unflatten(0, (len(ends) - 1, longest))
        sides.append(rows.transpose(1, 2))
        firsts.append(first)
    return *sides, (*firsts, count)


def rng_state(device):
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(device, state):
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


def load(path: Path, device: str) -> types.ModuleType:
    """The file as a module, with its imports from the package replaced."""
    ours._refuse_probabilities = lambda *_: None  # S_dmask comes from here
    package = types.ModuleType("flash_attn")
    for name in POSITION:
        setattr(package, name, with_s_dmask(name))
    package.flash_attn_with_kvcache = ours.flash_attn_with_kvcache
    # One block of keys: S_dmask is relative to the maximum over all scores.
    interface = {"_get_block_size_n": lambda *_: 1 << 30, "USE_TRITON_ROCM": False}
    parts = {
        "flash_attn": vars(package),
        "flash_attn.bert_padding": {"unpad_input": unpad_input, "pad_input": pad_input},
        "flash_attn.flash_attn_interface": interface,
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": {"apply_rotary_emb": apply_rotary_emb},
    }
    for name, contents in parts.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update({key: value for key, value in contents.items() if not key.startswith("__")})
    source = path.read_text()
    if device == "cpu":
        source = source.replace('"cuda"', '"cpu"')
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 40)
    module = types.ModuleType("flash_attn_tests")
    exec(compile(source, str(path), "exec"), vars(module))
    return module


def sampled(test, count: int, longest: int | None, rng: random.Random) -> list[dict]:
    """Cases of a test from its parametrize marks, ``count`` of each dtype."""
    axes = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names = [name.strip() for name in mark.args[0].split(",")]
            axes.append([dict(zip(names, values if len(names) > 1 else (values,))) for values in mark.args[1]])
    sizes = {name for axis in axes for name in axis[0] if name.startswith("seqlen") and not isinstance(axis[0][name], bool)}
    by_dtype: dict = {}
    for choice in itertools.product(*axes):
        case = {name: value for part in choice for name, value in part.items()}
        if longest is None or all(case[name] <= longest for name in sizes):
            by_dtype.setdefault(case.get("dtype"), []).append(case)
    return [case for cases in by_dtype.values() for case in rng.sample(cases, min(count, len(cases)))]


def run(test, case: dict) -> tuple[str, str]:
    """(passed, skipped or failed; why)."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            test(**case)
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped) or "skipped by the test itself"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return "failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else frame.line} (line {frame.lineno})"
    return "passed", ""


def main() -> int:
    parser = argparse.ArgumentParser(description="The flash-attn package's tests on sparse_flash.integrations.flash_attn.")
    parser.add_argument("file", type=Path, help="the package's tests/test_flash_attn.py")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--cases", type=int, default=40, help="of each test and dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, help="leave out longer sequences")
    parser.add_argument("--only", default="", help="tests whose names hold this")
    options = parser.parse_args()
    module = load(options.file, options.device)
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_") and options.only in name}
    not_ours = NOT_OURS | (SLOW_ON_A_CPU if options.device == "cpu" else {})
    failures = 0
    for name, test in tests.items():
        if name in not_ours:
            print(f"{name}: does not apply: {not_ours[name]}", flush=True)
            continue
        begin, counts, reasons = time.perf_counter(), Counter(), Counter()
        for case in sampled(test, options.cases, options.longest, random.Random(f"{options.seed} {name}")):
            result, reason = run(test, case)
            counts[result] += 1
            if result == "skipped":
                reasons[reason] += 1
            elif result == "failed":
                print(f"  FAILED {name} {case}: {reason}", flush=True)
            if options.device == "cuda":
                torch.cuda.empty_cache()
        failures += counts["failed"]
        said = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
        why = "".join(f"; {count} skipped: {reason}" for reason, count in reasons.items())
        print(f"{name}: {said} in {time.perf_counter() - begin:.0f} s{why}", flush=True)
    print(f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
