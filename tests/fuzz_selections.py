"""Random small calls on key blocks chosen by query, for ``fuzz.py``: forward and backward against the oracle."""

import random
from dataclasses import dataclass

import torch
from calls import name_of
from picked import check_selected, drawn_picks, sorted_picks, tensors

import sparse_flash as sf
from sparse_flash.core.description import Call
from sparse_flash.selection.operators import BACKENDS

ALWAYS = (None, None, None, "sinks(3)", "local(20)", "sinks(4) | local(33)", "strided(7)", "full")
TRIES = 200


@dataclass(frozen=True)
class DrawnSelection:
    """sizes: arguments of ``picked.check_selected``. dropped: the share of queries that pick nothing. all_pick: a block that every
    query picks, or None."""

    seed: int
    backend: str
    sizes: dict
    dropped: float
    all_pick: int | None

    def __str__(self):
        return f"seed {self.seed}: {self.backend}, {name_of({**self.sizes, 'dropped': self.dropped, 'all_pick': self.all_pick})}"

    def picks(self) -> torch.Tensor:
        of = self.sizes
        shape = of["batch"], of["pickers"], of["q_len"], of["n"]
        picks = drawn_picks(shape, of["block"], of["kv_len"], self.seed)
        nothing = torch.rand(shape[:3], generator=torch.Generator().manual_seed(self.seed)) < self.dropped
        picks = picks.masked_fill(nothing[..., None].to(picks.device), -1)
        if self.all_pick is not None:
            picks[..., 0] = self.all_pick
        return sorted_picks(picks)


def draw(seed: int, backend: str) -> DrawnSelection:
    """The call of a seed. Raises RuntimeError if the back end accepts none of what is drawn."""
    rng = random.Random(f"selection {seed}")
    for _ in range(TRIES):
        sizes = _sizes(rng)
        call = DrawnSelection(seed, backend, sizes, rng.choice((0.0, 0.0, 0.3, 1.0)), 0 if rng.random() < 0.2 else None)
        picks = call.picks()
        selection = sf.BlockSelection(picks, sizes["q_len"], sizes["kv_len"], sizes["block"])
        shape = (sizes[name] for name in ("heads", "kv_heads", "q_len", "kv_len", "dim", "dtype", "v_dim"))
        q, k, v, _ = tensors(1, *shape)
        if BACKENDS[backend].supports(Call.from_tensors(q, k, v, sizes["block"]), selection) is None:
            return call
    raise RuntimeError(f"{backend} runs none of {TRIES} selections that were drawn")


def _sizes(rng: random.Random) -> dict:
    kv_heads, group = rng.choice((1, 1, 2)), rng.choice((1, 2, 3, 4, 16))
    block, q_len = rng.choice((16, 32, 64, 64, 64, 128, 128, 256, 512)), rng.randint(1, 70)
    dim = rng.choice((16, 40, 64, 64, 96, 128)) if rng.random() < 0.8 else rng.randint(1, 128)
    return {
        "dtype": rng.choice((torch.float16, torch.bfloat16, torch.float32)),
        "batch": rng.choice((1, 1, 2)),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "pickers": kv_heads if rng.random() < 0.7 else kv_heads * group,
        "q_len": q_len,
        "kv_len": rng.randint(1, 3 * block) if block > 128 else q_len if rng.random() < 0.3 else rng.randint(1, 200),
        "block": block,
        "n": rng.randint(1, 6),
        "always": rng.choice(ALWAYS),
        "always_block": rng.choice([size for size in (16, 32, 64, 128) if size <= block]),
        "dim": dim,
        "v_dim": dim if rng.random() < 0.7 else rng.choice((16, 24, 64, 128)),
    }


def failure(call: DrawnSelection) -> str | None:
    """Says what is wrong with the results or gradients, or None."""
    try:
        check_selected(call.backend, **call.sizes, picks=call.picks(), seed=call.seed)
    except AssertionError as error:
        return str(error).partition("\n")[0]
    return None
