"""Random padded runs of each decoder equal PyTorch's attention: whole, in pieces with every kind of cache, and generating.

SPARSE_FLASH_RUNS=40 python -m pytest tests/integrations/test_transformers_runs.py    # so many of each decoder, by number
"""

import os
import random
from functools import cache
from itertools import pairwise

import pytest
import torch
from tiny_models import DECODERS, PATTERNS, WORDS, as_oracle, close, decoder_of, encoder_of, takes_static_caches, transformers

from sparse_flash.integrations.transformers import use_sparse_flash

# The model's own mask, two that are equal to it in short prompts, and others.
MASKS = ["own", "causal", "causal & (sampled(2, keep=1, block=64) | sinks(2))", *PATTERNS.values()]
CACHES = {
    "none": lambda config: None,
    "dynamic": lambda config: transformers.DynamicCache(),
    "sliding": lambda config: transformers.DynamicCache(config=config),
    "static": lambda config: transformers.StaticCache(config, max_cache_len=320),
}
PLAIN = {"do_sample": False, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
RUNS = range(int(os.environ.get("SPARSE_FLASH_RUNS", 4)))
PACKED_ENCODERS = ["bert", "roberta", "electra", "modernbert", "esm"]
decoder, encoder = cache(decoder_of), cache(encoder_of)


def draw_tokens(chance) -> int:
    """Few, or more than attention_decode takes and than a block of a table has."""
    return chance.choice([chance.randint(2, 40), chance.randint(65, 140)])


def draw_rows(chance) -> torch.Tensor:
    """Which tokens of a batch exist: one run in each row, which may end before the others do."""
    side, batch, tokens = chance.choice(["none", "left", "right", "both"]), chance.randint(1, 3), draw_tokens(chance)
    exist = torch.zeros(batch, tokens, dtype=torch.int64)
    for row in exist:
        first = chance.randrange(tokens) if side in ("left", "both") else 0
        row[first : chance.randint(first + 1, tokens) if side in ("right", "both") else tokens] = 1
    return exist


def compare_with(name: str, mask: str):
    """The model under PyTorch's attention, or the oracle where that lacks soft caps, sinks or the pattern."""
    model = decoder(name)
    if mask in PATTERNS.values() or name in ("gemma2", "gpt_oss"):
        as_oracle(model, pattern=mask if mask in PATTERNS.values() else None)
    else:
        model.set_attn_implementation("sdpa")
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("seed", RUNS)
def test_random_runs_are_those_of_pytorchs_attention(seed, name):
    chance = random.Random(f"{seed} {name}")
    mask, exist = chance.choice(MASKS), draw_rows(chance)
    x = torch.randint(3, WORDS, exist.shape, generator=torch.Generator().manual_seed(seed))
    model = use_sparse_flash(decoder(name), mask)
    print(f"{name} under {mask!r}, (first, tokens) of rows {[(row.argmax().item(), row.sum().item()) for row in exist]}")
    if chance.random() < 0.5 and exist[:, -1].all():
        options = {"attention_mask": exist, "max_new_tokens": chance.randint(1, 12), **PLAIN}
        options["eos_token_id"] = chance.sample(range(3, WORDS), 12)  # rows finish before others
        in_chunks = {"prefill_chunk_size": chance.choice([1, 3, 6, 11, None])}
        static = takes_static_caches(name, in_chunks["prefill_chunk_size"] is not None)
        in_chunks["cache_implementation"] = chance.choice([None, "dynamic", "static"][: 3 if static else 2])
        options["num_beams"] = chance.choice([1, 3]) if in_chunks["prefill_chunk_size"] is None else 1
        print(f"generates {options['max_new_tokens']} tokens by {options['num_beams']} beams, {in_chunks}")
        ours = model.generate(x, **options, **in_chunks)
        theirs = compare_with(name, mask).generate(x, **options)
        assert torch.equal(ours.sequences, theirs.sequences)
        close(torch.stack(ours.logits), torch.stack(theirs.logits))
        return
    kind, sizes, positions = (
        chance.choice([*CACHES][: 4 if takes_static_caches(name) else 3]),
        [],
        (exist.cumsum(1) - 1).clamp(min=0),
    )
    while (rest := x.shape[1] - sum(sizes)) > 0:
        sizes.append(rest if kind == "none" else min(chance.choice([1, 2, 5, 8, 13, 30, 70]), rest))
    print(f"in pieces of {sizes} tokens beside a cache: {kind}")
    held, ours = CACHES[kind](model.config), []
    for piece, at in zip(x.split(sizes, 1), positions.split(sizes, 1), strict=True):
        seen = exist[:, : sum(sizes[: len(ours) + 1])]
        given = {"position_ids": at, "past_key_values": held, "use_cache": held is not None}
        ours.append(model(piece, attention_mask=seen, **given).logits)
    theirs = compare_with(name, mask)(x, attention_mask=exist, position_ids=positions, use_cache=False).logits
    close(torch.cat(ours, 1)[exist.bool()], theirs[exist.bool()])


def draw_packed(chance, side_by_side: bool) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, slice]], torch.Tensor]:
    """(which tokens exist, their positions, (row, place) of each sequence, where each run starts among all tokens, and the end).
    side_by_side: without padding."""
    batch, tokens = chance.randint(1, 3), draw_tokens(chance)
    exist, positions, places, starts = torch.zeros(batch, tokens, dtype=torch.int64), torch.ones(batch, tokens).long(), [], []
    for row in range(batch):
        bounds = sorted({0, *(chance.randrange(tokens) for _ in range(chance.randint(0, 4))), tokens})
        runs = [slice(*pair) for pair in pairwise(bounds)]
        kept = [run for run in runs if side_by_side or chance.random() < 0.7] or runs[:1]
        starts += [row * tokens + run.start for run in runs]
        for run in kept:
            exist[row, run], positions[row, run] = 1, torch.arange(run.stop - run.start)
            places.append((row, run))
    return exist, positions, places, torch.tensor([*starts, exist.numel()], dtype=torch.int32)


