"""A variant as arguments of the portable kernels: one tuple of pointers and numbers, with None for absent fields, and compile-time
switches."""

from typing import Any, NamedTuple

import torch

from .config import Config


class KernelVariant(NamedTuple):
    """A variant's pointers and numbers. Which fields are None is fixed at compile time.

    seed: int64, used with dropout_p, a float. q_starts .. kv_lens: (batch,) int32. alibi_slopes: (batch, heads) float32. softcap: a
    float. rel_bias and rel_bias_gradient: (heads, 2 * REACH + 1) float32. params: pointers for SCORE. sinks: (heads,), of forward
    passes, and of backward passes with sinks_gradient, (batch, heads, q_len) float32, the term of each query.
    """

    seed: Any = None
    dropout_p: Any = None
    q_starts: Any = None
    q_lens: Any = None
    kv_starts: Any = None
    kv_lens: Any = None
    alibi_slopes: Any = None
    softcap: Any = None
    rel_bias: Any = None
    rel_bias_gradient: Any = None
    params: Any = None
    sinks: Any = None
    sinks_gradient: Any = None


NO_VARIANT = KernelVariant()
# SCORED: whether scores are more than scaled products. REACH: the largest distance of rel_bias. SCORE, DERIVATIVE: the user's score
# function and its derivative.
NO_SWITCHES = {"SCORED": False, "REACH": 0, "SCORE": None, "DERIVATIVE": None}


def kernel_variant(
    variant,
    rel_bias_gradient: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    sinks_gradient: torch.Tensor | None = None,
) -> tuple[KernelVariant, dict, tuple]:
    """(the kernel's argument, its switches, the key of what Triton specializes on). sinks: of kernels that read sinks."""
    if variant is None and sinks is not None:
        return NO_VARIANT._replace(sinks=sinks, sinks_gradient=sinks_gradient), NO_SWITCHES, (sinks.dtype,)
    if variant is None:
        return NO_VARIANT, NO_SWITCHES, ()
    fields = {name: getattr(variant, name) for name in variant.names()}
    fields |= {"dropout_p": None if variant.seed is None else variant.dropout_p, "softcap": variant.softcap or None}
    fields |= {"params": variant.score_params or None, "rel_bias_gradient": rel_bias_gradient}
    given = NO_VARIANT._replace(**fields | {"sinks": sinks, "sinks_gradient": sinks_gradient})
    switches = {
        "SCORED": variant.scored,
        "REACH": 0 if variant.rel_bias is None else variant.rel_bias.shape[1] // 2,
        "SCORE": variant.score_mod and variant.score_mod.triton,
        "DERIVATIVE": variant.score_mod and variant.score_mod.derivative,
    }
    kinds = *variant.names(), variant.softcap > 0.0, rel_bias_gradient is not None, sinks is not None and sinks.dtype
    if variant.score_params:
        kinds += tuple(param.dtype for param in variant.score_params)
    return given, switches, kinds


def launch_options(config: Config, given: KernelVariant, switches: dict, rows: int) -> dict[str, int]:
    """Triton's options for a kernel of this variant; the config's for plain attention. rows: of a step's products.

    Chosen by compiling for sm_90 (triton 3.6). With dropout or the gradient of a bias, eight warps pay only for 128 rows, where
    four spill 130 to 800 bytes; for 64 rows they repeat work. A bias with a user's function gets one stage less, as Triton
    prefetches the bias through shared memory: see ``portable.scores._add_bias``.
    """
    crowded = rows >= 128 and (given.seed is not None or given.rel_bias_gradient is not None)
    biased = given.rel_bias is not None and switches["SCORE"] is not None
    warps = max(8, config.num_warps) if crowded else config.num_warps
    return {"num_warps": warps, "num_stages": max(1, config.num_stages - biased)}
