"""Checks, printed layers, and the record of what layers keep, for the adapters of all libraries. Knows no library's models."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from ..api.call import observers
from ..core.operators import DEFAULT_BLOCK_SIZE
from ..masks.block_mask import BlockMask, compile_cached
from ..masks.compiler import is_shift_invariant
from ..masks.parsing import parse
from ..masks.pattern import Pattern, short_text
from ..selection.block_selection import BlockSelection


def library_of(model: object) -> str | None:
    """Returns the library that a model, or a part of it, is of: "diffusers" or "transformers"; None for others."""
    parts = model.modules() if isinstance(model, torch.nn.Module) else [model]
    found = {cls.__module__.partition(".")[0] for part in parts for cls in type(part).__mro__}
    return next((name for name in ("diffusers", "transformers") if name in found), None)


def check_layers(layers: Any, numbers: Collection[int], name: str = "dense_layers") -> frozenset[int]:
    """Returns the layers that a user names. numbers: of a model's layers. Raises ValueError for others. name: of the argument."""
    if not isinstance(layers, Iterable):
        raise ValueError(f"{name} must be numbers of layers, such as [0, 1]; got {layers!r}")
    given = tuple(layers)
    if wrong := [number for number in given if isinstance(number, bool) or number not in numbers]:
        raise ValueError(f"{name} must name layers of the model, {min(numbers)} to {max(numbers)}; got {wrong}")
    return frozenset(given)


def depends_on_position(mask: Any) -> bool:
    """Whether a mask depends on more than the distance of query and key."""
    mask = parse(mask) if isinstance(mask, str) else mask
    return mask is not None and not (isinstance(mask, Pattern) and is_shift_invariant(mask, 1))


def unswitched_error(got: str, call: str) -> ValueError:
    return ValueError(f"model must be one that use_sparse_flash switched; got {got}; call {call}")


def describe_layer(layer: torch.nn.Module, text: str | None) -> str:
    """Returns what print(model) shows of an attention layer besides its modules. text: of its mask; None if it is not switched."""
    own = type(layer).extra_repr(layer)
    return own if text is None else "\n".join(filter(None, (own, f"sparse_flash mask: {text}")))


@contextmanager
def record_layers(masks: Mapping[int, Any]) -> Iterator["MaskRecord"]:
    """A context with a new record of layers under these masks. Compiled models run uncompiled in it, as graphs record nothing."""
    with torch.compiler.set_stance("force_eager"):
        yield MaskRecord({number: LayerRecord(mask) for number, mask in masks.items()})


@dataclass
class LayerRecord:
    """What one layer did. mask: as ``masks_of`` gives it. calls: of the layer. dense: calls that kept all pairs, by the reason."""

    mask: Any
    calls: int = 0
    dense: dict[str, int] = field(default_factory=dict)
    _kept_pairs: np.ndarray = field(default_factory=lambda: np.zeros(1), repr=False)
    _all_pairs: float = field(default=0, repr=False)

    @property
    def kept(self) -> np.ndarray:
        """(heads,) float64, or (1,) if heads are equal: the share of pairs that the other calls kept; NaN if there were none."""
        return self._kept_pairs / self._all_pairs if self._all_pairs else np.full(1, np.nan)

    def add(self, count_all: Callable[[int, int], float], mask: Any, q: torch.Tensor, k: torch.Tensor) -> None:
        """Counts the pairs that a mask keeps in a call, of batch entries on average. count_all: how many all pairs are."""
        q_len, kv_len = q.shape[2], k.shape[2]
        if mask is None or isinstance(mask, BlockSelection):
            kept = np.full(1, (1.0 if mask is None else mask.density) * q_len * kv_len)
        else:
            table = mask if isinstance(mask, BlockMask) else compile_cached(mask, q_len, kv_len, DEFAULT_BLOCK_SIZE, q.device)
            kept = table.kept_pairs()[table.mask_index.cpu().numpy()].mean(0)
        self._kept_pairs, self._all_pairs = self._kept_pairs + kept, self._all_pairs + count_all(q_len, kv_len)

    def __str__(self) -> str:
        kept, said = self.kept, [f"{count} dense ({reason})" for reason, count in self.dense.items()]
        if self._all_pairs:
            by_head = f", by head {kept.min():.1%} to {kept.max():.1%}" if kept.min() < kept.max() else ""
            said.insert(0, f"{kept.mean():.1%} kept{by_head}")
        return f"{self.calls} calls: {', '.join(said) or 'none'}; {short_text(self.mask)}"


class MaskRecord(dict[int, LayerRecord]):
    """The record of each layer, by its number. Prints as a line for each layer."""

    @contextmanager
    def layer(self, number: int, why_dense: str | None, count_all: Callable[[int, int], float]) -> Iterator[None]:
        """Records a call of a layer. why_dense: why it keeps all pairs; None if it does not. count_all: how many those are."""
        one = self[number]
        one.calls += 1
        if why_dense is not None:
            one.dense[why_dense] = one.dense.get(why_dense, 0) + 1
            yield
            return
        observe = partial(one.add, count_all)
        observers.append(observe)
        try:
            yield
        finally:
            observers.remove(observe)

    def __str__(self) -> str:
        return "\n".join(f"layer {number}: {one}" for number, one in self.items())

    __repr__ = __str__


def count_causal(q_len: int, kv_len: int) -> float:
    return float(np.clip(np.arange(q_len) + 1 + kv_len - q_len, 0, kv_len).sum())
