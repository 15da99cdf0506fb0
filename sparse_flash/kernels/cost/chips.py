"""Describes GPUs to the model: by constants that were measured on them, or by estimates from what they report.

``chips.json`` holds the constants that come with the package. ``sparse-flash tune --calibrate`` writes a file of the same form for
the GPU of a machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

SHIPPED = Path(__file__).with_name("chips.json")
# The share of the peak that steps reach, forward and backward, where none was measured: Hopper's kernels, and the portable ones.
_HOPPER_SHARES, _PORTABLE_SHARES = (0.9, 0.65), (0.65, 0.4)
_EXPONENTIALS = 64  # columns of products that take as long as the exponentials of a step
# Operations of a multiprocessor in a cycle, 16-bit with sums of 32 bits, by compute capability.
_FLOPS_OF_CYCLE = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192}
_FLOPS_OF_OTHERS = 1024
_MEMORY_SHARE = 0.8  # of a memory's nominal rate, that kernels reach


class KernelFamily(NamedTuple):
    """Kernels that share constants. used, used_v: columns of q and k, and of v, that products cover. queries, keys: of a tile and a
    step. programs: that share a multiprocessor. portable: not of Hopper's kernels."""

    backward: bool
    used: int
    used_v: int
    queries: int
    keys: int
    programs: int
    portable: bool = False

    @property
    def step_flops(self) -> int:
        qk, v = (3 * self.used, 2 * self.used_v) if self.backward else (self.used, self.used_v)
        return 2 * self.queries * self.keys * (qk + v + _EXPONENTIALS)

    @property
    def small(self) -> bool:
        """Returns whether a tile has fewer rows than products of the largest size."""
        return min(self.queries, self.keys) < 64

    def __str__(self) -> str:
        name = "portable " * self.portable + ("backward" if self.backward else "forward")
        return f"{name} {self.used}/{self.used_v}, {self.queries} x {self.keys}, {self.programs}"

    @classmethod
    def parse(cls, text: str) -> KernelFamily:
        """The reverse of ``str``."""
        return cls("backward" in text, *map(int, re.findall(r"\d+", text)), portable="portable" in text)


class Times(NamedTuple):
    """Microseconds of a program: a row's start and end; a step in a full block, and in a partial block; and what is added to a step
    whose operands have left the L2 cache."""

    row: float
    full: float
    partial: float
    reload: float


