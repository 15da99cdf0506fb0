"""A layer's cache of keys and values."""

from typing import Any

import torch

from ..core.caches import E4M3, dequantized
from ..core.variant import check_counts


class KeyValueCache:
    """One layer's keys and values of the tokens seen so far. Allocates ``length`` tokens at once.

    keys, values: (batch, kv_heads, tokens seen, head_dim), views of ``room``. room: the storage of keys and of values, (batch,
    kv_heads, length, head_dim) each.
    dtype: of the storage. torch.float8_e4m3fn takes half the memory of bfloat16, with a scale for each token of a head, so later
    larger tokens are not clipped; each access to ``keys`` and ``values`` then computes them in float32. scales: of keys and of
    values, (batch, kv_heads, length) float32; None for other dtypes.
    v_head_dim: head_dim of the values; by default that of the keys.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        length: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        widths = {"head_dim": head_dim, "v_head_dim": head_dim if v_head_dim is None else v_head_dim}
        check_counts(batch=batch, kv_heads=kv_heads, length=length, **widths)
        if dtype not in (None, E4M3, torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"dtype must be a floating-point type of 16 bits or more, or torch.float8_e4m3fn; got {dtype}")
        self.room = tuple(torch.zeros(batch, kv_heads, length, width, dtype=dtype, device=device) for width in widths.values())
        self.tokens, self.scales = 0, None
        if dtype == E4M3:
            self.scales = tuple(torch.zeros(batch, kv_heads, length, device=device, dtype=torch.float32) for _ in "kv")

    @property
    def length(self) -> int:
        return self.room[0].shape[2]

    @property
    def keys(self) -> torch.Tensor:
        return self._read_tokens(self.tokens, 0, torch.float32)

    @property
    def values(self) -> torch.Tensor:
        return self._read_tokens(self.tokens, 1, torch.float32)

    def _read_tokens(self, tokens: int, which: int, dtype: torch.dtype) -> torch.Tensor:
        """Reads the first tokens, keys or values. dtype: of e4m3 ones."""
        stored = self.room[which][:, :, :tokens]
        return stored if self.scales is None else dequantized(stored, self.scales[which][:, :, :tokens], dtype)

    def held(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Returns the first tokens' keys and values as stored, and their scales as keywords of ``attention_decode``."""
        k, v = (room[:, :, :tokens] for room in self.room)
        scales = () if self.scales is None else (scale[:, :, :tokens] for scale in self.scales)
        return k, v, dict(zip(("k_scale", "v_scale"), scales, strict=False))

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores k and v, (batch, kv_heads, tokens, head_dim), without their gradients, and returns ``keys`` and ``values``, in k's
        dtype if the cache is e4m3."""
        self.tokens = self._write(k, v)
        return self._read_tokens(self.tokens, 0, k.dtype), self._read_tokens(self.tokens, 1, k.dtype)

    def _write(self, k: torch.Tensor, v: torch.Tensor) -> int:
        """Writes k and v after the tokens seen so far, and returns the new number of tokens; ``tokens`` stays."""
        for name, tensor in (("k", k), ("v", v)):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
        tokens: int | str = k.shape[2] if k.dim() == 4 else "tokens"
        wanted = [(*room.shape[:2], tokens, room.shape[3]) for room in self.room]
        if [tuple(k.shape), tuple(v.shape)] != wanted:
            raise ValueError(
                f"k and v must have shapes {wanted[0]} and {wanted[1]}, as the cache was made for; got {tuple(k.shape)} and "
                f"{tuple(v.shape)}"
            )
        stop = self.tokens + k.shape[2]
        if stop > self.length:
            raise ValueError(f"the cache has room for {self.length} tokens and holds {self.tokens}; {k.shape[2]} more do not fit")
        for which, new in enumerate((k.detach(), v.detach())):
            if self.scales is not None:
                new = new.float()
                # A token's largest number becomes 448, the largest of e4m3; zeros stay zeros.
                scale = torch.linalg.vector_norm(new, torch.inf, -1).div_(448.0).clamp_(min=2.0**-126)
                self.scales[which][:, :, self.tokens : stop] = scale
                new = new / scale[..., None]
            self.room[which][:, :, self.tokens : stop] = new
        return stop

    def reset(self) -> None:
        """Removes all tokens; the storage stays."""
        self.tokens = 0
