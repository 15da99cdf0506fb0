"""Fits the factors of predicted times of decoding, choosers and selections to measured rows, and says how far predictions are off.

    python -m sparse_flash.benchmarks.fit_factors             # errors of the shipped factors
    python -m sparse_flash.benchmarks.fit_factors --hold-out  # errors of each fifth of the calls by a fit to the others
    python -m sparse_flash.benchmarks.fit_factors --write     # fits all, writes kernels/cost/chips.json
    python -m sparse_flash.benchmarks.fit_factors runs/decode/drawn.json

Rows that were timed call by call count if they took three times as long as the host: others say nothing of the GPU.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import sparse_flash as sf
from sparse_flash.kernels.cost import chips
from sparse_flash.kernels.cost.calls import describe_decode
from sparse_flash.kernels.cost.chips import Chip
from sparse_flash.kernels.cost.model import AttentionSizes, CallWork, predict_work
from sparse_flash.masks.chooser import choices_of
from sparse_flash.masks.grid import BlockGrid
from sparse_flash.tools.cost import describe_chooser, describe_picks

from .drawn_calls import ChooserCall, DecodeCall, SelectionCall
from .fit_cost import FOLDS, H100, H200, RESULTS, fold_of

FILES = (
    "precision/h200-2026-11-27-decoding.json",
    "selection/h200-2026-11-23-peers.json",
    "selection/h200-2026-11-26-blocks.json",
    "selection/h200-2026-11-26-lengths.json",
    "choosers/h200-2026-11-27-peers.json",
    "kernels/h200-2026-11-27-choosers.json",
    "cost/h200-2026-11-27-calls.json",
)
_LEAST_US = 20.0  # errors of shorter calls count as if they took this long
_OF_HOST = 3


class CallSample(NamedTuple):
    """A measured call. us: its microseconds."""

    work: CallWork
    us: float
    name: str

    def error(self, chip: Chip) -> float:
        """Returns by how much the prediction exceeds the measurement, as a share of it."""
        return predict_work(self.work, chip).us / self.us - 1


def read_samples(path: Path) -> Iterator[tuple[Chip, CallSample]]:
    """Yields (the GPU, a measured call) of a results file."""
    yield from samples_of(json.loads(path.read_text()))


def samples_of(data: object, facts: dict | None = None) -> Iterator[tuple[Chip, CallSample]]:
    """Yields what ``read_samples`` does, of a results file's contents. facts: what the dicts around ``data`` say."""
    facts = facts or {}
    if isinstance(data, list):
        for value in data:
            yield from samples_of(value, facts)
    elif isinstance(data, dict):
        facts = facts | {name: value for name, value in data.items() if name in ("environment", "heads", "tokens", "head_dim")}
        chip = H100 if "H100" in facts.get("environment", {}).get("device", "") else H200
        found = list(_samples_of_row(data, facts, chip))
        for sample in found:
            yield chip, sample
        if not found:
            yield from samples_of(list(data.values()), facts)


def _samples_of_row(row: dict, facts: dict, chip: Chip) -> Iterator[CallSample]:
    """Yields the calls of one measured row of any kind."""
    case = row.get("case", {})
    if row.get("kind") == "decode" and "us" in row:
        yield from _of_decode(DecodeCall(**row["call"]), row["us"], chip)
    elif "cache" in row and "us" in row and not row["cache"].startswith("FA3"):
        heads, kv_heads = facts["heads"]
        kinds = {"dense": ("dense", 0, 0), "window": ("causal & local(4096)", 0, 0), "picks": ("picks", 16, 64)}
        what, picks, block = kinds[row["what"]]
        sizes = row["batch"], heads, kv_heads, facts["tokens"], facts["head_dim"], 1
        yield from _of_decode(DecodeCall(*sizes, what, picks, block, row["cache"], row["page"]), row["us"], chip)
    elif row.get("kind") == "selection" and "forward_ms" in row:
        yield from _of_selection(SelectionCall(**row["call"]), row, chip, False)
    elif "picks" in case:
        for peer, result in row["results"].items():
            if peer.startswith("sparse_flash") and "forward_ms" in result:
                yield from _of_selection(SelectionCall(**case), result, chip, "triton" in peer)
    elif row.get("kind") == "chooser" and "choose_us" in row:
        yield from _of_choice(ChooserCall(**row["call"]), row["choose_us"], chip)
    elif "choose_ms" in row and "spec" in row:
        shape = case.get("shape") or {"heads": 32, "kv_heads": 8, "tokens": row["tokens"], "head_dim": 128}
        chooser = re.search(r"\w+\([^()]*block=\d+\)", row["spec"])
        assert chooser
        call = ChooserCall(shape["heads"], shape["kv_heads"], shape["tokens"], shape["head_dim"], chooser[0])
        yield from _beyond_host(_of_choice(call, 1e3 * row["choose_ms"], chip))


