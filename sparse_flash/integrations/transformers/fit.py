"""Fits masks to a model: measures choosers and a window on a text, head by head, and picks the best within a budget.

May know the rest of this integration and the calls that users make; prints nothing. Source: arXiv:2407.02490, sec. 3.2.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple, cast

import torch
import transformers
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ...api.attention import attention
from ...masks.block_mask import BlockMask
from ...masks.chooser import BLOCK_SIZES
from ...masks.compiler import compile_mask
from ...masks.parsing import parse
from ...masks.pattern import PerHead
from . import NAME, use_sparse_flash
from .by_content import DENSE_BELOW
from .check_masks import OWN
from .layers import find_self_attention, find_tower, unwrap_model
from .limits import keeps_all
from .masks import ModelMask, assume_mask
from .saved import write_masks

WINDOW, BUDGET = "window", "sampled, budget"
MOST_TOKENS = 8192
_LEAST_BLOCKS = 8  # the first, the own and the nearest block are always kept, and fewer blocks leave nothing to choose
_CHOOSERS = {"sampled": "8, ", "antidiagonal": "8, ", "pooled": "", "last_queries": "64, "}
_ALWAYS_KEPT = "sinks(64) | local(64)"


class FittedLayer(NamedTuple):
    """A layer's mask. kinds: what each head got, a name of ``candidates`` or "own". error: the relative L2 distance between the
    layer's attention under the mask and without it. candidate_errors: that error for each candidate in all heads. Layers with the
    model's own mask have no errors: 0 and {}."""

    spec: str
    kinds: tuple[str, ...]
    error: float
    candidate_errors: dict[str, float]