@torch.no_grad()
@pytest.mark.parametrize("name", [*DECODERS, *PACKED_ENCODERS])
@pytest.mark.parametrize("seed", RUNS)
def test_random_packed_sequences_equal_separate_calls(seed, name):
    chance = random.Random(f"{seed} {name} packed")
    side_by_side, decodes = chance.random() < 0.5, name in DECODERS
    exist, positions, places, ends = draw_packed(chance, side_by_side)
    masks = ["own", "causal & local(3)", *PATTERNS.values()] if decodes else [None, "local(4) | sinks(2)"]
    mask = chance.choice(masks)
    model = use_sparse_flash(decoder(name) if decodes else encoder(name), mask)
    given = {"position_ids": positions}
    if not side_by_side or chance.random() < 0.3:
        given["attention_mask"] = exist
    cache = chance.choice(["none", "dynamic", "static"][: 3 if takes_static_caches(name) else 2]) if decodes else "none"
    if decodes:
        given |= {"past_key_values": CACHES[cache](model.config), "use_cache": cache != "none"}
    # Llama 4 and some encoders pass no position_ids to attention, but Transformers reads them where nothing else is given.
    alone_in_masks = name == "llama4_text" and cache == "none" and "attention_mask" not in given
    if chance.random() < 0.3 or (name in ("modernbert", "esm", "llama4_text") and not alone_in_masks):
        given["cu_seq_lens_q"] = ends
    print(f"{name} under {mask!r} with {cache}, {[*given]}, sequences {places}")
    x = torch.randint(3, WORDS, exist.shape, generator=torch.Generator().manual_seed(seed))
    together = model(x, **given)[0]
    for row, place in places:
        one = {"position_ids": positions[row : row + 1, place]} | ({"use_cache": False} if decodes else {})
        close(together[row, place], model(x[row : row + 1, place], **one)[0][0])
