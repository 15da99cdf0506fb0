"""BlockMeans: the mean keys of blocks, kept beside a cache of keys, by which the newest queries choose."""

from __future__ import annotations

import torch

from ..backends import E4M3, cache_capacity
from ..selection.block_selection import BlockSelection, check_selection_block
from ..selection.newest import choose_newest, update_means
from ..variant.variant import check_counts
from .arguments import check_dtype
from .decoding_arguments import MAX_QUERIES, check_cache_lengths, check_cache_scales
from .selection_arguments import check_keep


class BlockMeans:
    """Mean keys of the whole blocks of a cache, so that a step of decoding chooses without reading the keys again.

    Call ``update`` when keys were appended to the cache, then ``choose``, and pass what it returns to ``attention_decode``. Each
    token then sees what ``topk_blocks`` of all queries and keys with every=1 and score="mean" lets it see.

    batch, kv_heads, length, head_dim: of the cache; length: tokens that it has room for. block_size: keys of a block, as for
    ``topk_blocks``. dtype: of the keys.
    means: (batch, kv_heads, length // block_size, head_dim) float32, or float64 for float64 keys; means of blocks that are
    not whole yet are never read. Raises ValueError for sizes that cannot be.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        length: int,
        head_dim: int,
        block_size: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_counts(batch=batch, kv_heads=kv_heads, length=length, head_dim=head_dim)
        self.length, self.block_size = length, check_selection_block(block_size)
        exact = torch.promote_types(torch.get_default_dtype() if dtype is None else dtype, torch.float32)
        self._room = torch.zeros(batch, kv_heads, length // self.block_size + 1, head_dim, dtype=exact, device=device)

    @property
    def means(self) -> torch.Tensor:
        return self._room[:, :, :-1]

    @torch.no_grad()
    def update(
        self,
        k: torch.Tensor,
        tokens: int,
        *,
        kv_lens: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
    ) -> None:
        """Takes in the last ``tokens`` of each sequence, whose keys are in the cache already; reads the blocks that they end.

        k, kv_lens, block_table, k_scale: the cache and the lengths with these tokens, as for ``attention_decode``. Does not
        synchronize.
        Raises ValueError for a cache of other sizes, TypeError for wrong types.
        """
        self._check_tensor("k", k)
        batch, kv_heads, _, head_dim = self._room.shape
        paged = block_table is not None
        if k.dim() != 4 or (k.shape[1], k.shape[3]) != (kv_heads, head_dim) or not (paged or k.shape[0] == batch):
            wanted = (batch, kv_heads, "capacity", head_dim), ("pages", kv_heads, "page_size", head_dim)
            raise ValueError(f"k must have shape ({', '.join(map(str, wanted[paged]))}), as for these means; got {tuple(k.shape)}")
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= self.length:
            raise ValueError(f"tokens must be how many were appended, 1 to the {self.length} of the cache; got {tokens!r}")
        kv_lens, block_table = check_cache_lengths(self._room, k.shape[2], kv_lens, block_table)
        k_scale, _ = check_cache_scales(self._room, k, k_scale, k_scale, block_table)
        capacity = cache_capacity(k, block_table)
        if capacity < self.length:
            raise ValueError(
                f"the cache must have at least the {self.length} tokens of these means; got {capacity}; pass the whole cache, and "
                "how many of its tokens exist as kv_lens="
            )
        update_means(self._room, k, tokens, self.block_size, kv_lens, block_table, k_scale)

    @torch.no_grad()
    def choose(
        self, q: torch.Tensor, keep: int, *, share_group: bool = False, kv_lens: torch.Tensor | None = None
    ) -> BlockSelection:
        """The blocks that the newest queries choose: their own and the best of the blocks that end before it, ``keep`` in all.

        q: (batch, heads, q_len, head_dim), q_len up to 64, of the last tokens of each sequence. keep, share_group: as for
        ``topk_blocks``. kv_lens: (batch,), the length of each sequence, with these tokens; None: ``length``.
        Returns a BlockSelection for ``attention_decode`` with these kv_lens, which tell the queries' positions there. Does not
        synchronize. Raises ValueError for arguments that do not fit together, TypeError for wrong types.
        """
        self._check_tensor("q", q)
        batch, kv_heads, _, head_dim = self._room.shape
        if q.dim() != 4 or (q.shape[0], q.shape[3]) != (batch, head_dim) or q.shape[1] % kv_heads or not q.shape[1]:
            raise ValueError(
                f"q must have shape ({batch}, a multiple of {kv_heads} heads, q_len, {head_dim}), as these means were made for; "
                f"got {tuple(q.shape)}"
            )
        if not 1 <= q.shape[2] <= MAX_QUERIES:
            raise ValueError(f"means choose for 1 to {MAX_QUERIES} queries; got {q.shape[2]}; use topk_blocks for more")
        blocks = check_keep(keep)
        if isinstance(blocks, float):
            raise TypeError(f"keep of a selection must be an int, how many blocks; got {keep}, a share")
        kv_lens, _ = check_cache_lengths(q, 1, kv_lens, None)
        keep = min(blocks, -(-self.length // self.block_size))
        picks = choose_newest(q, self.means, kv_lens, self.length, keep, self.block_size, share_group)
        return BlockSelection(picks, q.shape[2], self.length, self.block_size)

    def _check_tensor(self, name: str, x: torch.Tensor) -> None:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
        if name != "k" or x.dtype != E4M3:
            check_dtype(name, x)
        if x.device != self._room.device:
            here = str(x.device)
            raise ValueError(f"{name} is on {here} and the means on {self._room.device}; make the means with device={here!r}")
