"""Models that load the package by a name of the Hub, compared with their own attention: python by_name.py FOLDER, of `make hub`.

A program, as its process must know the package by no other name, and Transformers must not have looked for ``kernels`` before.
"""

import inspect
import os
import sys
import tempfile

from transformers.utils import import_utils

NAME = "org/block-sparse"
os.environ |= {"LOCAL_KERNELS": f"{NAME}={sys.argv[1]}", "HF_HUB_OFFLINE": "1"}
# Transformers 5.23 asks for kernels 0.18 or newer, which the package index lacks (2026-12-01). It calls 0.17's functions.
available = inspect.unwrap(import_utils.is_kernels_available)
available.__defaults__ = ("0.17", available.__defaults__[1])

import kernels  # noqa: E402
import torch  # noqa: E402

kernel = sys.modules["sparse_flash"] = kernels.get_kernel(NAME, version=1)
import tiny_models as tiny  # noqa: E402
from tiny_models import padded, words  # noqa: E402
from transformers import AttentionMaskInterface, AutoModelForCausalLM, AutoModelForMaskedLM  # noqa: E402

FAMILIES = ("llama", "gemma2", "gemma3_text", "gpt_oss", "qwen3", "modernbert")
EAGER = ("gemma2", "gpt_oss")  # PyTorch's attention has neither a soft cap nor sinks
POSITIONS = torch.cat([torch.arange(n) for n in (70, 1, 40, 39)]).expand(2, -1)
EXPRESSION = "causal & (local(9) | sinks(3))"
NAMED = f"{NAME}:{EXPRESSION.replace('|', 'or')}"


def loaded(name: str, implementation: str, folder: str):
    kind = AutoModelForMaskedLM if name in tiny.ENCODERS else AutoModelForCausalLM
    return kind.from_pretrained(folder, attn_implementation=implementation)


def compare(name: str, folder: str) -> None:
    model = tiny.encoder_of(name) if name in tiny.ENCODERS else tiny.decoder_of(name)
    if name in tiny.ENCODERS:
        model = tiny.made(tiny.transformers.MODEL_FOR_MASKED_LM_MAPPING[type(model.config)], model.config)
    model.save_pretrained(folder)
    theirs = loaded(name, "eager" if name in EAGER else "sdpa", folder)
    ours = loaded(name, NAME, folder)
    assert ours.config._attn_implementation == NAME
    x = words(tokens=150)
    cases = {side: {"attention_mask": padded(x, side)} for side in ("none", "left", "right", "holes")}
    cases["packed"] = {"position_ids": POSITIONS, "use_cache": False}  # with a cache, PyTorch's attention would not separate them
    cases["pairs"] = {"attention_mask": (torch.rand(2, 1, 150, 150) < 0.5).tril() | torch.eye(150, dtype=torch.bool)}
    if name in EAGER:  # which adds a mask's numbers
        del cases["pairs"]
    if name == "gpt_oss":  # whose mask in Transformers does not separate packed sequences
        del cases["packed"]
    for case, inputs in cases.items():
        print(name, case, flush=True)
        mask = inputs.get("attention_mask")
        exist = torch.ones_like(x) if mask is None or mask.dim() == 4 else mask
        seen = exist * exist.roll(1, 1)  # a padding token's output, which may predict the next token, means nothing
        inputs |= {"input_ids": x, "labels": x.masked_fill(seen == 0, -100)}
        tiny.close_outcomes(tiny.outcome(ours, inputs), tiny.outcome(theirs, inputs))
    if name in tiny.ENCODERS:
        return
    for side in ("none", "left"):
        prompt = {"input_ids": x, "attention_mask": padded(x, side)}
        for cache in (None, "static"):
            options = {"max_new_tokens": 40, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
            assert torch.equal(*(one.generate(**prompt, **options) for one in (ours, theirs))), (name, side, cache)


def check_masks_by_name(folder: str) -> None:
    """Checks masks of the name, then of a saved model's config."""
    x = words(tokens=150)
    named = loaded("llama", NAMED, folder)
    one_line = kernel.use_sparse_flash(loaded("llama", NAME, folder), EXPRESSION)
    one_line.save_pretrained(folder)
    saved = loaded("llama", NAME, folder)
    compiled = torch.compile(loaded("llama", NAMED, folder), fullgraph=True, backend="aot_eager")
    dense = tiny.as_oracle(loaded("llama", "eager", folder), pattern=EXPRESSION)
    for side in ("none", "left"):
        mask = padded(x, side)
        inputs, seen = {"input_ids": x, "attention_mask": mask}, mask.bool()
        right = tiny.outcome(dense, inputs, seen)
        for model in (named, one_line, saved, compiled):
            tiny.close_outcomes(tiny.outcome(model, inputs, seen), right)
    refuse(named, "must be 2-D, .* under causal &", torch.ones(2, 1, 150, 150, dtype=torch.bool))
    refuse(saved, "numbers cannot be added", torch.zeros(2, 1, 150, 150))
    refuse(loaded("llama", f"{NAME}:local(9)", folder), "must be within causal and say so")


def refuse(model, message: str, mask=None) -> None:
    import pytest

    with pytest.raises(ValueError, match=message):
        model(words(tokens=150), attention_mask=mask)


if __name__ == "__main__":
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as place:
            compare(family, place)
            if family == "llama":
                check_masks_by_name(place)
            print(family, flush=True)
    assert AttentionMaskInterface()[NAME].__module__.startswith(kernel.__name__)  # no tensors of all pairs
    assert not [name for name in sys.modules if name.startswith("sparse_flash.")]
