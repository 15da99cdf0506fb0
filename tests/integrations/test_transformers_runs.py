"""Random padded runs of decoders equal PyTorch's attention: whole, in pieces beside every kind of cache, and generating.

SPARSE_FLASH_RUNS=1000 python -m pytest tests/integrations/test_transformers_runs.py    # a run's number is its seed
"""

import os
import random
from functools import cache

import pytest
import torch

transformers = pytest.importorskip("transformers")
from test_transformers_models import DECODERS, KEPT, PATTERNS, WORDS, as_oracle, close, decoder_of, keep  # noqa: E402

from sparse_flash.integrations.transformers import use_sparse_flash  # noqa: E402

# The model's own mask, two that are equal to it in short prompts, and others.
MASKS = ["own", "causal", "causal & (sampled(2, keep=1, block=64) | sinks(2))", *PATTERNS.values()]
CACHES = {
    "none": lambda config: None,
    "dynamic": lambda config: transformers.DynamicCache(),
    "sliding": lambda config: transformers.DynamicCache(config=config),
    "static": lambda config: transformers.StaticCache(config, max_cache_len=64),
}
PLAIN = {"do_sample": False, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
decoder = cache(decoder_of)


def draw_rows(chance) -> torch.Tensor:
    """Which tokens of a batch exist: one run in each row, which may end before the others do."""
    side, batch, tokens = chance.choice(["none", "left", "right", "both"]), chance.randint(1, 3), chance.randint(2, 40)
    exist = torch.zeros(batch, tokens, dtype=torch.int64)
    for row in exist:
        first = chance.randrange(tokens) if side in ("left", "both") else 0
        row[first : chance.randint(first + 1, tokens) if side in ("right", "both") else tokens] = 1
    return exist


def compare_with(name: str, mask: str):
    """The model under PyTorch's attention, or the oracle where that lacks soft caps, sinks or the pattern."""
    model = decoder(name)
    KEPT.clear()
    if mask in PATTERNS.values():
        keep(mask)
    if KEPT or name in ("gemma2", "gpt_oss"):
        as_oracle(model)
    else:
        model.set_attn_implementation("sdpa")
    return model


@torch.no_grad()
@pytest.mark.parametrize("seed", range(int(os.environ.get("SPARSE_FLASH_RUNS", 50))))
def test_random_runs_are_those_of_pytorchs_attention(seed):
    chance = random.Random(seed)
    name, mask, exist = chance.choice([*DECODERS]), chance.choice(MASKS), draw_rows(chance)
    x = torch.randint(3, WORDS, exist.shape, generator=torch.Generator().manual_seed(seed))
    model = use_sparse_flash(decoder(name), mask)
    print(f"{name} under {mask!r}, (first, tokens) of rows {[(row.argmax().item(), row.sum().item()) for row in exist]}")
    if chance.random() < 0.5 and exist[:, -1].all():
        options = {"attention_mask": exist, "max_new_tokens": chance.randint(1, 12), **PLAIN}
        options["eos_token_id"] = chance.sample(range(3, WORDS), 12)  # rows finish before others
        in_chunks = {"prefill_chunk_size": chance.choice([1, 3, 6, 11, None])}
        in_chunks["cache_implementation"] = chance.choice([None, "dynamic", "static"])
        print(f"generates {options['max_new_tokens']} tokens, {in_chunks}")
        ours = model.generate(x, **options, **in_chunks)
        theirs = compare_with(name, mask).generate(x, **options)
        assert torch.equal(ours.sequences, theirs.sequences)
        close(torch.stack(ours.logits), torch.stack(theirs.logits))
        return
    kind, sizes, positions = chance.choice([*CACHES]), [], (exist.cumsum(1) - 1).clamp(min=0)
    while (rest := x.shape[1] - sum(sizes)) > 0:
        sizes.append(rest if kind == "none" else min(chance.choice([1, 2, 5, 8, 13, 30]), rest))
    print(f"in pieces of {sizes} tokens beside a cache: {kind}")
    held, ours = CACHES[kind](model.config), []
    for piece, at in zip(x.split(sizes, 1), positions.split(sizes, 1), strict=True):
        seen = exist[:, : sum(sizes[: len(ours) + 1])]
        given = {"position_ids": at, "past_key_values": held, "use_cache": held is not None}
        ours.append(model(piece, attention_mask=seen, **given).logits)
    theirs = compare_with(name, mask)(x, attention_mask=exist, position_ids=positions, use_cache=False).logits
    close(torch.cat(ours, 1)[exist.bool()], theirs[exist.bool()])