def _of_decode(call: DecodeCall, us: float, chip: Chip) -> Iterator[CallSample]:
    if call.cache == "e4m3 by token":  # not predicted
        return
    sizes = AttentionSizes(call.batch, call.heads, call.kv_heads, call.queries, call.tokens, call.head_dim, call.head_dim)
    block = call.block or (None if call.what == "dense" else 128)
    work = describe_decode(sizes, call.keys, chip, block, call.what == "picks", call.cache == "e4m3", call.page)
    yield CallSample(work, us, str(call))


def _of_selection(call: SelectionCall, result: dict, chip: Chip, portable: bool) -> Iterator[CallSample]:
    for work, name in zip(_describe_picks(call, chip.name, portable), ("forward_ms", "backward_ms"), strict=True):
        yield from _beyond_host(iter([CallSample(work, 1e3 * result[name], f"{name[:-3]}, {call}")]))


@cache
def _describe_picks(call: SelectionCall, chip: str, portable: bool) -> tuple[CallWork, ...]:
    picks = call.draw_picks(torch.device("cpu"), 1).expand(-1, call.kv_heads, -1, -1)
    selection = sf.BlockSelection.from_picks(picks.contiguous(), call.block_size, every=call.every, check=False)
    return describe_picks(selection, call.heads, call.kv_heads, call.head_dim, H100 if chip == H100.name else H200, portable)


def _of_choice(call: ChooserCall, us: float, chip: Chip) -> Iterator[CallSample]:
    (chooser,) = choices_of(call.spec)[0].choosers
    sizes = AttentionSizes(1, call.heads, call.kv_heads, call.tokens, call.tokens, call.head_dim, call.head_dim)
    work = describe_chooser(chooser, BlockGrid(call.tokens, call.tokens, chooser.block_size), True, sizes, chip)
    if work:
        yield CallSample(work, us, str(call))


def _beyond_host(samples: Iterator[CallSample]) -> Iterator[CallSample]:
    return (sample for sample in samples if sample.us > _OF_HOST * sample.work.host_us)


def fit_factors(samples: list[CallSample]) -> dict[str, dict[str, float]]:
    """Returns factors by kind and part, by non-negative least squares of relative errors."""
    from scipy.optimize import nnls

    made = {}
    for kind in sorted({sample.work.kind for sample in samples}):
        some = [sample for sample in samples if sample.work.kind == kind]
        parts = list(dict.fromkeys(part for sample in some for part in sample.work.amounts))
        rows = np.array([[sample.work.amounts.get(part, 0.0) for part in parts] for sample in some])
        us = np.array([sample.us for sample in some])
        scale = np.maximum(us, _LEAST_US)
        found = nnls(rows / scale[:, None], us / scale)[0]
        made[kind] = dict(zip(parts, found.tolist(), strict=True))
    return made


def errors_of(samples: list[CallSample], chip: Chip, held_out: bool) -> list[tuple[float, CallSample]]:
    """Returns the signed errors. held_out: by factors that were fitted to the other parts of the calls; otherwise by the chip's."""
    if not held_out:
        return [(sample.error(chip), sample) for sample in samples]
    found = []
    for fold in range(FOLDS):
        rest = [sample for sample in samples if fold_of(sample.name) != fold]
        made = replace(chip, factors=fit_factors(rest))
        found += [(sample.error(made), sample) for sample in samples if fold_of(sample.name) == fold]
    return found


def report(gpu: str, errors: list[tuple[float, CallSample]]) -> None:
    """Prints the errors of each kind: of calls over 100 us, and of shorter ones in microseconds."""
    for kind in sorted({sample.work.kind for _, sample in errors}):
        some = [(error, sample) for error, sample in errors if sample.work.kind == kind]
        if sizes := [abs(error) for error, sample in some if sample.us >= 100]:
            figures = f"median {np.median(sizes):.1%}, 90 % within {np.quantile(sizes, 0.9):.1%}, at most {max(sizes):.1%}"
            print(f"{gpu}, {kind}: {len(sizes)} calls: {figures}")
        if short := [abs(error * sample.us) for error, sample in some if sample.us < 100]:
            near = sum(us <= 10 for us in short)
            print(f"{gpu}, {kind}: {near} of {len(short)} shorter calls within 10 us, off by at most {max(short):.0f} us")
        for error, sample in sorted(some, key=lambda pair: -abs(pair[0]))[:4]:
            print(f"    {error:+.1%} of {sample.us:.1f} us: {sample.name}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog="python -m sparse_flash.benchmarks.fit_factors")
    parser.add_argument("files", nargs="*", type=Path, default=[RESULTS / name for name in FILES], help="results files")
    parser.add_argument("--hold-out", action="store_true", help="report each call by a fit to the others")
    parser.add_argument("--write", action="store_true", help="fit all, and write the factors that come with the package")
    options = parser.parse_args(arguments)
    found: dict[str, list[CallSample]] = {}
    for path in options.files:
        for chip, sample in read_samples(path):
            found.setdefault(chip.name, []).append(sample)
    shipped = chips.shipped_chips()
    for gpu, samples in found.items():
        chip = replace(shipped[gpu], factors=fit_factors(samples)) if options.write else shipped[gpu]
        report(gpu, errors_of(samples, chip, options.hold_out))
        if options.write:
            chips.write_chips(chips.SHIPPED, [chip])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
