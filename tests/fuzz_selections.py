"""Random small calls on key blocks chosen by query, for ``fuzz.py``: forward and backward against the oracle."""

from __future__ import annotations

import random
from dataclasses import astuple, dataclass

import torch
from picked import check_selected, drawn_picks, sorted_picks

import sparse_flash as sf
from sparse_flash import backends
from sparse_flash.selection.operators import BACKENDS

ALWAYS = (None, None, None, "sinks(3)", "local(20)", "sinks(4) | local(33)", "strided(7)", "full")
TRIES = 200


@dataclass(frozen=True)
class DrawnSelection:
    """pickers: heads that pick. n: picks of a choice. dropped: the share of choices that pick nothing.
    all_pick: a block that every choice picks, or None. always_block: of the table of ``always``."""

    seed: int
    backend: str
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    pickers: int
    q_len: int
    kv_len: int
    every: int
    block: int
    n: int
    dropped: float
    all_pick: int | None
    always: str | None
    always_block: int
    dim: int
    v_dim: int

    def __str__(self):
        names = list(self.__dataclass_fields__)[2:]
        values = ", ".join(f"{name} {value}" for name, value in zip(names, astuple(self)[2:], strict=True))
        return f"seed {self.seed}: {self.backend}, {values}"

    def picks(self) -> torch.Tensor:
        shape = self.batch, self.pickers, -(-self.q_len // self.every), self.n
        picks = drawn_picks(shape, self.every, self.block, self.q_len, self.kv_len, self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        nothing = torch.rand(shape[:3], generator=generator) < self.dropped
        picks = picks.masked_fill(nothing[..., None].to(picks.device), -1)
        if self.all_pick is not None:
            picks[..., 0] = self.all_pick
        return sorted_picks(picks)


def draw(seed: int, backend: str) -> DrawnSelection:
    """The call of a seed. Raises RuntimeError if the back end accepts none of what is drawn."""
    rng = random.Random(f"selection {seed}")
    for _ in range(TRIES):
        call = _drawn(seed, backend, rng)
        q, k, v = (
            torch.empty(call.batch, heads, tokens, dim, dtype=call.dtype)
            for heads, tokens, dim in (
                (call.heads, call.q_len, call.dim),
                (call.kv_heads, call.kv_len, call.dim),
                (call.kv_heads, call.kv_len, call.v_dim),
            )
        )
        if torch.cuda.is_available():
            q, k, v = q.cuda(), k.cuda(), v.cuda()
        selection = sf.BlockSelection(call.picks(), call.q_len, call.kv_len, call.block, call.every)
        if BACKENDS[backend].supports(backends.Call.from_tensors(q, k, v, call.block), selection) is None:
            return call
    raise RuntimeError(f"{backend} runs none of {TRIES} selections that were drawn")


def _drawn(seed: int, backend: str, rng: random.Random) -> DrawnSelection:
    kv_heads, group = rng.choice((1, 1, 2)), rng.choice((1, 2, 3, 4, 16))
    q_len, kv_len = rng.randint(1, 70), rng.randint(1, 200)
    if rng.random() < 0.3:
        kv_len = q_len
    dim = rng.choice((16, 40, 64, 64, 96, 128)) if rng.random() < 0.8 else rng.randint(1, 128)
    block = rng.choice((16, 32, 64, 64, 64, 128, 128, 256, 512))
    if block > 128:
        kv_len = rng.randint(1, 3 * block)
    return DrawnSelection(
        seed,
        backend,
        rng.choice((torch.float16, torch.bfloat16, torch.float32)),
        batch=rng.choice((1, 1, 2)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        pickers=kv_heads if rng.random() < 0.7 else kv_heads * group,
        q_len=q_len,
        kv_len=kv_len,
        every=rng.choice((1, 1, 1, 2, 3, 16, 40, 128)),
        block=block,
        n=rng.randint(1, 6),
        dropped=rng.choice((0.0, 0.0, 0.3, 1.0)),
        all_pick=0 if rng.random() < 0.2 else None,
        always=rng.choice(ALWAYS),
        always_block=rng.choice([size for size in (16, 32, 64, 128) if size <= block]),
        dim=dim,
        v_dim=dim if rng.random() < 0.7 else rng.choice((16, 24, 64, 128)),
    )


def failure(call: DrawnSelection) -> str | None:
    """Says what is wrong with the results or gradients, or None."""
    sizes = call.heads, call.kv_heads, call.pickers, call.q_len, call.kv_len, call.every, call.block, call.n
    options = {"dtype": call.dtype, "dim": call.dim, "v_dim": call.v_dim, "seed": call.seed}
    try:
        check_selected(call.backend, *sizes, call.always, call.always_block, call.picks(), call.batch, **options)
    except AssertionError as error:
        return str(error).partition("\n")[0]
    return None
