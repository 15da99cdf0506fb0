"""Picks of key blocks to test with, and what they keep by definition."""

from dataclasses import replace

import torch
from accepted import DEVICE
from oracle import Call, assert_right, dense_attention, kept_pairs

import sparse_flash as sf


def drawn_picks(shape: tuple[int, int, int, int], block: int, kv_len: int, seed: int = 0) -> torch.Tensor:
    """(batch, pickers, q_len, n) int32: the block of each query and earlier ones, sorted, then -1."""
    generator = torch.Generator().manual_seed(seed)
    own = ((torch.arange(shape[2]) + kv_len - shape[2]).clamp(min=0) // block)[:, None]
    picks = (torch.rand(shape, generator=generator) * (own + 1)).int()
    picks[..., 0] = own[:, 0]
    return sorted_picks(picks)


def sorted_picks(picks: torch.Tensor) -> torch.Tensor:
    """Ascending, duplicates once, then -1."""
    none = 1 << 20
    picks = picks.where(picks >= 0, none).sort(3).values
    again = torch.zeros_like(picks, dtype=torch.bool)
    again[..., 1:] = picks[..., 1:] == picks[..., :-1]
    picks = picks.where(~again, none).sort(3).values
    return picks.where(picks < none, -1).to(DEVICE, torch.int32).contiguous()


def kept_by_picks(picks: torch.Tensor, block: int, kv_len: int) -> torch.Tensor:
    """(batch, pickers, q_len, n, kv_len) bool: the pairs of each pick."""
    pick, q_len = picks.cpu()[..., None], picks.shape[2]
    key, query = torch.arange(kv_len), torch.arange(q_len)
    causal = key <= (query + kv_len - q_len)[:, None]
    return (pick >= 0) & (key // block == pick) & causal[:, None]


def tensors(batch, heads, kv_heads, q_len, kv_len, dim, dtype=torch.float32, v_dim=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, v_dim or dim), (heads, q_len, v_dim or dim)
    return [torch.randn(batch, *shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def attention_over_picks(inputs, picks, block: int, always: str | None = None, table=None, **options) -> Call:
    """Of q, k and v. always: the spec text of what is kept too. table: its mask, where blocks are of another size than usual."""
    (_, heads, q_len, _), kv_len = inputs[0].shape, inputs[1].shape[2]
    kept = kept_by_picks(picks, block, kv_len).any(3).repeat_interleave(heads // picks.shape[1], 1)
    if always is not None:
        kept |= kept_pairs(sf.parse(f"causal & ({always})"), None, q_len, kv_len)
    kept = kept.to(DEVICE)

    def run(q, k, v, picks):
        given = {"kv_len": k.shape[2], "own": False, "always": table or always}
        return sf.attention(q, k, v, sf.BlockSelection.from_picks(picks, block, **given), return_lse=True, **options)

    return Call(tuple(inputs), run, lambda *t: dense_attention(*t, kept, options.get("scale")), (picks,))


def check_selected(
    backend, heads, kv_heads, pickers, q_len, kv_len, block, n, always=None, always_block=32, picks=None, batch=1, **options
):  # fmt: skip
    """Compares attention over drawn or given picks with the oracle, by its rule."""
    *inputs, dout = tensors(batch, heads, kv_heads, q_len, kv_len, options.pop("dim", 16), **options)
    if picks is None:
        picks = drawn_picks((batch, pickers, q_len, n), block, kv_len)
    table = always and sf.compile_mask(always, q_len, kv_len, always_block, device=DEVICE)
    call = attention_over_picks(inputs, picks, block, always, table, backend=backend)
    assert_right(replace(call, dout=dout), backend, keeps_order=True)
