"""Measures rows: the rule's number, what layers keep, loss, and retrieval."""

import hashlib
import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

import sparse_flash as sf

from . import oracle  # noqa: F401  (registers its chooser)
from .model import DENSE, Layers, density, mask_of
from .rows import Row
from .texts import Needles, plant_needles, texts, windows_of

_STEPS, _LOW, _HIGH = 11, math.log(1e-6), math.log(999)  # bisection over numbers from 1e-6 to 0.999, by the logarithm of their odds
_NEAR = 0.01  # a density is near enough to the wanted one


class Measurer:
    """A model with its texts.

    lengths: tokens of windows. windows: how many of each kind of text, at the greatest length; shorter ones are parts of them.
    needles: how many of each length, in the first kind of text. files: texts instead of those that are installed. precision: of
    attention, None for the model's own. Raises ValueError for lengths that do not fit together.
    """

    packages = torch, transformers, sf

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        lengths: list[int],
        windows: int,
        needles: int,
        files: list[Path],
        precision: str | None = None,
    ):
        self.lengths = sorted(set(lengths))
        for length in self.lengths:
            if length < 128 or length % 128 or self.lengths[-1] % length:
                raise ValueError(f"--length must be a multiple of 128 that divides the greatest; got {length}")
        self.model, self.device, self.head = model, model.device, model.get_output_embeddings()
        self.precision = precision
        self.layers, self.batch_tokens = Layers(model, precision), 65_536 if model.device.type == "cuda" else 8192
        found = texts(tokenizer, files)
        self.windows = {kind: windows_of(text.test, self.lengths[-1], windows) for kind, text in found.items()}
        self.tuning = torch.cat([windows_of(text.tuning, self.lengths[-1], 1) for text in found.values()])
        self.needles = {
            length: plant_needles(tokenizer, next(iter(found.values())).test, length, needles) for length in self.lengths
        }

    def setup(self) -> dict:
        """Returns what all rows of a file must have in common."""
        digest = hashlib.sha256(b"".join(ids.numpy().tobytes() for ids in (*self.windows.values(), self.tuning))).hexdigest()
        counts = {kind: len(ids) for kind, ids in self.windows.items()}
        size = sum(parameter.numel() for parameter in self.model.parameters())
        needles = len(self.needles[self.lengths[0]].tokens)
        found = {"parameters": size, "lengths": self.lengths, "windows": counts, "needles": needles, "texts": digest[:16]}
        return found | ({"precision": self.precision} if self.precision else {})

    def why_missing(self, row: Row) -> None:
        """Every row can be measured."""

    @torch.no_grad()
    def measure_row(self, row: Row) -> dict:
        """A row's result as plain data. by_head: at the greatest length, lists by layer and head. shares: likewise, what the heads
        of a row by head keep."""
        number, shares = self._tune_number(row) if row.rule else (1.0, None)
        sparse = [row.spec_by_head(of_layer) for of_layer in shares] if shares else [row.spec(number)] * len(self.layers.specs)
        self.layers.specs = [DENSE] * row.dense + sparse[row.dense :]
        lengths, by_head = {}, {}
        for length in self.lengths:
            self.layers.note = seen = LayerStatistics(len(sparse), row.block, self.layers.options)
            loss = {kind: _rounded(self._losses(ids.view(-1, length))) for kind, ids in self.windows.items()}
            self.layers.note = None
            by_head, means = seen.summarize()
            lengths[str(length)] = {**means, "loss": loss, **self._retrieved(self.needles[length])}
        return {
            "spec": row.spec(number),
            "lengths": lengths,
            "shares": shares,
            "by_head": {name: _rounded(values, 3) for name, values in by_head.items()} if row.rule else None,
        }

    @cached_property
    def _queries_and_keys(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Queries and keys of each layer for the tuning texts, under dense attention: (windows, heads, tokens, head_dim)."""
        found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.layers.specs]

        def note(layer, spec, q, k, v):
            found[layer].append((q, k))
            return sf.attention(q, k, v, DENSE)

        self.layers.note = note
        for _ in self._hidden(self.tuning):
            pass
        self.layers.note = None
        return [tuple(torch.cat(parts) for parts in zip(*of_layer, strict=True)) for of_layer in found]

    def _tune_number(self, row: Row) -> tuple[float, list[list[float]] | None]:
        """(the number of the rule, the share that each head of each layer then keeps, for rows by head). With this number the
        sparse layers keep the row's share of the tuning texts on average, as nearly as the bisection finds."""
        low, high = _LOW, _HIGH
        for _ in range(_STEPS):
            middle = (low + high) / 2
            number = row.number(1 / (1 + math.exp(-middle)), self.tuning.shape[1])
            masks = (mask_of(row.spec(number), q, k, row.block) for q, k in self._queries_and_keys)
            by_head = torch.stack([density(mask, q.shape) for mask, (q, _) in zip(masks, self._queries_and_keys, strict=True)])
            kept = by_head[row.dense :].mean().item()
            if abs(kept - row.share) < _NEAR * row.share:
                break
            less = (kept > row.share) == (row.rule != "floor")
            low, high = (low, middle) if less else (middle, high)
        return number, _rounded(by_head.clamp(0.001, 0.999), 3) if row.by_head else None

    def _hidden(self, ids: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The last layer's output beside the tokens, some windows at a time: (windows, tokens, width) and (windows, tokens)."""
        for batch in ids.to(self.device).split(max(1, self.batch_tokens // ids.shape[1])):
            yield self.model.base_model(input_ids=batch, use_cache=False).last_hidden_state, batch

    def _losses(self, ids: torch.Tensor) -> torch.Tensor:
        """(windows,): nats a token, over the second half of each window."""
        half, found = ids.shape[1] // 2, []
        for batch in self._hidden(ids):
            for hidden, window in zip(*batch, strict=True):
                found.append(cross_entropy(self.head(hidden[half - 1 : -1]).float(), window[half:]))
        return torch.stack(found)

    def _retrieved(self, asked: Needles) -> dict[str, float]:
        """digits: the share of digits that are right after the right ones before. needles: the share of answers that are right in
        all digits."""
        last = slice(-asked.digits.shape[1], None)
        right = [
            self.head(hidden[:, last.start - 1 : -1]).argmax(-1) == batch[:, last] for hidden, batch in self._hidden(asked.tokens)
        ]
        hits = torch.cat(right).cpu()
        whole = (hits | ~asked.digits).all(1)
        return {"digits": _rounded(hits[asked.digits].float().mean()), "needles": _rounded(whole.float().mean())}


class LayerStatistics:
    """Sums, over windows, how sparse layers compare with dense attention to the same queries, keys and values: density; recall, the
    softmax mass of the kept keys, mean over queries; error, the relative L2 distance of the outputs. options: of the layers'
    attention."""

    def __init__(self, layers: int, block: int, options: dict[str, Any] | None = None):
        self.block, self.windows, self.options = block, 0, options or {}
        self.sums: list[Any] = [0.0] * layers  # (4, heads) each

    def __call__(self, layer: int, spec: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.windows += len(q) if layer == 0 else 0
        dense, whole = sf.attention(q, k, v, DENSE, return_lse=True)
        kept, recall = torch.ones(2, q.shape[1], device=q.device)
        mask = DENSE if spec == DENSE else mask_of(spec, q, k, self.block)
        out, lse = sf.attention(q, k, v, mask, return_lse=True, **self.options)
        if spec != DENSE:
            kept, recall = density(mask, q.shape), (lse - whole).exp().mean((0, 2))
        apart, norm = (one.square().sum((0, 2, 3)) for one in (out.float() - dense.float(), dense.float()))
        self.sums[layer] += torch.stack([kept * len(q), recall * len(q), apart, norm])
        return out

    def summarize(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """By layer and head, (layers, heads) each; and means over both, of errors over layers."""
        kept, recall, apart, norm = torch.stack(self.sums).unbind(1)
        by_head = {"density": kept / self.windows, "recall": recall / self.windows, "error": (apart / norm).sqrt()}
        means = by_head | {"error": (apart.sum(1) / norm.sum(1)).sqrt()}
        return by_head, {name: _rounded(one.mean()) for name, one in means.items()}


def _rounded(values: torch.Tensor, digits: int = 4) -> Any:
    """A number, or nested lists of numbers."""
    return round(values.item(), digits) if values.dim() == 0 else [_rounded(part, digits) for part in values]
