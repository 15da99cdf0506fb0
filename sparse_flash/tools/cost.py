"""Predicts how long calls take on a GPU: which kernels run them, and the model of ``kernels/cost``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..backends import hopper, triton
from ..kernels.cost import hopper as hopper_kernels
from ..kernels.cost import portable as portable_kernels
from ..kernels.cost.chips import Chip, detect_chip, known_chips
from ..kernels.cost.model import AttentionSizes, Launch, Pass, predict_decode, predict_pass
from ..masks.block_mask import BlockMask


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a call. device: the GPU's name. backward: None for calls of few queries."""

    device: str
    forward: Pass
    backward: Pass | None

    @property
    def estimated(self) -> bool:
        """Whether some kernels were not measured on the GPU, so that constants follow from others or from what it reports."""
        return not (self.forward.measured and (self.backward is None or self.backward.measured))

    @property
    def forward_us(self) -> float:
        """Returns microseconds on the GPU."""
        return self.forward.us

    @property
    def backward_us(self) -> float | None:
        """Returns microseconds on the GPU, or None."""
        return self.backward and self.backward.us

    def lines(self) -> dict[str, str]:
        """Returns the passes as sentences, by name."""
        where = f"{'estimated for' if self.estimated else 'predicted on'} {self.device}"
        forward = f"{_describe_pass(self.forward)} ({where})"
        return {"forward time": forward} | ({"backward time": _describe_pass(self.backward)} if self.backward else {})


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


def refusal(mask: BlockMask, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    """Returns why the time of such calls is not predicted, or None."""
    if dtype not in hopper.DTYPES:
        return f"calls of float16 and bfloat16 are; got {str(dtype).removeprefix('torch.')}"
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
) -> Prediction:
    """Returns the predicted time of ``attention`` under a mask, of one head or of several, and of its backward pass.

    heads, kv_heads: of queries, and of keys and values. chip: see ``chip_named``. Raises ValueError for calls whose time is not
    predicted. Reads the table.
    """
    sizes = AttentionSizes(batch, heads, kv_heads or heads, mask.q_len, mask.kv_len, head_dim, v_head_dim or head_dim)
    if reason := refusal(mask, dtype, head_dim, sizes.v_head_dim):
        raise ValueError(f"the time of this call is not predicted: {reason}")
    table = mask.kernel_table(True)
    if mask.q_len <= triton.FEW_QUERIES:
        keys = sizes.kv_len * (1.0 if table is None else table.block_density * table.grid.q_blocks)
        read = 2 * sizes.batch * sizes.kv_heads * keys * (sizes.head_dim + sizes.v_head_dim)
        return Prediction(chip.name, predict_decode(read, chip), None)
    in_place = {sizes.head_dim, sizes.v_head_dim} <= {*hopper.HEAD_DIMS} and (table and table.block_size) in hopper.BLOCK_SIZES
    portable = not (chip.hopper and in_place)
    by_hopper = not portable and hopper.has_backward(sizes.head_dim, sizes.v_head_dim)
    forward, backward = (
        predict_pass(launch_of(back, by_portable, sizes, table, chip), chip)
        for back, by_portable in ((False, portable), (True, not by_hopper))
    )
    return Prediction(chip.name, forward, backward)
