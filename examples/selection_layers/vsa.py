"""VSA, Video Sparse Attention (arXiv:2505.13389): tiles of a video attend to tiles, this attention chooses tiles, and tokens attend
to the tokens of the chosen tiles.

As in the paper: the mean query, key and value of each tile, after rotary positions; softmax attention among the tiles, without
parameters, whose result all tokens of a tile get (the coarse branch); each head and each tile of queries keeps the tiles with the
largest weights of this attention (the fine branch); a gate of each branch, token and channel, linear in what the layer reads. The
choice has no gradient: the coarse branch trains the means that choose.
Gates begin at 0 for the coarse branch and 1 for the fine one, so a layer that keeps all tiles begins as dense attention, and may
begin with a dense model's weights. In the authors' code, hao-ai-lab/FastVideo, the coarse gate begins at 0, too, and the fine
branch has none.
Not as in the paper: a tile's own tile is always kept, and counts among ``keep``. Of a tile at a ragged edge, the mean is over its
own tokens. Tokens beside the video, such as text, are refused.
"""

import torch
from torch import nn

import sparse_flash as sf


class VSA(nn.Module):
    """Attention of a layer. layout: of tiles of 64 or 128 tokens, without prefix and suffix. keep: tiles that each tile attends to,
    its own among them. dim: of what the layer reads. Raises ValueError for other layouts and numbers of tiles."""

    def __init__(self, layout: sf.VideoLayout, keep: int, dim: int, heads: int, head_dim: int):
        super().__init__()
        if layout.block not in (64, 128) or layout.prefix or layout.suffix:
            raise ValueError(f"layout must have tiles of 64 or 128 tokens and nothing beside the video; got {layout}")
        tiles = layout.length // layout.block
        if not 1 <= keep <= tiles:
            raise ValueError(f"keep must be 1 to {tiles} tiles, as many as {layout} has; got {keep}")
        self.block, self.spec = layout.block, f"{layout} & scored(keep={keep}, block={layout.block})"
        self.gates = nn.Linear(dim, 2 * heads * head_dim)
        nn.init.zeros_(self.gates.weight)
        self.gates.bias.data = torch.tensor([0.0, 1.0]).repeat_interleave(heads * head_dim)
        exists = torch.from_numpy(layout.positions[:, 0] >= 0).unflatten(0, (tiles, layout.block))
        self.register_buffer("shares", exists / exists.sum(1, keepdim=True), persistent=False)  # of each token in its tile's mean

    def forward(self, x, q, k, v):
        """x: (batch, tokens, dim), what the layer reads. q, k, v: (batch, heads, tokens, head_dim), q and k rotated. All in tile
        order. Returns the shape of q."""
        coarse, mask = self.coarse(q, k, v)
        fine = sf.attention(q, k, v, mask)
        gates = self.gates(x).unflatten(2, (2, q.shape[1], -1)).permute(2, 0, 3, 1, 4)
        return gates[0] * coarse.repeat_interleave(self.block, 2) + gates[1] * fine

    def coarse(self, q, k, v):
        """(what tiles read from tiles: (batch, heads, tiles, head_dim), the mask of the tiles that they choose by it)."""
        shares = self.shares[..., None].to(q.dtype)
        of_q, of_k, of_v = ((t.unflatten(2, (-1, self.block)) * shares).sum(3) for t in (q, k, v))
        weights = (of_q @ of_k.mT * q.shape[3] ** -0.5).softmax(-1)
        return weights @ of_v, sf.choose_blocks(self.spec, q, k, scores=weights.detach())
