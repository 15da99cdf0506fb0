"""A decoder with RMSNorm, rotary positions, SwiGLU, grouped-query heads, normalized queries and keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import sparse_flash as sf
from sparse_flash.api.shared import SharedSequence

from .settings import SDPA, Choice, Recompute, Settings, Shape

IGNORED = -100  # a label that counts for nothing
_EPSILON = 1e-6
_NEUTRAL_KEYS = 1024  # with so many, log-length scaling leaves scores as they are
LOGITS_TOGETHER = 1 << 26  # logits that exist at a time: 256 MiB in float32
MLP_TOGETHER = 1 << 15  # tokens whose MLP is computed again at a time, where blocks are recomputed in full


class Documents(NamedTuple):
    """Holds the bounds of packed documents. cu_seqlens: (documents + 1,) int32, the start of each document, then the end of the
    last. longest: no document has more tokens."""

    cu_seqlens: torch.Tensor
    longest: int


class Positions(NamedTuple):
    """Holds what attention needs of its tokens' positions. cos, sin: (tokens, 1, head_dim / 2) float32. sharpness: (tokens, 1, 1)
    float32, a factor of each query's scores; None for 1."""

    cos: torch.Tensor
    sin: torch.Tensor
    sharpness: torch.Tensor | None = None

    def since(self, first: int) -> Positions:
        return Positions(*(None if t is None else t[first:] for t in self))