def candidates(tokens: int, budget: float, block: int) -> dict[str, str]:
    """Returns spec texts by kind, of masks that keep this share of the causal blocks, and the first, the nearest and the own block
    in any case. The window is as long as the budget allows at this number of tokens. Raises ValueError for a budget below what is
    kept in any case."""
    blocks = -(-tokens // block)
    rows = range(1, blocks + 1)
    least = _count_kept(rows, 1) / sum(rows)
    if budget < least:
        raise ValueError(
            f"budget must be at least {least:.3f} for {tokens} tokens in blocks of {block}, as the first, the nearest and the own "
            f"block are kept in any case; got {budget}; pass more tokens, or a smaller block"
        )
    made = {WINDOW: f"causal & (sinks(64) | local({block * _find_window_width(rows, budget)}))"}
    for name, fields in _CHOOSERS.items():
        made[name] = f"causal & ({name}({fields}keep={float(budget)!r}, block={block}) | {_ALWAYS_KEPT})"
    made[BUDGET] = f"causal & (sampled(8, budget={float(budget)!r}, block={block}) | {_ALWAYS_KEPT})"
    return {kind: parse(spec).to_spec() for kind, spec in made.items()}


def _count_kept(rows: range, width: int) -> int:
    """Returns how many blocks a window keeps, beside the first block and the own."""
    return sum(min(row, width + 2) for row in rows)


def _find_window_width(rows: range, budget: float) -> int:
    """Returns the blocks of the window: the most that the budget allows."""
    return max([1, *(width for width in rows if _count_kept(rows, width) <= budget * sum(rows))])


def kept_shares(tokens: int, budget: float, block: int) -> dict[str, float]:
    """Returns the share of the causal blocks that each of ``candidates`` keeps at this number of tokens, by kind. It does not
    depend on q and k. Under the budget for which heads compete, it is the share of all heads together, up to rounding."""
    rows = range(1, -(-tokens // block) + 1)
    width, each = _find_window_width(rows, budget), [max(min(row, 3), math.ceil(budget * row - 1e-6)) for row in rows]
    kept = {WINDOW: _count_kept(rows, width)} | dict.fromkeys(_CHOOSERS, sum(each))
    together = sum(max(min(row, 3), budget * row) for row in rows)
    return {kind: count / sum(rows) for kind, count in {**kept, BUDGET: together}.items()}


def check_budget(budget: float, block: int) -> None:
    """Raises ValueError for settings that no candidate takes."""
    if not 0 < budget <= 1:
        raise ValueError(f"budget must be in (0, 1], the share of the causal blocks that is kept; got {budget}; try 0.15")
    if block not in BLOCK_SIZES:
        raise ValueError(f"block must be one of {', '.join(map(str, BLOCK_SIZES))}; got {block}")


def load(name: str, device: str) -> tuple[Any, Any]:
    """Returns a causal language model and its tokenizer, from a folder or by its name."""
    AutoConfig.from_pretrained(name)  # first, as its errors name what is missing
    tokenizer = AutoTokenizer.from_pretrained(name)
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    return model.to(device).eval(), tokenizer


def tokenize_windows(tokenizer: Any, text: str, tokens: int | None, windows: int, block: int, most: int | None) -> torch.Tensor:
    """Returns the first tokens of a text, (windows, tokens) int64. tokens: None for as many as the text has, up to ``MOST_TOKENS``
    and most, the model's positions. Raises ValueError for a text that is too short, and for too many tokens."""
    ids = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)
    wanted = min(MOST_TOKENS, len(ids) // windows, most or MOST_TOKENS) if tokens is None else tokens
    if most is not None and wanted > most:
        raise ValueError(f"tokens must be at most {most}, the positions of the model; got {wanted}")
    if tokens is not None and tokens < _LEAST_BLOCKS * block:
        raise ValueError(f"tokens must be at least {_LEAST_BLOCKS} blocks of {block}; got {tokens}; pass more, or a smaller block")
    least = max(wanted, _LEAST_BLOCKS * block)
    if len(ids) < windows * least or wanted < least:
        raise ValueError(
            f"text must have at least {windows * least} tokens, {windows} x {least}, which the model's positions must hold; got "
            f"{len(ids)} tokens and {most} positions; pass a longer text, or fewer tokens, windows or a smaller block"
        )
    return ids[: windows * wanted].view(windows, wanted)


@torch.no_grad()
def fit(
    model: torch.nn.Module,
    windows: torch.Tensor,
    budget: float,
    block: int = 128,
    advance: Callable[[], object] = lambda: None,
) -> dict[int, FittedLayer]:
    """Returns the best mask of each layer, by number. The model then runs under its own masks, through ``use_sparse_flash``.

    windows: (windows, tokens) int64; the model runs dense on one after the other. A layer's queries, keys and values are measured
    where the layer computes them, so memory is that of one layer. advance: called after each layer of each window.

    Each head takes the candidate of least error. The layer takes the heads' mix, or one candidate for all its heads if that has
    less error, such as a budget for which the heads compete. A layer that the model limits to less than causal keeps its own mask.
    Raises ValueError if these are all layers, and for models that ``use_sparse_flash`` refuses.
    """
    check_budget(budget, block)
    use_sparse_flash(model, OWN)
    held = unwrap_model(model)
    layers = find_self_attention(find_tower(held))
    numbers = {id(layer): number for number, layer in layers.items()}
    tokens = windows.shape[1]
    specs = candidates(tokens, budget, block)
    # A window keeps whole blocks beside choosers, and its pairs alone.
    blocks = compile_mask(specs[WINDOW], tokens, tokens, block).block_states() > 0
    whole = BlockMask.from_blocks(blocks.view(1, 1, *blocks.shape[-2:]), block, tokens, tokens, within="causal")
    sums: dict[int, torch.Tensor] = {}
    heads: dict[int, int] = {}
    attend = AttentionInterface()[NAME]

    def attend_and_measure(module, query, key, value, attention_mask, **options):
        out = attend(module, query, key, value, attention_mask, **options)
        if (number := numbers.get(id(module))) is not None:
            heads[number] = query.shape[1]
            if _is_causal(module, query, key, attention_mask, options):
                masks = [*specs.values(), whole.to(query.device)]
                sums[number] = sums.get(number, 0) + _measure_errors(masks, out[0].transpose(1, 2), query, key, value, options)
            advance()
        return out

    AttentionInterface.register(NAME, attend_and_measure)
    try:
        for ids in windows:
            held.base_model(input_ids=ids[None].to(held.device), use_cache=False)
    finally:
        AttentionInterface.register(NAME, attend)
    if not sums:
        raise ValueError(
            f"model must have layers that attend to all earlier keys; {type(held).__name__} has none at {tokens} tokens; fit "
            "texts that are shorter than its windows"
        )
    own = {number: FittedLayer(OWN, (OWN,) * heads.get(number, 1), 0.0, {}) for number in layers}
    return own | {number: _pick_mask(specs, sums[number]) for number in layers if number in sums}


def _is_causal(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, mask: object, options: dict[str, Any]) -> bool:
    """Whether a layer's own mask keeps all earlier keys and no others."""
    if mask is None:
        mask = assume_mask(module, query, key, options.get("sliding_window"), options.get("is_causal"))
    if not isinstance(mask, ModelMask) or mask.base != "causal" or mask.kept_pairs is not None or mask.refusal is not None:
        return False
    limits = [one for limit in mask.limits for one in limit]
    return options.get("block_indices") is None and all(keeps_all(one, key.shape[2]) for one in limits)


def _measure_errors(
    masks: list[Any],
    dense: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Returns (masks + 1, heads) float64: the squared distance between the outputs under each mask and the dense ones, and the
    squared length of the dense ones."""
    call: dict[str, Any] = {"scale": options.get("scaling"), "softcap": options.get("softcap"), "sinks": options.get("s_aux")}
    outs = (cast(torch.Tensor, attention(query, key, value, mask, **call)) for mask in masks)
    found = [(out.float() - dense.float()).square().sum((0, 2, 3)) for out in outs]
    return torch.stack([*found, dense.float().square().sum((0, 2, 3))]).double().cpu()


def _pick_mask(specs: dict[str, str], sums: torch.Tensor) -> FittedLayer:
    """Picks a layer's mask. sums: what ``_measure_errors`` returns for the specs, and for the window in whole blocks."""
    *by_spec, whole, norm = sums
    distance = dict(zip(specs, by_spec, strict=True))
    errors = {kind: _relative_error(one, norm) for kind, one in distance.items()}
    by_head = {WINDOW: whole} | {kind: distance[kind] for kind in _CHOOSERS}
    best = torch.stack([*by_head.values()]).min(0)
    kinds = tuple([*by_head][index] for index in best.indices.tolist())
    single = min(errors, key=errors.__getitem__)
    mixed = _relative_error(best.values, norm)
    if len(set(kinds)) > 1 and mixed < errors[single]:
        return FittedLayer(PerHead(tuple(parse(specs[kind]) for kind in kinds)).to_spec(), kinds, mixed, errors)
    return FittedLayer(specs[single], (single,) * len(norm), errors[single], errors)


def _relative_error(distance: torch.Tensor, norm: torch.Tensor) -> float:
    return float((distance.sum() / norm.sum()).sqrt())


def mean_errors(fitted: dict[int, FittedLayer]) -> dict[str, float]:
    """Returns mean errors over the measured layers: of each candidate in all heads, by kind, and of "fit"."""
    layers = [layer for layer in fitted.values() if layer.candidate_errors]
    errors = {kind: sum(layer.candidate_errors[kind] for layer in layers) / len(layers) for kind in layers[0].candidate_errors}
    return errors | {"fit": sum(layer.error for layer in layers) / len(layers)}


def write_fit(
    path: str | PathLike[str], fitted: dict[int, FittedLayer], tokens: int, text: str, version: str, **made_by: object
) -> None:
    """Writes the masks for ``use_sparse_flash(model, path)``. Prompts as long as the text choose, also if it is shorter than the
    default of ``dense_below``. version: of this package. made_by: what else the file says of its making."""
    chosen = any(kind not in (OWN, WINDOW) for layer in fitted.values() for kind in layer.kinds)
    said: dict[str, object] = {"command": "sparse-flash fit", **made_by, "tokens": tokens}
    said["text"] = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    said["errors"] = {kind: round(error, 5) for kind, error in mean_errors(fitted).items()}
    said["versions"] = {"sparse-flash": version, "torch": str(torch.__version__), "transformers": transformers.__version__}
    below = tokens if chosen and tokens < DENSE_BELOW else None
    write_masks(path, {number: layer.spec for number, layer in fitted.items()}, dense_below=below, made_by=said)
