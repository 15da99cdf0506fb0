"""Predicts how long calls take on a GPU: which kernels run them, and the model of ``kernels/cost``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..backends import E4M3, hopper, triton
from ..choosers.features import features_of
from ..kernels.cost import hopper as hopper_kernels
from ..kernels.cost import portable as portable_kernels
from ..kernels.cost.calls import ChoiceSizes, describe_choice, describe_decode, describe_selection
from ..kernels.cost.chips import Chip, detect_chip, known_chips
from ..kernels.cost.model import AttentionSizes, CallWork, Launch, Pass, predict_pass, predict_work
from ..kernels.selection.division import TILE_ROWS, SelectionSizes
from ..masks.block_mask import BlockMask
from ..masks.chooser import Chooser, HeadChoice, is_causal
from ..masks.grid import BlockGrid
from ..selection import hopper as hopper_selection
from ..selection.block_selection import BlockSelection


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a call. device: the GPU's name. backward: None for calls of few queries. choice: of the blocks of a
    chooser, before ``forward``; None without."""

    device: str
    forward: Pass
    backward: Pass | None
    choice: Pass | None = None

    @property
    def estimated(self) -> bool:
        """Whether some kernels were not measured on the GPU, so that constants follow from others or from what it reports."""
        return not all(one.measured for one in (self.forward, self.backward, self.choice) if one)

    @property
    def forward_us(self) -> float:
        """Returns microseconds on the GPU, including a choice."""
        return self.forward.us + (self.choice.us if self.choice else 0.0)

    @property
    def backward_us(self) -> float | None:
        """Returns microseconds on the GPU, or None."""
        return self.backward and self.backward.us

    def lines(self) -> dict[str, str]:
        """Returns the passes as sentences, by name."""
        where = f"{'estimated for' if self.estimated else 'predicted on'} {self.device}"
        forward = f"{_describe_pass(self.forward)} ({where})"
        lines = {"time of the choice": _describe_pass(self.choice)} if self.choice else {}
        return lines | {"forward time": forward} | ({"backward time": _describe_pass(self.backward)} if self.backward else {})


def time_lines(time: Prediction | str | None) -> dict[str, str]:
    """Returns a predicted time, or the reason why there is none, as sentences by name."""
    if isinstance(time, Prediction):
        return time.lines()
    return {"time": f"not predicted: {time}"} if time else {}