class Norm(nn.RMSNorm):
    """RMSNorm whose weight follows the stream's dtype: with a float32 weight, autocast takes a slow path and gives float32."""

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Takes and returns (batch, tokens, dim)."""

    def __init__(self, shape: Shape, mask: str):
        super().__init__()
        self.mask, self.head_dim = mask, shape.head_dim
        self.choice = Choice.of(mask)
        self.q_proj = nn.Linear(shape.dim, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.out_proj = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=False)
        # Scores of normalized queries and keys are at most sqrt(head_dim): each head learns how sharp it wants them.
        self.gain = nn.Parameter(torch.ones(shape.heads))

    def forward(self, x, positions: Positions, documents: Documents | None, plan: SharedSequence | None = None):
        q, k, v = self.qkv(x, positions)
        if plan is None:
            return self.out_proj(self.attend(q, k, v, documents).flatten(2))
        # Several ranks share the sequence: the plan has the layer's mask.
        out = plan.attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def qkv(self, x, positions: Positions):
        """Returns q, k and v, each (batch, tokens, heads, head_dim)."""
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q = F.rms_norm(q, (self.head_dim,), eps=_EPSILON) * self.gain[:, None].to(q.dtype)
        k = F.rms_norm(k, (self.head_dim,), eps=_EPSILON)
        q, k = (apply_rotary(t, positions.cos, positions.sin) for t in (q, k))
        if positions.sharpness is not None:
            q = q * positions.sharpness
        return q.to(v.dtype), k.to(v.dtype), v

    def attend(self, q, k, v, documents: Documents | None):
        """Returns (batch, tokens, heads, head_dim). Attention takes heads before tokens by stride: transposing copies nothing."""
        if documents is not None:
            packed = (t.flatten(0, 1) for t in (q, k, v))
            longest = documents.longest
            out = sf.attention_varlen(*packed, documents.cu_seqlens, mask=self.mask, max_seqlen_q=longest, max_seqlen_k=longest)
            return out.view(q.shape)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.mask == SDPA:
            return attend_dense(q, k, v).transpose(1, 2)
        return sf.attention(q, k, v, self.mask if self.choice is None else self.choice(q, k)).transpose(1, 2)


def attend_dense(q, k, v):
    """Runs PyTorch's own causal attention by the fastest of its kernels. In compiled code it would otherwise take another."""
    fastest_first = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(fastest_first, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def apply_rotary(x, cos, sin):
    """Applies rotary positions (arXiv:2104.09864) to pairs half of head_dim apart. x: (batch, tokens, heads, head_dim). cos, sin:
    (tokens, 1, head_dim / 2) float32."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to what came in. (batch, tokens, dim) -> the same."""

    def __init__(self, shape: Shape, mask: str, recompute: Recompute):
        super().__init__()
        self.recompute = recompute
        self.attention_norm, self.mlp_norm = (Norm(shape.dim, eps=_EPSILON) for _ in range(2))
        self.attention = Attention(shape, mask)
        self.gate_proj, self.up_proj = (nn.Linear(shape.dim, shape.mlp_dim, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(shape.mlp_dim, shape.dim, bias=False)

    def forward(self, x, positions: Positions, documents: Documents | None = None, plan: SharedSequence | None = None):
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.compute(x, positions, documents, plan)
        options = {}
        if self.recompute == "selective":
            options = {"context_fn": partial(create_selective_checkpoint_contexts, _choose_policy)}
        elif self.attention.choice is not None:
            options = {"context_fn": sf.keep_picks}
        return checkpoint(self.compute, x, positions, documents, plan, use_reentrant=False, **options)

    def compute(self, x, positions: Positions, documents: Documents | None, plan: SharedSequence | None = None):
        x = x + self.attention(self.attention_norm(x), positions, documents, plan)
        normed = self.mlp_norm(x)
        if self.recompute != "full":
            return x + self.mlp(normed)
        # In pieces: the compiled backward pass computes the inner activations of a piece just before it needs them.
        return x + torch.cat([self.mlp(piece) for piece in normed.split(MLP_TOGETHER, 1)], 1)

    def mlp(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@contextmanager
def kept_on_host(x: torch.Tensor):
    """Within it, autograd keeps ``x`` in the host's pinned memory between the two passes."""
    address, device = x.data_ptr(), x.device  # not x: hooks live as long as what they keep

    def pack(saved: torch.Tensor) -> torch.Tensor:
        if saved.data_ptr() != address:
            return saved
        host = torch.empty(saved.shape, dtype=saved.dtype, pin_memory=device.type == "cuda")
        return host.copy_(saved, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.to(device, non_blocking=True)):
        yield


def _choose_policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
    """Keeps what takes long to compute again: the results of matrix products and of attention."""
    ours = ("attention", "context", "pack", "choose_blocks", "selected_attention")
    names = ("aten.mm", "aten.addmm", "scaled_dot_product", *(f"sparse_flash.{name}" for name in ours))
    return CheckpointPolicy.MUST_SAVE if any(name in str(operator) for name in names) else CheckpointPolicy.PREFER_RECOMPUTE


def reset_matrices(model: nn.Module, layers: int) -> None:
    """Draws all matrices of a model with so many blocks. Matrices that add to the stream are smaller in deep models."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            into_the_stream = name.endswith(("out_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if into_the_stream else 0.02)


class Decoder(nn.Module):
    """tokens (batch, tokens) int64 -> logits (batch, tokens, vocabulary), or with labels of the same shape the sum of their
    losses in nats, float32; labels of IGNORED count for nothing. plans: a plan for each layer if ranks share the sequence; tokens
    and labels are then this rank's."""

    def __init__(self, settings: Settings):
        super().__init__()
        self.shape = shape = settings.shape
        self.log_length, self.offload = settings.log_length, settings.offload
        self.embed = nn.Embedding(shape.vocabulary, shape.dim)
        masks = (settings.mask_of(layer) for layer in range(shape.layers))
        self.blocks = nn.ModuleList([Block(shape, mask, settings.recompute) for mask in masks])
        self.norm = Norm(shape.dim, eps=_EPSILON)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        self.chunk_loss = chunk_loss
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_matrices(self, self.shape.layers)

    def compile(self, packed: bool = False) -> None:
        """Compiles each block, and the loss; equal blocks share their code. packed: the number of documents differs by call."""
        # Each mask, each length, and training and evaluation have code of their own.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        for block in self.blocks:
            block.compile(fullgraph=True, dynamic=None if packed else False)
        self.chunk_loss = torch.compile(chunk_loss, dynamic=False)

    def forward(self, tokens, labels=None, documents: Documents | None = None, plans: Sequence[SharedSequence] | None = None):
        """documents: give positions; under plans, the masks keep the same documents apart."""
        x = self.hidden(tokens, documents, plans)
        if labels is None:
            return self.head(x)
        return ChunkedLoss.apply(x.flatten(0, 1), self.head.weight, labels.flatten(), self.chunk_loss)

    def hidden(self, tokens, documents: Documents | None = None, plans: Sequence[SharedSequence] | None = None):
        """Returns the input of the head: (batch, tokens, dim)."""
        positions = self.positions(tokens.shape[1], tokens.device, documents, plans and plans[0])
        x = self.embed(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for number, block in enumerate(self.blocks):
            with kept_on_host(x) if number < self.offload else nullcontext():
                x = block(x, positions, documents) if plans is None else block(x, positions, plan=plans[number])
        return self.norm(x)

    def positions(self, tokens: int, device, documents: Documents | None = None, plan: SharedSequence | None = None) -> Positions:
        """Returns the positions of all tokens, or of the rank's tokens by a plan. Positions start again with each document."""
        position = torch.arange(tokens, device=device) if plan is None else plan.positions
        if documents is not None:
            starts = documents.cu_seqlens.to(torch.int64)
            position = position - starts[torch.searchsorted(starts, position, right=True) - 1]
        half = self.shape.head_dim // 2
        rate = self.shape.rotary_base ** -(torch.arange(half, device=device, dtype=torch.float64) / half)
        angle = (position[:, None].double() * (rate / self.shape.rotary_scale)).float()[:, None]
        sharpness = (position + 1).double().log().div(math.log(_NEUTRAL_KEYS)).float() if self.log_length else None
        return Positions(angle.cos(), angle.sin(), None if sharpness is None else sharpness[:, None, None])


class ChunkedLoss(torch.autograd.Function):
    """Sums cross entropies without all logits at once: the logits of some tokens are made, differentiated and dropped.

    hidden: (tokens, dim). weight: (vocabulary, dim). labels: (tokens,) int64. Gradients are computed in the forward pass, as logits
    would otherwise be made twice.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, chunk_loss):
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        matrix = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        to_hidden = torch.empty_like(hidden) if wanted else None
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted else None
        tokens = max(1, LOGITS_TOGETHER // len(weight))
        for first in range(0, len(hidden), tokens):
            piece = slice(first, first + tokens)
            loss, dlogits = chunk_loss(hidden[piece], matrix, labels[piece], wanted)
            total += loss
            if wanted:
                to_hidden[piece] = dlogits @ matrix
                to_weight += dlogits.T @ hidden[piece]
        if wanted:
            ctx.save_for_backward(to_hidden, to_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, dloss):
        to_hidden, to_weight = ctx.saved_tensors
        return to_hidden * dloss, to_weight * dloss, None, None


def chunk_loss(hidden, weight, labels, differentiate: bool):
    """Returns (sum of cross entropies, its gradient by the logits or None)."""
    logits = (hidden @ weight.T).float()
    lse = logits.logsumexp(-1)
    counted = labels != IGNORED
    index = labels.clamp(min=0)[:, None]
    loss = ((lse - logits.gather(1, index)[:, 0]) * counted).sum()
    if not differentiate:
        return loss, None
    kinds = torch.arange(len(weight), device=labels.device)
    dlogits = ((logits - lse[:, None]).exp() - (kinds == index).float()) * counted[:, None]
    return loss, dlogits.to(hidden.dtype)