@dataclass(frozen=True)
class Chip:
    """A GPU as the model sees it.

    flops_per_us: of a multiprocessor, at its peak. bytes_per_us: that copies reach. hopper: whether Hopper's kernels run on it.
    measured: constants by family. inherited: constants that were measured on GPUs with the same multiprocessors. Others are
    estimated from these. factors: of the amounts of other calls, by kind and part, see ``model.CallWork``.
    """

    name: str
    multiprocessors: int
    flops_per_us: float
    bytes_per_us: float
    hopper: bool = True
    measured: Mapping[KernelFamily, Times] = field(default_factory=dict)
    inherited: Mapping[KernelFamily, Times] = field(default_factory=dict)
    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def times(self, family: KernelFamily) -> Times:
        """Returns the family's constants. Without a measurement: a guess, times what the guess misses for the most alike family."""
        guess, known_times = self._guess(family), {**self.inherited, **self.measured}
        if family in known_times:
            # A constant that measurements could not tell from 0 is a tenth of its guess.
            return Times(*(max(time, least / 10) for time, least in zip(known_times[family], guess, strict=True)))
        alike = [known for known in known_times if (known.backward, known.portable) == (family.backward, family.portable)]
        if not alike:
            return guess
        nearest = min(
            alike,
            key=lambda known: (
                known.small != family.small,
                known.programs != family.programs,
                abs(known.step_flops - family.step_flops),
            ),
        )
        of_nearest = zip(guess, self.times(nearest), self._guess(nearest), strict=True)
        return Times(*(time * measured / guessed for time, measured, guessed in of_nearest))

    def factors_of(self, kind: str) -> Mapping[str, float]:
        """Returns the factors of a kind of calls. If this chip has none, they are a shipped chip's: amounts are relative to a
        chip's rates, so factors of chips are alike."""
        return self.factors.get(kind) or next(chip.factors[kind] for chip in shipped_chips().values() if kind in chip.factors)

    def _guess(self, family: KernelFamily) -> Times:
        """Returns constants from the peak rate alone."""
        shares = _PORTABLE_SHARES if family.portable else _HOPPER_SHARES
        step = family.step_flops * family.programs / self.flops_per_us / shares[family.backward]
        # A row starts with the operands of its tile, ends with its results, and is partly hidden by other rows.
        row = 2.0 * step * 128 / family.queries if family.backward else 1.5 * step * 128 / family.keys
        return Times(row, step, 1.15 * step, 0.2 * step)

    def as_data(self) -> dict:
        """Returns the chip as plain data."""
        families = sorted(self.measured, key=lambda family: (family.portable, family))
        measured = {str(family): [round(time, 4) for time in self.measured[family]] for family in families}
        own = {name: getattr(self, name) for name in ("name", "multiprocessors", "flops_per_us", "bytes_per_us", "hopper")}
        factors = {kind: {part: round(factor, 4) for part, factor in parts.items()} for kind, parts in sorted(self.factors.items())}
        return own | {"measured": measured} | ({"factors": factors} if factors else {})

    @classmethod
    def from_data(cls, data: dict) -> Chip:
        """The reverse of ``as_data``."""
        return cls(**data | {"measured": {KernelFamily.parse(text): Times(*times) for text, times in data["measured"].items()}})

    def with_inherited(self, others: Iterable[Chip]) -> Chip:
        """Returns the chip with the constants of chips that have the same multiprocessors."""
        alike = [chip for chip in others if (chip.multiprocessors, chip.flops_per_us) == (self.multiprocessors, self.flops_per_us)]
        return replace(self, inherited={family: times for chip in alike for family, times in chip.measured.items()})


def calibrated_file() -> Path:
    """Returns the path of the constants that were measured on this machine."""
    return Path(os.environ.get("SPARSE_FLASH_CACHE") or "~/.cache/sparse_flash").expanduser() / "calibrated.json"


@cache
def shipped_chips() -> dict[str, Chip]:
    """Returns the chips that come with the package by name."""
    chips = list(read_chips(SHIPPED))
    return {chip.name: chip.with_inherited(chips) for chip in chips}


def known_chips() -> dict[str, Chip]:
    """Returns the chips with measured constants by name. Chips of this machine replace the ones that come with the package."""
    own = read_chips(calibrated_file()) if calibrated_file().exists() else ()
    return shipped_chips() | {chip.name: chip.with_inherited(shipped_chips().values()) for chip in own}


def read_chips(path: Path) -> Iterator[Chip]:
    """Returns the chips of a file."""
    return map(Chip.from_data, json.loads(path.read_text()))


def write_chips(path: Path, chips: list[Chip]) -> None:
    """Writes the chips. Others that the file holds stay."""
    kept = {chip.name: chip for chip in read_chips(path)} if path.exists() else {}
    kept |= {chip.name: chip for chip in chips}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    text = json.dumps([chip.as_data() for chip in kept.values()], indent=1)
    partial.write_text(re.sub(r"\[\s+([^][{}]+?)\s+\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text) + "\n")
    partial.replace(path)


def detect_chip(name: str, index: int, capability: tuple[int, int]) -> Chip:
    """Returns a GPU of this machine: with measured constants if there are any for its name, otherwise estimated from what its
    driver reports."""
    return known_chips().get(name) or _estimate_chip(name, index, capability)


def _estimate_chip(name: str, index: int, capability: tuple[int, int]) -> Chip:
    from triton.runtime import driver

    found = driver.active.utils.get_device_properties(index)
    flops = _FLOPS_OF_CYCLE.get(capability, _FLOPS_OF_OTHERS) * found["sm_clock_rate"] / 1e3
    # Bytes in a cycle of a memory's clock, at two transfers; kHz to MHz.
    rate = _MEMORY_SHARE * 2 * found["mem_bus_width"] / 8 * found["mem_clock_rate"] / 1e3
    return Chip(name, found["multiprocessor_count"], flops, rate, hopper=capability == (9, 0))
