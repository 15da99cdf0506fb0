"""Random small calls in ``precision="fp8"``, for ``fuzz.py``: against its definition, under the masks of ``fuzz_calls``."""

import random
from dataclasses import replace

import fuzz_calls
import oracle
import torch

import sparse_flash as sf
from sparse_flash.core.eight_bits import attention_in_eight_bits

HEAD_DIMS = (64, 64, 128, 128, 40, 72, 96)
STATISTICS = ("mean", "outliers", "rising")  # a mean of k and v; channels of q and k that are larger; scores that rise with the key


def draw(seed: int, backend: str) -> fuzz_calls.DrawnCall:
    """The call of a seed, its ``terms`` of ``STATISTICS``. Raises RuntimeError if the back end does not accept it."""
    drawn, rng = fuzz_calls._mask(seed // fuzz_calls.CALLS_PER_MASK, backend), random.Random(f"fp8 {seed}")
    dtypes = (torch.float16, *((torch.bfloat16,) if oracle.DEVICE == "cuda" else ()))  # NumPy has no bfloat16
    head_dim, terms = rng.choice(HEAD_DIMS), tuple(rng.sample(STATISTICS, rng.randint(0, 2)))
    v_head_dim = head_dim if rng.random() < 0.7 else rng.choice(HEAD_DIMS)
    changed = {"dtype": rng.choice(dtypes), "head_dim": head_dim, "v_head_dim": v_head_dim, "score_shift": 0.0, "terms": ()}
    call = fuzz_calls._drawn(seed, backend, drawn)
    call = replace(call, sizes=replace(call.sizes, **changed, deterministic=False))
    if reason := fuzz_calls._refusal(call, precision="fp8"):
        raise RuntimeError(f"{backend} does not take {call}: {reason}")
    return replace(call, sizes=replace(call.sizes, terms=terms, score_rise=50.0 if "rising" in terms else 0.0))


def failure(call: fuzz_calls.DrawnCall) -> str | None:
    """Runs a call. Returns what is wrong with its results, or None. Other exceptions pass through."""
    sizes, (q, k, v) = call.sizes, oracle.normal(call.sizes)
    if "mean" in sizes.terms:
        k, v = k + 1, v + 0.5
    if "outliers" in sizes.terms:
        q[..., ::32] *= 4
        k[..., ::32] *= 4
    with fuzz_calls._launches(call):
        out, lse = sf.attention(q, k, v, call.drawn.mask, precision="fp8", **sizes.options())
    scale = sizes.head_dim**-0.5 if sizes.scale is None else sizes.scale
    wanted, wanted_lse = attention_in_eight_bits(q, k, v, call.drawn.kept, scale)
    some = ~wanted_lse.isneginf()
    if not torch.equal(lse.isneginf(), ~some) or out[~some].any():
        return "rows without keys are not 0 with lse -inf, or others are"
    if not some.any():
        return None
    # Sums in another order round some k or v the other way, by up to 1/8, and some weights in any case. Hopper GPUs cut sums of
    # products in e4m3 to about 13 bits, so large scores come out too low, by up to 2^-10.4 of themselves (seen on an H200; the
    # definition with such errors differs as much). of_sums is two thirds of that; the limits below hold the rest.
    off, of_sums = (out.double() - wanted).abs(), 2**-11 * wanted_lse[some].abs().max().item()
    largest = v.double().abs().max()
    found = {
        "out": off.norm() / wanted.norm(),
        "its largest error": off.max() / largest,
        "lse": (lse - wanted_lse)[some].abs().max(),
    }
    allowed = {"out": 2e-2, "its largest error": 1 / 8, "lse": 1 / 4}
    wrong = [f"{name} is off by {error:.3g}" for name, error in found.items() if not error <= allowed[name] + of_sums]
    return "; ".join(wrong) or None