def _describe_pass(one: Pass) -> str:
    parts = sorted(one.parts.items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {us / one.us:.0%}" for name, us in parts if us >= 0.005 * one.us)
    host = f"; call by call, the host takes {one.host_us:.0f} us" if one.bound == "the host" else ""
    kernels = " by the portable kernels" if one.portable else ""
    return f"{_time_text(one.us)}{kernels}: {shares}{host}"


def _time_text(us: float) -> str:
    return f"{us / 1e3:.3f} ms" if us >= 1e3 else f"{us:.0f} us"


def chip_named(device: str | torch.device | None) -> Chip | None:
    """Returns a GPU as the model sees it, or None without a GPU and a name. device: a GPU of this machine, None for the current
    one, or a part of the name of one with measured constants, such as "h200". Raises ValueError for other devices."""
    if device is None and not torch.cuda.is_available():
        return None
    name = "cuda" if device is None else str(device)
    if not name.startswith("cuda"):
        chips = known_chips()
        found = [chip for known, chip in chips.items() if name.lower() in known.lower()]
        if len(found) != 1:
            raise ValueError(f"device must be a GPU of this machine, or one of {', '.join(sorted(chips))}; got {name!r}")
        return found[0]
    if not torch.cuda.is_available():
        raise ValueError(f"device must be a GPU that is there; got {name!r} without any; name one, such as 'h200'")
    index = torch.device(name).index
    index = torch.cuda.current_device() if index is None else index
    return detect_chip(torch.cuda.get_device_name(index), index, torch.cuda.get_device_capability(index))


def refusal(mask: BlockMask | BlockSelection, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    """Returns why the time of such calls is not predicted, or None."""
    if dtype not in hopper.DTYPES and not (dtype == E4M3 and mask.q_len <= triton.FEW_QUERIES):
        few = f", and over caches of e4m3 with up to {triton.FEW_QUERIES} queries" if dtype == E4M3 else ""
        return f"calls of float16 and bfloat16 are{few}; got {str(dtype).removeprefix('torch.')}"
    if (widest := max(head_dim, v_head_dim)) > triton.MAX_HEAD_DIM:
        return f"calls of head_dim up to {triton.MAX_HEAD_DIM} are; got {widest}"
    return None


def launch_of(backward: bool, portable: bool, sizes: AttentionSizes, table: BlockMask | None, chip: Chip) -> Launch:
    """Returns the launches of a pass. table: what kernels iterate over."""
    table = table and table.to("cpu")
    if portable:
        return portable_kernels.describe_launch(backward, sizes, table, chip)
    return (hopper_kernels.describe_backward if backward else hopper_kernels.describe_forward)(sizes, table, chip)


def predict(
    mask: BlockMask,
    heads: int,
    head_dim: int,
    chip: Chip,
    *,
    batch: int = 1,
    kv_heads: int | None = None,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int | None = None,
) -> Prediction:
    """Returns the predicted time of ``attention`` under a mask, of one head or of several, and of its backward pass.

    heads, kv_heads: of queries, and of keys and values. chip: see ``chip_named``. dtype, page_size: of the cache that few queries
    read. Raises ValueError for calls whose time is not predicted. Reads the table.
    """
    sizes = AttentionSizes(batch, heads, kv_heads or heads, mask.q_len, mask.kv_len, head_dim, v_head_dim or head_dim)
    if reason := refusal(mask, dtype, head_dim, sizes.v_head_dim):
        raise ValueError(f"the time of this call is not predicted: {reason}")
    table = mask.kernel_table(True)
    if mask.q_len <= triton.FEW_QUERIES:
        keys = sizes.kv_len * (1.0 if table is None else table.block_density * table.grid.q_blocks)
        apart = sizes._replace(kv_heads=heads) if mask.masks > 1 else sizes  # heads with masks of their own read for themselves
        work = describe_decode(apart, keys, chip, table.block_size if table else None, e4m3=dtype == E4M3, page=page_size or 0)
        return Prediction(chip.name, predict_work(work, chip), None)
    in_place = {sizes.head_dim, sizes.v_head_dim} <= {*hopper.HEAD_DIMS} and (table and table.block_size) in hopper.BLOCK_SIZES
    portable = not (chip.hopper and in_place)
    by_hopper = not portable and hopper.has_backward(sizes.head_dim, sizes.v_head_dim)
    forward, backward = (
        predict_pass(launch_of(back, by_portable, sizes, table, chip), chip)
        for back, by_portable in ((False, portable), (True, not by_hopper))
    )
    return Prediction(chip.name, forward, backward)


def selection_refusal(selection: BlockSelection, heads: int, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    """Returns why the time of attention over picked blocks is not predicted, or None."""
    if reason := refusal(selection, dtype, head_dim, v_head_dim):
        return reason
    if selection.always is not None:
        return "selections without always are"
    if selection.q_len <= triton.FEW_QUERIES:
        return None
    if v_head_dim != head_dim or selection.block_size < 64:
        return "selections of blocks of 64 keys and more are, with v of the head_dim of q"
    if (members := heads // selection.heads) > TILE_ROWS:
        return f"up to {TILE_ROWS} query heads that share a choice are; got {members}"
    return None


def describe_picks(
    selection: BlockSelection, heads: int, kv_heads: int, head_dim: int, chip: Chip, portable: bool = False
) -> tuple[CallWork, CallWork]:
    """Returns the work of both passes of attention over picked blocks. portable: by the portable kernels."""
    batch, picking, _, slots = selection.picks.shape
    lengths = selection.q_len, selection.kv_len, selection.every, slots, picking // kv_heads, selection.block_size
    sizes = SelectionSizes(batch, heads, kv_heads, *lengths)
    picks = selection.picks.cpu().numpy()
    forward, backward = (describe_selection(back, picks, sizes, head_dim, chip, portable) for back in (False, True))
    return forward, backward


def predict_selection(
    selection: BlockSelection,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    chip: Chip,
    dtype: torch.dtype,
    page_size: int | None,
) -> Prediction:
    """Returns the predicted time of attention over picked blocks and of its backward pass, or of ``attention_decode`` for few
    queries. Reads the picks. ``selection_refusal`` must be None."""
    batch, picking, groups, _ = selection.picks.shape
    if selection.q_len <= triton.FEW_QUERIES:
        keys = float((selection.picks >= 0).sum()) / (batch * picking * groups) * selection.block_size * selection.q_len
        sizes = AttentionSizes(batch, heads, picking, selection.q_len, selection.kv_len, head_dim, v_head_dim)
        work = describe_decode(sizes, keys, chip, selection.block_size, picked=True, e4m3=dtype == E4M3, page=page_size or 0)
        return Prediction(chip.name, predict_work(work, chip), None)
    of_hopper = head_dim in hopper_selection.HEAD_DIMS and selection.block_size in hopper_selection.BLOCK_SIZES
    works = describe_picks(selection, heads, kv_heads, head_dim, chip, not (chip.hopper and of_hopper))
    return Prediction(chip.name, *(predict_work(work, chip) for work in works))


def with_choice(time: Prediction, choice: HeadChoice, grid: BlockGrid, sizes: AttentionSizes, chip: Chip) -> Prediction | str:
    """Returns the time of attention with the time of its choice by one chooser, or why that is not predicted."""
    work = describe_chooser(choice.choosers[0], grid, is_causal(choice.within), sizes, chip)
    if work is None:
        return f"choices by comparing queries with keys are; got {choice.choosers[0]}"
    return replace(time, choice=predict_work(work, chip))


def describe_chooser(chooser: Chooser, grid: BlockGrid, causal: bool, sizes: AttentionSizes, chip: Chip) -> CallWork | None:
    """Returns the work of a choice, or None for choosers whose time is not predicted: those without rows and columns."""
    q, k = (torch.empty(1, 1, tokens, sizes.head_dim, device="meta") for tokens in (sizes.q_len, sizes.kv_len))
    features = features_of(chooser, q, k, grid, causal, 1.0)
    if features is None:
        return None
    seen, means = 1 - causal * sizes.q_len / (2 * sizes.kv_len), features.columns.shape[2] < sizes.kv_len
    choice = ChoiceSizes(
        features.row_count, features.column_count, features.span, seen, grid.shape, means, chooser.budget is not None
    )
    return describe_choice(choice, sizes, chip)
